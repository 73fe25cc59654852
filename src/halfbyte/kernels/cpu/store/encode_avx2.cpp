// Storing with AVX2.

#include <cmath>
#include <cstring>
#include <limits>

#include "convert.h"
#include "store/encode.h"

#if HALFBYTE_X86

#include <immintrin.h>

namespace halfbyte {
namespace {

#define TARGET __attribute__((target("avx2,f16c")))

TARGET inline uint32_t top_bits(const float* x) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  const __m256i a = _mm256_and_si256(_mm256_loadu_si256((const __m256i*)x), mask);
  const __m256i b = _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(x + 8)), mask);
  const __m256i c = _mm256_max_epu32(a, b);
  __m128i d = _mm_max_epu32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
  d = _mm_max_epu32(d, _mm_shuffle_epi32(d, 0x4e));
  d = _mm_max_epu32(d, _mm_shuffle_epi32(d, 0xb1));
  return (uint32_t)_mm_cvtsi128_si32(d);
}

TARGET inline void pack_codes(__m256i codes, uint8_t* out) {
  // The odd code of a pair moves to the upper half of the even one's byte.
  const __m256i pairs = _mm256_or_si256(codes, _mm256_srli_epi64(codes, 28));
  const __m128i low = _mm256_castsi256_si128(pairs), high = _mm256_extracti128_si256(pairs, 1);
  const __m128i bytes =
      _mm_shuffle_epi8(_mm_or_si128(low, _mm_slli_epi64(high, 8)),
                       _mm_setr_epi8(0, 8, 1, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  const int four = _mm_cvtsi128_si32(bytes);
  std::memcpy(out, &four, 4);
}

TARGET inline void e2m1_values(const float* x, float divisor, uint8_t* out) {
  for (int i = 0; i < 16; i += 8) {
    const __m256 given = _mm256_loadu_ps(x + i);
    const __m256 y =
        _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_div_ps(given, _mm256_set1_ps(divisor)));
    const __m256i negative =
        _mm256_castps_si256(_mm256_cmp_ps(given, _mm256_setzero_ps(), _CMP_LT_OQ));
    // Comparisons are -1, and false for NaN.
    __m256i codes = _mm256_and_si256(negative, _mm256_set1_epi32(8));
#define ABOVE(limit, how) \
  codes = _mm256_sub_epi32(codes, _mm256_castps_si256(_mm256_cmp_ps(y, _mm256_set1_ps(limit), how)))
    ABOVE(0.25f, _CMP_GT_OQ);
    ABOVE(0.75f, _CMP_GE_OQ);
    ABOVE(1.25f, _CMP_GT_OQ);
    ABOVE(1.75f, _CMP_GE_OQ);
    ABOVE(2.5f, _CMP_GT_OQ);
    ABOVE(3.5f, _CMP_GE_OQ);
    ABOVE(5.0f, _CMP_GT_OQ);
#undef ABOVE
    pack_codes(codes, out + i / 2);
  }
}

// Sum of 16 values as a tree, neighbours first. The first two additions stay within 128-bit lanes.
TARGET inline float tree_sum(__m256 first, __m256 second) {
  __m256 both = _mm256_hadd_ps(first, second);
  both = _mm256_hadd_ps(both, both);
  const __m128 low = _mm256_castps256_ps128(both), high = _mm256_extractf128_ps(both, 1);
  const __m128 halves = _mm_add_ps(low, high);
  return _mm_cvtss_f32(_mm_add_ss(halves, _mm_movehdup_ps(halves)));
}

TARGET inline float squared_error(const float* x, const uint8_t* data, float s, float g) {
  __m256 sum[2];
  for (int i = 0; i < 2; i++) {
    int word;
    std::memcpy(&word, data + i * 4, 4);
    const __m256i codes =
        _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    const __m256 q = _mm256_or_ps(_mm256_permutevar8x32_ps(_mm256_load_ps(kE2M1), codes),
                                  _mm256_castsi256_ps(_mm256_and_si256(
                                      _mm256_slli_epi32(codes, 28), _mm256_set1_epi32(INT32_MIN))));
    const __m256 value = _mm256_mul_ps(_mm256_mul_ps(q, _mm256_set1_ps(s)), _mm256_set1_ps(g));
    const __m256 error = _mm256_sub_ps(value, _mm256_loadu_ps(x + i * 8));
    sum[i] = _mm256_mul_ps(error, error);
  }
  return tree_sum(sum[0], sum[1]);
}

// `SmallFloat::of`; magnitudes compare alike as signed numbers.
template <class SMALL>
TARGET inline void small_values(const float* x, float scale, uint8_t* out) {
  for (int i = 0; i < 16; i += 8) {
    const __m256i bits =
        _mm256_castps_si256(_mm256_div_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(scale)));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
    const __m256i given = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i magnitude = _mm256_min_epu32(given, _mm256_set1_epi32(SMALL::kLargest));
    const __m256i magic = _mm256_set1_epi32(SMALL::kMagic);
    const __m256i subnormal =
        _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(magnitude),
                                                           _mm256_castsi256_ps(magic))),
                         magic);
    const __m256i odd =
        _mm256_and_si256(_mm256_srli_epi32(magnitude, SMALL::kDropped), _mm256_set1_epi32(1));
    const __m256i moved = _mm256_add_epi32(magnitude, _mm256_set1_epi32((int)SMALL::kMove));
    const __m256i normal = _mm256_srli_epi32(_mm256_add_epi32(moved, odd), SMALL::kDropped);
    const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(SMALL::kNormal), magnitude);
    const __m256i nan = _mm256_cmpgt_epi32(given, _mm256_set1_epi32(0x7f800000));
    __m256i code = _mm256_or_si256(sign, _mm256_blendv_epi8(normal, subnormal, is_small));
    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f), nan);
    const __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    _mm_storel_epi64((__m128i*)(out + i), _mm_packus_epi16(words, words));
  }
}

