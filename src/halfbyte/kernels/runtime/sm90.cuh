// PTX wrappers for SM90: mbarriers, clusters, bulk and TMA copies, and fences of `wgmma`.

#pragma once
#include "kernels/runtime/basics.cuh"

__device__ __forceinline__ u32 cluster_rank() {
  u32 y;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(y));
  return y;
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Without release semantics: a fence must have released earlier writes.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The same shared memory address in another CTA of the cluster.
__device__ __forceinline__ u32 map_to_rank(u32 address, u32 rank) {
  u32 y;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(y) : "r"(address), "r"(rank));
  return y;
}

// Whether this lane is the elected one of its warp. The compiler knows that a single lane passes, so that
// instructions with uniform registers need no loop over lanes.
__device__ __forceinline__ bool elect_one() {
  u32 elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected;
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialized barriers visible to the cluster and to TMA.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and adds `bytes` to the bytes of copies that the barrier waits for.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives when this thread's copies (cp.async) have ended.
__device__ __forceinline__ void barrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Arrives at a barrier of another CTA of the cluster (address from `map_to_rank`). Not `.release.cluster`, which
// would wait for all loads in flight: the memory that the barrier guards must have been read before.
__device__ __forceinline__ void barrier_arrive_mapped(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same, and adds `bytes` to the bytes that the barrier waits for.
__device__ __forceinline__ void barrier_expect_mapped(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Stores to another CTA of the cluster, counted by its barrier; both addresses from `map_to_rank`.
__device__ __forceinline__ void send_floats(const float* x, u32 address, u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          address),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// A stage of a ring, and the parity of its barriers.
template <int COUNT>
struct RingState {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == COUNT) stage = 0, parity ^= 1;
  }
};

// Bulk copy to shared memory; completes on the barrier.
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// A TMA tensor map (tensor_maps.py).
struct __align__(64) TensorMap {
  u64 opaque[16];
};

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// TMA load of boxes, from `row` and from box `box` along k, to shared memory; completes on the barrier.
__device__ __forceinline__ void copy_boxes(u32 to, const TensorMap* map, int row, int box, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(0), "r"(row), "r"(box), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the last `LEFT` committed groups are pending.
template <int LEFT = 0>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Keeps the compiler from moving what reads or writes sums of matmuls over this place, a wait.
template <int N>
__device__ __forceinline__ void hold(float* sums) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// Makes writes to shared memory visible to wgmma and TMA.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
