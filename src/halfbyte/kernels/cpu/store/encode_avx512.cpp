// Storing with AVX-512.

#include <cmath>
#include <cstring>
#include <limits>

#include "convert.h"
#include "store/encode.h"

#if HALFBYTE_X86

#include <immintrin.h>

namespace halfbyte {
namespace {

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")))

TARGET inline uint32_t top_bits(const float* x) {
  const __m512i magnitudes = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi32(0x7fffffff));
  return _mm512_reduce_max_epu32(magnitudes);
}

TARGET inline void pack_codes(__m512i codes, uint8_t* out) {
  // The odd code of a pair moves to the upper half of the even one's byte.
  const __m512i pairs = _mm512_or_si512(codes, _mm512_srli_epi64(codes, 28));
  _mm_storel_epi64((__m128i*)out, _mm512_cvtepi64_epi8(pairs));
}

TARGET inline void e2m1_values(const float* x, float divisor, uint8_t* out) {
  const __m512 given = _mm512_loadu_ps(x);
  const __m512 y = _mm512_abs_ps(_mm512_div_ps(given, _mm512_set1_ps(divisor)));
  const __m512i one = _mm512_set1_epi32(1);
  // Comparisons are false for NaN.
  __m512i codes =
      _mm512_maskz_set1_epi32(_mm512_cmp_ps_mask(given, _mm512_setzero_ps(), _CMP_LT_OQ), 8);
#define ABOVE(limit, how) \
  codes =                 \
      _mm512_mask_add_epi32(codes, _mm512_cmp_ps_mask(y, _mm512_set1_ps(limit), how), codes, one)
  ABOVE(0.25f, _CMP_GT_OQ);
  ABOVE(0.75f, _CMP_GE_OQ);
  ABOVE(1.25f, _CMP_GT_OQ);
  ABOVE(1.75f, _CMP_GE_OQ);
  ABOVE(2.5f, _CMP_GT_OQ);
  ABOVE(3.5f, _CMP_GE_OQ);
  ABOVE(5.0f, _CMP_GT_OQ);
#undef ABOVE
  pack_codes(codes, out);
}

TARGET inline float tree_sum(__m512 sum) {
  // Both neighbours get their sum, which does not depend on their order.
  sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xb1));
  sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0x4e));
  sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0xb1));
  sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0x4e));
  return _mm512_cvtss_f32(sum);
}

TARGET inline float squared_error(const float* x, const uint8_t* data, float s, float g) {
  const __m512i word = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const __m512i shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i words = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i*)data));
  const __m512i codes = _mm512_srlv_epi32(_mm512_permutexvar_epi32(word, words), shift);
  const __m512 q = _mm512_permutexvar_ps(codes, _mm512_load_ps(kE2M1));
  const __m512 value = _mm512_mul_ps(_mm512_mul_ps(q, _mm512_set1_ps(s)), _mm512_set1_ps(g));
  const __m512 error = _mm512_sub_ps(value, _mm512_loadu_ps(x));
  return tree_sum(_mm512_mul_ps(error, error));
}

// `SmallFloat::of`.
template <class SMALL>
TARGET inline void small_values(const float* x, float scale, uint8_t* out) {
  const __m512i bits =
      _mm512_castps_si512(_mm512_div_ps(_mm512_loadu_ps(x), _mm512_set1_ps(scale)));
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  const __m512i given = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __m512i magnitude = _mm512_min_epu32(given, _mm512_set1_epi32(SMALL::kLargest));
  const __m512i magic = _mm512_set1_epi32(SMALL::kMagic);
  const __m512i subnormal =
      _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(magnitude),
                                                         _mm512_castsi512_ps(magic))),
                       magic);
  const __m512i odd =
      _mm512_and_si512(_mm512_srli_epi32(magnitude, SMALL::kDropped), _mm512_set1_epi32(1));
  const __m512i moved = _mm512_add_epi32(magnitude, _mm512_set1_epi32((int)SMALL::kMove));
  const __m512i normal = _mm512_srli_epi32(_mm512_add_epi32(moved, odd), SMALL::kDropped);
  const __mmask16 is_small = _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(SMALL::kNormal));
  const __mmask16 nan = _mm512_cmpgt_epu32_mask(given, _mm512_set1_epi32(0x7f800000));
  __m512i code = _mm512_or_si512(sign, _mm512_mask_mov_epi32(normal, is_small, subnormal));
  code = _mm512_mask_mov_epi32(code, nan, _mm512_set1_epi32(0x7f));
  _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8(code));
}

