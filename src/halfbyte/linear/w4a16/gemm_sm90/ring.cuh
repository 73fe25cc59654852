// The ring of tiles in shared memory, as matmul kernels on SM90 use it: x by TMA for both CTAs of a cluster, its
// descriptor for `wgmma`, stages, and the barrier of a warpgroup.
//
// Macro: STAGES, tiles in the ring

#pragma once
#include "kernels/runtime/sm90.cuh"

// Barrier of a warpgroup.
__device__ __forceinline__ void group_sync(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

// Loads a box of x to the same address in both CTAs of the cluster (multicast); both barriers count its bytes.
__device__ __forceinline__ void copy_x(u32 to, const TensorMap* map, int k, int token, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(k), "r"(token), "r"(barrier), "h"((u16)3)
      : "memory");
}

// Lower word of the wgmma descriptor of x: rows of 128 bytes with 128-byte swizzle. Addresses count 16 bytes, so
// that descriptors differ by a constant. The shuffle tells the compiler that it is the same in all lanes, so
// that descriptors stay in uniform registers.
__device__ __forceinline__ u32 x_descriptor(u32 address) {
  return __shfl_sync(~0u, address / 16 | 1u << 16, 0);
}

typedef RingState<STAGES> PipelineState;

// Waits until this thread's TMA stores have read shared memory.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
