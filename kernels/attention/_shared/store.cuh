// Stores that may be left out and are no branch: the addresses and values of several are then worked out side by side.
#pragma once

__device__ __forceinline__ void store_4_if(bool wanted, void* global, unsigned x) {
    asm volatile("{ .reg .pred wanted; setp.ne.s32 wanted, %0, 0;\n"
        "@wanted st.global.b32 [%1], %2; }" :: "r"((int)wanted), "l"(global), "r"(x) : "memory");
}
__device__ __forceinline__ void store_16_if(bool wanted, void* global, uint4 x) {   // 16-byte aligned
    asm volatile("{ .reg .pred wanted; setp.ne.s32 wanted, %0, 0;\n"
        "@wanted st.global.v4.b32 [%1], {%2, %3, %4, %5}; }" :: "r"((int)wanted), "l"(global), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
