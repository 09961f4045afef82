// Packets: 2, 4, 8 or 16 bytes moved by one instruction, and the elements inside them.
//
// No CUDA header is included: cuda_fp16.h costs more to parse than a whole kernel costs to compile,
// and the few conversions needed are one PTX instruction each.
#pragma once

// Element types: storage only. Arithmetic is done on float after unpack().
struct f16  { unsigned short bits; };
struct bf16 { unsigned short bits; };
struct f32  { unsigned bits; };

// BYTES of consecutive elements, first element in the low bits of word[0].
template <int BYTES> struct alignas(BYTES < 4 ? 4 : BYTES) packet { unsigned word[BYTES < 4 ? 1 : BYTES / 4]; };

// Defines a type NAME with NAME::into(packet&, address) and NAME::into(packet&, address, wanted); the latter leaves
// the packet as it was when `wanted` is false. PTX is the instruction up to its vector suffix (it carries the cache hint), SETUP
// prepares a register called `policy`, TAIL passes it ("" and "" without a policy).
#define DEFINE_PACKET_LOAD(NAME, SETUP, PTX, TAIL) struct NAME {                                                      \
    static __device__ __forceinline__ void into(packet<16>& v, const void* p) {                                       \
        asm volatile("{ .reg .b64 policy; " SETUP PTX ".v4.b32 {%0, %1, %2, %3}, [%4]" TAIL "; }"                     \
            : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "l"(p)); }                         \
    static __device__ __forceinline__ void into(packet<8>& v, const void* p) {                                        \
        asm volatile("{ .reg .b64 policy; " SETUP PTX ".v2.b32 {%0, %1}, [%2]" TAIL "; }"                             \
            : "=r"(v.word[0]), "=r"(v.word[1]) : "l"(p)); }                                                           \
    static __device__ __forceinline__ void into(packet<4>& v, const void* p) {                                        \
        asm volatile("{ .reg .b64 policy; " SETUP PTX ".b32 %0, [%1]" TAIL "; }" : "=r"(v.word[0]) : "l"(p)); }       \
    static __device__ __forceinline__ void into(packet<2>& v, const void* p) {                                        \
        asm volatile("{ .reg .b64 policy; " SETUP PTX ".u16 %0, [%1]" TAIL "; }" : "=r"(v.word[0]) : "l"(p)); }       \
    static __device__ __forceinline__ void into(packet<16>& v, const void* p, bool wanted) {                          \
        asm volatile("{ .reg .pred q; .reg .b64 policy; setp.ne.b32 q, %5, 0; " SETUP                                 \
            "@q " PTX ".v4.b32 {%0, %1, %2, %3}, [%4]" TAIL "; }"                                                     \
            : "+r"(v.word[0]), "+r"(v.word[1]), "+r"(v.word[2]), "+r"(v.word[3]) : "l"(p), "r"((int)wanted)); }       \
    static __device__ __forceinline__ void into(packet<8>& v, const void* p, bool wanted) {                           \
        asm volatile("{ .reg .pred q; .reg .b64 policy; setp.ne.b32 q, %3, 0; " SETUP                                 \
            "@q " PTX ".v2.b32 {%0, %1}, [%2]" TAIL "; }"                                                             \
            : "+r"(v.word[0]), "+r"(v.word[1]) : "l"(p), "r"((int)wanted)); }                                         \
    static __device__ __forceinline__ void into(packet<4>& v, const void* p, bool wanted) {                           \
        asm volatile("{ .reg .pred q; .reg .b64 policy; setp.ne.b32 q, %2, 0; " SETUP                                 \
            "@q " PTX ".b32 %0, [%1]" TAIL "; }" : "+r"(v.word[0]) : "l"(p), "r"((int)wanted)); }                     \
    static __device__ __forceinline__ void into(packet<2>& v, const void* p, bool wanted) {                           \
        asm volatile("{ .reg .pred q; .reg .b64 policy; setp.ne.b32 q, %2, 0; " SETUP                                 \
            "@q " PTX ".u16 %0, [%1]" TAIL "; }" : "+r"(v.word[0]) : "l"(p), "r"((int)wanted)); } };

// Defines a type NAME with NAME::from(packet, address): the store that mirrors DEFINE_PACKET_LOAD.
#define DEFINE_PACKET_STORE(NAME, SETUP, PTX, TAIL) struct NAME {                                                     \
    static __device__ __forceinline__ void from(const packet<16>& v, void* p) {                                       \
        asm volatile("{ .reg .b64 policy; " SETUP PTX ".v4.b32 [%4], {%0, %1, %2, %3}" TAIL "; }"                     \
            :: "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]), "l"(p) : "memory"); }                  \
    static __device__ __forceinline__ void from(const packet<8>& v, void* p) {                                        \
        asm volatile("{ .reg .b64 policy; " SETUP PTX ".v2.b32 [%2], {%0, %1}" TAIL "; }"                             \
            :: "r"(v.word[0]), "r"(v.word[1]), "l"(p) : "memory"); }                                                  \
    static __device__ __forceinline__ void from(const packet<4>& v, void* p) {                                        \
        asm volatile("{ .reg .b64 policy; " SETUP PTX ".b32 [%1], %0" TAIL "; }"                                      \
            :: "r"(v.word[0]), "l"(p) : "memory"); }                                                                  \
    static __device__ __forceinline__ void from(const packet<2>& v, void* p) {                                        \
        asm volatile("{ .reg .b64 policy; " SETUP PTX ".u16 [%1], %0" TAIL "; }"                                      \
            :: "r"(v.word[0]), "l"(p) : "memory"); } };

// One element of a 32-bit word as float; 16-bit types hold two, `high` picks.
template <class T> __device__ __forceinline__ float widen(unsigned word, bool high);
template <> __device__ __forceinline__ float widen<f32>(unsigned word, bool) { return __uint_as_float(word); }
template <> __device__ __forceinline__ float widen<bf16>(unsigned word, bool high) {
    return __uint_as_float(high ? word & 0xffff0000u : word << 16);
}
template <> __device__ __forceinline__ float widen<f16>(unsigned word, bool high) {
    float f;
    if (high) asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, hi; }" : "=f"(f) : "r"(word));
    else      asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, lo; }" : "=f"(f) : "r"(word));
    return f;
}

