// Tensor-core building blocks of sm_80 and later: 16x16 tiles between shared memory and registers, and their products.
// PTX ISA, "Matrix multiply-accumulate operation using mma instruction", m16n8k16; "ldmatrix".
//
// A fragment of a 16 x 16 tile is four registers of two 16-bit elements a lane; an accumulator of a 16 x 8 tile is four
// floats a lane: elements (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) with g = lane / 4, t = lane % 4. Two
// accumulators side by side, rounded and packed, are an A fragment: the products of one step feed the next.
#pragma once

struct f16 {
    static constexpr unsigned ONES = 0x3c003c00u;
    // c += a b, a: 16 x 16 row-major, b: 16 x 8 column-major
    static __device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ unsigned pack(float low, float high) {
        unsigned packed;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }
    static __device__ __forceinline__ float widen(unsigned short bits) {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
        return wide;
    }
};

struct bf16 {
    static constexpr unsigned ONES = 0x3f803f80u;
    static __device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ unsigned pack(float low, float high) {
        unsigned packed;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }
    static __device__ __forceinline__ float widen(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
};

// Four 8 x 8 matrices from shared memory: lanes 8i .. 8i + 7 give the addresses of the rows of matrix i, 16 bytes each.
// Volatile, so that no load moves across a barrier.
__device__ __forceinline__ void load_tiles(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
__device__ __forceinline__ void load_tiles_transposed(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

// Rows of BYTES bytes in shared memory such that 8 rows at one column lie in 8 different groups of banks, as ldmatrix
// needs it. SWIZZLED: 16-byte chunk c of row r stands where c ^ turn(r) would; else 16 unused bytes follow every row.
template <int BYTES, bool SWIZZLED> struct tile_rows {
    static constexpr int PITCH = BYTES + (SWIZZLED ? 0 : 16);
    static __device__ __forceinline__ int turn(int row) {
        if (!SWIZZLED) return 0;
        return BYTES % 128 == 0 ? row & 7 : row >> 1 & 3;   // rows of 64 or 192 bytes: neighbours already differ by 64
    }
    static __device__ __forceinline__ int place(int row, int chunk) { return row * PITCH + ((chunk ^ turn(row)) << 4); }
};

__device__ __forceinline__ float exp2_fast(float x) {   // 2 ulp; denormal results are 0; CUDA math API, ex2.approx.ftz
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {   // 1 ulp; of denormals infinity; PTX ISA, rcp.approx.ftz
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 2^x by arithmetic instead of the special-function unit, which has a sixteenth of the lanes: x as integer plus fraction
// in [-1/2, 1/2], a polynomial for the latter (Cody and Waite, "Software Manual for the Elementary Functions", 1980).
// Relative error below 5e-5, a tenth of what rounding the result to 16 bits costs; at least 2^-125; NaN stays NaN.
__device__ __forceinline__ float exp2_polynomial(float x) {
    x = x < -125.f ? -125.f : x;
    const float shifted = x + 12582912.f, f = x - (shifted - 12582912.f);
    const float scale = __int_as_float((__float_as_int(shifted) + 127) << 23);
    float y = fmaf(f, 0.0096181291f, 0.0555041087f);
    y = fmaf(y, f, 0.2402265070f);
    y = fmaf(y, f, 0.6931471806f);
    return fmaf(y, f, 1.f) * scale;
}
