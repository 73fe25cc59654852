// Block scales of NVFP4: by weighted error (numerics/weighted_rounding.py), or as a format chooses them
// (numerics/nvfp4.py).
//
// Macros:
//   FOUR_OVER_SIX   1 if K's format is `nvfp4_4over6`, 0 if `nvfp4`
//   SMALL_GRID      1 if the launch does not fill the GPU

#pragma once
#include "kvcache/store/cuda/arithmetic.cuh"

#define CANDIDATES 4
#define LARGEST_SCALE 126          // the byte of 448
#define NORMAL_SCALES 0x3C000000u  // bits of a scale from 8 on, less its byte times 2^20

// The block scale of its byte, from 8 on; 448 at most if it is LIMITED.
template <bool LIMITED>
__device__ __forceinline__ float normal_scale(int byte) {
  int bits = (byte << 20) + NORMAL_SCALES;
  if (LIMITED) {
    bits = min(bits, (LARGEST_SCALE << 20) + (int)NORMAL_SCALES);
    asm("" : "+r"(bits));  // opaque: sum and minimum are one instruction, which the minimum of two floats would not be
  }
  return float_of(bits);
}

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
    return of<EASY>(min(max(start + candidate_step(n), 1), LARGEST_SCALE), g);
  }
};

// Weights of a block's channels, used for several tokens.
struct Weights {
  float w[BLOCK];
  Inverse unit;  // of 6 g: amax times it is the scale of amax6
  // 2^-19 times their sum. NaN if a weight is negative, or the sum is outside 2^-12 .. 2^20: then `likely_scale` is never
  // sure.
  float slack;

  __device__ __forceinline__ Weights(const float* from, float g) : unit(mul(6.0f, g)) {
    float sizes[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i += 4) {
      const float4 x = *(const float4*)(from + i);
      w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < BLOCK; i++) sizes[i] = fabsf(w[i]);
    const float sum = pairwise_sum<BLOCK>(w);
    const bool is_usual = sum == pairwise_sum<BLOCK>(sizes) && sum >= 0x1p-12f && sum <= 0x1p20f;
    slack = is_usual ? mul(sum, 0x1p-19f) : NOT_A_NUMBER;
  }
};

// The distance from |x| to the nearest E2M1 value times d; r is 1 / d. Near `shift` the step between floats equals the
// step between E2M1 values near t = |x| r, so subtracting t from `shift` rounds t (ties may go either way). E2M1's step
// doubles at 2 and at 4; for t in 1.75 .. 2.25 both steps round to 2, and for t in 3.5 .. 4.5 both round to 4. So the
// shift begins above 2^22, may cross 2^23, where the floats' step doubles, anywhere in t = 1.75 .. 2.25, may cross 2^24
// anywhere in t = 3.5 .. 4.5, and stays below 2^25.
template <bool CLAMPS>
__device__ __forceinline__ float distance(float x, float d, float r, float shift) {
  const float nearest = sub(shift, __fmaf_rn(fabsf(x), -r, shift));
  return __fmaf_rn(CLAMPS ? fminf(nearest, 6.0f) : nearest, d, -fabsf(x));
}

// Shifts for the candidates of a block: one for amax6's scale, the next smaller, and the next larger one; one for the
// scale four bytes up. (A maximum of |x| times a factor and 2^22 would do, too, in more instructions of a slower pipe.)
//
// In multiples u of 1.984375 d, d being amax6's, the first is 2^22 (1 + u / 2 + u^2 / 2) and a little: 2^23 at u = 1,
// 2^24 at u = 2. That is a t of 1.984 and 3.969 for amax6's scale, of 2.116 to 2.233 and 4.233 to 4.465 for the smaller
// one, of 1.763 to 1.861 and 3.527 to 3.721 for the larger one. u is 3.22 at most, where the shift is 0.98 * 2^25. The
// other one is the first with its distance from 2^22 multiplied by `flatter`, which depends on the ratio of the scales
// so that the shift crosses at a t of 1.875 to 1.937, and of 3.632 to 3.825.
struct Shifts {
  float slope, flatter, base;

  __device__ __forceinline__ Shifts(float r, float d_over_far) {
    slope = mul(r, 1448.1546879f / 1.984375f);  // sqrt(2^21) at u = 1
    flatter = __fmaf_rn(d_over_far, 1.25f, -0.25f), base = __fmaf_rn(flatter, -0x1p22f, 0x1p22f);
  }
  __device__ __forceinline__ float near(float x) const {
    const float root = __fmaf_rn(fabsf(x), slope, 0.5f * 1448.1546879f);
    return __fmaf_rn(root, root, 0.875f * 0x1p22f + 4.0f);
  }
  __device__ __forceinline__ float far(float near) const { return __fmaf_rn(near, flatter, base); }
};

