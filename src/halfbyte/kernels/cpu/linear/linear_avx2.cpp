// AVX2. `vpermps` takes three bits of its indices: a code's magnitude; its sign is moved into
// place.

#include <algorithm>
#include <cstring>

#include "convert.h"
#include "linear/linear.h"
#include "linear/linear_pack.h"

#if HALFBYTE_X86

#include <immintrin.h>

namespace halfbyte {
namespace {

#define TARGET __attribute__((target("avx2,fma,f16c")))

using Vec = __m256;
constexpr int kLanes = 8;
constexpr int kUnits = 16;
constexpr int kSums = 8;
constexpr int kPackedRows = 5;
constexpr int kUnpackedRows = 6;
constexpr float kFactor = 128.0f;

TARGET inline Vec zero() { return _mm256_setzero_ps(); }
TARGET inline Vec load(const float* x) { return _mm256_loadu_ps(x); }
TARGET inline void store(float* x, Vec v) { _mm256_storeu_ps(x, v); }
TARGET inline Vec broadcast(const float* x) { return _mm256_broadcast_ss(x); }
TARGET inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
TARGET inline Vec multiply(Vec w, const float* x) { return _mm256_mul_ps(w, broadcast(x)); }
TARGET inline Vec multiply_add(Vec sum, Vec w, const float* x) {
  return _mm256_fmadd_ps(w, broadcast(x), sum);
}

TARGET inline void store_float16(const float* x, uint8_t* out) {
  for (int i = 0; i < kStrip; i += 8)
    _mm_storeu_si128((__m128i*)(out + 2 * i),
                     _mm256_cvtps_ph(load(x + i), _MM_FROUND_TO_NEAREST_INT));
}

TARGET inline void store_bfloat16(const float* x, uint8_t* out) {
  for (int i = 0; i < kStrip; i += 8) {
    const __m256i bits = _mm256_castps_si256(load(x + i)), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256 nan = _mm256_cmp_ps(load(x + i), load(x + i), _CMP_UNORD_Q);
    const __m256i halves =
        _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0xffff), _mm256_castps_si256(nan));
    _mm_storeu_si128(
        (__m128i*)(out + 2 * i),
        _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
  }
}

struct Words {
  __m256i even[2][2], odd[2][2];  // twice the values of a word's columns 0, 2, 4, 6, and 1, 3, 5, 7
};

TARGET inline Words load_words(const uint8_t* codes) {
  const __m256i twice = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
  const __m256i nibble = _mm256_set1_epi8(15);
  Words words;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)(codes + i * 32));
    words.even[i / 2][i % 2] = _mm256_shuffle_epi8(twice, _mm256_and_si256(bytes, nibble));
    words.odd[i / 2][i % 2] =
        _mm256_shuffle_epi8(twice, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble));
  }
  return words;
}

template <int U>
TARGET inline Vec unit_of(const Words& words, int v) {
  const __m256i bytes = (U % 2 ? words.odd : words.even)[U / 8][v];
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bytes, 24 - U % 8 / 2 * 8), 24));
}

// E4M3 bits moved into an fp16 give the value times 2^-8, subnormals included; NaN is set separately.
TARGET inline void unpack_scales(const uint8_t* bytes, float* scales) {
  for (int i = 0; i < kScaleBytes; i += 8) {
    const __m128i eight = _mm_loadl_epi64((const __m128i*)(bytes + i));
    const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(eight), 7);
    const __m256 x = _mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16((short)0xbf80)));
    const __m256i low = _mm256_and_si256(_mm256_cvtepu8_epi32(eight), _mm256_set1_epi32(127));
    const __m256i nan = _mm256_cmpeq_epi32(low, _mm256_set1_epi32(127));
    store(scales + i, _mm256_or_ps(x, _mm256_castsi256_ps(nan)));
  }
}

constexpr auto pack = pack_floats;

#include "linear/linear_simd.inc"

}  // namespace

const LinearKernels kLinearAvx2 = kKernels;

}  // namespace halfbyte

#endif