TARGET void e4m3_values(const float* x, float scale, uint8_t* out) {
  small_values<E4M3>(x, scale, out);
}

TARGET void e5m2_values(const float* x, float scale, uint8_t* out) {
  small_values<E5M2>(x, scale, out);
}

TARGET void float16_values(const float* x, float, uint8_t* out) {
  // Minimum and maximum give their second operand where either is NaN.
  const __m512 low = _mm512_min_ps(_mm512_set1_ps(65504.0f), _mm512_loadu_ps(x));
  const __m512 y = _mm512_max_ps(_mm512_set1_ps(-65504.0f), low);
  _mm256_storeu_si256((__m256i*)out, _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT));
}

TARGET void bfloat16_values(const float* x, float, uint8_t* out) {
  const __m512i bits = _mm512_loadu_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512 y = _mm512_loadu_ps(x);
  const __mmask16 nan = _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q);
  const __m512i code =
      _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0xffff));
  _mm256_storeu_si256((__m256i*)out, _mm512_cvtepi32_epi16(code));
}

TARGET inline __m512 ratios_of(__m512 x, float r) {
  const __m512 t = _mm512_abs_ps(_mm512_mul_ps(x, _mm512_set1_ps(r)));
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(t, t, _CMP_ORD_Q), t);
}

// `e2m1_nearest`.
TARGET inline __m512 nearest_values(__m512 t) {
  const __m512 clamped = _mm512_min_ps(t, _mm512_set1_ps(6.0f));
  const __m512i bits = _mm512_and_si512(_mm512_castps_si512(clamped), _mm512_set1_epi32(0x7f800000));
  const __m512 power = _mm512_castsi512_ps(_mm512_add_epi32(
      _mm512_max_epi32(bits, _mm512_set1_epi32(0x3f800000)), _mm512_set1_epi32(22 << 23)));
  return _mm512_sub_ps(_mm512_add_ps(clamped, power), power);
}

TARGET inline float weighted_error(const float* x, const float* weights, float r) {
  const __m512 t = ratios_of(_mm512_loadu_ps(x), r);
  const __m512 off = _mm512_sub_ps(nearest_values(t), t);
  return tree_sum(_mm512_mul_ps(_mm512_mul_ps(off, off), _mm512_loadu_ps(weights)));
}

TARGET inline void product_codes(const float* x, float r, uint8_t* out) {
  const __m512 given = _mm512_loadu_ps(x), v = nearest_values(ratios_of(given, r));
  const __m512 high = _mm512_add_ps(_mm512_mul_ps(v, _mm512_set1_ps(0.5f)), _mm512_set1_ps(4.0f));
  const __m512 middle = _mm512_min_ps(_mm512_add_ps(v, _mm512_set1_ps(2.0f)), high);
  const __m512i codes = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_add_ps(v, v), middle));
  const __mmask16 negative = _mm512_cmp_ps_mask(given, _mm512_setzero_ps(), _CMP_LT_OQ);
  pack_codes(_mm512_mask_or_epi32(codes, negative, codes, _mm512_set1_epi32(8)), out);
}

TARGET inline void subtract_product(float* x, const float* feedback, float error, int n) {
  const __m512 e = _mm512_set1_ps(error);
  for (int i = 0; i < n; i += 16) {
    const __m512 product = _mm512_mul_ps(e, _mm512_loadu_ps(feedback + i));
    _mm512_storeu_ps(x + i, _mm512_sub_ps(_mm512_loadu_ps(x + i), product));
  }
}

#include "store/encode.inc"
#include "store/weighted.inc"

}  // namespace

TARGET void encode_avx512(int format, const float* x, int size, float global_scale, uint8_t* data,
                          uint8_t* scales) {
  encode(format, x, size, global_scale, data, scales);
}

TARGET void encode_weighted_avx512(bool four_over_six, float* x, int size, float g,
                                   const float* weights, const float* feedback, uint8_t* data,
                                   uint8_t* scales) {
  encode_weighted(four_over_six, x, size, g, weights, feedback, data, scales);
}

}  // namespace halfbyte

#endif
