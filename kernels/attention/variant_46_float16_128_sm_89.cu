// Attention forward, float16, head dimension 128, boolean mask: o = softmax(scale q k^T) v.
// 16 rows a block of 4 heads that share keys, 64 keys a step; 1 x 4 warps.
// Rendered for sm_89 from templates/attention/cuda.cu.j2, which explains every choice.
#include "_shared/async_copy.cuh"
#include "_shared/mma.cuh"
#include "_shared/store.cuh"

using i64 = long long;
using T = f16;
constexpr int D = 128, WARPS_M = 1, WARPS_N = 4, TILES = 1;
constexpr int WARPS = WARPS_M * WARPS_N, THREADS = 32 * WARPS;
constexpr int ROWS = 16 * TILES, BM = ROWS * WARPS_M, BN = 64, KEYS = BN / WARPS_N;   // of a warp, a block; a block, a warp
constexpr int K_STAGES = 2, V_STAGES = 3, AHEAD = 1;
constexpr int V_AHEAD = V_STAGES - 1;
constexpr bool CAUSAL = false;
constexpr int PACK = 4;   // rows of a query, for heads that share keys
using Rows = tile_rows<D * 2, false>;
constexpr int TILE_BYTES = BN * Rows::PITCH;
// Step i asks for k of step i + K_STAGES - 1 (one later if AHEAD), then for v of step i + V_AHEAD, a group of copies
// each; with one stage of v for that first, and with one stage of k for the next k amid the step. Groups end in order. Those
// that may still be in flight when a step begins, which needs its k and, unless V_LATE, its v; and before its v is used:
constexpr bool V_LATE = false;
__device__ constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int IN_FLIGHT = K_STAGES == 1 || (V_STAGES == 1 && K_STAGES == 2) ? 0 : V_STAGES == 1 ? 1
    : V_LATE ? 2 * (K_STAGES - 2) + 1 : least(2 * (V_AHEAD - 1), 2 * (K_STAGES - 2) + 1);
constexpr int V_IN_FLIGHT = V_STAGES > 1 ? 2 * (V_STAGES - 1) : K_STAGES > 1 ? 1 : 0;
// Bits by which weights stand lower than their maximum: where a maximum may lag, no weight exceeds 1, as large values need it.
// Not for float16: its weights would become denormal, and its values are too small to overflow a float.
constexpr float MARGIN = 0.f;
// A weight, 2^(s * slope - top * slope), is off by as much as top * slope is rounded: 2^-6 at most up to this, about what the
// roundings of a score do there. It is rounded up: beyond, weights become too small, and none is infinite.
constexpr float MOST_ROUNDED = 262144.f;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
#define NONE __int_as_float(0xff800000)   // minus infinity: the score of a key that is not seen

// A thread copies chunks of one column of a tile: every STEP-th row, in each of the GROUPS of COLUMNS 16-byte chunks.
constexpr int COLUMNS = D * 2 % 128 == 0 ? 8 : 4, GROUPS = D / 8 / COLUMNS;
// A column of warps copies the keys it multiplies.
constexpr int KEY_THREADS = 32 * WARPS_M, KEY_ROWS = KEYS;

// Waits for COUNT threads, which name the same of the hardware's barriers; 0 is that of __syncthreads.
template <int COUNT> __device__ __forceinline__ void barrier_of(int id) {
    asm volatile("barrier.sync.aligned %0, %1;" :: "r"(id), "n"(COUNT) : "memory");
}

// COUNT rows into a tile; unless it is known to be `whole`, those from `left` on become zeros. row: the thread's first of them;
// tile, from: its first chunk there and here. Whether a first tile is whole is not asked: a jump to code that is still in DRAM
// takes longer than the comparisons.
template <int COUNT, int BY>
__device__ __forceinline__ void load_rows(int row, unsigned tile, const char* from, i64 pitch, bool whole, int left) {
    constexpr int STEP = BY / COLUMNS;
    const int rows = (whole ? COUNT : left) - row;   // where STEP does not divide COUNT, whole tiles come here, too
    if (COUNT % STEP == 0 && whole) {
        #pragma unroll
        for (int i = 0; i < COUNT / STEP; ++i, from += STEP * pitch)
            #pragma unroll
            for (int g = 0; g < GROUPS; ++g) copy_async_16(tile + i * STEP * Rows::PITCH + g * COLUMNS * 16, from + g * COLUMNS * 16);
    } else {
        #pragma unroll 1
        for (int i = 0; i < (COUNT + STEP - 1) / STEP; ++i, from += STEP * pitch)
            if (COUNT % STEP == 0 || row + i * STEP < COUNT)
                #pragma unroll
                for (int g = 0; g < GROUPS; ++g)
                    copy_async_16_or_zero(tile + i * STEP * Rows::PITCH + g * COLUMNS * 16, from + g * COLUMNS * 16, i * STEP < rows);
    }
}

