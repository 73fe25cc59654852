// Unpacks words of packed_words.py to operands of the matmul.
//
// Macro: X_BF16, 1 for bfloat16 activations, 0 for float16.

#pragma once
#include "kernels/runtime/pairs.cuh"

// Unpacks a word of eight values to the A registers of one step: pairs of values times 2^-126 (bfloat16) or
// 2^-14 (float16). `(x ^ y) & keep` is one instruction.
__device__ __forceinline__ void unpack_values(u32* a, u32 w) {
#if X_BF16
  const u32 keep = 0x81C081C0u;
  a[0] = w & keep;
  a[1] = __funnelshift_r(w, w, 4) & keep;
  a[2] = (w << 6) & keep;
  a[3] = ((w << 2) ^ (w >> 6)) & keep;
#else
  const u32 keep = 0x8E008E00u;
  a[0] = (w << 9) & keep;
  a[1] = (w << 6) & keep;
  a[2] = (w ^ (w << 2)) & keep;
  a[3] = (w ^ (w >> 3)) & keep;
#endif
}

// Unpacks a word of scales to those of two steps: row g in the lower half, row g + 8 in the upper one, times
// 2^115 (bfloat16) or 2^3 (float16). `exponent` is SCALE_EXPONENT, hidden from the compiler: mask and constant fit
// into one instruction only if one of them is in a register.
#define SCALE_EXPONENT 0x70007000u
__device__ __forceinline__ void unpack_scales(u32* s, u32 w, u32 exponent) {
#if X_BF16
  s[0] = (w & 0x0FF00FF0u) | exponent;
  s[1] = (__funnelshift_r(w, w, 8) & 0x0FF00FF0u) | exponent;
#else
  s[0] = (w << 3) & 0x7F807F80u;
  s[1] = __funnelshift_r(w, w, 5) & 0x7F807F80u;
#endif
}

__device__ __forceinline__ u32 multiply2(u32 a, u32 b) {
  u32 y;
#if !X_BF16
  asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
#elif __CUDA_ARCH__ >= 900
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return y;
}

// The step's operand A: values times block scales times 2^-11, exact.
__device__ __forceinline__ void unpack_operand(u32* a, u32 w, u32 scale) {
  unpack_values(a, w);
  a[0] = multiply2(a[0], both_low(scale));
  a[1] = multiply2(a[1], both_high(scale));
  a[2] = multiply2(a[2], both_low(scale));
  a[3] = multiply2(a[3], both_high(scale));
}

// Conversions between float and 16-bit halves of the activations' dtype.
__device__ __forceinline__ float lower_to_float(u32 x) {
#if X_BF16
  return __int_as_float(x << 16);
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)x));
  return y;
#endif
}

__device__ __forceinline__ float upper_to_float(u32 x) {
#if X_BF16
  return __int_as_float(x & 0xFFFF0000u);
#else
  return lower_to_float(x >> 16);
#endif
}
