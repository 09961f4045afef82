// Attention forward, float16, head dimension 128: o = softmax(scale q k^T) v.
// 64 rows a block, 64 keys a step; 4 x 1 warps.
// Rendered for sm_89 from templates/attention/cuda.cu.j2, which explains every choice.
#include "_shared/async_copy.cuh"
#include "_shared/mma.cuh"
#include "_shared/store.cuh"

using i64 = long long;
using T = f16;
constexpr int D = 128, WARPS_M = 4, WARPS_N = 1, TILES = 1;
constexpr int WARPS = WARPS_M * WARPS_N, THREADS = 32 * WARPS;
constexpr int ROWS = 16 * TILES, BM = ROWS * WARPS_M, BN = 64, KEYS = BN / WARPS_N;   // of a warp, a block; a block, a warp
constexpr int K_STAGES = 2, V_STAGES = 2, AHEAD = 1;
constexpr int V_AHEAD = V_STAGES - 1;
constexpr bool CAUSAL = false;
using Rows = tile_rows<D * 2, true>;
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
constexpr int KEY_THREADS = THREADS, KEY_ROWS = BN;

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
        #pragma unroll
        for (int i = 0; i < (COUNT + STEP - 1) / STEP; ++i, from += STEP * pitch)
            if (COUNT % STEP == 0 || row + i * STEP < COUNT)
                #pragma unroll
                for (int g = 0; g < GROUPS; ++g)
                    copy_async_16_or_zero(tile + i * STEP * Rows::PITCH + g * COLUMNS * 16, from + g * COLUMNS * 16, i * STEP < rows);
    }
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
    bool moved = false;
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
            moved |= (top[m][h] - running.top[m][h]) * slope > 8.f;   // weights stay below 2^8: safe in float16
        }
    if (__any_sync(~0u, moved))
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
                x = exp2_fast(x);
}
            weights[m][n][h] = T::pack(s[m][2 * n][2 * h], s[m][2 * n][2 * h + 1]);
            weights[m][n][h + 2] = T::pack(s[m][2 * n + 1][2 * h], s[m][2 * n + 1][2 * h + 1]);
        }
}

// Which rows and keys a block works on: the grid has an axis for each of blocks of rows, heads and batch.
struct Place {
    int batch, head, row;                // row: the first of BM
    __device__ __forceinline__ Place() {
        int block = blockIdx.z;
        head = blockIdx.x, batch = blockIdx.y;
        if (CAUSAL) block = gridDim.z - 1 - block;   // the longest first
        row = block * BM;
    }
};