// Has L2 give up COUNT rows last, of which `left` are there; the rest as load_rows. Not by a policy of the copies themselves: the
// assembler of CUDA 13.0 to 13.3 loses it for sm_90, and they trap (github.com/triton-lang/triton, pull request 11660).
template <int COUNT, int BY>
__device__ __forceinline__ void keep_in_l2(int row, const char* from, i64 pitch, int left) {
    if (threadIdx.x % COLUMNS) return;   // one thread for a line
    #pragma unroll
    for (int i = 0; i < (COUNT + BY / COLUMNS - 1) / (BY / COLUMNS); ++i, from += BY / COLUMNS * pitch)
        if (row + i * (BY / COLUMNS) < least(COUNT, left))
            #pragma unroll
            for (int g = 0; g < GROUPS; ++g) asm volatile("prefetch.global.L2::evict_last [%0];" :: "l"(from + g * COLUMNS * 16));
}

// s = q k^T for the warp's rows and its keys of a tile, those from FROM to TO. q_at, k_at: addresses of the lane's part of the
// first fragment.
template <int FROM = 0, int TO = KEYS>
__device__ __forceinline__ void multiply_qk(float (&s)[TILES][KEYS / 8][4], const unsigned (&q)[TILES][D / 16][4], unsigned k_at, unsigned k_turn) {
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int n = FROM / 8; n < TO / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) s[m][n][e] = 0.f;
    #pragma unroll
    for (int d = 0; d < D / 16; ++d) {
        const unsigned (&a)[TILES][D / 16][4] = q;
        constexpr bool held = true;
        #pragma unroll
        for (int n = FROM / 16; n < TO / 16; ++n) {
            unsigned f[4];
            load_tiles(f, k_at + n * 16 * Rows::PITCH + (k_turn ^ d * 32));
            #pragma unroll
            for (int m = 0; m < TILES; ++m) {
                T::multiply_add(s[m][2 * n], a[m][held ? d : 0], f[0], f[1]);
                T::multiply_add(s[m][2 * n + 1], a[m][held ? d : 0], f[2], f[3]);
            }
        }
    }
}

// The same for the n-th 16 keys of the warp's alone.
__device__ __forceinline__ void multiply_qk_part(float (&s)[TILES][KEYS / 8][4], const unsigned (&q)[TILES][D / 16][4], int n, unsigned k_at, unsigned k_turn) {
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int e = 0; e < 4; ++e) s[m][2 * n][e] = s[m][2 * n + 1][e] = 0.f;
    #pragma unroll
    for (int d = 0; d < D / 16; ++d) {
        unsigned f[4];
        load_tiles(f, k_at + n * 16 * Rows::PITCH + (k_turn ^ d * 32));
        #pragma unroll
        for (int m = 0; m < TILES; ++m) {
            T::multiply_add(s[m][2 * n], q[m][d], f[0], f[1]);
            T::multiply_add(s[m][2 * n + 1], q[m][d], f[2], f[3]);
        }
    }
}

// o += p v for the n-th 16 keys of the warp's, with p as A fragments.
__device__ __forceinline__ void multiply_pv(float (&o)[TILES][D / 8][4], const unsigned (&weights)[TILES][KEYS / 16][4], int n, unsigned v_at, unsigned v_turn, float (&sum)[TILES][4]) {
    #pragma unroll
    for (int d = 0; d < D / 16; ++d) {
        unsigned f[4];
        load_tiles_transposed(f, v_at + n * 16 * Rows::PITCH + (v_turn ^ d * 32));
        #pragma unroll
        for (int m = 0; m < TILES; ++m) {
            T::multiply_add(o[m][2 * d], weights[m][n], f[0], f[1]);
            T::multiply_add(o[m][2 * d + 1], weights[m][n], f[2], f[3]);
        }
    }
    #pragma unroll
    for (int m = 0; m < TILES; ++m) T::multiply_add(sum[m], weights[m][n], T::ONES, T::ONES);
}

