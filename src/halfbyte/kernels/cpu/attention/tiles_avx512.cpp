// AVX-512. nvfp4 is decoded in registers, from words of eight codes. A look-up (`vpermw`)
// takes the low bits of both halves of a word, so it gives the bfloat16 of elements 0 and 4 of
// sixteen words, and of the next after a shift; a shift and a mask make floats of them.
//
// K is transposed first so that a lane holds a token: scores need no sums over lanes, and a block
// scale multiplies the sum of its sixteen products. V is not transposed: a lane holds eight elements
// of a token, and the weights are multiplied by the block scales.

#include <climits>
#include <cstring>
#include <limits>

#include "avx512.h"

#if HALFBYTE_X86

namespace halfbyte {
namespace {

#define TARGET AVX512

using Vec = __m512;
constexpr int kLanes = 16;
constexpr int kColumns = 4;
constexpr int kHeldRows = 6;

TARGET inline Vec load(const float* x) { return _mm512_loadu_ps(x); }
TARGET inline void store(float* x, Vec v) { _mm512_storeu_ps(x, v); }
TARGET inline Vec set(float x) { return _mm512_set1_ps(x); }
TARGET inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
TARGET inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
TARGET inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
TARGET inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
TARGET inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
TARGET inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where either is NaN
TARGET inline Vec choose_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);
}
TARGET inline Vec absolute(Vec x) { return _mm512_abs_ps(x); }
TARGET inline Vec with_sign_of(Vec x, Vec sign) {
  return _mm512_or_ps(x, _mm512_and_ps(sign, _mm512_castsi512_ps(_mm512_set1_epi32(INT32_MIN))));
}
TARGET inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, 0); }
TARGET inline Vec times_power(Vec x, Vec power) { return _mm512_scalef_ps(x, power); }

TARGET inline Vec from_float32(const uint8_t* data) { return _mm512_loadu_ps(data); }
TARGET inline Vec from_float16(const uint8_t* data) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)data));
}
TARGET inline Vec from_bfloat16(const uint8_t* data) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)data));
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}
TARGET inline Vec from_e4m3(const uint8_t* data) {
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)data));
  const __m512i half = half_of_e4m3(_mm512_castsi256_si512(words));
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(half)), set(256.0f));
}
TARGET inline Vec from_e5m2(const uint8_t* data) {  // the upper half of an fp16
  const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)data));
  return _mm512_cvtph_ps(_mm256_slli_epi16(words, 8));
}
TARGET inline Vec from_e2m1(const uint8_t* data) {
  const __m512i word = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const __m512i shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i words = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i*)data));
  const __m512i codes = _mm512_srlv_epi32(_mm512_permutexvar_epi32(word, words), shift);
  return _mm512_permutexvar_ps(codes, _mm512_load_ps(kE2M1));
}

TARGET void transpose(const float* in, int64_t in_stride, int columns, float* out,
                      int64_t out_stride) {
  const uint8_t* rows[16];
  for (int r = 0; r < 16; r++) rows[r] = (const uint8_t*)(in + r * in_stride);
  for (int c = 0; c < columns; c += 16) {
    __m512i turned[16];
    transpose_16_words(rows, c * 4, turned);
    const int count = columns - c < 16 ? columns - c : 16;
    for (int i = 0; i < count; i++) _mm512_storeu_si512(out + (c + i) * out_stride, turned[i]);
  }
}

#include "attention/tiles_simd.inc"

// Queries: groups of up to four rows, in each [word][look-up][operand][row].
void pack(const float* q, int64_t stride, int rows, int head_size, float* packed) {
  for (; rows > 0; rows -= 4, q += 4 * stride, packed += 4 * packed_size(head_size)) {
    const int count = rows < 4 ? rows : 4;
    for (int r = 0; r < count; r++)
      for (int d = 0; d < head_size; d++)
        packed[(d / 8 * 8 + d % 4 * 2 + d % 8 / 4) * count + r] = q[r * stride + d];
  }
}

using Sum = __m512;
constexpr int kOperands = 2, kBlockFloats = 16;
TARGET inline __m512i codes_table() { return bfloat16_of_e2m1(); }
TARGET inline Sum no_sum() { return _mm512_setzero_ps(); }
TARGET inline __m512 float_of_sum(Sum sum, const float*) { return sum; }
TARGET inline __m512i operand(__m512i pair, int o) {
  return o ? _mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000))
           : _mm512_slli_epi32(pair, 16);
}
TARGET inline __m512 multiply_add(__m512 sum, __m512i x, __m512 y) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(x), y, sum);
}

