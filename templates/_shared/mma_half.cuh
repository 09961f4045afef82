// Products of float16 tiles that are summed in float16, beside those of mma.cuh. Twice as many a cycle on GeForce GPUs of Ampere
// and Ada.
#pragma once
#include "_shared/mma.cuh"

struct f16_in_half : f16 {
    using f16::multiply_add;
    // c += a b, c: two elements a register
    static __device__ __forceinline__ void multiply_add(unsigned (&c)[2], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
            : "+r"(c[0]), "+r"(c[1])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ float2 unpack(unsigned packed) {
        float2 x;
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
            : "=f"(x.x), "=f"(x.y) : "r"(packed));
        return x;
    }
};