// Two floats rounded to nearest even into one word (f32: only `low` is used).
template <class T> __device__ __forceinline__ unsigned narrow(float low, float high);
template <> __device__ __forceinline__ unsigned narrow<f32>(float low, float) { return __float_as_uint(low); }
template <> __device__ __forceinline__ unsigned narrow<f16>(float low, float high) {
    unsigned w; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low)); return w;
}
template <> __device__ __forceinline__ unsigned narrow<bf16>(float low, float high) {
    unsigned w; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low)); return w;
}

template <class T, int BYTES>
__device__ __forceinline__ void unpack(const packet<BYTES>& p, float (&v)[BYTES / sizeof(T)]) {
    #pragma unroll
    for (int e = 0; e < BYTES / (int)sizeof(T); ++e) v[e] = widen<T>(p.word[e * sizeof(T) / 4], e * sizeof(T) % 4 != 0);
}

template <class T, int BYTES>
__device__ __forceinline__ packet<BYTES> pack(const float (&v)[BYTES / sizeof(T)]) {
    constexpr int VEC = BYTES / sizeof(T), STEP = sizeof(T) == 2 ? 2 : 1;
    packet<BYTES> p;
    #pragma unroll
    for (int e = 0; e < VEC; e += STEP) p.word[e / STEP] = narrow<T>(v[e], v[e + 1 < VEC ? e + 1 : e]);
    return p;
}

// Hides from the compiler that `p` is unchanged. Without it the floats of an earlier unpack() are kept instead of being
// unpacked again, which doubles the registers of a 16-bit row.
template <int BYTES> __device__ __forceinline__ void keep_packed(packet<BYTES>& p) {
    #pragma unroll
    for (unsigned& w : p.word) asm volatile("" : "+r"(w));
}

// Packets as queues of elements, for the rare element-by-element path: rolled loops, no run-time register index.
template <class T, int BYTES> __device__ __forceinline__ void push_first(packet<BYTES>& p, unsigned bits) {
    constexpr int WORDS = BYTES < 4 ? 1 : BYTES / 4;
    #pragma unroll
    for (int i = WORDS - 1; i > 0; --i) p.word[i] = sizeof(T) == 2 ? __funnelshift_l(p.word[i - 1], p.word[i], 16) : p.word[i - 1];
    p.word[0] = sizeof(T) == 2 ? p.word[0] << 16 | bits : bits;
}
template <class T, int BYTES> __device__ __forceinline__ unsigned pop_first(packet<BYTES>& p) {
    constexpr int WORDS = BYTES < 4 ? 1 : BYTES / 4;
    const unsigned bits = sizeof(T) == 2 ? p.word[0] & 0xffffu : p.word[0];
    #pragma unroll
    for (int i = 0; i + 1 < WORDS; ++i) p.word[i] = sizeof(T) == 2 ? __funnelshift_r(p.word[i], p.word[i + 1], 16) : p.word[i + 1];
    if (sizeof(T) == 2) p.word[WORDS - 1] >>= 16;
    return bits;
}

// All elements equal to 1, or all 0: what a missing weight or bias stands for.
template <class T, int BYTES> __device__ __forceinline__ packet<BYTES> splat(float value) {
    packet<BYTES> p;
    #pragma unroll
    for (unsigned& w : p.word) w = narrow<T>(value, value);
    return p;
}

// Elements first .. first+VEC-1 of the 2*VEC elements in `low` then `high`; `first` is a run-time number in 0 .. VEC-1.
// A network of selects and one funnel shift, because registers cannot be indexed at run time.
template <class T, int BYTES>
__device__ __forceinline__ packet<BYTES> realign(const packet<BYTES>& low, const packet<BYTES>& high, int first) {
    constexpr int WORDS = BYTES / 4, PER_WORD = 4 / sizeof(T);
    unsigned w[2 * WORDS];
    #pragma unroll
    for (int i = 0; i < WORDS; ++i) { w[i] = low.word[i]; w[WORDS + i] = high.word[i]; }
    #pragma unroll
    for (int step = WORDS / 2; step > 0; step /= 2) {
        const bool move = (first / PER_WORD) & step;
        #pragma unroll
        for (int i = 0; i + step < 2 * WORDS; ++i) w[i] = move ? w[i + step] : w[i];
    }
    packet<BYTES> out;
    #pragma unroll
    for (int i = 0; i < WORDS; ++i)
        out.word[i] = PER_WORD == 2 ? __funnelshift_r(w[i], w[i + 1], 16 * (first % 2)) : w[i];
    return out;
}