// Running maximum (of raw scores) and sum of a warp's rows: row 16 m + 8 h + lane / 4 in top[m][h].
struct Running {
    float top[TILES][2];
    float sum[TILES][4];   // an accumulator: the whole row's in [m][2 h]
};

// The running maxima with those of a step's scores; `running` and `o` follow.
__device__ __forceinline__ void raise(const float (&s)[TILES][KEYS / 8][4], Running& running, float (&o)[TILES][D / 8][4], float slope) {
    float top[TILES][2];
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            float a = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
            #pragma unroll
            for (int n = 1; n < KEYS / 8; ++n) a = fmaxf(a, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
            a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
            a = fmaxf(a, __shfl_xor_sync(~0u, a, 2));
            top[m][h] = fmaxf(a, running.top[m][h]);
        }
    {
        #pragma unroll
        for (int m = 0; m < TILES; ++m)
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float base = top[m][h] == NONE ? 0.f : top[m][h];
                const float factor = exp2_fast((running.top[m][h] - base) * slope);
                running.top[m][h] = top[m][h];
                running.sum[m][2 * h] *= factor;
                #pragma unroll
                for (int d = 0; d < D / 8; ++d) {
                    o[m][d][2 * h] *= factor;
                    o[m][d][2 * h + 1] *= factor;
                }
            }
    }
}

// The weights of the n-th 16 keys, 2^((s - top) * slope), packed as an A fragment.
__device__ __forceinline__ void weigh(unsigned (&weights)[TILES][KEYS / 16][4], float (&s)[TILES][KEYS / 8][4], int n, Running& running, float slope) {
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float base = __fmaf_ru(running.top[m][h] == NONE ? 0.f : running.top[m][h], slope, MARGIN);   // NONE - NONE would be NaN
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& x = s[m][2 * n + e / 2][2 * h + e % 2];
                x = fmaf(x, slope, -base);
                x = (4 * n + e) % 3 == 2 ? exp2_polynomial(x) : exp2_fast(x);
}
            weights[m][n][h] = T::pack(s[m][2 * n][2 * h], s[m][2 * n][2 * h + 1]);
            weights[m][n][h + 2] = T::pack(s[m][2 * n + 1][2 * h], s[m][2 * n + 1][2 * h + 1]);
        }
}

// An element of the mask: a byte, 0 where the key is not seen, else 1. Those of two neighbouring keys are held together.
constexpr int MASK_BYTES = 1, MASK_BITS = 8 * MASK_BYTES;
constexpr unsigned UNSEEN = 0;

// These loads are volatile: before the products that hide how long they take, and after the wait for who wrote the mask.
__device__ __forceinline__ unsigned load_pair(const char* from) {   // aligned as a pair
    unsigned pair;
    asm volatile("ld.global.u16 %0, [%1];" : "=r"(pair) : "l"(from));
    return pair;
}
// An element; nothing is read if not `wanted`.
__device__ __forceinline__ unsigned load_element_if(bool wanted, const char* from) {
    unsigned element;
    asm volatile("{ .reg .pred wanted; setp.ne.s32 wanted, %2, 0; mov.b32 %0, %3;\n"
        "@wanted ld.global.u8 %0, [%1]; }" : "=&r"(element) : "l"(from), "r"((int)wanted), "n"(UNSEEN));
    return element;
}

// Scores that a row does not see become NONE. mask: of the row 16 m + 8 h + lane / 4 and the n-th of
// the lane's pairs of keys.
__device__ __forceinline__ void apply_mask(float (&s)[TILES][KEYS / 8][4], const unsigned (&mask)[TILES][2][KEYS / 8]) {
    unsigned seen = ~0u;
    #pragma unroll
    for (int i = 0; i < TILES * 2 * (KEYS / 8); ++i) seen &= mask[i / (2 * (KEYS / 8))][i / (KEYS / 8) % 2][i % (KEYS / 8)];
    if (__all_sync(~0u, seen == 0x101)) return;
    asm volatile("");   // keeps this a branch
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const unsigned element = mask[m][e / 2][n] >> e % 2 * MASK_BITS & ((1u << MASK_BITS) - 1);
                if (element == UNSEEN) s[m][n][e] = NONE;
            }
}

