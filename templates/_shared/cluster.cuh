// Blocks of a cluster (sm_90) and each other's shared memory. PTX ISA, "barrier.cluster", "mapa", "st".
#pragma once

// A cluster's barrier in two halves: every thread of all its blocks arrives, and later waits for the others. What it has
// written before it arrives is seen by who has waited.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier() {
    cluster_arrive();
    cluster_wait();
}

// Where another block of the cluster has what this one has at a shared address.
__device__ __forceinline__ unsigned address_in_block(unsigned address, int block) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}
__device__ __forceinline__ void store_in_cluster(unsigned address, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void store_in_cluster(unsigned address, float2 x) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" :: "r"(address), "f"(x.x), "f"(x.y) : "memory");
}
