// Residual addition and RMSNorm forward, float16, 4096 columns: y = (x + residual) / sqrt(mean of its squares + eps) * weight.
// 256 threads a row, 1 row(s) a block, 16-byte packets; row in registers, loaded direct; statistics: squares.
// Rendered for sm_89 from templates/add_rmsnorm/cuda.cu.j2, which explains every choice.
#include "_shared/row.cuh"
#include "_shared/reduce.cuh"

DEFINE_PACKET_LOAD(load_x, "", "ld.global.cs", "")
DEFINE_PACKET_STORE(store_y, "", "st.global.cs", "")
DEFINE_PACKET_LOAD(load_affine, "", "ld.global.nc", "")

using T = f16;
constexpr int COLS = 4096, BYTES = 16, TPR = 256, GROUPS = 1;
constexpr int CLUSTER = 1, SPLIT = 2;   // blocks that share a row, blocks that repeat it
using Row = row_packets<T, BYTES, COLS, TPR * CLUSTER, true>;
using Packet = Row::Packet;
using Group = row_group<TPR, GROUPS, CLUSTER, across_warps::broadcast>;
constexpr int VEC = Row::VEC, ITERS = Row::ITERS;
constexpr int OWN = Row::COUNT / SPLIT, OWN_ITERS = (OWN + TPR - 1) / TPR;   // packets that a block writes, and a thread
constexpr int CHAINS = 4 < VEC ? 4 : VEC;

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
add_rmsnorm_unaligned(const T* x, const T* residual, const T* weight, T* y, T* sum, float* saved_rstd, long long rows, long long cols, float eps) {
    using Element = packet<sizeof(T)>;
    using Threads = row_group<TPR, GROUPS, 1, across_warps::shuffle>;
    __shared__ Threads::Scratch scratch;
    Threads group = {scratch, (int)threadIdx.x / TPR, (int)threadIdx.x % TPR, 0};
    #pragma unroll 1
    for (long long row = (long long)blockIdx.x * GROUPS + group.group; row < rows; row += (long long)gridDim.x * GROUPS) {
        const T* const x_row = x + row * COLS;
        auto x_at = [&](int c) {
            packet<sizeof(T)> e, other; load_x::into(e, x_row + c); load_x::into(other, residual + row * COLS + c);
            return widen<T>(add<T>(e, other).word[0], false);
        };
        sum1 q = {0.f};
        #pragma unroll 1
        for (int c = group.thread; c < COLS; c += TPR) q.a += x_at(c) * x_at(c);
        const float rstd = reciprocal_std(group.reduce(q).a * (1.f / COLS), eps);
        #pragma unroll 1
        for (int c = group.thread; c < COLS; c += TPR) {
            Element y_at, w = splat<T, sizeof(T)>(1.f);
            load_affine::into(w, weight + c, weight != nullptr);
            y_at.word[0] = narrow<T>(x_at(c) * rstd * widen<T>(w.word[0], false), 0.f);
            store_y::from(y_at, y + row * COLS + c);
            y_at.word[0] = narrow<T>(x_at(c), 0.f);
            store_y::from(y_at, sum + row * COLS + c);
        }
    }
}

extern "C" __global__ void __launch_bounds__(TPR * GROUPS, 5)
add_rmsnorm(const T* x, const T* residual, const T* weight, T* y, T* sum, float* saved_rstd, long long rows, long long cols, float eps) {
    __shared__ Group::Scratch scratch;
    Group group = {scratch, 0, (int)threadIdx.x, 0};
    const int thread = group.thread;
    const int lane = (int)(blockIdx.x % SPLIT) * OWN + thread;   // first the packets that this block writes, then the rest of the row
    const long long first_row = (long long)(blockIdx.x / (CLUSTER * SPLIT)) * GROUPS + group.group;
    [[maybe_unused]] const long long row_step = rows;

    [[maybe_unused]] const Packet weight_tail = Row::vector_tail<load_affine>(weight, 1.f);

    if (const long long row = first_row; row < rows) {
        [[maybe_unused]] const T* const x_row = x + row * COLS;
        [[maybe_unused]] const int shift = Row::shift_of(row);
        Packet row_packed[ITERS];
        #pragma unroll
        for (int it = 0; it < ITERS; ++it) row_packed[it] = add<T>(Row::load<load_x>(x_row, it, lane, shift, row + 1 == rows), Row::load<load_x>(residual + row * COLS, it, lane, shift, row + 1 == rows));
        Packet w[OWN_ITERS];
        #pragma unroll
        for (int it = 0; it < OWN_ITERS; ++it) { w[it] = Row::beside<load_affine>(weight, weight_tail, 1.f, it, lane, shift, (OWN % TPR == 0 || it * TPR + thread < OWN)); }

        float q[CHAINS] = {};
        #pragma unroll
        for (int it = 0; it < ITERS; ++it) if (Row::present(it, lane)) {
            float v[VEC]; unpack<T>(row_packed[it], v);
            #pragma unroll
            for (int e = 0; e < VEC; ++e) { const float d = Row::inside(it, lane, shift, e) ? v[e] : 0.f; q[e % CHAINS] += d * d; }
        }
        #pragma unroll
        for (int i = 1; i < CHAINS; ++i) q[0] += q[i];
        const float rstd = reciprocal_std(group.reduce(sum1{q[0]}).a * (1.f / COLS), eps);

        #pragma unroll
        for (int it = 0; it < ITERS; ++it) keep_packed(row_packed[it]);
        #pragma unroll
        for (int it = 0; it < OWN_ITERS; ++it) if ((OWN % TPR == 0 || it * TPR + thread < OWN)) {
            float v[VEC]; unpack<T>(row_packed[it], v);
            Row::store<store_y>(sum + row * COLS, it, lane, shift, pack<T, BYTES>(v));

            float scale[VEC];
            unpack<T>(w[it], scale);
            float result[VEC];
            #pragma unroll
            for (int e = 0; e < VEC; ++e) result[e] = v[e] * rstd * scale[e];
            Row::store<store_y>(y + row * COLS, it, lane, shift, pack<T, BYTES>(result));
        }
    }
}