// Which rows and keys a block works on: the grid has an axis for each of blocks of rows, heads and batch.
struct Place {
    int batch, head, row;                // head: the first of the tile's; row: the first of BM
    int kv_head, heads;                  // heads: how many of the group are left from `head` on; a tile has rows for PACK
    __device__ __forceinline__ Place(int group, int first) {
        int block = blockIdx.x;
        kv_head = blockIdx.y, batch = blockIdx.z;
        head = kv_head * group + first, heads = group - first;
        if (CAUSAL) block = gridDim.x - 1 - block;   // the longest first
        row = block * BM;
    }
};

// A row is a query for one of PACK heads: rows of a query follow each other. Its head is counted from place.head on.
__device__ __forceinline__ int query_of(int row) { return (unsigned)row / PACK; }
__device__ __forceinline__ int head_of(int row) { return (unsigned)row % PACK; }
__device__ __forceinline__ i64 offset_of(int row, i64 head, i64 seq) { return head_of(row) * head + query_of(row) * seq; }

// heads / kv_heads, exactly: before it is truncated, the quotient is 0.5 / kv_heads off the integers.
__device__ __forceinline__ int group_of(int heads, int kv_heads) { return __fdividef(heads + 0.5f, kv_heads); }
// The channels [from, to) of a row, by a warp, a lane for every 32nd channel. Weights are of differences of scores, which is exact
// for any. lse: where it is written; null: nowhere.
__device__ __noinline__ void attend_row(
    const unsigned short* q, const unsigned short* k, const unsigned short* v, const char* mask, unsigned short* o, float* lse, int seen,
    i64 k_seq, i64 v_seq, i64 mask_key, float slope, int from, int to) {
    const int lane = threadIdx.x % 32;
    float own[D / 32], acc[D / 32], top = NONE, sum = 0.f;
    for (int d = 0; d < D / 32; ++d) own[d] = T::widen(q[d * 32 + lane]), acc[d] = 0.f;
    for (int key = 0; key < seen; ++key) {
        const unsigned element = load_element_if(true, mask + key * mask_key * MASK_BYTES);
        if (element == UNSEEN) continue;
        float s = 0.f;
        for (int d = 0; d < D / 32; ++d) s = fmaf(own[d], T::widen(k[key * k_seq + d * 32 + lane]), s);
        for (int across = 16; across; across /= 2) s += __shfl_xor_sync(~0u, s, across);
        const float next = fmaxf(top, s), base = next == NONE ? 0.f : next;
        const float factor = exp2_fast((top - base) * slope), weight = exp2_fast((s - base) * slope);
        sum = sum * factor + weight;
        for (int d = 0; d < D / 32; ++d) acc[d] = fmaf(weight, T::widen(v[key * v_seq + d * 32 + lane]), acc[d] * factor);
        top = next;
    }
    for (int d = 0; d < D / 32; ++d)
        if (d * 32 + lane >= from && d * 32 + lane < to)
            o[d * 32 + lane] = (unsigned short)T::pack(sum == 0.f ? 0.f : acc[d] / sum, 0.f);
}
extern "C" __global__ void __launch_bounds__(THREADS) attention(
    const char* __restrict__ q, const char* __restrict__ k, const char* __restrict__ v, const char* __restrict__ attn_mask, char* __restrict__ o, float* __restrict__ lse,
    i64 batch, i64 heads, i64 kv_heads, i64 q_len, i64 kv_len, i64 head_dim, float scale,
    i64 q_batch, i64 q_head, i64 q_seq, i64 k_batch, i64 k_head, i64 k_seq,
    i64 v_batch, i64 v_head, i64 v_seq, i64 o_batch, i64 o_head, i64 o_seq, i64 mask_batch, i64 mask_head, i64 mask_query, i64 mask_key) {
    extern __shared__ __align__(128) char shared[];
    unsigned q_tile = shared_address(shared);
    const int group = group_of(heads, kv_heads);
    for (int first = 0; first < group; first += PACK) {   // once, where a tile has rows for the whole group
    const Place place(group, first);
    // Told by lane 0, so that the compiler knows it to be the same in a whole warp.
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int rows_end = (int)q_len * PACK, shift = (int)kv_len - (int)q_len;
    const int warp_m = WARPS_N == 1 ? warp : warp % WARPS_M, warp_n = WARPS_N == 1 ? 0 : warp / WARPS_M;
    const int keys_end = CAUSAL ? min((int)kv_len, query_of(min(place.row + BM, rows_end)) + shift) : (int)kv_len;   // may be negative
    const int steps = keys_end > 0 ? (keys_end + BN - 1) / BN : 0;
    const float slope = (scale == 0.f ? rsqrtf((float)D) : scale) * LOG2_E;
    const unsigned k_tiles = q_tile + BM * Rows::PITCH, v_tiles = k_tiles + K_STAGES * TILE_BYTES;

    // Tiles come from the last to the first: the masked ones are then done before the long run of others.
    const int copy_row = threadIdx.x / COLUMNS, copy_byte = threadIdx.x % COLUMNS * 16;
    const unsigned copy_to = Rows::place(copy_row, threadIdx.x % COLUMNS);
    const int key_row = threadIdx.x % KEY_THREADS / COLUMNS, last = (steps - 1) * BN + warp_n * KEYS;
    const unsigned key_to = Rows::place(key_row, threadIdx.x % COLUMNS) + warp_n * KEYS * Rows::PITCH;

    const char* const q_from = q + (place.batch * q_batch + place.head * q_head) * 2 + copy_byte;
    // Of a row; where there is no such row, of the block's first.
    const char* const mask_from = attn_mask + (place.batch * mask_batch + place.head * mask_head) * MASK_BYTES;
    auto mask_of = [&](int asked) {
        const int row = asked < rows_end && head_of(asked) < place.heads ? asked : place.row;
        return mask_from + (offset_of(row, mask_head, mask_query)) * MASK_BYTES;
    };
    if (steps > 0) {   // as load_rows, but rows of several heads have no pitch
        constexpr int STEP = THREADS / COLUMNS;
        #pragma unroll
        for (int i = 0; i < (BM + STEP - 1) / STEP; ++i) {
            const int row = place.row + copy_row + i * STEP;
            if (BM % STEP == 0 || copy_row + i * STEP < BM)
                #pragma unroll
                for (int g = 0; g < GROUPS; ++g)
                    copy_async_16_or_zero(q_tile + copy_to + i * STEP * Rows::PITCH + g * COLUMNS * 16,
                                          q_from + offset_of(row, q_head, q_seq) * 2 + g * COLUMNS * 16, row < rows_end && head_of(row) < place.heads);
        }
    }
    const int kv_head = place.kv_head;
    // Of the thread, in the tile that is asked for next.
    const char* k_from = k + (place.batch * k_batch + kv_head * k_head + (last + key_row) * k_seq) * 2 + copy_byte;
    const char* v_from = v + (place.batch * v_batch + kv_head * v_head + (last + key_row) * v_seq) * 2 + copy_byte;
    auto load_k = [&](int step) {
        if (step >= 0 && step < steps) {
            keep_in_l2<KEY_ROWS, KEY_THREADS>(key_row, k_from, k_seq * 2, step > 0 ? KEY_ROWS : (int)kv_len - last);
            load_rows<KEY_ROWS, KEY_THREADS>(key_row, k_tiles + step % K_STAGES * TILE_BYTES + key_to, k_from, k_seq * 2, step > 0, (int)kv_len - last);
            k_from -= BN * k_seq * 2;
        }
        commit_copies();
    };
    auto load_v = [&](int step) {
        if (step >= 0 && step < steps) {
            keep_in_l2<KEY_ROWS, KEY_THREADS>(key_row, v_from, v_seq * 2, step > 0 ? KEY_ROWS : (int)kv_len - last);
            load_rows<KEY_ROWS, KEY_THREADS>(key_row, v_tiles + step % V_STAGES * TILE_BYTES + key_to, v_from, v_seq * 2, step > 0, (int)kv_len - last);
            v_from -= BN * v_seq * 2;
        }
        commit_copies();
    };
    auto ask = [&](int step) {
        if (V_STAGES == 1) load_v(step);
        if (K_STAGES > 1) load_k(step + K_STAGES - 1 + AHEAD);
        if (V_STAGES > 1) load_v(step + V_AHEAD);
    };

    if (K_STAGES == 1) load_k(0);
    #pragma unroll
    for (int i = least(1 - K_STAGES - AHEAD, -V_AHEAD); i < 0; ++i) ask(i);

    // The lane's row and 16-byte chunk within a 16 x 16 fragment, and what it is xor-ed with.
    const int a_row = lane & 15, a_chunk = lane >> 4, k_row = (lane & 7) + (lane >> 4 << 3), k_chunk = lane >> 3 & 1;
    const unsigned q_at = q_tile + (warp_m * ROWS + a_row) * Rows::PITCH, q_turn = (a_chunk ^ Rows::turn(a_row)) << 4;
    const unsigned k_lane = k_tiles + (warp_n * KEYS + k_row) * Rows::PITCH, k_turn = (k_chunk ^ Rows::turn(k_row)) << 4;
    const unsigned v_lane = v_tiles + (warp_n * KEYS + a_row) * Rows::PITCH, v_turn = q_turn;

    float acc[TILES][D / 8][4];
    Running running;
    #pragma unroll
    for (int m = 0; m < TILES; ++m) {
        running.top[m][0] = running.top[m][1] = NONE;
        #pragma unroll
        for (int e = 0; e < 4; ++e) running.sum[m][e] = 0.f;
        #pragma unroll
        for (int d = 0; d < D / 8; ++d) acc[m][d][0] = acc[m][d][1] = acc[m][d][2] = acc[m][d][3] = 0.f;
    }
    const int own_row = place.row + warp_m * ROWS;   // the warp's first

    const bool pairs = mask_key == 1 && (mask_batch | mask_head | mask_query) % 2 == 0;   // of elements lie in one aligned word
    const char* mask_rows[TILES][2];
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int h = 0; h < 2; ++h) mask_rows[m][h] = mask_of(own_row + m * 16 + h * 8 + lane / 4);
    // What apply_mask needs for a step. Keys past the end are not seen.
    auto fetch_mask = [&](unsigned (&mask)[TILES][2][KEYS / 8], int step) {
        const int first = (steps - 1 - step) * BN + warp_n * KEYS, key = first + 2 * (lane % 4);
        #pragma unroll
        for (int m = 0; m < TILES; ++m)
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const char* const from = mask_rows[m][h] + key * mask_key * MASK_BYTES;
                if (pairs && first + KEYS <= (int)kv_len) {
                    #pragma unroll
                    for (int n = 0; n < KEYS / 8; ++n) mask[m][h][n] = load_pair(from + n * 8 * MASK_BYTES);
                } else {
                    #pragma unroll
                    for (int n = 0; n < KEYS / 8; ++n)
                        mask[m][h][n] = load_element_if(key + n * 8 < (int)kv_len, from + n * 8 * mask_key * MASK_BYTES)
                            | load_element_if(key + n * 8 + 1 < (int)kv_len, from + (n * 8 + 1) * mask_key * MASK_BYTES) << MASK_BITS;
                }
            }
    };
    // Whether the warp's rows see any of its keys of a step.
    auto sees = [&](int step) {
        return !CAUSAL || (steps - 1 - step) * BN + warp_n * KEYS <= query_of(own_row + ROWS - 1) + shift;
    };
    unsigned q_held[TILES][D / 16][4];
    auto load_q = [&]() {
        #pragma unroll
        for (int m = 0; m < TILES; ++m)
            #pragma unroll
            for (int d = 0; d < D / 16; ++d) load_tiles(q_held[m][d], q_at + m * 16 * Rows::PITCH + (q_turn ^ d * 32));
    };

    // For those whose keys are this warp's, too: what they have copied is there for all of them, and what they have read is free.
    auto wait_for_warps = [&]() {
        __syncwarp();
    };
    // s holds the scores of `step`; those of the next are multiplied beside its softmax.
    float even[TILES][KEYS / 8][4], odd[TILES][KEYS / 8][4];
    unsigned mask[TILES][2][KEYS / 8];
    if (steps > 0) fetch_mask(mask, 0);
    wait_copies<(V_STAGES == 1 ? 2 * (K_STAGES - 1) : 2 * K_STAGES - 1)>();
    __syncthreads();
    load_q();
    if (steps > 0) multiply_qk(even, q_held, k_lane, k_turn);
    auto advance = [&](float (&s)[TILES][KEYS / 8][4], float (&next)[TILES][KEYS / 8][4], int step) {
        wait_copies<IN_FLIGHT>();
        wait_for_warps();
        ask(step);
        const unsigned v_at = v_lane + step % V_STAGES * TILE_BYTES;
        unsigned weights[TILES][KEYS / 16][4];
        apply_mask(s, mask);
        if (step + 1 < steps) fetch_mask(mask, step + 1);
        raise(s, running, acc, slope);
        if (V_STAGES == 1 || V_LATE) {
            wait_copies<V_IN_FLIGHT>();
            wait_for_warps();
        }
        const unsigned k_at = k_lane + (step + 1) % K_STAGES * TILE_BYTES;   // past the last step: of no use, and harmless
        #pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) {
            weigh(weights, s, n, running, slope);
            multiply_qk_part(next, q_held, n, k_at, k_turn);
            multiply_pv(acc, weights, n, v_at, v_turn, running.sum);
        }
    };
    for (int step = 0; step < steps; step += 2) {
        advance(even, odd, step);
        if (step + 1 < steps) advance(odd, even, step + 1);
    }
    float sum[TILES][2];
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[m][h] = running.sum[m][2 * h];
            if (running.top[m][h] != NONE && fabsf(running.top[m][h]) * slope > MOST_ROUNDED) sum[m][h] = __int_as_float(0x7fffffff);   // NaN: its row is computed again
        }
    wait_copies<0>();   // none may land in what follows

    // Those that shared the keys merge a share of the head each: they keep that of their own sums, and get the others' for it.
    constexpr int SHARE = D / 8 / WARPS_N;   // 8-wide pieces of a row
    static_assert(D / 8 % WARPS_N == 0, "every one of them merges as much");
    // What the w-th partner further on has sent: a piece of its sums; its maximum and sum of weights.
    constexpr int PIECES = TILES * 2 * (D / 8);   // pairs of accumulators a lane
    float2* const partial = (float2*)(shared);   // [WARPS_N][WARPS_M][PIECES][32]
    float2* const state = partial + WARPS_N * WARPS_M * PIECES * 32;               // [WARPS_N][WARPS_M][ROWS]: maximum, sum
    auto sums_of = [&](int w, int m, int h, int i) {
        return partial[(((warp_n + w) % WARPS_N * WARPS_M + warp_m) * PIECES + (m * 2 + h) * (D / 8) + warp_n * SHARE + i) * 32 + lane];
    };
    auto state_of = [&](int w, int m, int h) { return state[((warp_n + w) % WARPS_N * WARPS_M + warp_m) * ROWS + m * 16 + h * 8 + lane / 4]; };
    __syncthreads();
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (lane % 4 == 0) state[(warp_n * WARPS_M + warp_m) * ROWS + m * 16 + h * 8 + lane / 4] = make_float2(running.top[m][h], sum[m][h]);
            #pragma unroll
            for (int d = 0; d < D / 8; ++d)
                if (d / SHARE != warp_n)
                    partial[((warp_n * WARPS_M + warp_m) * PIECES + (m * 2 + h) * (D / 8) + d) * 32 + lane] = make_float2(acc[m][d][2 * h], acc[m][d][2 * h + 1]);
        }
    __syncthreads();
    float factor[TILES][2][WARPS_N];   // of what was kept, then of what was sent
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            float2 of[WARPS_N];
            of[0] = make_float2(running.top[m][h], sum[m][h]);
            float top = of[0].x;
            sum[m][h] = 0.f;
            #pragma unroll
            for (int w = 1; w < WARPS_N; ++w) {
                of[w] = state_of(w, m, h);
                top = fmaxf(top, of[w].x);
            }
            #pragma unroll
            for (int w = 0; w < WARPS_N; ++w) {
                factor[m][h][w] = exp2_fast((of[w].x - (top == NONE ? 0.f : top)) * slope);
                sum[m][h] = fmaf(of[w].y, factor[m][h][w], sum[m][h]);
            }
            running.top[m][h] = top;
        }

    // Rows that see no key are zero, not 0 / 0.
    float inverse[TILES][2];
    bool repeat = false;
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = own_row + m * 16 + h * 8 + lane / 4;
            const bool blind = running.top[m][h] == NONE && sum[m][h] == sum[m][h];   // NaN is no maximum, but the sum then is NaN
            repeat |= sum[m][h] != sum[m][h];
            inverse[m][h] = blind ? 0.f : reciprocal_fast(sum[m][h]);   // no row's own sum is denormal
        }
    repeat = __any_sync(~0u, repeat);
    char* const o_rows = o + (place.batch * o_batch + place.head * o_head) * 2;
    char* const o_lane = o_rows + warp_n * SHARE * 16 + lane % 4 * (SHARE % 4 == 0 ? 16 : 4);
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const bool wanted = own_row + m * 16 + h * 8 + lane / 4 < rows_end && head_of(own_row + m * 16 + h * 8 + lane / 4) < place.heads;
            unsigned packed[SHARE];
            #pragma unroll
            for (int i = 0; i < SHARE; ++i) {
                float2 total = make_float2(acc[m][i][2 * h], acc[m][i][2 * h + 1]);
                #pragma unroll
                for (int w = 1; w < WARPS_N; ++w)
                    if (warp_n == w) total = make_float2(acc[m][w * SHARE + i][2 * h], acc[m][w * SHARE + i][2 * h + 1]);
                total.x *= factor[m][h][0];
                total.y *= factor[m][h][0];
                #pragma unroll
                for (int w = 1; w < WARPS_N; ++w) {
                    const float2 x = sums_of(w, m, h, i);
                    total.x = fmaf(x.x, factor[m][h][w], total.x);
                    total.y = fmaf(x.y, factor[m][h][w], total.y);
                }
                packed[i] = T::pack(total.x * inverse[m][h], total.y * inverse[m][h]);
            }
            char* const to = o_lane + offset_of(own_row + m * 16 + h * 8 + lane / 4, o_head, o_seq) * 2;
            #pragma unroll
            for (int i = 0; i < SHARE; ++i) {
                if (SHARE % 4) store_4_if(wanted, to + i * 16, packed[i]);
                else if (i % 4 == 0) store_16_if(wanted, to + i * 16, own_chunk(packed + i, lane));
            }
        }

    // Sums that are NaN are of NaN, or of huge scores, whose rows are computed once more: as much of them as was written here.
    if (repeat) {
        __syncwarp();
        #pragma unroll 1
        for (int row = own_row; row < own_row + ROWS; ++row)
            if (row < rows_end && head_of(row) < place.heads) {
                attend_row((const unsigned short*)q + place.batch * q_batch + place.head * q_head + offset_of(row, q_head, q_seq),
                           (const unsigned short*)k + place.batch * k_batch + kv_head * k_head, (const unsigned short*)v + place.batch * v_batch + kv_head * v_head,
                           attn_mask + (place.batch * mask_batch + place.head * mask_head + offset_of(row, mask_head, mask_query)) * MASK_BYTES,
                           (unsigned short*)o + place.batch * o_batch + place.head * o_head + offset_of(row, o_head, o_seq),
                           nullptr,
                           CAUSAL ? min((int)kv_len, query_of(row) + shift + 1) : (int)kv_len, k_seq, v_seq, mask_key, slope, warp_n * SHARE * 8, warp_n * SHARE * 8 + SHARE * 8);
            }
    }
    __syncthreads();   // nobody reads the tiles any more
    }
}

