// Pairs of 16-bit values.
//
// Macro: X_BF16, 1 for bfloat16, 0 for float16

#pragma once
#include "kernels/runtime/basics.cuh"

__device__ __forceinline__ u32 pack_pair(float lower, float upper) {
  u32 y;
#if X_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(upper), "f"(lower));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(upper), "f"(lower));
#endif
  return y;
}
