// AVX-512 with bfloat16 dot products, for x in bfloat16: products with E2M1 are exact, sums are in
// float32. A look-up (`vpermw`) gives columns n and n + 4 of sixteen words, which is a unit.

#include <algorithm>
#include <cstring>

#include "avx512.h"
#include "convert.h"
#include "linear/linear.h"

#if HALFBYTE_X86

namespace halfbyte {
namespace {

#define TARGET __attribute__((target(HALFBYTE_AVX512 ",avx512bf16")))

#include "linear/linear_avx512.inc"

constexpr int kUnits = 8;

// Inline assembly: compilers load the broadcast into a register first, which is up to 40 % slower.
TARGET inline Vec multiply_add(Vec sum, Vec w, const float* x) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*x));
  return sum;
}
TARGET inline Vec multiply(Vec w, const float* x) { return multiply_add(zero(), w, x); }

template <int U>
TARGET inline Vec unit_of(const Words& words, int) {
  const __m512i codes = _mm512_srli_epi16(words.word[U / 4], U % 4 * 4);
  return (Vec)_mm512_permutexvar_epi16(codes, bfloat16_of_e2m1());
}

void pack(int, const uint8_t* x, int64_t stride, int rows, int64_t k, float* tile) {
  const int64_t columns = (k + kChunk - 1) / kChunk * kChunk;
  // Eight columns of all tokens at a time, which are contiguous in the tile.
  for (int64_t i = 0; i < columns; i += 8, tile += 4 * rows)
    for (int r = 0; r < rows; r++) {
      uint16_t eight[8] = {};
      if (i < k) std::memcpy(eight, x + r * stride + i * 2, sizeof eight);
      for (int n = 0; n < 4; n++) {
        const uint32_t pair = eight[n] | (uint32_t)eight[n + 4] << 16;
        std::memcpy(tile + n * rows + r, &pair, 4);
      }
    }
}

#include "linear/linear_simd.inc"

}  // namespace

const LinearKernels kLinearAvx512Bf16 = kKernels;

}  // namespace halfbyte

#endif
