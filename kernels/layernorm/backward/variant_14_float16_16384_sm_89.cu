// Backward of LayerNorm, float16, 16384 columns.
// 512 threads a row, 1 row(s) at once in each of 128 blocks; row in reread; 2 sum(s) a column, finish: launch.
// Rendered for sm_89 from templates/_norm_backward/cuda.cu.j2, which explains every choice.
#include "_shared/row.cuh"
#include "_shared/reduce.cuh"

DEFINE_PACKET_LOAD(load_row, "", "ld.global.nc", "")
DEFINE_PACKET_LOAD(load_weight, "", "ld.global.nc", "")
DEFINE_PACKET_STORE(store_row, "", "st.global.cs", "")

using T = f16;
constexpr int COLS = 16384, BYTES = 16, TPR = 512, GROUPS = 1, THREADS = TPR * GROUPS;
using Row = row_packets<T, BYTES, COLS, TPR>;
using Packet = Row::Packet;
using Group = row_group<TPR, GROUPS, 1, across_warps::leader>;
constexpr int VEC = Row::VEC, ITERS = Row::ITERS, SUMS = 2;
static_assert(!Row::RAGGED);

// The sum of a column over slices first, first + step, ...; past L1, which other blocks do not write through.
__device__ __forceinline__ float sum_of_slices(const float* partial, int slot, int first, int step, int slices) {
    float sum = 0.f;
    #pragma unroll 4
    for (int i = first; i < slices; i += step) sum += __ldcg(partial + (long long)i * (SUMS * COLS) + slot);
    return sum;
}
__device__ __forceinline__ void write_sum(T* dweight, T* dbias, int slot, float sum) {
    packet<sizeof(T)> e;
    e.word[0] = narrow<T>(sum, 0.f);
    store_row::from(e, (slot < COLS ? dweight : dbias - COLS) + slot);
}

constexpr int FINISH_COLS = 32, SPLITS = 8;
extern "C" __global__ void __launch_bounds__(FINISH_COLS * SPLITS) layernorm_backward_finish(const T* dy, const T* x, const T* weight, const float* mean, const float* rstd, const T* dresidual, T* dx, T* dweight, T* dbias, float* partial, int* arrivals, long long rows, long long cols) {
    __shared__ float sums[SPLITS][FINISH_COLS];
    const int own = threadIdx.x % FINISH_COLS, split = threadIdx.x / FINISH_COLS;
    const int column = blockIdx.x / SUMS * FINISH_COLS + own, slot = blockIdx.x % SUMS * COLS + column;
    const long long most = (rows + GROUPS - 1) / GROUPS;
    const int slices = most < 128 ? (int)most : 128;
    sums[split][own] = column < COLS ? sum_of_slices(partial, slot, split, SPLITS, slices) : 0.f;
    __syncthreads();
    if (split > 0 || column >= COLS) return;
    float sum = sums[0][own];
    #pragma unroll
    for (int i = 1; i < SPLITS; ++i) sum += sums[i][own];
    write_sum(dweight, dbias, slot, sum);
}

// Launched in place of the other where an address is no multiple of BYTES, with the same grid and block: views of a tensor
// may start at any element. A compact loop of all threads of the block over one row after another, element by element; the
// sums are kept in the block's slice.
extern "C" __global__ void __launch_bounds__(THREADS)
layernorm_backward_unaligned(const T* dy, const T* x, const T* weight, const float* mean, const float* rstd, const T* dresidual, T* dx, T* dweight, T* dbias, float* partial, int* arrivals, long long rows, long long cols) {
    using Element = packet<sizeof(T)>;
    using Threads = row_group<THREADS, 1, 1, across_warps::shuffle>;
    __shared__ Threads::Scratch scratch;
    Threads group = {scratch, 0, (int)threadIdx.x, 0};
    auto at = [&](const T* p, long long i) { Element e; load_row::into(e, p + i); return widen<T>(e.word[0], false); };
    #pragma unroll 1
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const float scale_of_row = rstd[row], centre = mean[row];
        sum2 s = {0.f, 0.f};
        #pragma unroll 1
        for (int c = threadIdx.x; c < COLS; c += THREADS) {
            const float d = at(dy, row * COLS + c), xhat = (at(x, row * COLS + c) - centre) * scale_of_row;
            const float g = d * (weight ? at(weight, c) : 1.f);
            s.a += g * xhat; s.b += g;
            float* const slice = partial + (long long)blockIdx.x * (SUMS * COLS) + c;
            const bool first = row == blockIdx.x;
            slice[0] = (first ? 0.f : slice[0]) + d * xhat;
            slice[(SUMS - 1) * COLS] = (first ? 0.f : slice[(SUMS - 1) * COLS]) + d;
        }
        s = group.reduce(s);
        #pragma unroll 1
        for (int c = threadIdx.x; c < COLS; c += THREADS) {
            const float xhat = (at(x, row * COLS + c) - centre) * scale_of_row;
            const float g = at(dy, row * COLS + c) * (weight ? at(weight, c) : 1.f);
            Element e;
            e.word[0] = narrow<T>((g - s.b / COLS - xhat * (s.a / COLS)) * scale_of_row, 0.f);
            store_row::from(e, dx + row * COLS + c);
        }
    }
    
}

