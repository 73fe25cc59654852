// AVX-512. `vpermps` takes the low four bits of its indices, which are a code.

#include <algorithm>
#include <cstring>

#include "avx512.h"
#include "convert.h"
#include "linear/linear.h"
#include "linear/linear_pack.h"

#if HALFBYTE_X86

namespace halfbyte {
namespace {

#define TARGET AVX512

#include "linear/linear_avx512.inc"

constexpr int kUnits = 16;

TARGET inline Vec multiply(Vec w, const float* x) { return _mm512_mul_ps(w, broadcast(x)); }
TARGET inline Vec multiply_add(Vec sum, Vec w, const float* x) {
  return _mm512_fmadd_ps(w, broadcast(x), sum);
}

template <int U>
TARGET inline Vec unit_of(const Words& words, int) {
  const __m512i codes = _mm512_srli_epi32(words.word[U / 8], U % 8 * 4);
  return _mm512_permutexvar_ps(codes, _mm512_load_ps(kE2M1));
}

constexpr auto pack = pack_floats;

#include "linear/linear_simd.inc"

}  // namespace

const LinearKernels kLinearAvx512 = kKernels;

}  // namespace halfbyte

#endif