// For addresses that are no multiples of 16 bytes: a warp a row, a lane for every 32nd element of it.
extern "C" __global__ void __launch_bounds__(THREADS) attention_unaligned(
    const char* q, const char* k, const char* v, const char* attn_mask, char* o, float* lse,
    i64 batch, i64 heads, i64 kv_heads, i64 q_len, i64 kv_len, i64 head_dim, float scale,
    i64 q_batch, i64 q_head, i64 q_seq, i64 k_batch, i64 k_head, i64 k_seq,
    i64 v_batch, i64 v_head, i64 v_seq, i64 o_batch, i64 o_head, i64 o_seq, i64 mask_batch, i64 mask_head, i64 mask_query, i64 mask_key) {
    const int group = group_of(heads, kv_heads);
    for (int first = 0; first < group; first += PACK) {   // once, where a tile has rows for the whole group
    const Place place(group, first);
    const int shift = (int)kv_len - (int)q_len;
    const float slope = (scale == 0.f ? rsqrtf((float)D) : scale) * LOG2_E;
    const int kv_head = place.kv_head;
    for (int row = place.row + threadIdx.x / 32; row < place.row + BM && row < q_len * PACK; row += WARPS) {
        if (head_of(row) >= place.heads) continue;
        attend_row((const unsigned short*)q + place.batch * q_batch + place.head * q_head + offset_of(row, q_head, q_seq),
                   (const unsigned short*)k + place.batch * k_batch + kv_head * k_head, (const unsigned short*)v + place.batch * v_batch + kv_head * v_head,
                   attn_mask + (place.batch * mask_batch + place.head * mask_head + offset_of(row, mask_head, mask_query)) * MASK_BYTES,
                   (unsigned short*)o + place.batch * o_batch + place.head * o_head + offset_of(row, o_head, o_seq),
                   nullptr,
                   CAUSAL ? min((int)kv_len, query_of(row) + shift + 1) : (int)kv_len, k_seq, v_seq, mask_key, slope, 0, D);
    }
    }
}
