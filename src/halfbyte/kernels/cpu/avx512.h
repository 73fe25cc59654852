// Shared by the AVX-512 sources: transposes bytes of several tokens so that a lane holds a token.
#pragma once

#include "attention/tiles.h"

#if HALFBYTE_X86

#include <immintrin.h>

#define HALFBYTE_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define AVX512 __attribute__((target(HALFBYTE_AVX512)))

namespace halfbyte {

// Defined in tiles_avx512.cpp.
void accumulate_avx512(const float* weights, int rows, Rows v, int tokens, int head_size,
                       float* sums, Rows next, int ahead);
void fold_avx512(float* sums, int rows, int head_size);
int position_avx512(int element);

// E4M3 in 16-bit lanes (sign-extended) to fp16 bits that are the same value times 2^-8, subnormals
// included; NaN becomes a NaN of fp16.
AVX512 inline __m512i half_of_e4m3(__m512i words) {
  const __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(127));
  // Bit 7 of magnitude + 1 is set for NaN alone; 14 bits up it makes the exponent all ones.
  const __m512i nan = _mm512_slli_epi16(_mm512_add_epi16(magnitude, _mm512_set1_epi16(1)), 7);
  const __m512i moved = _mm512_slli_epi16(words, 7);
  // (moved & 0xbf80) | (nan & 0x4000)
  return _mm512_ternarylogic_epi32(_mm512_and_si512(nan, _mm512_set1_epi16(0x4000)), moved,
                                   _mm512_set1_epi16((short)0xbf80), 0xf8);
}

// By code, twice: `vpermw` takes five bits of its index. Looking up words of eight codes gives
// elements 0 and 4, after shifts elements 1 and 5, and so on.
AVX512 inline __m512i bfloat16_of_e2m1() {
  return _mm512_broadcast_i64x4(_mm256_setr_epi16(
      0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000, (short)0xbf00,
      (short)0xbf80, (short)0xbfc0, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0));
}

AVX512 inline __m512i unpack_lo(__m512i a, __m512i b) { return _mm512_unpacklo_epi32(a, b); }
AVX512 inline __m512i unpack_hi(__m512i a, __m512i b) { return _mm512_unpackhi_epi32(a, b); }

// out[w] = word w of sixteen tokens, of rows that hold sixteen words or more.
AVX512 inline void transpose_16_words(const uint8_t* const* rows, int64_t offset, __m512i* out) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + offset);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = unpack_lo(a[i], a[i + 1]);
    b[i + 1] = unpack_hi(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4g + j]: 128-bit lane l holds word 4l + j of tokens 4g .. 4g + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    b[j] = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
    b[4 + j] = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    b[8 + j] = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    b[12 + j] = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    out[j] = _mm512_shuffle_i32x4(b[j], b[8 + j], 0x88);
    out[4 + j] = _mm512_shuffle_i32x4(b[4 + j], b[12 + j], 0x88);
    out[8 + j] = _mm512_shuffle_i32x4(b[j], b[8 + j], 0xdd);
    out[12 + j] = _mm512_shuffle_i32x4(b[4 + j], b[12 + j], 0xdd);
  }
}

// The same for the first `words` <= 8 words of rows that may end there.
AVX512 inline void transpose_8_words(const uint8_t* const* rows, int64_t offset, int words,
                                     __m512i* out) {
  const __mmask8 mask = (__mmask8)((1u << words) - 1);
  __m512i a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    a[i] =
        _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi32(mask, rows[i] + offset)),
                           _mm256_maskz_loadu_epi32(mask, rows[i + 8] + offset), 1);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = unpack_lo(a[i], a[i + 1]);
    b[i + 1] = unpack_hi(a[i], a[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
  const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    out[j] = _mm512_permutex2var_epi64(a[j], low, a[4 + j]);
    out[4 + j] = _mm512_permutex2var_epi64(a[j], high, a[4 + j]);
  }
}

