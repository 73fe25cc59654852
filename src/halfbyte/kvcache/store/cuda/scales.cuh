// Block scales of NVFP4: by weighted error (numerics/weighted_rounding.py), or as a format chooses them
// (numerics/nvfp4.py).
//
// Macros:
//   FOUR_OVER_SIX   1 if K's format is `nvfp4_4over6`, 0 if `nvfp4`

#pragma once
#include "kvcache/store/cuda/arithmetic.cuh"

#define CANDIDATES 4

// `weighted_rounding.CANDIDATES` (reasons there): the byte of candidate n, relative to that of amax6, which wins ties.
__device__ __forceinline__ int candidate_step(int n) { return n == 0 ? 0 : n == 1 ? -1 : n == 2 ? 1 : 4; }

// amax / (6 g), 448 at most; NaN for a block with a NaN.
template <bool EASY>
__device__ __forceinline__ float ratio_of_amax(float amax, float g) {
  const float six = mul(6.0f, g);
  if (EASY) {
    const float ratio = Inverse(six).of(fminf(amax, mul(448.0f, six)));
    return amax == amax ? ratio : amax;
  }
  const float ratio = amax == INF ? amax : __fdiv_rn(amax, six);
  return ratio == ratio ? fminf(fmaxf(ratio, 0.0f), 448.0f) : ratio;
}

// Sum of w * (E2M1(t) - t)^2 with t = |x * r|.
template <bool EASY, bool CLAMPS, int COUNT>
__device__ __forceinline__ float weighted_error(const float* x, const float* w, float r) {
  float sums[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const float t = ratio_of<EASY>(x[i], r), off = sub(nearest<CLAMPS>(t), fabsf(t));
    sums[i] = mul(mul(off, off), w[i]);
  }
  return pairwise_sum<COUNT>(sums);
}

// A candidate for a block's scale.
struct Candidate {
  int byte;
  float s, d, r;

  template <bool EASY>
  __device__ __forceinline__ static Candidate of(int byte, float g) {
    const float s = scale_of_byte(byte), d = mul(s, g);
    return {byte, s, d, inverse<EASY>(d)};
  }
  template <bool EASY>
  __device__ __forceinline__ static Candidate near(int start, int n, float g) {
    return of<EASY>(min(max(start + candidate_step(n), 1), 126), g);
  }
};

template <bool EASY, bool CLAMPS>
__device__ __forceinline__ void try_candidates(const float* x, const float* w, float g, int start, int from, int to,
                                               int& best, float& best_error) {
#pragma unroll 1
  for (int n = from; n < to; n++) {
    const Candidate c = Candidate::near<EASY>(start, n, g);
    const float error = mul(mul(weighted_error<EASY, CLAMPS, BLOCK>(x, w, c.r), c.s), c.s);
    if (n == 0 || error < best_error) best = c.byte, best_error = error;
  }
}

// The byte with the smallest error; NAN_SCALE for NaN. A whole warp comes here.
template <bool EASY>
__device__ __forceinline__ int best_scale(const float* x, const float* w, float amax, float g) {
  const float ratio = ratio_of_amax<EASY>(amax, g);
  const int start = ratio == ratio ? byte_of_ratio(ratio) : 0;
  int best = 0;
  float best_error = 0.0f;
  // Next to a normal scale of amax6 magnitudes are below 6.4, and lower for larger scales.
  const bool clamps = !EASY || (amax > 0.0f && (start < 8 || start > 125));
  if (__any_sync(~0u, clamps))
    try_candidates<EASY, true>(x, w, g, start, 0, CANDIDATES, best, best_error);
  else {
    try_candidates<EASY, false>(x, w, g, start, 0, 1, best, best_error);
    try_candidates<EASY, true>(x, w, g, start, 1, 2, best, best_error);  // the smaller scale
    try_candidates<EASY, false>(x, w, g, start, 2, CANDIDATES, best, best_error);
  }
  return ratio == ratio ? best : NAN_SCALE;
}

// A block's scale that maps amax to `target`, and codes with it.
template <bool EASY>
struct Fit {
  int byte;
  float s;
  u32 codes[BLOCK];

  __device__ __forceinline__ Fit(const float* x, float amax, float g, float target) {
    const float unit = mul(target, g);
    float ratio;
    if (EASY)
      ratio = Inverse(unit).of(fminf(amax, mul(448.0f, unit)));
    else {
      ratio = amax == INF ? amax : __fdiv_rn(amax, unit);
      if (ratio == ratio) ratio = fminf(fmaxf(ratio, 0.0f), 448.0f);
    }
    const float power = mul(float_of(max(bits_of(ratio) & 0x7F800000, 0x3C800000u)), 0x1p20f);
    s = fmaxf(sub(add(ratio, power), power), 0x1p-9f);
    byte = bits_of(mul(s, 0x1p-120f)) >> 20;
    if (!EASY && ratio != ratio) byte = NAN_SCALE, s = ratio;
    const float divisor = mul(s, g);
    if (EASY) {
      const Inverse shared(divisor);
      const float limit = mul(6.0f, divisor);
#pragma unroll
      for (int i = 0; i < BLOCK; i++) codes[i] = code_bits(shared.of(fminf(fabsf(x[i]), limit)));
    } else {
#pragma unroll
      for (int i = 0; i < BLOCK; i++) {
        const float y = fabsf(__fdiv_rn(x[i], divisor));
        codes[i] = code_bits(y == y ? fminf(y, 6.0f) : 0.0f);  // 0 / 0 is 0
      }
    }
  }
  __device__ __forceinline__ float squared_error(const float* x, float g) const {
    float sums[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
      const float q = mul(float_of((codes[i] - FIRST_CODE) << 22), 0x1p126f);
      const float error = sub(mul(mul(q, s), g), fabsf(x[i]));
      sums[i] = mul(error, error);
    }
    return pairwise_sum<BLOCK>(sums);
  }
};

struct Encoded {
  uint2 words;
  int scale;
};

// A block as its format chooses the scale.
template <bool EASY, bool OF_TWO>
__device__ __forceinline__ Encoded encode_as_format(const float* x, float g) {
  const float amax = amax_of<BLOCK>(x);
  Fit<EASY> six(x, amax, g, 6.0f);
  if (OF_TWO) {
    const Fit<EASY> four(x, amax, g, 4.0f);
    const bool take_four = four.squared_error(x, g) < six.squared_error(x, g);
    six.byte = take_four ? four.byte : six.byte;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) six.codes[i] = take_four ? four.codes[i] : six.codes[i];
  }
  const uint2 words = pack(six.codes, x);
  if (amax != amax) return {make_uint2(0, 0), NAN_SCALE};
  return {words, amax == 0.0f ? 0 : six.byte};
}

// A block with the scale of smallest weighted error, each value rounded alone. A whole warp comes here.
template <bool EASY>
__device__ __forceinline__ Encoded encode_weighted(const float* x, const float* w, float g) {
  const float amax = amax_of<BLOCK>(x);
  const int scale = best_scale<EASY>(x, w, amax, g);
  if (amax == 0.0f) return {make_uint2(0, 0), 0};
  if (scale == NAN_SCALE) return {make_uint2(0, 0), NAN_SCALE};
  const float r = inverse<EASY>(mul(scale_of_byte(scale), g));
  u32 codes[BLOCK];
#pragma unroll
  for (int i = 0; i < BLOCK; i++) codes[i] = code_bits(fminf(fabsf(ratio_of<EASY>(x[i], r)), 6.0f));
  return {pack(codes, x), scale};
}
