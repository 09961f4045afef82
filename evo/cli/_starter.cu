// c = a + b on CUDA. Replace it by your kernel.
//
// The parameters of the space in kernel.py, block_size_x and per_thread, are macros: evo puts a #define of each at the head
// of this file. Arguments arrive in the order of `arguments` in kernel.py.

extern "C" __global__ void __launch_bounds__(block_size_x)
vector_add(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, int n) {
    // A block computes block_size_x * per_thread elements, as `plan` in kernel.py says.
    const long long first = (long long)blockIdx.x * block_size_x * per_thread + threadIdx.x;
#pragma unroll
    for (int k = 0; k < per_thread; ++k) {
        const long long i = first + k * block_size_x;
        if (i < n) c[i] = a[i] + b[i];
    }
}
