// AVX-512. nvfp4 is read straight from its bytes, as words of eight codes. A look-up (`vpermw`)
// takes the low bits of both halves of a word, so it gives the bfloat16 of elements 0 and 4 of
// sixteen words, and of the next after a shift; a shift and a mask make floats of them.
//
// K is turned first so that a lane holds a token: scores need no sums over lanes, and a block scale
// multiplies the sums of its sixteen products. V stays as it lies, a lane holding eight elements of
// a token, and weights take the block scales.

#include <climits>
#include <cstring>
#include <limits>
#include <type_traits>

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

#include "tiles_simd.inc"

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

#include "score_avx512.inc"

// V of a chunk of 128 elements, a token at a time: a lane holds a word of eight codes.
struct WholeChunk {
  int blocks;
  __mmask16 words;

  static constexpr int kTokens = 1;
  static constexpr bool kReady = false;
  TARGET explicit WholeChunk(int elements)
      : blocks(elements / 16), words((__mmask16)((1u << elements / 8) - 1)) {}
  TARGET __m512i codes(Rows v, int t, int, int element) const {
    return _mm512_maskz_loadu_epi32(words, v.data_of(t) + element / 2);
  }
  // Each for the two words of its block.
  TARGET __m512 scales(const float (*of)[8], int t) const {
    const __m512i block = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(block, _mm512_castps256_ps512(_mm256_load_ps(of[t])));
  }
  TARGET __m512 weights(const float* row, int t, int) const { return set(row[t]); }
};

// The same for all of 128 elements, without a mask.
struct FullChunk : WholeChunk {
  TARGET FullChunk() : WholeChunk(128) {}
  TARGET __m512i codes(Rows v, int t, int, int element) const {
    return _mm512_loadu_si512(v.data_of(t) + element / 2);
  }
};

// The same for a chunk of up to 64 elements and two tokens, which take turns in the lanes.
struct HalfChunk {
  int blocks;
  __mmask8 words;

  static constexpr int kTokens = 2;
  static constexpr bool kReady = false;
  TARGET explicit HalfChunk(int elements)
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
  TARGET __m512 weights(const float* row, int t, int) const {
    double both;
    std::memcpy(&both, row + t, sizeof both);
    return _mm512_castpd_ps(_mm512_set1_pd(both));
  }
};

// Past the last token, up to a multiple of four, it stands again.
TARGET inline void token_scales(Rows v, int tokens, int element, int blocks, float (*scales)[8]) {
  const int64_t offset = v.scale_offset + element / 16;
  const int whole = tokens / 4 * 4;
  unpack_scales(v.scales, offset, blocks, whole, scales);
  if (whole == tokens) return;
  const uint8_t* rest[4];
  for (int i = 0; i < 4; i++) rest[i] = v.scales[whole + i < tokens ? whole + i : tokens - 1];
  unpack_scales(rest, offset, blocks, 4, scales + whole);
}

// Half of the elements of words of codes, four per word.
template <int HALF>
TARGET inline void look_up_half(__m512i words, __m512* x) {
  if (HALF) words = _mm512_srli_epi32(words, 8);
#pragma GCC unroll 2
  for (int n = 0; n < 2; n++) {
    const __m512i pair =
        _mm512_permutexvar_epi16(_mm512_srli_epi32(words, 4 * n), bfloat16_of_e2m1());
    x[2 * n] = _mm512_castsi512_ps(operand(pair, 0));
    x[2 * n + 1] = _mm512_castsi512_ps(operand(pair, 1));
  }
}

// A chunk whose look-ups are made once, for many rows.
template <class CHUNK>
struct ReadyChunk : CHUNK {
  __m512 scale[kStep], value[kStep][8];

  static constexpr bool kReady = true;
  TARGET ReadyChunk(const CHUNK& chunk, Rows v, int tokens, int element) : CHUNK(chunk) {
    alignas(64) float scales[kStep][8];
    token_scales(v, tokens, element, chunk.blocks, scales);
    for (int t = 0; t < tokens; t += CHUNK::kTokens) {
      const __m512i words = chunk.codes(v, t, t + 1 < tokens ? t + 1 : t, element);
      scale[t] = chunk.scales(scales, t);
      look_up_half<0>(words, value[t]);
      look_up_half<1>(words, value[t] + 4);
    }
  }
};

