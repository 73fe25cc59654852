// AVX-512 with dot products of 16-bit integers: for queries in bfloat16 where there are no dot
// products of bfloat16, or slow ones (Intel's take three times as long). Twice a code is an
// integer. A power of two makes integers below 2^15 of the sixteen elements of q that meet a block:
// exact for those above 2^-7 of the largest, and within 2^-16 of it for all. Sums of a block are
// exact.

#include "avx512.h"

#if HALFBYTE_X86

#include <climits>
#include <cstring>
#include <limits>

namespace halfbyte {
namespace {

#define TARGET __attribute__((target(HALFBYTE_AVX512 ",avx512vnni")))

using Sum = __m512i;
constexpr int kOperands = 1, kBlockFloats = 9;  // eight pairs and the scale

// Groups of up to four rows, in each [block][pair][row], then the scales, [row]. A pair is elements
// n and n + 4 of a word of eight.
TARGET void pack(const float* q, int64_t stride, int rows, int head_size, float* packed) {
  const __m512 zero = _mm512_setzero_ps();
  const __m512i pairs = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
  for (; rows > 0; rows -= 4, q += 4 * stride, packed += 4 * sum_size(head_size)) {
    const int count = rows < 4 ? rows : 4;
    for (int r = 0; r < count; r++)
      for (int d = 0; d < head_size; d += 16) {
        const __m512 x = _mm512_loadu_ps(q + r * stride + d);
        const float largest = _mm512_reduce_max_ps(_mm512_abs_ps(x));
        const __m512 exponent = _mm512_getexp_ps(_mm512_set1_ps(largest > 0 ? largest : 1.0f));
        const __m512 power = _mm512_sub_ps(_mm512_set1_ps(14.0f), exponent);
        const __m512i integers = _mm512_cvtps_epi32(_mm512_scalef_ps(x, power));
        const __m512i turned = _mm512_permutexvar_epi32(pairs, integers);
        const __m256i low = _mm512_castsi512_si256(turned);
        const __m256i high = _mm256_slli_epi32(_mm512_extracti64x4_epi64(turned, 1), 16);
        alignas(32) uint32_t both[8];
        _mm256_store_si256((__m256i*)both, _mm256_blend_epi16(low, high, 0xaa));
        float* at = packed + d / 16 * kBlockFloats * count + r;
        for (int n = 0; n < 8; n++) std::memcpy(at + n * count, &both[n], 4);
        // Halved, for codes are doubled. Integers know no NaN and no infinity: the scale does.
        const __m512 scale = _mm512_scalef_ps(_mm512_set1_ps(0.5f), _mm512_sub_ps(zero, power));
        const bool finite = _mm512_cmp_ps_mask(_mm512_sub_ps(x, x), zero, _CMP_EQ_OQ) == 0xffff;
        at[8 * count] = finite ? _mm512_cvtss_f32(scale) : std::numeric_limits<float>::quiet_NaN();
      }
  }
}

TARGET inline __m512i codes_table() {
  return _mm512_broadcast_i64x4(
      _mm256_setr_epi16(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
}
TARGET inline Sum no_sum() { return _mm512_setzero_si512(); }
TARGET inline __m512i operand(__m512i pair, int) { return pair; }
TARGET inline Sum multiply_add(Sum sum, __m512i x, __m512 y) {
  return _mm512_dpwssd_epi32(sum, x, _mm512_castps_si512(y));
}
TARGET inline __m512 float_of_sum(Sum sum, const float* scale) {
  return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(*scale));
}

#include "score_avx512.inc"

}  // namespace

const PackedKernels kPackedVnni = {
    256.0f, INT_MAX, pack, score, accumulate_avx512, fold_avx512, position_avx512};

}  // namespace halfbyte

#endif
