// Reductions over the threads that share a row: part of a warp, a warp, warps of a block, blocks of a cluster.
#pragma once
#include "_shared/cluster.cuh"

// What is reduced. merge(a, b) combines two partial results; exchange(a, distance, mask) fetches the partner's; put and
// get move one to and from WORDS floats of shared memory, pairs as one word of 8 bytes.
struct sum1 {
    static constexpr int WORDS = 1;
    float a;
    __device__ __forceinline__ static sum1 nothing() { return {0.f}; }
    __device__ __forceinline__ void put(float* p) const { p[0] = a; }
    __device__ __forceinline__ sum1 get(const float* p) const { return {p[0]}; }
};
struct sum2 {
    static constexpr int WORDS = 2;
    float a, b;
    __device__ __forceinline__ static sum2 nothing() { return {0.f, 0.f}; }
    __device__ __forceinline__ void put(float* p) const { *reinterpret_cast<float2*>(p) = {a, b}; }
    __device__ __forceinline__ sum2 get(const float* p) const { const float2 f = *reinterpret_cast<const float2*>(p); return {f.x, f.y}; }
};
// Count, mean and sum of squared deviations from that mean. With EQUAL every partner holds the same count, so it
// stays a compile-time constant: the weights of Chan's formula fold to constants, and it is neither exchanged nor stored.
template <bool EQUAL> struct moments {
    static constexpr int WORDS = EQUAL ? 2 : 3;
    float count, mean, m2;
    __device__ __forceinline__ static moments nothing() { return {0.f, 0.f, 0.f}; }
    __device__ __forceinline__ void put(float* p) const {
        if (EQUAL) *reinterpret_cast<float2*>(p) = {mean, m2};
        else { p[0] = mean; p[1] = m2; p[2] = count; }
    }
    __device__ __forceinline__ moments get(const float* p) const {   // called on the reader's own: of the same count, if EQUAL
        if (!EQUAL) return {p[2], p[0], p[1]};
        const float2 f = *reinterpret_cast<const float2*>(p);
        return {count, f.x, f.y};
    }
};
// A maximum, and a maximum with the sum of exponentials less it (Milakov & Gimelshein 2018, arXiv:1805.02867, eq. 4). They
// start at a finite number, so that -Inf less the maximum is -Inf, and not NaN; NaN shows in the sum alone. BASE_2: the
// maximum is in units of log 2.
constexpr float LOWEST = -3.402823466e38f;
__device__ __forceinline__ float exp2_approx(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
struct max1 {
    static constexpr int WORDS = 1;
    float a;
    __device__ __forceinline__ static max1 nothing() { return {LOWEST}; }
    __device__ __forceinline__ void put(float* p) const { p[0] = a; }
    __device__ __forceinline__ max1 get(const float* p) const { return {p[0]}; }
};
template <bool BASE_2> struct max_sum {
    static constexpr int WORDS = 2;
    float max, sum;
    __device__ __forceinline__ static max_sum nothing() { return {LOWEST, 0.f}; }
    __device__ __forceinline__ void put(float* p) const { *reinterpret_cast<float2*>(p) = {max, sum}; }
    __device__ __forceinline__ max_sum get(const float* p) const { const float2 f = *reinterpret_cast<const float2*>(p); return {f.x, f.y}; }
    // The same sum, less another maximum.
    __device__ __forceinline__ float less(float other) const { return sum * exp2_approx((max - other) * (BASE_2 ? 1.f : 1.44269504f)); }
};

__device__ __forceinline__ sum1 merge(const sum1& p, const sum1& q) { return {p.a + q.a}; }
__device__ __forceinline__ sum2 merge(const sum2& p, const sum2& q) { return {p.a + q.a, p.b + q.b}; }
__device__ __forceinline__ max1 merge(const max1& p, const max1& q) { return {fmaxf(p.a, q.a)}; }
template <bool BASE_2>
__device__ __forceinline__ max_sum<BASE_2> merge(const max_sum<BASE_2>& p, const max_sum<BASE_2>& q) {
    const float max = fmaxf(p.max, q.max);
    return {max, p.less(max) + q.less(max)};
}
// Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979), eq. 2.1.
// The mean moves by delta * share, so equal means stay equal exactly: a constant row keeps variance 0. Beside nothing a
// partner keeps its mean exactly, too, which the approximate division would not give: the threads of a row would differ.
template <bool EQUAL>
__device__ __forceinline__ moments<EQUAL> merge(const moments<EQUAL>& p, const moments<EQUAL>& q) {
    const float count = p.count + q.count, delta = q.mean - p.mean;
    const float share = EQUAL ? q.count / count : p.count == 0.f ? 1.f : __fdividef(q.count, count);
    return {count, p.mean + delta * share, p.m2 + q.m2 + delta * delta * (p.count * share)};
}

__device__ __forceinline__ sum1 exchange(const sum1& p, int d, unsigned mask) { return {__shfl_xor_sync(mask, p.a, d)}; }
__device__ __forceinline__ sum2 exchange(const sum2& p, int d, unsigned mask) {
    return {__shfl_xor_sync(mask, p.a, d), __shfl_xor_sync(mask, p.b, d)};
}
__device__ __forceinline__ max1 exchange(const max1& p, int d, unsigned mask) { return {__shfl_xor_sync(mask, p.a, d)}; }
template <bool BASE_2> __device__ __forceinline__ max_sum<BASE_2> exchange(const max_sum<BASE_2>& p, int d, unsigned mask) {
    return {__shfl_xor_sync(mask, p.max, d), __shfl_xor_sync(mask, p.sum, d)};
}
template <bool EQUAL>
__device__ __forceinline__ moments<EQUAL> exchange(const moments<EQUAL>& p, int d, unsigned mask) {
    return {EQUAL ? p.count : __shfl_xor_sync(mask, p.count, d), __shfl_xor_sync(mask, p.mean, d), __shfl_xor_sync(mask, p.m2, d)};
}

// Butterfly over aligned runs of WIDTH lanes (a power of two): every lane ends with the result.
template <int WIDTH, class M> __device__ __forceinline__ M reduce_lanes(M m, unsigned mask) {
    #pragma unroll
    for (int d = WIDTH / 2; d > 0; d /= 2) m = merge(m, exchange(m, d, mask));
    return m;
}

// Waits for the THREADS threads of one of GROUPS row groups; groups of a block do not wait for each other (hardware
// barrier `id`). Every barrier is named by a constant: for one named at run time ptxas reserves all 16, and an SM that
// has 64 then holds no more than four blocks.
template <int THREADS, int GROUPS> __device__ __forceinline__ void group_barrier(int id, unsigned mask) {
    if constexpr (THREADS <= 32) {
        __syncwarp(mask);
    } else if constexpr (GROUPS > 1) {
        if (id == GROUPS - 1) asm volatile("bar.sync %0, %1;" :: "n"(GROUPS - 1), "n"(THREADS) : "memory");
        else group_barrier<THREADS, GROUPS - 1>(id, mask);
    } else {
        asm volatile("bar.sync 0, %0;" :: "n"(THREADS) : "memory");
    }
}

enum class across_warps { none, shuffle, broadcast, leader };   // none: the group is within a warp

__device__ constexpr int power_of_two_from(int n) { int p = 1; while (p < n) p *= 2; return p; }

// Combines the result of each warp of a group through shared memory; `partial` holds one entry a warp and is not used
// by the previous call (the caller alternates two buffers, so one barrier a reduction is enough).
//   shuffle:   each warp reads all entries, one a lane, and reduces them by shuffles (one barrier)
//   broadcast: each thread reads all entries and merges them one by one: no shuffles (one barrier)
//   leader:    the first warp reduces and publishes the result (two barriers, least shared-memory traffic)
template <int THREADS, int GROUPS, across_warps HOW, class M>
__device__ __forceinline__ M reduce_warps(M m, float* partial, int lane, int id) {
    constexpr int WARPS = THREADS / 32, WIDTH = power_of_two_from(WARPS);
    if (lane % 32 == 0) m.put(partial + lane / 32 * M::WORDS);
    group_barrier<THREADS, GROUPS>(id, 0xffffffffu);
    if (HOW == across_warps::broadcast) {
        M all = m.get(partial);
        #pragma unroll
        for (int w = 1; w < WARPS; ++w) all = merge(all, m.get(partial + w * M::WORDS));
        return all;
    }
    if (HOW == across_warps::shuffle || lane < 32) {
        m = lane % WIDTH < WARPS ? m.get(partial + lane % WIDTH * M::WORDS) : M::nothing();
        m = reduce_lanes<WIDTH>(m, 0xffffffffu);
    }
    if (HOW == across_warps::leader) {
        if (lane == 0) m.put(partial + WARPS * M::WORDS);
        group_barrier<THREADS, GROUPS>(id, 0xffffffffu);
        m = m.get(partial + WARPS * M::WORDS);
    }
    return m;
}

// Same over the blocks of a cluster (sm_90): each warp writes its result into every block's `partial`
// (BLOCKS * THREADS / 32 <= 32 entries), one cluster barrier, then every warp reduces all entries.
template <int THREADS, int BLOCKS, class M>
__device__ __forceinline__ M reduce_cluster(M m, float* partial, int thread, int rank) {
    constexpr int WARPS = THREADS / 32, ENTRIES = WARPS * BLOCKS, WIDTH = power_of_two_from(ENTRIES);
    const int lane = thread % 32;
    if (lane < BLOCKS) {
        const unsigned local = (unsigned)__cvta_generic_to_shared(partial + (rank * WARPS + thread / 32) * M::WORDS);
        const unsigned remote = address_in_block(local, lane);
        alignas(8) float words[M::WORDS];
        m.put(words);
        #pragma unroll
        for (int i = 0; i < M::WORDS; ++i) store_in_cluster(remote + 4 * i, words[i]);
    }
    cluster_barrier();
    m = lane % WIDTH < ENTRIES ? m.get(partial + lane % WIDTH * M::WORDS) : M::nothing();
    return reduce_lanes<WIDTH>(m, 0xffffffffu);
}

// The threads that share a row: THREADS of this block (GROUPS such groups in it), times BLOCKS blocks of a cluster.
template <int THREADS, int GROUPS, int BLOCKS, across_warps HOW> struct row_group {
    // Two buffers, one entry of up to three words a warp and one more; a multiple of 16 bytes, so that reads can be wide.
    struct alignas(16) Scratch { float words[2][GROUPS][(3 * (THREADS / 32 * BLOCKS + 1) + 3) / 4 * 4]; };
    Scratch& scratch;
    int group, thread, rank;   // which group of the block, which thread of the group, which block of the cluster
    int turn = 0;

    __device__ __forceinline__ unsigned mask() const {   // lanes of this group in its warp
        return THREADS >= 32 ? 0xffffffffu : ((1u << THREADS % 32) - 1) << (group % (32 / (THREADS < 32 ? THREADS : 32)) * THREADS);
    }
    __device__ __forceinline__ void barrier() const { group_barrier<THREADS, GROUPS>(group, mask()); }
    // The merged partial results of all threads of the row, in every thread.
    template <class M> __device__ __forceinline__ M reduce(M m) {
        m = reduce_lanes<THREADS < 32 ? THREADS : 32>(m, mask());
        if constexpr (THREADS > 32 || BLOCKS > 1) {
            float* partial = scratch.words[turn][group];
            turn ^= 1;
            if constexpr (BLOCKS > 1) m = reduce_cluster<THREADS, BLOCKS>(m, partial, thread, rank);
            else m = reduce_warps<THREADS, GROUPS, HOW>(m, partial, thread, group);
        }
        return m;
    }
};