template <int TILES>
TARGET inline void complete(const float*, int, int, int, const TurnedChunk<TILES>&, float*) {}

#include "attention/score_avx512.inc"

// One token of V per vector, for a chunk of up to 128 elements: a lane holds a word of eight codes.
struct WholeLanes {
  int blocks;
  __mmask16 words;

  static constexpr int kTokens = 1;
  TARGET explicit WholeLanes(int elements)
      : blocks(elements / 16), words((__mmask16)((1u << elements / 8) - 1)) {}
  TARGET __m512i codes(Rows v, int t, int, int element) const {
    return _mm512_maskz_loadu_epi32(words, v.data_of(t) + element / 2);
  }
  // Each scale in the two lanes of its block.
  TARGET __m512 scales(const float (*of)[8], int t) const {
    const __m512i block = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(block, _mm512_castps256_ps512(_mm256_load_ps(of[t])));
  }
  TARGET __m512 weights(const float* row, int t) const { return set(row[t]); }
};

// The same for all of 128 elements, without a mask.
struct FullLanes : WholeLanes {
  TARGET FullLanes() : WholeLanes(128) {}
  TARGET __m512i codes(Rows v, int t, int, int element) const {
    return _mm512_loadu_si512(v.data_of(t) + element / 2);
  }
};

// Two tokens of V per vector, for a chunk of up to 64 elements: even lanes have one, odd lanes the other.
struct HalfLanes {
  int blocks;
  __mmask8 words;

  static constexpr int kTokens = 2;
  TARGET explicit HalfLanes(int elements)
      : blocks(elements / 16), words((__mmask8)((1u << elements / 8) - 1)) {}
  TARGET __m512i codes(Rows v, int t, int u, int element) const {
    const __m256i x = _mm256_maskz_loadu_epi32(words, v.data_of(t) + element / 2);
    const __m256i y = _mm256_maskz_loadu_epi32(words, v.data_of(u) + element / 2);
    const __m512i turns = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_epi32(_mm512_castsi256_si512(x), turns, _mm512_castsi256_si512(y));
  }
  TARGET __m512 scales(const float (*of)[8], int t) const {
    const __m512i block = _mm512_setr_epi32(0, 8, 0, 8, 1, 9, 1, 9, 2, 10, 2, 10, 3, 11, 3, 11);
    return _mm512_permutexvar_ps(block, _mm512_load_ps(of[t]));
  }
  // After an odd last token the weights are padded with 0.
  TARGET __m512 weights(const float* row, int t) const {
    double both;
    std::memcpy(&both, row + t, sizeof both);
    return _mm512_castpd_ps(_mm512_set1_pd(both));
  }
};

// Scales of `tokens` tokens, padded to a multiple of four by repeating the last.
TARGET inline void token_scales(Rows v, int tokens, int element, int blocks, float (*scales)[8]) {
  const int64_t offset = v.scale_offset + element / 16;
  const int whole = tokens / 4 * 4;
  unpack_scales(v.scales, offset, blocks, whole, scales);
  if (whole == tokens) return;
  const uint8_t* rest[4];
  for (int i = 0; i < 4; i++) rest[i] = v.scales[whole + i < tokens ? whole + i : tokens - 1];
  unpack_scales(rest, offset, blocks, 4, scales + whole);
}

// V of up to kStep tokens of a chunk; codes are converted at each use.
template <class LANES>
struct CodesOfV {
  LANES lanes;
  Rows v;
  int element, tokens;
  alignas(64) float scales[kStep][8];

  static constexpr int kTokens = LANES::kTokens;
  TARGET CodesOfV(const LANES& l, Rows rows, int first_element, int count)
      : lanes(l), v(rows), element(first_element), tokens(count) {
    token_scales(v, tokens, element, lanes.blocks, scales);
  }
  TARGET __m512 scale(int t) const { return lanes.scales(scales, t); }
  // Half of the elements (four per word) of token t, with HalfLanes also of token t + 1.
  template <int HALF>
  TARGET void values(int t, __m512* x) const {
    __m512i words = lanes.codes(v, t, t + 1 < tokens ? t + 1 : t, element);
    if (HALF) words = _mm512_srli_epi32(words, 8);
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
      const __m512i pair =
          _mm512_permutexvar_epi16(_mm512_srli_epi32(words, 4 * n), bfloat16_of_e2m1());
      x[2 * n] = _mm512_castsi512_ps(operand(pair, 0));
      x[2 * n + 1] = _mm512_castsi512_ps(operand(pair, 1));
    }
  }
};

