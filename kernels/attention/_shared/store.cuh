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

// Four lanes side by side hold a word each of four 16-byte chunks: chunk[i] the lane's word of chunk i. Each gets one of the
// chunks whole, lane % 4 its number. A 4 x 4 transposition in two exchanges, with the neighbour and with the one after it.
__device__ __forceinline__ uint4 own_chunk(const unsigned* chunk, int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    const unsigned a = __shfl_xor_sync(~0u, odd ? chunk[0] : chunk[1], 1), b = __shfl_xor_sync(~0u, odd ? chunk[2] : chunk[3], 1);
    const unsigned low[2] = {odd ? a : chunk[0], odd ? chunk[1] : a}, high[2] = {odd ? b : chunk[2], odd ? chunk[3] : b};
    const unsigned c = __shfl_xor_sync(~0u, upper ? low[0] : high[0], 2), d = __shfl_xor_sync(~0u, upper ? low[1] : high[1], 2);
    return upper ? make_uint4(c, d, high[0], high[1]) : make_uint4(low[0], low[1], c, d);
}
