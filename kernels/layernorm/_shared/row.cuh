// A row of COLS elements of T, cut into packets of BYTES and dealt out to STRIDE threads: packet number
// it * STRIDE + lane is packet `it` of thread `lane`.
//
// Where COLS is no multiple of the packet, rows start up to MAX_SHIFT elements into a packet (`shift`, it differs from
// row to row). Packets then keep to the alignment of memory, not of the row: all accesses stay wide, the first and the
// last packet of a row also hold elements of its neighbours, which inside() tells apart.
//
// ROTATED: `lane` may be any packet of the row to begin with, and a thread's packets go on from there round the row. All
// threads have the same number of packets then (EVEN).
#pragma once
#include "_shared/packet.cuh"

template <class T, int BYTES, int COLS, int STRIDE, bool ROTATED = false> struct row_packets {
    using Packet = packet<BYTES>;
    static constexpr int VEC = BYTES / sizeof(T);
    static constexpr bool RAGGED = COLS % VEC != 0;
    static constexpr int MAX_SHIFT = RAGGED ? VEC - (COLS & -COLS) : 0;   // a ragged row starts at a multiple of gcd(COLS, VEC)
    static constexpr int COUNT = (COLS + MAX_SHIFT + VEC - 1) / VEC;      // packets a row can touch
    static constexpr int ITERS = (COUNT + STRIDE - 1) / STRIDE;           // packets a thread
    static constexpr bool EVEN = !RAGGED && COUNT % STRIDE == 0;          // every thread has ITERS whole packets
    static_assert(EVEN || !ROTATED);

    static __device__ __forceinline__ int shift_of(long long row) { return RAGGED ? (int)(row * COLS % VEC) : 0; }
    // First column of a packet; negative or partly past the end at the edges of a ragged row.
    static __device__ __forceinline__ int column(int it, int lane, int shift) { return (it * STRIDE + lane) * VEC - shift; }
    // Whether packet `it` of every thread lies inside the row: a constant once the loop over `it` is unrolled.
    static __device__ __forceinline__ constexpr bool whole(int it) {
        return RAGGED ? it > 0 && (it + 1) * STRIDE * VEC <= COLS : (it + 1) * STRIDE <= COUNT;
    }
    // Whether the thread has a packet `it` at all (a ragged row decides element by element).
    static __device__ __forceinline__ bool present(int it, int lane) { return RAGGED || whole(it) || it * STRIDE + lane < COUNT; }
    // Whether element e of a present packet belongs to the row.
    static __device__ __forceinline__ bool inside(int it, int lane, int shift, int e) {
        return !RAGGED || whole(it) || (unsigned)(column(it, lane, shift) + e) < (unsigned)COLS;
    }
    static __device__ __forceinline__ int members(int it, int lane, int shift) {   // of a present packet, inside the row
        const int low = column(it, lane, shift), first = low > 0 ? low : 0, last = low + VEC < COLS ? low + VEC : COLS;
        return !RAGGED || whole(it) ? VEC : last > first ? last - first : 0;
    }

    template <class Load> static __device__ __forceinline__ Packet load(const T* row, int it, int lane, int shift, bool last_row) {
        int col = column(it, lane, shift);
        if (ROTATED && col >= COLS) col -= COLS;
        Packet v = {};
        if (whole(it)) { Load::into(v, row + col); return v; }
        if constexpr (!RAGGED) Load::into(v, row + col, present(it, lane));
        else {
            const bool past_tensor = last_row && col + VEC > COLS;   // elsewhere the neighbour's elements are there to be read
            Load::into(v, row + col, col < COLS && !past_tensor);
            if (past_tensor) {
                #pragma unroll 1
                for (int c = COLS - 1; c >= col; --c) { packet<sizeof(T)> e; Load::into(e, row + c); push_first<T>(v, e.word[0]); }
            }
        }
        return v;
    }

    template <class Store> static __device__ __forceinline__ void store(T* row, int it, int lane, int shift, Packet v) {
        const int col = column(it, lane, shift);
        if constexpr (!RAGGED) Store::from(v, row + col);
        else if (whole(it) || (col >= 0 && col + VEC <= COLS)) Store::from(v, row + col);
        else {
            #pragma unroll 1
            for (int c = col; c < col + VEC; ++c) {
                packet<sizeof(T)> e; e.word[0] = pop_first<T>(v);
                if ((unsigned)c < (unsigned)COLS) Store::from(e, row + c);
            }
        }
    }

    // A vector of COLS elements that is the same for every row (weight, bias), null meaning `missing` everywhere.
    // vector_tail() is its last, partial packet, loaded once; beside() the packet that lies beside packet `it` of a row.
    template <class Load> static __device__ __forceinline__ Packet vector_tail(const T* p, float missing) {
        Packet v = splat<T, BYTES>(missing);
        if constexpr (RAGGED) if (p != nullptr) {
            #pragma unroll
            for (int c = COLS - 1; c >= COLS / VEC * VEC; --c) { packet<sizeof(T)> e; Load::into(e, p + c); push_first<T>(v, e.word[0]); }
        }
        return v;
    }
    template <class Load>
    static __device__ __forceinline__ Packet beside(const T* p, const Packet& tail, float missing, int it, int lane, int shift, bool wanted) {
        Packet low = splat<T, BYTES>(missing), high = low;
        if constexpr (!RAGGED) {
            Load::into(low, p + column(it, lane, 0), p != nullptr && wanted && present(it, lane));
            return low;
        } else {   // the row starts `shift` elements into a packet, the vector at a boundary: join two packets and cut
            const int col = column(it, lane, 0) - (shift ? VEC : 0);
            Load::into(low, p + col, p != nullptr && (whole(it) || (col >= 0 && col + VEC <= COLS)));
            Load::into(high, p + col + VEC, p != nullptr && col + 2 * VEC <= COLS);
            if (col + VEC > COLS) low = tail; else if (col + 2 * VEC > COLS) high = tail;
            return realign<T>(low, high, shift ? VEC - shift : 0);
        }
    }
};
