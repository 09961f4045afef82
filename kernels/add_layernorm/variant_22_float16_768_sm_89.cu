// Residual addition and LayerNorm forward, float16, 768 columns: y = (x + residual - mean) / sqrt(var + eps) * weight + bias.
// 32 threads a row, 4 row(s) a block, 16-byte packets; row in registers, loaded direct; statistics: shifted.
// Rendered for sm_89 from templates/add_layernorm/cuda.cu.j2, which explains every choice.
#include "_shared/row.cuh"
#include "_shared/reduce.cuh"

DEFINE_PACKET_LOAD(load_x, "", "ld.global.nc", "")
DEFINE_PACKET_STORE(store_y, "createpolicy.fractional.L2::evict_first.b64 policy, 1.0; ", "st.global.L2::cache_hint", ", policy")
DEFINE_PACKET_LOAD(load_affine, "", "ld.global.nc", "")

using T = f16;
constexpr int COLS = 768, BYTES = 16, TPR = 32, GROUPS = 4;
constexpr int CLUSTER = 1, SPLIT = 1;   // blocks that share a row, blocks that repeat it
using Row = row_packets<T, BYTES, COLS, TPR * CLUSTER>;
using Packet = Row::Packet;
using Group = row_group<TPR, GROUPS, CLUSTER, across_warps::none>;
constexpr int VEC = Row::VEC, ITERS = Row::ITERS;
constexpr int OWN_ITERS = ITERS;
constexpr int CHAINS = 4 < VEC ? 4 : VEC;
// Every partner of every merge holds the same number of elements.
constexpr bool EQUAL = Row::EVEN && true;
using Moments = moments<EQUAL>;

__device__ __forceinline__ float reciprocal_std(float var, float eps) {
    const float a = (var < 0.f ? 0.f : var) + eps;   // a comparison, not fmaxf: NaN must stay NaN
    return rsqrtf(a);
}

// Their sum, rounded as a model's own addition rounds it.
template <class E, int N> __device__ __forceinline__ packet<N> add(const packet<N>& p, const packet<N>& q) {
    constexpr int COUNT = N / sizeof(E);
    float a[COUNT], b[COUNT];
    unpack<E, N>(p, a); unpack<E, N>(q, b);
    #pragma unroll
    for (int e = 0; e < COUNT; ++e) a[e] += b[e];
    return pack<E, N>(a);
}

// Launched in place of the other where an address is no multiple of BYTES, with the same grid and block: views of a tensor
// may start at any element. A compact two-pass loop, element by element. In the other kernel even an untaken branch costs
// a launch of 2 us 4% of its time: its code lies in the way of the instruction fetch.
extern "C" __global__ void __launch_bounds__(TPR * GROUPS)
add_layernorm_unaligned(const T* x, const T* residual, const T* weight, const T* bias, T* y, T* sum, float* saved_mean, float* saved_rstd, long long rows, long long cols, float eps) {
    using Element = packet<sizeof(T)>;
    using Threads = row_group<TPR, GROUPS, 1, across_warps::none>;
    __shared__ Threads::Scratch scratch;
    Threads group = {scratch, (int)threadIdx.x / TPR, (int)threadIdx.x % TPR, 0};
    #pragma unroll 1
    for (long long row = (long long)blockIdx.x * GROUPS + group.group; row < rows; row += (long long)gridDim.x * GROUPS) {
        const T* const x_row = x + row * COLS;
        auto x_at = [&](int c) {
            packet<sizeof(T)> e, other; load_x::into(e, x_row + c); load_x::into(other, residual + row * COLS + c);
            return widen<T>(add<T>(e, other).word[0], false);
        };
        sum1 s = {0.f};
        #pragma unroll 1
        for (int c = group.thread; c < COLS; c += TPR) s.a += x_at(c);
        const float centre = __fmul_rn(group.reduce(s).a, 1.f / COLS);   // rounded: contracted into d below it would not be one number
        sum2 q = {0.f, 0.f};
        #pragma unroll 1
        for (int c = group.thread; c < COLS; c += TPR) { const float d = x_at(c) - centre; q.a += d; q.b += d * d; }
        q = group.reduce(q);
        // The deviations of a constant row cancel exactly: hence the division.
        const float correction = q.a / COLS, rstd = reciprocal_std((q.b - q.a * correction) * (1.f / COLS), eps);
        #pragma unroll 1
        for (int c = group.thread; c < COLS; c += TPR) {
            Element y_at, w = splat<T, sizeof(T)>(1.f), b = splat<T, sizeof(T)>(0.f);
            load_affine::into(w, weight + c, weight != nullptr); load_affine::into(b, bias + c, bias != nullptr);
            y_at.word[0] = narrow<T>(fmaf((x_at(c) - centre - correction) * rstd, widen<T>(w.word[0], false), widen<T>(b.word[0], false)), 0.f);
            store_y::from(y_at, y + row * COLS + c);
            y_at.word[0] = narrow<T>(x_at(c), 0.f);
            store_y::from(y_at, sum + row * COLS + c);
        }
    }
}

