// Values of 16 bits, eight or four at a time.
//
// Macro: X_BF16  1 for bfloat16, 0 for float16

#pragma once
#include "kernels/runtime/basics.cuh"

__device__ __forceinline__ void widen2(float* to, u32 word) {
#if X_BF16
  to[0] = __uint_as_float(word << 16), to[1] = __uint_as_float(word & 0xFFFF0000u);
#else
  asm("cvt.f32.f16 %0, %1;" : "=f"(to[0]) : "h"((u16)word));
  asm("cvt.f32.f16 %0, %1;" : "=f"(to[1]) : "h"((u16)(word >> 16)));
#endif
}

__device__ __forceinline__ u32 narrow2(const float* x) {
  u32 y;
#if X_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(x[1]), "f"(x[0]));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(x[1]), "f"(x[0]));
#endif
  return y;
}

__device__ __forceinline__ void widen4(float* to, uint2 x) { widen2(to, x.x), widen2(to + 2, x.y); }
__device__ __forceinline__ uint2 narrow4(const float* x) { return make_uint2(narrow2(x), narrow2(x + 2)); }

__device__ __forceinline__ void widen8(float* to, uint4 x) {
  widen2(to, x.x), widen2(to + 2, x.y), widen2(to + 4, x.z), widen2(to + 6, x.w);
}
__device__ __forceinline__ uint4 narrow8(const float* x) {
  return make_uint4(narrow2(x), narrow2(x + 2), narrow2(x + 4), narrow2(x + 6));
}
