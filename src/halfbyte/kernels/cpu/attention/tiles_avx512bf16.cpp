// AVX-512 with bfloat16 dot products: for queries in bfloat16. E2M1 is exact in bfloat16, so
// products are exact and sums are in float32; one look-up (`vpermw`) gives two elements of sixteen
// tokens.

#include "avx512.h"

#if HALFBYTE_X86

#include <climits>
#include <cstring>

namespace halfbyte {
namespace {

#define TARGET __attribute__((target(HALFBYTE_AVX512 ",avx512bf16")))

// Packs elements n and n + 4 of each eight as a pair of bfloat16. Groups of up to four rows follow each
// other; a group is [eight elements][n][row].
void pack(const float* q, int64_t stride, int rows, int head_size, float* packed) {
  for (; rows > 0; rows -= 4, q += 4 * stride, packed += 4 * packed_size(head_size)) {
    const int count = rows < 4 ? rows : 4;
    for (int r = 0; r < count; r++)
      for (int d = 0; d < head_size; d += 8)
        for (int n = 0; n < 4; n++) {
          uint32_t low, high;
          std::memcpy(&low, q + r * stride + d + n, 4);
          std::memcpy(&high, q + r * stride + d + n + 4, 4);
          const uint32_t pair = low >> 16 | (high & 0xffff0000);
          std::memcpy(packed + (d / 2 + n) * count + r, &pair, 4);
        }
  }
}

using Sum = __m512;
constexpr int kOperands = 1, kBlockFloats = 8;
TARGET inline __m512i codes_table() { return bfloat16_of_e2m1(); }
TARGET inline Sum no_sum() { return _mm512_setzero_ps(); }
TARGET inline __m512 float_of_sum(Sum sum, const float*) { return sum; }
TARGET inline __m512i operand(__m512i pair, int) { return pair; }
TARGET inline __m512 multiply_add(__m512 sum, __m512i x, __m512 y) {
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
}

template <int TILES>
TARGET inline void complete(const float*, int, int, int, const TurnedChunk<TILES>&, float*) {}

#include "attention/score_avx512.inc"

}  // namespace

const PackedKernels kPackedBfloat16Avx512 = {
    256.0f, INT_MAX, pack, score, accumulate_avx512, fold_avx512, position_avx512};

}  // namespace halfbyte

#endif
