// Softmax forward, float16, 1024 columns.
// 96 threads a row, 1 row(s) a block, 2-byte packets; row in registers_f32; two_pass.
// Rendered for sm_89 from templates/softmax/cuda.cu.j2, which explains every choice.
#include "_shared/row.cuh"
#include "_shared/reduce.cuh"

DEFINE_PACKET_LOAD(load_x, "createpolicy.fractional.L2::evict_first.b64 policy, 1.0; ", "ld.global.nc.L1::no_allocate.L2::cache_hint", ", policy")
DEFINE_PACKET_STORE(store_y, "", "st.global.L1::no_allocate", "")

using T = f16;
constexpr int COLS = 1024, BYTES = 2, TPR = 96, GROUPS = 1;
constexpr bool FUSED = true;
constexpr float LOG2E = 1.44269504f;
using Row = row_packets<T, BYTES, COLS, TPR>;
using Packet = Row::Packet;
constexpr int VEC = Row::VEC, ITERS = Row::ITERS;

// The maximum, in units of log 2 where that is fused. It is rounded before it is used, so that its error is one factor of
// all exponentials, and of their sum.
__device__ __forceinline__ float level_of(float max) { return FUSED ? __fmul_rn(max, LOG2E) : max; }
__device__ __forceinline__ float exponential(float x, float level) {
    return exp2_approx(FUSED ? fmaf(x, LOG2E, -level) : (x - level) * LOG2E);
}

// A row's exponentials over their sum. A sum of 0, that of a row of -Inf, gives NaN.
struct Quotient {
    float sum, reciprocal;
    __device__ __forceinline__ explicit Quotient(float sum) : sum(sum), reciprocal(__fdividef(1.f, sum)) {}
    __device__ __forceinline__ float of(float x) const {
        const float y = x * reciprocal;
        return y;
    }
};

__device__ __forceinline__ void values(const Packet& packed, int it, int thread, int shift, float (&v)[VEC]) {
    unpack<T>(packed, v);
    #pragma unroll
    for (int e = 0; e < VEC; ++e) if (!Row::inside(it, thread, shift, e)) v[e] = __int_as_float(0xff800000);
}

extern "C" __global__ void __launch_bounds__(TPR * GROUPS, 3)
softmax(const T* x, T* y, long long rows, long long cols) {
    using Group = row_group<TPR, GROUPS, 1, across_warps::broadcast>;
    __shared__ Group::Scratch scratch;
    Group group = {scratch, 0, (int)threadIdx.x, 0};
    const int thread = group.thread;
    if (const long long row = (long long)blockIdx.x * GROUPS + group.group; row < rows) {
        const T* const x_row = x + row * COLS;
        const int shift = Row::shift_of(row);
        Packet row_packed[ITERS];
        #pragma unroll
        for (int it = 0; it < ITERS; ++it) row_packed[it] = Row::load<load_x>(x_row, it, thread, shift, row + 1 == rows);
        float row_f32[ITERS][VEC];
        #pragma unroll
        for (int it = 0; it < ITERS; ++it) values(row_packed[it], it, thread, shift, row_f32[it]);
        float tops[VEC], sums[VEC] = {};   // a chain for each place in a packet
        #pragma unroll
        for (int e = 0; e < VEC; ++e) tops[e] = LOWEST;
        #pragma unroll
        for (int it = 0; it < ITERS; ++it) if (Row::present(it, thread)) {
            float (&v)[VEC] = row_f32[it];
            #pragma unroll
            for (int e = 0; e < VEC; ++e) tops[e] = fmaxf(tops[e], v[e]);
        }
        #pragma unroll
        for (int e = 1; e < VEC; ++e) tops[0] = fmaxf(tops[0], tops[e]);
        const float level = level_of(group.reduce(max1{tops[0]}).a);
        #pragma unroll
        for (int it = 0; it < ITERS; ++it) if (Row::present(it, thread)) {
            float (&v)[VEC] = row_f32[it];
            #pragma unroll
            for (int e = 0; e < VEC; ++e) {
                const float weight = exponential(v[e], level);
                sums[e] += weight;
                v[e] = weight;
            }
        }
        #pragma unroll
        for (int e = 1; e < VEC; ++e) sums[0] += sums[e];
        const Quotient quotient(group.reduce(sum1{sums[0]}).a);
        #pragma unroll
        for (int it = 0; it < ITERS; ++it) if (Row::present(it, thread)) {
            float (&v)[VEC] = row_f32[it];
            #pragma unroll
            for (int e = 0; e < VEC; ++e) v[e] = quotient.of(v[e]);
            Row::store<store_y>(y + row * COLS, it, thread, shift, pack<T, BYTES>(v));
        }
    }
}