__device__ __forceinline__ void add_to(float* to, const float (&v)[VEC], bool first) {
    #pragma unroll
    for (int e = 0; e < VEC; ++e) to[e] = first ? v[e] : to[e] + v[e];
}
extern "C" __global__ void __launch_bounds__(THREADS)
layernorm_backward(const T* dy, const T* x, const T* weight, const float* mean, const float* rstd, const T* dresidual, T* dx, T* dweight, T* dbias, float* partial, int* arrivals, long long rows, long long cols) {
    __shared__ Group::Scratch scratch;
    Group group = {scratch, (int)threadIdx.x / TPR, (int)threadIdx.x % TPR, 0};
    const int lane = group.thread;
    const long long row_step = (long long)gridDim.x * GROUPS;
    long long row = (long long)blockIdx.x * GROUPS + group.group;
    Packet weight_row[ITERS];
    #pragma unroll
    for (int it = 0; it < ITERS; ++it) weight_row[it] = Row::beside<load_weight>(weight, {}, 1.f, it, lane, 0, true);
    float sum_dweight[ITERS][VEC] = {};
    float sum_dbias[ITERS][VEC] = {};
    #pragma unroll 1
    for (; row < rows; row += row_step) {
        const float scale_of_row = rstd[row], centre = mean[row];
        sum2 s = {0.f, 0.f};   // of g * xhat, of g
        #pragma unroll
        for (int it = 0; it < ITERS; ++it) if (Row::present(it, lane)) {            float v[VEC], d[VEC], scale[VEC];
            unpack<T>(Row::load<load_row>(x + row * COLS, it, lane, 0, false), v);
            unpack<T>(Row::load<load_row>(dy + row * COLS, it, lane, 0, false), d);
            unpack<T>(weight_row[it], scale);
            #pragma unroll
            for (int e = 0; e < VEC; ++e) {
                const float xhat = (v[e] - centre) * scale_of_row, g = d[e] * scale[e];
                s.a += g * xhat;
                s.b += g;
                sum_dweight[it][e] += d[e] * xhat;
                sum_dbias[it][e] += d[e];
            }
        }
        s = group.reduce(s);
        s.a *= 1.f / COLS; s.b *= 1.f / COLS;
        #pragma unroll
        for (int it = 0; it < ITERS; ++it) if (Row::present(it, lane)) {            float v[VEC], d[VEC], scale[VEC];
            unpack<T>(Row::load<load_row>(x + row * COLS, it, lane, 0, false), v);
            unpack<T>(Row::load<load_row>(dy + row * COLS, it, lane, 0, false), d);
            unpack<T>(weight_row[it], scale);
            float result[VEC];
            #pragma unroll
            for (int e = 0; e < VEC; ++e) {
                const float xhat = (v[e] - centre) * scale_of_row, g = d[e] * scale[e];
                result[e] = (g - s.b - xhat * s.a) * scale_of_row;
            }
            Row::store<store_row>(dx + row * COLS, it, lane, 0, pack<T, BYTES>(result));
        }
    }
    // One group after another adds what it has to the block's slice.
    float* const slice = partial + (long long)blockIdx.x * (SUMS * COLS);
    float* const total = slice;
    #pragma unroll 1
    for (int turn = 0; turn < GROUPS; ++turn) {
        if (group.group == turn) {
            #pragma unroll
            for (int it = 0; it < ITERS; ++it) if (Row::present(it, lane)) {
                add_to(total + Row::column(it, lane, 0), sum_dweight[it], true);
                add_to(total + (SUMS - 1) * COLS + Row::column(it, lane, 0), sum_dbias[it], true);
            }
        }
    }
    
}
