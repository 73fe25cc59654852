// Asynchronous copies of 16 or 4 bytes to shared memory (cp.async), for kernels that stream weights or store tokens.

#pragma once
#include "kernels/runtime/basics.cuh"

__device__ __forceinline__ void copy16(u32 to, const u8* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "l"(policy));
}

__device__ __forceinline__ void copy4(u32 to, const u8* from, u64 policy) {
  asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "l"(policy));
}

__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

// Copies 16 bytes, or writes zeros.
__device__ __forceinline__ void copy16_or_zeros(u32 to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(exists ? 16 : 0));
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the last `LEFT` committed groups are pending.
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
