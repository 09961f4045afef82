// Copies from global to shared memory that hold no registers while in flight.
#pragma once

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// cp.async (sm_80): BYTES (4, 8 or 16) by the calling thread; complete for that thread after wait_copies.
template <int BYTES> __device__ __forceinline__ void copy_async(void* shared, const void* global) {
    if constexpr (BYTES == 16)   // .cg: past L1, only legal at 16 bytes
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(shared)), "l"(global) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(shared_address(shared)), "l"(global), "n"(BYTES) : "memory");
}
// 16 bytes to a shared address, in lines of 128; zeros if not `wanted`: nothing is read then.
__device__ __forceinline__ void copy_async_16(unsigned shared, const void* global) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_16_or_zero(unsigned shared, const void* global, bool wanted) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
        :: "r"(shared), "l"(global), "r"(wanted ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of this thread's committed groups are still in flight.
template <int PENDING> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

// cp.async.bulk (sm_90): the copy engine moves a whole run of bytes (multiple of 16, 16-byte aligned) and counts
// them on an mbarrier. One thread issues, all that read must wait.
__device__ __forceinline__ void init_barrier(unsigned long long* barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, unsigned bytes, unsigned long long* barrier) {
    const unsigned b = shared_address(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(b), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(b) : "memory");
}
__device__ __forceinline__ void wait_barrier(unsigned long long* barrier, unsigned parity) {
    asm volatile("{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again; }" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}