// The same, converted once for many rows.
template <class LANES>
struct FloatsOfV {
  LANES lanes;
  int element, tokens;
  __m512 scales[kStep], floats[kStep][8];

  static constexpr int kTokens = LANES::kTokens;
  TARGET explicit FloatsOfV(const CodesOfV<LANES>& v)
      : lanes(v.lanes), element(v.element), tokens(v.tokens) {
    for (int t = 0; t < tokens; t += kTokens) {
      scales[t] = v.scale(t);
      v.template values<0>(t, floats[t]);
      v.template values<1>(t, floats[t] + 4);
    }
  }
  TARGET __m512 scale(int t) const { return scales[t]; }
  template <int HALF>
  TARGET void values(int t, __m512* x) const {
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) x[n] = floats[t][HALF * 4 + n];
  }
};

// Accumulates half of a chunk's elements, so that the sums of four rows stay in registers over all tokens.
// The first half stores weights times block scales for the second.
template <int ROWS, int HALF, class V>
TARGET void accumulate_half(const V& v, const float* weights, int size, __m512 (*scaled)[ROWS],
                            float* sums, Rows next, int ahead) {
  float* at = sums + v.element + HALF * 64;
  __m512 sum[ROWS][4];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) sum[r][n] = load(at + r * size + n * 16);
  for (int t = 0; t < v.tokens; t += V::kTokens) {
    if (!HALF) {
      if (t < ahead) next.prefetch(t, v.element);
      if (V::kTokens == 2 && t + 1 < ahead) next.prefetch(t + 1, v.element);
      const __m512 scale = v.scale(t);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++)
        scaled[t][r] = _mm512_mul_ps(scale, v.lanes.weights(weights + r * kSpan, t));
    }
    __m512 x[4];
    v.template values<HALF>(t, x);
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++)
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) sum[r][n] = _mm512_fmadd_ps(x[n], scaled[t][r], sum[r][n]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) store(at + r * size + n * 16, sum[r][n]);
}

template <class V>
TARGET void accumulate_rows(const V& v, const float* weights, int rows, int size, float* sums,
                            Rows next, int ahead) {
  for (; rows > 0; rows -= 4, weights += 4 * kSpan, sums += 4 * size, ahead = 0)
    with_rows(rows < 4 ? rows : 4, [&](auto number) TARGET {
      constexpr int kRows = decltype(number)::value;
      __m512 scaled[kStep][kRows];
      accumulate_half<kRows, 0>(v, weights, size, scaled, sums, next, ahead);
      accumulate_half<kRows, 1>(v, weights, size, scaled, sums, next, ahead);
    });
}

constexpr PackedKernels kPacked = {256.0f,      INT_MAX,        pack, score, accumulate_avx512,
                                   fold_avx512, position_avx512};

}  // namespace

TARGET void accumulate_avx512(const float* weights, int rows, Rows v, int tokens, int head_size,
                              float* sums, Rows next, int ahead) {
  const int size = sum_size(head_size);
  for (int d = 0; d < head_size; d += 128) {
    const auto with = [&](const auto& lanes) TARGET {
      const CodesOfV codes(lanes, v, d, tokens);
      if (rows <= 4)
        accumulate_rows(codes, weights, rows, size, sums, next, ahead);
      else
        accumulate_rows(FloatsOfV(codes), weights, rows, size, sums, next, ahead);
    };
    const int elements = head_size - d;
    if (elements >= 128)
      with(FullLanes());
    else if (elements > 64)
      with(WholeLanes(elements));
    else
      with(HalfLanes(elements));
  }
}

void fold_avx512(float* sums, int rows, int head_size) {
  const int size = sum_size(head_size), last = size - 128;
  if (head_size - last > 64) return;
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < 128; n += 16) {
      float* lanes = sums + r * size + last + n;
      for (int i = 0; i < 8; i++) lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
    }
}

int position_avx512(int element) {
  const int n = element % 8;
  return element / 128 * 128 + (n % 4 * 2 + n / 4) * 16 + element % 128 / 8;
}

const Kernels kAvx512Kernels = {unpack,       transpose, multiply, logits, largest,
                                exponentials, addresses, &kPacked, nullptr};

}  // namespace halfbyte

#endif