// head / (heads / kv_heads), exactly: before it is truncated, the quotient is 0.5 / group or more off the integers.
__device__ __forceinline__ int kv_head_of(int head, int heads, int kv_heads) {
    if (heads != kv_heads) {
        asm volatile("");   // keeps this a branch: else everybody would wait for the division
        head = __fdividef((head + 0.5f) * kv_heads, heads);
    }
    return head;
}
// The channels [from, to) of a row, by a warp, a lane for every 32nd channel. Weights are of differences of scores, which is exact
// for any. lse: where it is written; null: nowhere.
__device__ __noinline__ void attend_row(
    const unsigned short* q, const unsigned short* k, const unsigned short* v, const char* mask, unsigned short* o, float* lse, int seen,
    i64 k_seq, i64 v_seq, i64 mask_key, float slope, int from, int to) {
    const int lane = threadIdx.x % 32;
    float own[D / 32], acc[D / 32], top = NONE, sum = 0.f;
    for (int d = 0; d < D / 32; ++d) own[d] = T::widen(q[d * 32 + lane]), acc[d] = 0.f;
    for (int key = 0; key < seen; ++key) {
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
            o[d * 32 + lane] = (unsigned short)T::pack(seen > 0 ? acc[d] / sum : 0.f, 0.f);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(
    const char* __restrict__ q, const char* __restrict__ k, const char* __restrict__ v, const char* __restrict__ attn_mask, char* __restrict__ o, float* __restrict__ lse,
    i64 batch, i64 heads, i64 kv_heads, i64 q_len, i64 kv_len, i64 head_dim, float scale,
    i64 q_batch, i64 q_head, i64 q_seq, i64 k_batch, i64 k_head, i64 k_seq,
    i64 v_batch, i64 v_head, i64 v_seq, i64 o_batch, i64 o_head, i64 o_seq, i64 mask_batch, i64 mask_head, i64 mask_query, i64 mask_key) {
    extern __shared__ __align__(128) char shared[];
    unsigned q_tile = shared_address(shared);
    const Place place;
    // Told by lane 0, so that the compiler knows it to be the same in a whole warp.
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int rows_end = q_len, shift = (int)kv_len - (int)q_len;
    const int warp_m = WARPS_N == 1 ? warp : warp % WARPS_M, warp_n = WARPS_N == 1 ? 0 : warp / WARPS_M;
    const int keys_end = CAUSAL ? min((int)kv_len, min(place.row + BM, rows_end) + shift) : (int)kv_len;   // may be negative
    const int steps = keys_end > 0 ? (keys_end + BN - 1) / BN : 0;
    const float slope = (scale == 0.f ? rsqrtf((float)D) : scale) * LOG2_E;
    const unsigned k_tiles = q_tile + BM * Rows::PITCH, v_tiles = k_tiles + K_STAGES * TILE_BYTES;

    // Tiles come from the last to the first: the masked ones are then done before the long run of others.
    const int copy_row = threadIdx.x / COLUMNS, copy_byte = threadIdx.x % COLUMNS * 16;
    const unsigned copy_to = Rows::place(copy_row, threadIdx.x % COLUMNS);
    const int key_row = copy_row, last = (steps - 1) * BN;
    const unsigned key_to = copy_to;

    const char* const q_from = q + (place.batch * q_batch + place.head * q_head + (place.row + copy_row) * q_seq) * 2 + copy_byte;
    if (steps > 0) load_rows<BM, THREADS>(copy_row, q_tile + copy_to, q_from, q_seq * 2, false, rows_end - place.row);
    // Only now, or q would wait for what k and v alone need.
    int head = place.head;
    asm volatile("" : "+r"(head));
    const int kv_head = kv_head_of(head, heads, kv_heads);
    // Of the thread, in the tile that is asked for next.
    const char* k_from = k + (place.batch * k_batch + kv_head * k_head + (last + key_row) * k_seq) * 2 + copy_byte;
    const char* v_from = v + (place.batch * v_batch + kv_head * v_head + (last + key_row) * v_seq) * 2 + copy_byte;
    auto load_k = [&](int step) {
        if (step >= 0 && step < steps) {
            load_rows<KEY_ROWS, KEY_THREADS>(key_row, k_tiles + step % K_STAGES * TILE_BYTES + key_to, k_from, k_seq * 2, step > 0, (int)kv_len - last);
            k_from -= BN * k_seq * 2;
        }
        commit_copies();
    };
    auto load_v = [&](int step) {
        if (step >= 0 && step < steps) {
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

    // Scores that a row does not see become NONE.
    auto mask = [&](float (&s)[TILES][KEYS / 8][4], int step) {
        const int key = (steps - 1 - step) * BN + warp_n * KEYS;
        if (key + KEYS <= (int)kv_len && !(CAUSAL && key + KEYS - 1 > own_row + shift)) return;
        asm volatile("");   // keeps this a branch: as selects it would cost as much in every step
        #pragma unroll
        for (int m = 0; m < TILES; ++m)
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = own_row + m * 16 + h * 8 + lane / 4;
                const int seen = (CAUSAL ? min((int)kv_len, row + shift + 1) : (int)kv_len) - key - 2 * (lane % 4);
                #pragma unroll
                for (int n = 0; n < KEYS / 8; ++n)
                    #pragma unroll
                    for (int e = 0; e < 2; ++e)
                        if (n * 8 + e >= seen) s[m][n][2 * h + e] = NONE;
            }
    };
    // Whether the warp's rows see any of its keys of a step.
    auto sees = [&](int step) {
        return !CAUSAL || (steps - 1 - step) * BN + warp_n * KEYS <= own_row + ROWS - 1 + shift;
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
        __syncthreads();
    };
    // s holds the scores of `step`; those of the next are multiplied beside its softmax.
    float even[TILES][KEYS / 8][4], odd[TILES][KEYS / 8][4];
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
        if (step + 1 < steps) multiply_qk(next, q_held, k_lane + (step + 1) % K_STAGES * TILE_BYTES, k_turn);
        mask(s, step);
        raise(s, running, acc, slope);
        if (V_STAGES == 1 || V_LATE) wait_copies<V_IN_FLIGHT>();
        if (K_STAGES == 1 || V_STAGES == 1 || V_LATE) wait_for_warps();
        if (K_STAGES == 1) load_k(step + 1);
        {
            weigh(weights, s, 0, running, slope);
            #pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                if (n + 1 < KEYS / 16) weigh(weights, s, n + 1, running, slope);
                multiply_pv(acc, weights, n, v_at, v_turn, running.sum);
            }
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


    // Rows that see no key are zero, not 0 / 0.
    float inverse[TILES][2];
    bool repeat = false;
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = own_row + m * 16 + h * 8 + lane / 4;
            const bool blind = (CAUSAL && row + shift < 0) || kv_len == 0;
            repeat |= sum[m][h] != sum[m][h];
            inverse[m][h] = blind ? 0.f : reciprocal_fast(sum[m][h]);   // no row's own sum is denormal
        }
    repeat = __any_sync(~0u, repeat);
    char* const o_rows = o + (place.batch * o_batch + place.head * o_head) * 2;
    char* const o_lane = o_rows + (own_row + lane / 4) * o_seq * 2 + lane % 4 * 16;
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int h = 0; h < 2; ++h)
            #pragma unroll
            for (int d = 0; d < D / 8; d += 4) {
                unsigned packed[4];
                #pragma unroll
                for (int i = 0; i < 4; ++i) packed[i] = T::pack(acc[m][d + i][2 * h] * inverse[m][h], acc[m][d + i][2 * h + 1] * inverse[m][h]);
                store_16_if(own_row + m * 16 + h * 8 + lane / 4 < rows_end, o_lane + (m * 16 + h * 8) * o_seq * 2 + d * 16, own_chunk(packed, lane));
            }

    // Sums that are NaN are of NaN, or of huge scores, whose rows are computed once more: as much of them as was written here.
    if (repeat) {
        __syncwarp();
        int head = place.head;
        asm volatile("" : "+r"(head));   // or kv_head would be kept through all steps
        const int kv_head = kv_head_of(head, heads, kv_heads);
        #pragma unroll 1
        for (int row = own_row; row < own_row + ROWS; ++row)
            if (row < rows_end) {
                attend_row((const unsigned short*)q + place.batch * q_batch + place.head * q_head + row * q_seq,
                           (const unsigned short*)k + place.batch * k_batch + kv_head * k_head, (const unsigned short*)v + place.batch * v_batch + kv_head * v_head,
                           nullptr,
                           (unsigned short*)o + place.batch * o_batch + place.head * o_head + row * o_seq,
                           nullptr,
                           CAUSAL ? min((int)kv_len, row + shift + 1) : (int)kv_len, k_seq, v_seq, mask_key, slope, 0, D);
            }
    }
}

// For addresses that are no multiples of 16 bytes: a warp a row, a lane for every 32nd element of it.
extern "C" __global__ void __launch_bounds__(THREADS) attention_unaligned(
    const char* q, const char* k, const char* v, const char* attn_mask, char* o, float* lse,
    i64 batch, i64 heads, i64 kv_heads, i64 q_len, i64 kv_len, i64 head_dim, float scale,
    i64 q_batch, i64 q_head, i64 q_seq, i64 k_batch, i64 k_head, i64 k_seq,
    i64 v_batch, i64 v_head, i64 v_seq, i64 o_batch, i64 o_head, i64 o_seq, i64 mask_batch, i64 mask_head, i64 mask_query, i64 mask_key) {
    const Place place;
    const int shift = (int)kv_len - (int)q_len;
    const float slope = (scale == 0.f ? rsqrtf((float)D) : scale) * LOG2_E;
    const int kv_head = kv_head_of(place.head, heads, kv_heads);
    for (int row = place.row + threadIdx.x / 32; row < place.row + BM && row < q_len; row += WARPS) {
        attend_row((const unsigned short*)q + place.batch * q_batch + place.head * q_head + row * q_seq,
                   (const unsigned short*)k + place.batch * k_batch + kv_head * k_head, (const unsigned short*)v + place.batch * v_batch + kv_head * v_head,
                   nullptr,
                   (unsigned short*)o + place.batch * o_batch + place.head * o_head + row * o_seq,
                   nullptr,
                   CAUSAL ? min((int)kv_len, row + shift + 1) : (int)kv_len, k_seq, v_seq, mask_key, slope, 0, D);
    }
}