// The E4M3 of four tokens' block scales in fp16, times 2^-8: [token][block], eight blocks each, of
// which `blocks` exist.
AVX512 inline __m512i scales_of_four(const uint8_t* const* rows, int64_t offset, int blocks) {
  __m128i x[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    x[i] = blocks >= 8
               ? _mm_loadl_epi64((const __m128i*)(rows[i] + offset))
               : _mm_maskz_loadu_epi8((__mmask16)((1u << blocks) - 1), rows[i] + offset);
  const __m256i low = _mm256_castsi128_si256(_mm_unpacklo_epi64(x[0], x[1]));
  const __m256i bytes = _mm256_inserti128_si256(low, _mm_unpacklo_epi64(x[2], x[3]), 1);
  return half_of_e4m3(_mm512_cvtepi8_epi16(bytes));
}

AVX512 inline void store_halves(__m512i halves, float* first, float* second) {
  _mm512_store_ps(first, _mm512_cvtph_ps(_mm512_castsi512_si256(halves)));
  _mm512_store_ps(second, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)));
}

// out[t][b] = scale b of token t as float times 2^-8, for a multiple of four tokens.
AVX512 inline void unpack_scales(const uint8_t* const* rows, int64_t offset, int blocks, int tokens,
                                 float (*out)[8]) {
  for (int t = 0; t < tokens; t += 4)
    store_halves(scales_of_four(rows + t, offset, blocks), out[t], out[t + 2]);
}

// out[b][t] = the same for sixteen tokens.
AVX512 inline void transpose_scales(const uint8_t* const* rows, int64_t offset, int blocks,
                                    float (*out)[16]) {
  const __m512i turned =
      _mm512_set_epi16(31, 23, 15, 7, 30, 22, 14, 6, 29, 21, 13, 5, 28, 20, 12, 4,  //
                       27, 19, 11, 3, 26, 18, 10, 2, 25, 17, 9, 1, 24, 16, 8, 0);
  const __m512i lower = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i upper = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  __m512i a[4];  // [block][four tokens]
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    a[i] = _mm512_permutexvar_epi16(turned, scales_of_four(rows + 4 * i, offset, blocks));
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; odd++) {
    // 128-bit lane l: eight tokens' scale 2 l + odd.
    const __m512i x = odd ? _mm512_unpackhi_epi64(a[0], a[1]) : _mm512_unpacklo_epi64(a[0], a[1]);
    const __m512i y = odd ? _mm512_unpackhi_epi64(a[2], a[3]) : _mm512_unpacklo_epi64(a[2], a[3]);
    store_halves(_mm512_permutex2var_epi64(x, lower, y), out[odd], out[2 + odd]);
    store_halves(_mm512_permutex2var_epi64(x, upper, y), out[4 + odd], out[6 + odd]);
  }
}

// Sixteen or thirty-two tokens' words and scales of a chunk of 128 elements.
template <int TILES>
struct TurnedChunk {
  alignas(64) __m512i words[TILES][16];
  alignas(64) float scales[TILES][8][16];
};

template <int TILES>
AVX512 inline void turn_chunk(Rows k, int tokens, int element, int head_size,
                              TurnedChunk<TILES>& chunk) {
  const int words = (head_size - element) / 8;
#pragma GCC unroll 2
  for (int i = 0; i < TILES; i++) {
    const uint8_t *data[16], *scales[16];
    const uint8_t *const *at_data = k.data + i * 16, *const *at_scales = k.scales + i * 16;
    if (tokens < (i + 1) * 16) {  // repeat the last token: its columns are ignored
      for (int t = 0; t < 16; t++) {
        const int from = i * 16 + t < tokens ? i * 16 + t : tokens - 1;
        data[t] = k.data[from];
        scales[t] = k.scales[from];
      }
      at_data = data;
      at_scales = scales;
    }
    const int64_t data_offset = k.data_offset + element / 2;
    if (words >= 16) {
      transpose_16_words(at_data, data_offset, chunk.words[i]);
    } else {
      transpose_8_words(at_data, data_offset, words < 8 ? words : 8, chunk.words[i]);
      if (words > 8) transpose_8_words(at_data, data_offset + 32, words - 8, chunk.words[i] + 8);
    }
    transpose_scales(at_scales, k.scale_offset + element / 16, words / 2, chunk.scales[i]);
  }
}

}  // namespace halfbyte

#endif
