// Arithmetic of NVFP4 for the store kernels, bit for bit as `halfbyte.numerics`.
//
// Products and sums are rounded one by one, so they are intrinsics that the compiler does not fuse. EASY: the global
// scale is in 2^-40 .. 2^40. There overflow or underflow of a product cannot change a code, so divisions use one shared
// reciprocal in two parts (proof in kernels/formats/encode_floats.py).

#pragma once
#include "kernels/runtime/basics.cuh"

typedef long long i64;

#define INF __int_as_float(0x7F800000)
#define NOT_A_NUMBER __int_as_float(0x7FC00000)
#define BLOCK 16         // values with one scale
#define NAN_SCALE 0x7F   // of a block that holds a NaN
#define TOP 0x1p24f

__device__ __forceinline__ float mul(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ float add(float x, float y) { return __fadd_rn(x, y); }
__device__ __forceinline__ float sub(float x, float y) { return __fsub_rn(x, y); }
__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(u32 x) { return __uint_as_float(x); }

// The larger one; NaN if any is.
__device__ __forceinline__ float larger(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// 1 / x, within a unit of the last place.
__device__ __forceinline__ float approximate_inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x. With EASY, as `rcp.rn` for x in that range: an approximation and a Newton step.
template <bool EASY>
__device__ __forceinline__ float inverse(float x) {
  if (!EASY) return __frcp_rn(x);
  const float y = approximate_inverse(x);
  return __fmaf_rn(y, __fmaf_rn(-x, y, 1.0f), y);
}

// A divisor's reciprocal as a sum of two floats.
struct Inverse {
  float high, low;

  __device__ __forceinline__ explicit Inverse(float divisor) {
    high = inverse<true>(divisor);
    const float missing = __fmaf_rn(-divisor, high, 1.0f);
    low = mul(__fmaf_rn(missing, missing, missing), high);
  }
  // x over the divisor, on the true quotient's side of every tie.
  __device__ __forceinline__ float of(float x) const { return __fmaf_rn(x, high, mul(x, low)); }
};

// The block scale of its byte, 0 up to 126.
__device__ __forceinline__ float scale_of_byte(int byte) { return mul(float_of((u32)byte << 20), 0x1p120f); }

// The byte of a ratio of 2^-6 up to 464, to nearest even; more for larger ones and NaN.
__device__ __forceinline__ int byte_of_normal(float ratio) {
  const u32 bits = bits_of(ratio);
  return ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3);
}

// The byte of a ratio of 0 up to 448, to nearest even.
__device__ __forceinline__ int byte_of_ratio(float ratio) {
  const u32 bits = bits_of(ratio);
  const u32 subnormal = bits_of(add(ratio, 16384.0f)) - 0x46800000;  // the last place of 2^14 is 2^-9
  return bits < 0x3C800000 ? subnormal : byte_of_normal(ratio);
}

// The same in one instruction, where there is one.
__device__ __forceinline__ int byte_of_ratio_fast(float ratio) {
#if __CUDA_ARCH__ >= 890
  u16 bytes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(0.0f), "f"(ratio));
  return bytes;
#else
  return byte_of_ratio(ratio);
#endif
}

// x * r, and 0 if that is NaN. With EASY only a NaN in the block, or in one whose errors it receives, gives NaN, which
// is kept.
template <bool EASY>
__device__ __forceinline__ float ratio_of(float x, float r) {
  const float t = mul(x, r);
  return EASY || t == t ? t : 0.0f;
}

// The E2M1 value nearest to |t|, ties to the even code; CLAMPS if |t| may be 7 or more. Let p be the power of two at or
// below |t|, at least 1. Values near |t| are p/2 apart, which is the last place of a float32 at 2^22 p. So adding and
// subtracting 2^22 p rounds.
template <bool CLAMPS>
__device__ __forceinline__ float nearest(float t) {
  const float power = fmaxf(float_of(bits_of(t) & 0x7F800000), 1.0f);
  const float v = __fmaf_rn(power, -0x1p22f, __fmaf_rn(power, 0x1p22f, fabsf(t)));
  return CLAMPS ? fminf(v, 6.0f) : v;  // also for infinity, where v is NaN
}

// 0x4B7FFFFC + the code of a magnitude up to 6 (proof in kernels/formats/encode.py).
#define FIRST_CODE 0x4B7FFFFCu
__device__ __forceinline__ u32 code_bits(float t) {
  return bits_of(fminf(__fmaf_rn(t, 2.0f, TOP - 4.0f), add(t, TOP)));
}

// A word is this plus `code_bits` of eight codes, each moved to its place: modulo 2^32, their constant bits sum to
// 0x3F3BBBBC.
#define FIRST_CODES (0u - 0x3F3BBBBCu)

// Two words of codes.
__device__ __forceinline__ uint2 pack(const u32* codes, const float* x) {
  u32 words[2] = {FIRST_CODES, FIRST_CODES};
#pragma unroll
  for (int i = 0; i < BLOCK; i++) words[i / 8] += (codes[i] + (x[i] < 0.0f ? 8 : 0)) << 4 * (i % 8);
  return make_uint2(words[0], words[1]);
}

// Two words of the codes of x * r, which is below 7 in size. The ratio has the sign of x, also where it underflows;
// adding 0 makes -0 positive. Signs and codes are shifted in, the last value first.
__device__ __forceinline__ uint2 words_of_ratios(const float* x, float r) {
  u32 words[2] = {0, 0};
#pragma unroll
  for (int i = BLOCK; i--;) {
    const float t = __fmaf_rn(x[i], r, 0.0f);
    words[i / 8] = (__funnelshift_r(bits_of(t), words[i / 8], 31) << 3) + code_bits(fabsf(t));
  }
  return make_uint2(words[0] + FIRST_CODES, words[1] + FIRST_CODES);
}

// The sum of `COUNT` values, neighbours first.
template <int COUNT>
__device__ __forceinline__ float pairwise_sum(const float* x) {
  if constexpr (COUNT == 1)
    return x[0];
  else
    return add(pairwise_sum<COUNT / 2>(x), pairwise_sum<COUNT / 2>(x + COUNT / 2));
}

// The largest magnitude of `COUNT` values; NaN if any is.
template <int COUNT>
__device__ __forceinline__ float amax_of(const float* x) {
  if constexpr (COUNT == 1)
    return fabsf(x[0]);
  else
    return larger(amax_of<COUNT / 2>(x), amax_of<COUNT / 2>(x + COUNT / 2));
}

__device__ __forceinline__ bool is_easy(float g) { return g >= 0x1p-40f && g <= 0x1p40f; }
