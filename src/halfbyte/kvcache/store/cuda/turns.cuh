// Error feedback within some channels of a block: each is rounded, and its error goes to those after it.

#pragma once
#include "kvcache/store/cuda/rows.cuh"

// The scale that a block's values are rounded with.
struct Rounding {
  int scale;     // byte of the block scale; NAN_SCALE for NaN
  float d, r;    // scale times global scale, and its reciprocal
  bool is_zero;  // the block's values are all zero

  // A block of zeros may have scale 0: `d` then uses byte 1, so that its reciprocal is finite.
  template <bool EASY>
  __device__ __forceinline__ static Rounding of(int scale, float amax, float g) {
    const float d = scale == NAN_SCALE ? NOT_A_NUMBER : mul(scale_of_byte(max(scale, 1)), g);
    return {scale, d, inverse<EASY>(d), amax == 0.0f};
  }
};

// How block b of a head of K is rounded: by the scale of least weighted error, or the format's. `x`: its values.
template <bool EASY>
__device__ __forceinline__ Rounding rounding_of_key(const Params& p, const float* x, u32 head, u32 b, float g) {
  const float amax = amax_of<BLOCK>(x);
#if K_WEIGHTED
  float d;
  int scale = best_scale<EASY>(x, Weights(p.k_weights + head * HEAD_SIZE + b * BLOCK, g), amax, g, d);
  if (!(amax > 0.0f)) scale = amax == 0.0f ? 1 : NAN_SCALE;
#else
  const int scale = encode_as_format<EASY, FOUR_OVER_SIX>(x, g).scale;
#endif
  return Rounding::of<EASY>(scale, amax, g);
}

// condition < limit ? x - y : otherwise, as a predicated subtraction: a select would add its latency.
__device__ __forceinline__ float sub_if_less(float condition, float limit, float x, float y, float otherwise) {
  asm("{.reg .pred p; setp.lt.f32 p, %1, %2; @p sub.rn.f32 %0, %3, %4;}"
      : "+f"(otherwise)
      : "f"(condition), "f"(limit), "f"(x), "f"(y));
  return otherwise;
}

// The error of x. Later channels wait for it, so with EASY large x and NaN are handled off the critical path from x to
// its error: |x| of 6.5 d or more is rounded to 6 d. With EASY the error is finite if x is.
template <bool EASY>
__device__ __forceinline__ float error_of(float x, const Rounding& by) {
  const float t = ratio_of<EASY>(x, by.r);
  if (EASY) {
    const bool is_nan = by.scale == NAN_SCALE;
    const float d = copysignf(by.d, x);
    const float of_large = fabsf(x) < (is_nan ? 0.0f : INF) ? sub(x, mul(6.0f, d)) : 0.0f;
    return sub_if_less(fabsf(x), is_nan ? 0.0f : mul(6.5f, by.d), x, mul(nearest<false>(t), d), of_large);
  }
  const float error = sub(x, mul(nearest<true>(t), x < 0.0f ? -by.d : by.d));
  return fabsf(error) < INF ? error : 0.0f;
}

// FIRST_CODE + the code of x with its sign. Codes of blocks of zeros, or with a NaN, are set to 0 by the caller.
template <bool EASY>
__device__ __forceinline__ u32 signed_code_bits(float x, const Rounding& by) {
  const float t = x == x ? ratio_of<EASY>(x, by.r) : 0.0f;
  return code_bits(fminf(fabsf(t), 6.0f)) + (x < 0.0f ? 8 : 0);
}