// The byte of the candidate with the smallest error, for a `start` of 9 to LARGEST_SCALE, and EASY; `is_sure` is false if
// another one comes so close that rounding may decide.
//
// In the definition an error is the sum of w (v - t)^2 s^2, with t rounded to float32. Here t is not rounded, its r is
// approximate, and distances are multiplied by d. t is below 8, and the largest tie is 5. The definition's t is within
// 2^-20 of |x| / d, or 5/8 of that near a tie; r is within 2^-23 of itself of 1 / d, so near a tie the other side may be
// taken, up to 2 * 5 * 2^-23 farther away. So a distance over d differs from |v - t| by u = 2^-19 at most, and its square
// by 2^-17 of itself and 2^17 u^2 = 2^-21. Rounding changes each sum by less than 2^-19 of itself. So errors that differ
// by 2^-15 of themselves, and by 2^-19 d^2 times the sum of weights, are in the definition's order (d is that of amax6;
// others are up to 1.5 times as large).
__device__ __forceinline__ int likely_scale(const float* x, const Weights& weights, float g, int start, bool& is_sure) {
  float d[CANDIDATES], r[CANDIDATES], errors[CANDIDATES] = {};
#pragma unroll
  for (int n = 0; n < CANDIDATES; n++) {
    const int own = start + candidate_step(n);  // a step of 1 beyond the largest scale is left out below
    d[n] = mul(n < 3 ? normal_scale<false>(own) : normal_scale<true>(own), g);
    r[n] = approximate_inverse(d[n]);
  }
  const Shifts shifts(r[0], mul(d[0], r[3]));
#pragma unroll
  for (int i = 0; i < BLOCK; i++) {
    const float shift = shifts.near(x[i]), far_shift = shifts.far(shift);
    const float off[CANDIDATES] = {
        distance<false>(x[i], d[0], r[0], shift),
        distance<true>(x[i], d[1], r[1], shift),  // t is up to 7.125; the others are below 7
        distance<false>(x[i], d[2], r[2], shift),
        distance<false>(x[i], d[3], r[3], far_shift),
    };
#pragma unroll
    for (int n = 0; n < CANDIDATES; n++) errors[n] = __fmaf_rn(mul(off[n], off[n]), weights.w[i], errors[n]);
  }
  // Near the largest scale candidates are the same byte: the first one stands for all.
  if (start + candidate_step(2) > LARGEST_SCALE) errors[2] = INF;
  if (start + candidate_step(2) >= LARGEST_SCALE) errors[3] = INF;
  const float low = fminf(errors[0], errors[1]), high = fminf(errors[2], errors[3]), least = fminf(low, high);
  const float second = fminf(fmaxf(low, high), fminf(fmaxf(errors[0], errors[1]), fmaxf(errors[2], errors[3])));
  is_sure = second > __fmaf_rn(least, 1.0f + 0x1p-15f, mul(weights.slack, mul(d[0], d[0])));
  int step = candidate_step(3);
#pragma unroll
  for (int n = 0; n < CANDIDATES - 1; n++) step = errors[n] == least ? candidate_step(n) : step;
  return min(start + step, LARGEST_SCALE);
}

// The byte with the smallest error, by its definition; NAN_SCALE for NaN. `error_of` gives a block's `weighted_error`
// for a candidate's r.
template <bool EASY, typename ErrorOf>
__device__ __forceinline__ int exact_scale(float amax, float g, const ErrorOf& error_of) {
  const float ratio = ratio_of_amax<EASY>(amax, g);
  const int start = ratio == ratio ? byte_of_ratio(ratio) : 0;
  int best = 0;
  float best_error = 0.0f;
#pragma unroll SMALL_GRID ? CANDIDATES : 1
  for (int n = 0; n < CANDIDATES; n++) {
    const Candidate c = Candidate::near<EASY>(start, n, g);
    const float error = mul(mul(error_of(c.r), c.s), c.s);
    if (n == 0 || error < best_error) best = c.byte, best_error = error;
  }
  return ratio == ratio ? best : NAN_SCALE;
}

// The byte with the smallest error, and that scale times g; 0 for a block of zeros, NAN_SCALE for one with a NaN. Called
// by a whole warp.
template <bool EASY>
__device__ __forceinline__ int best_scale(const float* x, const Weights& weights, float amax, float g, float& d) {
  bool is_sure = false;
  int best = 0;
  if (!SMALL_GRID && EASY) {
    const float ratio = weights.unit.of(amax);
    best = likely_scale(x, weights, g, byte_of_ratio_fast(ratio), is_sure);
    // The bytes from 9 on, and nothing that saturates. Zeros and NaN are outside.
    is_sure = is_sure && bits_of(ratio) - bits_of(0x1.2p-6f) < bits_of(464.0f) - bits_of(0x1.2p-6f);
    d = mul(normal_scale<false>(best), g);
  }
  if (SMALL_GRID || !EASY || __any_sync(~0u, !is_sure)) {
    // Opaque, which keeps products with g for this rare case out of the registers of the common one.
    if (!SMALL_GRID && EASY) asm volatile("" : "+f"(g));
    best = exact_scale<EASY>(amax, g, [&](float r) { return weighted_error<EASY, true, BLOCK>(x, weights.w, r); });
    if (amax == 0.0f) best = 0;
    d = mul(scale_of_byte(best), g);
  }
  return best;
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

// A block with the scale of smallest weighted error, each value rounded alone. Called by a whole warp.
template <bool EASY>
__device__ __forceinline__ Encoded encode_weighted(const float* x, const Weights& weights, float g) {
  const float amax = amax_of<BLOCK>(x);
  float d;
  const int scale = best_scale<EASY>(x, weights, amax, g, d);
  const float r = inverse<EASY>(d);
  Encoded encoded = {make_uint2(0, 0), scale};
  // A smaller scale than amax6's often maps amax to 6.5 or more, but seldom to 7, from where codes need a limit. Blocks
  // of zeros (r is not finite) or with a NaN are as rare.
  if (EASY && !__any_sync(~0u, !(mul(amax, r) < 7.0f))) {
    encoded.words = words_of_ratios(x, r);
  } else {
    u32 codes[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) codes[i] = code_bits(fminf(fabsf(ratio_of<EASY>(x[i], r)), 6.0f));
    const uint2 words = pack(codes, x);
    encoded.words.x = amax > 0.0f ? words.x : 0, encoded.words.y = amax > 0.0f ? words.y : 0;
    encoded.scale = amax > 0.0f ? scale : amax == 0.0f ? 0 : NAN_SCALE;
  }
  return encoded;
}
