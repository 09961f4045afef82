// Packets of 32 bytes, of which one instruction moves a half: float32 elements beside 16 bytes of 16-bit ones.
#pragma once
#include "_shared/packet.cuh"

// LOAD of DEFINE_PACKET_LOAD for packets of up to 32 bytes.
template <class LOAD> struct in_halves {
    template <int BYTES, class... Wanted>
    static __device__ __forceinline__ void into(packet<BYTES>& v, const void* p, Wanted... wanted) {
        if constexpr (BYTES <= 16) LOAD::into(v, p, wanted...);
        else {
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                packet<16> half = {v.word[4 * h], v.word[4 * h + 1], v.word[4 * h + 2], v.word[4 * h + 3]};
                LOAD::into(half, static_cast<const char*>(p) + 16 * h, wanted...);
                #pragma unroll
                for (int i = 0; i < 4; ++i) v.word[4 * h + i] = half.word[i];
            }
        }
    }
};