TARGET void e4m3_values(const float* x, float scale, uint8_t* out) {
  small_values<E4M3>(x, scale, out);
}

TARGET void e5m2_values(const float* x, float scale, uint8_t* out) {
  small_values<E5M2>(x, scale, out);
}

TARGET void float16_values(const float* x, float, uint8_t* out) {
  for (int i = 0; i < 16; i += 8) {
    // Minimum and maximum give their second operand where either is NaN.
    const __m256 low = _mm256_min_ps(_mm256_set1_ps(65504.0f), _mm256_loadu_ps(x + i));
    const __m256 y = _mm256_max_ps(_mm256_set1_ps(-65504.0f), low);
    _mm_storeu_si128((__m128i*)(out + 2 * i), _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT));
  }
}

TARGET void bfloat16_values(const float* x, float, uint8_t* out) {
  for (int i = 0; i < 16; i += 8) {
    const __m256 y = _mm256_loadu_ps(x + i);
    const __m256i bits = _mm256_castps_si256(y);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(y, y, _CMP_UNORD_Q));
    const __m256i code =
        _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0xffff), nan);
    _mm_storeu_si128((__m128i*)(out + 2 * i), _mm_packus_epi32(_mm256_castsi256_si128(code),
                                                               _mm256_extracti128_si256(code, 1)));
  }
}

TARGET inline __m256 ratios_of(__m256 x, __m256 r) {
  const __m256 t = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_mul_ps(x, r));
  return _mm256_and_ps(t, _mm256_cmp_ps(t, t, _CMP_ORD_Q));
}

// `e2m1_nearest`.
TARGET inline __m256 nearest_values(__m256 t) {
  const __m256 clamped = _mm256_min_ps(t, _mm256_set1_ps(6.0f));
  const __m256i bits = _mm256_and_si256(_mm256_castps_si256(clamped), _mm256_set1_epi32(0x7f800000));
  const __m256 power = _mm256_castsi256_ps(_mm256_add_epi32(
      _mm256_max_epi32(bits, _mm256_set1_epi32(0x3f800000)), _mm256_set1_epi32(22 << 23)));
  return _mm256_sub_ps(_mm256_add_ps(clamped, power), power);
}

TARGET inline float weighted_error(const float* x, const float* weights, float r) {
  __m256 sum[2];
  for (int i = 0; i < 2; i++) {
    const __m256 t = ratios_of(_mm256_loadu_ps(x + i * 8), _mm256_set1_ps(r));
    const __m256 off = _mm256_sub_ps(nearest_values(t), t);
    sum[i] = _mm256_mul_ps(_mm256_mul_ps(off, off), _mm256_loadu_ps(weights + i * 8));
  }
  return tree_sum(sum[0], sum[1]);
}

TARGET inline void product_codes(const float* x, float r, uint8_t* out) {
  for (int i = 0; i < 16; i += 8) {
    const __m256 given = _mm256_loadu_ps(x + i);
    const __m256 v = nearest_values(ratios_of(given, _mm256_set1_ps(r)));
    const __m256 high = _mm256_add_ps(_mm256_mul_ps(v, _mm256_set1_ps(0.5f)), _mm256_set1_ps(4.0f));
    const __m256 middle = _mm256_min_ps(_mm256_add_ps(v, _mm256_set1_ps(2.0f)), high);
    const __m256i codes = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_add_ps(v, v), middle));
    const __m256i negative =
        _mm256_castps_si256(_mm256_cmp_ps(given, _mm256_setzero_ps(), _CMP_LT_OQ));
    pack_codes(_mm256_or_si256(codes, _mm256_and_si256(negative, _mm256_set1_epi32(8))),
               out + i / 2);
  }
}

TARGET inline void subtract_product(float* x, const float* feedback, float error, int n) {
  const __m256 e = _mm256_set1_ps(error);
  for (int i = 0; i < n; i += 8) {
    const __m256 product = _mm256_mul_ps(e, _mm256_loadu_ps(feedback + i));
    _mm256_storeu_ps(x + i, _mm256_sub_ps(_mm256_loadu_ps(x + i), product));
  }
}

#include "store/encode.inc"
#include "store/weighted.inc"

}  // namespace

TARGET void encode_avx2(int format, const float* x, int size, float global_scale, uint8_t* data,
                        uint8_t* scales) {
  encode(format, x, size, global_scale, data, scales);
}

TARGET void encode_weighted_avx2(bool four_over_six, float* x, int size, float g,
                                 const float* weights, const float* feedback, uint8_t* data,
                                 uint8_t* scales) {
  encode_weighted(four_over_six, x, size, g, weights, feedback, data, scales);
}

}  // namespace halfbyte

#endif