extern "C" __global__ void __launch_bounds__(TPR * GROUPS)
add_layernorm(const T* x, const T* residual, const T* weight, const T* bias, T* y, T* sum, float* saved_mean, float* saved_rstd, long long rows, long long cols, float eps) {
    __shared__ Group::Scratch scratch;
    Group group = {scratch, (int)threadIdx.x / TPR, (int)threadIdx.x % TPR, 0};
    const int thread = group.thread;
    const int lane = group.rank * TPR + thread;
    const long long first_row = (long long)(blockIdx.x / (CLUSTER * SPLIT)) * GROUPS + group.group;
    [[maybe_unused]] const long long row_step = rows;

    [[maybe_unused]] const Packet weight_tail = Row::vector_tail<load_affine>(weight, 1.f), bias_tail = Row::vector_tail<load_affine>(bias, 0.f);

    if (const long long row = first_row; row < rows) {
        [[maybe_unused]] const T* const x_row = x + row * COLS;
        [[maybe_unused]] const int shift = Row::shift_of(row);
        Packet row_packed[ITERS];
        #pragma unroll
        for (int it = 0; it < ITERS; ++it) row_packed[it] = add<T>(Row::load<load_x>(x_row, it, lane, shift, row + 1 == rows), Row::load<load_x>(residual + row * COLS, it, lane, shift, row + 1 == rows));

        // Statistics. Squares are taken about a mean or an element of the data; E[x^2] - E[x]^2 only where it keeps its digits.
        float s[CHAINS] = {}, q[CHAINS] = {}, first = 0.f, count = 0.f;
        #pragma unroll
        for (int it = 0; it < ITERS; ++it) if (Row::present(it, lane)) {
            float v[VEC]; unpack<T>(row_packed[it], v);
            if (it == 0) first = v[0];
            count += VEC;
            #pragma unroll
            for (int e = 0; e < VEC; ++e) { const float d = v[e] - first; s[e % CHAINS] += d; q[e % CHAINS] += d * d; }
        }
        #pragma unroll
        for (int i = 1; i < CHAINS; ++i) { s[0] += s[i]; q[0] += q[i]; }
        if (EQUAL) count = ITERS * VEC;
        const float correction = s[0] / fmaxf(count, 1.f);
        Moments m = {count, first + correction, q[0] - s[0] * correction};
        m = group.reduce(m);
        const float centre_of_row = m.mean, rstd = reciprocal_std(m.m2 * (1.f / COLS), eps);

        #pragma unroll
        for (int it = 0; it < ITERS; ++it) keep_packed(row_packed[it]);
        #pragma unroll
        for (int it = 0; it < OWN_ITERS; ++it) if (Row::present(it, lane)) {
            float v[VEC]; unpack<T>(row_packed[it], v);
            Row::store<store_y>(sum + row * COLS, it, lane, shift, pack<T, BYTES>(v));

            float scale[VEC], offset[VEC];
            unpack<T>(Row::beside<load_affine>(weight, weight_tail, 1.f, it, lane, shift, true), scale);
            unpack<T>(Row::beside<load_affine>(bias, bias_tail, 0.f, it, lane, shift, true), offset);
            float result[VEC];
            #pragma unroll
            for (int e = 0; e < VEC; ++e) result[e] = fmaf((v[e] - centre_of_row) * rstd, scale[e], offset[e]);
            Row::store<store_y>(y + row * COLS, it, lane, shift, pack<T, BYTES>(result));
        }
    }
}