// Half of the look-ups at a time, so that four rows' sums stay in registers over the tokens. The
// first half leaves the weights times block scales for the second.
template <class CHUNK, int ROWS, int HALF>
TARGET void accumulate_half(const CHUNK& chunk, const float* weights, Rows v, int tokens,
                            int element, int size, __m512 (*scaled)[ROWS], float* sums, Rows next,
                            int ahead) {
  float* at = sums + element + HALF * 64;
  alignas(64) float scales[kStep][8];
  if constexpr (!HALF && !CHUNK::kReady) token_scales(v, tokens, element, chunk.blocks, scales);
  __m512 sum[ROWS][4];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) sum[r][n] = load(at + r * size + n * 16);
  for (int t = 0; t < tokens; t += CHUNK::kTokens) {
    const int u = t + 1 < tokens ? t + 1 : t;
    if (!HALF) {
      if (t < ahead) next.prefetch(t, element);
      if (CHUNK::kTokens == 2 && t + 1 < ahead) next.prefetch(t + 1, element);
      __m512 scale;
      if constexpr (CHUNK::kReady)
        scale = chunk.scale[t];
      else
        scale = chunk.scales(scales, t);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++)
        scaled[t][r] = _mm512_mul_ps(scale, chunk.weights(weights + r * kSpan, t, u));
    }
    __m512 x[4];
    if constexpr (CHUNK::kReady)
#pragma GCC unroll 4
      for (int n = 0; n < 4; n++) x[n] = chunk.value[t][HALF * 4 + n];
    else
      look_up_half<HALF>(chunk.codes(v, t, u, element), x);
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

template <int ROWS, class CHUNK>
TARGET void accumulate_rows(const CHUNK& chunk, const float* weights, Rows v, int tokens,
                            int element, int size, float* sums, Rows next, int ahead) {
  __m512 scaled[kStep][ROWS];
  accumulate_half<CHUNK, ROWS, 0>(chunk, weights, v, tokens, element, size, scaled, sums, next,
                                  ahead);
  accumulate_half<CHUNK, ROWS, 1>(chunk, weights, v, tokens, element, size, scaled, sums, next,
                                  ahead);
}

template <class CHUNK>
TARGET void accumulate_chunk(const CHUNK& chunk, const float* weights, int rows, Rows v, int tokens,
                             int element, int size, float* sums, Rows next, int ahead) {
  if constexpr (!CHUNK::kReady)
    if (rows > 4)
      return accumulate_chunk(ReadyChunk<CHUNK>(chunk, v, tokens, element), weights, rows, v,
                              tokens, element, size, sums, next, ahead);
  for (; rows > 0; rows -= 4, weights += 4 * kSpan, sums += 4 * size, ahead = 0) {
    const auto rows_of = [&](auto number) TARGET {
      accumulate_rows<decltype(number)::value>(chunk, weights, v, tokens, element, size, sums, next,
                                               ahead);
    };
    if (rows >= 4) rows_of(std::integral_constant<int, 4>());
    if (rows == 3) rows_of(std::integral_constant<int, 3>());
    if (rows == 2) rows_of(std::integral_constant<int, 2>());
    if (rows == 1) rows_of(std::integral_constant<int, 1>());
  }
}

constexpr PackedKernels kPacked = {256.0f,      INT_MAX,        pack, score, accumulate_avx512,
                                   fold_avx512, position_avx512};

}  // namespace

TARGET void accumulate_avx512(const float* weights, int rows, Rows v, int tokens, int head_size,
                              float* sums, Rows next, int ahead) {
  const int size = sum_size(head_size);
  const auto with = [&](const auto& chunk, int d) TARGET {
    accumulate_chunk(chunk, weights, rows, v, tokens, d, size, sums, next, ahead);
  };
  for (int d = 0; d < head_size; d += 128) {
    const int elements = head_size - d;
    if (elements >= 128)
      with(FullChunk(), d);
    else if (elements > 64)
      with(WholeChunk(elements), d);
    else
      with(HalfChunk(elements), d);
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
