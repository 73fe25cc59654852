// AVX-512 with 16-bit integer dot products (VNNI), for queries in bfloat16 where bfloat16 dot products
// are missing or slow (Intel's take four times as long). Twice a code is an integer, and a power of two
// scales a block's sixteen elements of q to integers below 2^15. This is exact for elements of at least
// 2^-7 of the largest, in most queries 99 of 100. Others leave remainders, also bfloat16, which are
// multiplied one by one. The sum of a block is exact.

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

// Packed queries: groups of up to four rows; each block has its pairs, [pair][row], then its scales, [row].
// A pair is elements n and n + 4 of each eight. Remainders begin at float `sum_size` * rows, with room for
// 128 * rows per chunk of 128 elements. How many each chunk has stands right before them, the first chunk's
// last. A remainder is a bfloat16, a byte for its row and a byte for its element.
inline int count_at(int rows, int head_size, int chunk) {
  return rows * sum_size(head_size) - 1 - chunk;
}
inline int remainders_at(int rows, int head_size, int chunk) {
  return rows * (sum_size(head_size) + chunk * kSumChunk);
}

// The integers and the scale of sixteen elements; rounding errors go to `remainders`.
TARGET inline int pack_block(__m512 x, int row, int rows, int element, float* packed,
                             float* remainders) {
  const __m512i pairs = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512 zero = _mm512_setzero_ps();
  const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(_mm512_abs_ps(x)));
  // Bounded, so that `unit` is not subnormal.
  const __m512 exponent = _mm512_max_ps(_mm512_getexp_ps(largest), _mm512_set1_ps(-110.0f));
  const __m512 power = _mm512_sub_ps(_mm512_set1_ps(14.0f), exponent);
  const __m512 unit = _mm512_scalef_ps(_mm512_set1_ps(1.0f), _mm512_sub_ps(zero, power));
  const __m512i integers = _mm512_cvtps_epi32(_mm512_scalef_ps(x, power));

  const __m512i turned = _mm512_permutexvar_epi32(pairs, integers);
  const __m256i low = _mm512_castsi512_si256(turned);
  const __m256i high = _mm256_slli_epi32(_mm512_extracti64x4_epi64(turned, 1), 16);
  alignas(32) uint32_t both[8];
  _mm256_store_si256((__m256i*)both, _mm256_blend_epi16(low, high, 0xaa));
  for (int n = 0; n < 8; n++) std::memcpy(packed + n * rows + row, &both[n], 4);
  // Halved, because codes are doubled. NaN and infinity are carried by the scale.
  const bool finite = _mm512_cmp_ps_mask(_mm512_sub_ps(x, x), zero, _CMP_EQ_OQ) == 0xffff;
  packed[8 * rows + row] =
      finite ? 0.5f * _mm512_cvtss_f32(unit) : std::numeric_limits<float>::quiet_NaN();

  const __m512 rest = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(integers), unit, x);
  const __mmask16 mask = _mm512_cmp_ps_mask(rest, zero, _CMP_NEQ_OQ);
  if (!mask) return 0;
  const __m512i place = _mm512_add_epi32(lanes, _mm512_set1_epi32(row << 8 | element));
  const __m512i bits = _mm512_or_si512(_mm512_castps_si512(rest), place);
  _mm512_storeu_si512(remainders, _mm512_maskz_compress_epi32(mask, bits));
  return __builtin_popcount(mask);
}

TARGET void pack(const float* q, int64_t stride, int rows, int head_size, float* packed) {
  for (; rows > 0; rows -= 4, q += 4 * stride, packed += 4 * packed_size(head_size)) {
    const int count = rows < 4 ? rows : 4;
    for (int chunk = 0; chunk * kSumChunk < head_size; chunk++) {
      const int first = chunk * kSumChunk;
      const int size = head_size - first < kSumChunk ? head_size - first : kSumChunk;
      float* const remainders = packed + remainders_at(count, head_size, chunk);
      int found = 0;
      for (int r = 0; r < count; r++)
        for (int d = 0; d < size; d += 16)
          found += pack_block(_mm512_loadu_ps(q + r * stride + first + d), r, count, d,
                              packed + (first + d) / 16 * kBlockFloats * count, remainders + found);
      std::memcpy(packed + count_at(count, head_size, chunk), &found, 4);
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

// Adds the products of the remainders to the scores.
template <int TILES>
TARGET inline void complete(const float* packed, int rows, int head_size, int chunk_index,
                            const TurnedChunk<TILES>& chunk, float* scores) {
  const __m512 codes = _mm512_load_ps(kE2M1);
  const float* remainders = packed + remainders_at(rows, head_size, chunk_index);
  int count;
  std::memcpy(&count, packed + count_at(rows, head_size, chunk_index), 4);
  for (int n = 0; n < count; n++) {
    uint32_t bits;
    std::memcpy(&bits, remainders + n, 4);
    const int row = bits >> 8 & 255, element = bits & 255;
    const __m512 rest = _mm512_castsi512_ps(_mm512_set1_epi32((int)(bits & 0xffff0000)));
    float* const out = scores + row * kSpan;
#pragma GCC unroll 2
    for (int i = 0; i < TILES; i++) {
      const __m512i word = _mm512_srlv_epi32(chunk.words[i][element / 8],
                                             _mm512_set1_epi32(element % 8 * 4));
      const __m512 scaled = _mm512_mul_ps(_mm512_permutexvar_ps(word, codes),
                                          _mm512_load_ps(chunk.scales[i][element / 16]));
      const __m512 sum = _mm512_fmadd_ps(scaled, rest, _mm512_loadu_ps(out + i * 16));
      _mm512_storeu_ps(out + i * 16, sum);
    }
  }
}

#include "attention/score_avx512.inc"

}  // namespace

const PackedKernels kPackedVnni = {
    256.0f, INT_MAX, pack, score, accumulate_avx512, fold_avx512, position_avx512};

}  // namespace halfbyte

#endif
