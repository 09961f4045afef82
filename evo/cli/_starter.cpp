// c = a + b on the CPU, with the same arguments. Parameters: threads, chunk.

extern "C" void vector_add(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, int n) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n > chunk)
    for (long long first = 0; first < n; first += chunk) {
        const long long end = first + chunk < n ? first + chunk : n;
        for (long long i = first; i < end; ++i) c[i] = a[i] + b[i];
    }
}
