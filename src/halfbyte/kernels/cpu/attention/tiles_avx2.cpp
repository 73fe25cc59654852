// AVX2. 32 bytes of nvfp4 become 64 floats by two byte look-ups per nibble, which give the upper
// and the lower byte of its bfloat16; interleaved they are pairs of bfloat16, and a shift or a mask
// converts them to float. The elements are then permuted; q is packed and sums are kept in the same
// order. Half a vector shares a block scale.

#include <cstring>
#include <limits>

#include "attention/tiles.h"

#if HALFBYTE_X86

#include <immintrin.h>

namespace halfbyte {
namespace {

#define TARGET __attribute__((target("avx2,fma,f16c")))

using Vec = __m256;
constexpr int kLanes = 8;
constexpr int kColumns = 2;
constexpr int kHeldRows = 6;

TARGET inline Vec load(const float* x) { return _mm256_loadu_ps(x); }
TARGET inline void store(float* x, Vec v) { _mm256_storeu_ps(x, v); }
TARGET inline Vec set(float x) { return _mm256_set1_ps(x); }
TARGET inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
TARGET inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
TARGET inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
TARGET inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
TARGET inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
TARGET inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b where either is NaN
TARGET inline Vec choose_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
TARGET inline Vec sign_bit() { return _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN)); }
TARGET inline Vec absolute(Vec x) { return _mm256_andnot_ps(sign_bit(), x); }
TARGET inline Vec with_sign_of(Vec x, Vec sign) {
  return _mm256_or_ps(x, _mm256_and_ps(sign, sign_bit()));
}
TARGET inline Vec nearest(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT); }
TARGET inline Vec times_power(Vec x, Vec power) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

TARGET inline Vec from_float32(const uint8_t* data) { return _mm256_loadu_ps((const float*)data); }
TARGET inline Vec from_float16(const uint8_t* data) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)data));
}
TARGET inline Vec from_bfloat16(const uint8_t* data) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)data));
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
// E4M3 bits moved into an fp16 give the value times 2^-8, subnormals included; NaN is set separately.
TARGET inline Vec from_e4m3(const uint8_t* data) {
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)data);
  const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
  const __m256 x = _mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16((short)0xbf80)));
  const __m256i low = _mm256_and_si256(_mm256_cvtepu8_epi32(bytes), _mm256_set1_epi32(127));
  const __m256i nan = _mm256_cmpeq_epi32(low, _mm256_set1_epi32(127));
  return _mm256_or_ps(_mm256_mul_ps(x, set(256.0f)), _mm256_castsi256_ps(nan));
}
// The same for four bytes.
TARGET inline __m128 floats_of_e4m3(__m128i bytes) {
  const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
  const __m128 x = _mm_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16((short)0xbf80)));
  const __m128i low = _mm_and_si128(_mm_cvtepu8_epi32(bytes), _mm_set1_epi32(127));
  const __m128i nan = _mm_cmpeq_epi32(low, _mm_set1_epi32(127));
  return _mm_or_ps(_mm_mul_ps(x, _mm_set1_ps(256.0f)), _mm_castsi128_ps(nan));
}
TARGET inline Vec from_e5m2(const uint8_t* data) {  // the upper half of an fp16
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)data);
  return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), bytes));
}
TARGET inline Vec from_e2m1(const uint8_t* data) {
  int32_t word;
  std::memcpy(&word, data, 4);
  const __m256i codes =
      _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
  const __m256 x = _mm256_permutevar8x32_ps(_mm256_load_ps(kE2M1), codes);
  return with_sign_of(x, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
}

TARGET void transpose(const float* in, int64_t in_stride, int columns, float* out,
                      int64_t out_stride) {
  for (int r = 0; r < kPad; r += 8)
    for (int c = 0; c < columns; c += 8) {
      __m256 a[8], b[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) a[i] = load(in + (r + i) * in_stride + c);
#pragma GCC unroll 4
      for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
      }
#pragma GCC unroll 2
      for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        b[i] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x20);
        b[i + 4] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x31);
      }
      const int count = columns - c < 8 ? columns - c : 8;
      for (int i = 0; i < count; i++) store(out + (c + i) * out_stride + r, b[i]);
    }
}

#include "attention/tiles_simd.inc"

// Where an element of a row lies. A chunk of 64 elements is eight vectors: vector 4p + j holds elements
// 4i + j' of blocks p (lower half) and p + 2 (upper half), with j' = 0, 2, 1, 3 for j = 0, 1, 2, 3.
int position(int element) {
  const int block = element % 64 / 16, inner = element % 16;
  const int j = inner % 4 == 1 ? 2 : inner % 4 == 2 ? 1 : inner % 4;
  return element / 64 * 64 + (block % 2 * 4 + j) * 8 + block / 2 * 4 + inner / 4;
}

void pack(const float* q, int64_t stride, int rows, int head_size, float* packed) {
  const int size = sum_size(head_size);
  std::memset(packed, 0, sizeof(float) * rows * size);
  for (int r = 0; r < rows; r++)
    for (int d = 0; d < head_size; d++) packed[r * size + position(d)] = q[r * stride + d];
}

// 64 codes; those past the head are 0.
TARGET inline __m256i load_codes(const uint8_t* data, int elements) {
  if (elements >= 64) return _mm256_loadu_si256((const __m256i*)data);
  alignas(32) uint8_t bytes[32] = {};
  std::memcpy(bytes, data, elements / 2);
  return _mm256_load_si256((const __m256i*)bytes);
}

void prefetch(Rows rows, int t, int head_size) {
  for (int d = 0; d < head_size; d += 128) rows.prefetch(t, d);
}

struct Pair {
  __m256 first, second;
};

// Block scales of 64 values: `first` for vectors 0 .. 3, `second` for vectors 4 .. 7.
TARGET inline Pair load_scales(const uint8_t* scales, int elements) {
  uint32_t four = 0;
  if (elements >= 64)
    std::memcpy(&four, scales, 4);
  else
    std::memcpy(&four, scales, elements / 16);
  const __m256 all = _mm256_castps128_ps256(floats_of_e4m3(_mm_cvtsi32_si128((int)four)));
  return {_mm256_permutevar8x32_ps(all, _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2)),
          _mm256_permutevar8x32_ps(all, _mm256_setr_epi32(1, 1, 1, 1, 3, 3, 3, 3))};
}

// Bytes of bfloat16 by code.
alignas(16) const uint8_t kUpper[16] = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                        0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
alignas(16) const uint8_t kLower[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0,
                                        0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};

// Two vectors of the lower (HALF 0) or upper eight bytes of each lane, which hold nibbles.
template <int HALF>
TARGET inline Pair look_up(__m256i nibbles) {
  const __m256i upper = _mm256_shuffle_epi8(
      _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kUpper)), nibbles);
  const __m256i lower = _mm256_shuffle_epi8(
      _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kLower)), nibbles);
  const __m256i words =
      HALF ? _mm256_unpackhi_epi8(lower, upper) : _mm256_unpacklo_epi8(lower, upper);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int)0xffff0000)))};
}

// Half of a chunk as floats without scales.
struct Half {
  Pair even, odd;
};

template <int HALF>
TARGET inline Half half_of(__m256i codes) {
  const __m256i low = _mm256_set1_epi8(15);
  return {look_up<HALF>(_mm256_and_si256(codes, low)),
          look_up<HALF>(_mm256_and_si256(_mm256_srli_epi16(codes, 4), low))};
}

TARGET inline void store_half(float* out, Half x) {
  store(out, x.even.first);
  store(out + 8, x.even.second);
  store(out + 16, x.odd.first);
  store(out + 24, x.odd.second);
}

TARGET inline Half load_half(const float* x) {
  return {{load(x), load(x + 8)}, {load(x + 16), load(x + 24)}};
}

template <int ROWS>
TARGET inline void score_half(const float* q, int stride, Half x, __m256 scale, __m256* total) {
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) {
    const float* at = q + r * stride;
    __m256 sum = _mm256_mul_ps(x.even.first, load(at));
    sum = _mm256_fmadd_ps(x.even.second, load(at + 8), sum);
    sum = _mm256_fmadd_ps(x.odd.first, load(at + 16), sum);
    sum = _mm256_fmadd_ps(x.odd.second, load(at + 24), sum);
    total[r] = _mm256_fmadd_ps(sum, scale, total[r]);
  }
}

// Sums of the lanes of eight vectors, one per lane.
TARGET inline __m256 sum_lanes(const __m256* x) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// Floats of eight tokens, for more rows than fit in registers.
constexpr int kMaxUnpacked = 512;
struct Unpacked {
  alignas(32) float values[8][kMaxUnpacked];
  Pair scales[8][kMaxUnpacked / 64];
};

TARGET void unpack_tokens(Rows k, int tokens, int head_size, Unpacked& unpacked) {
  for (int t = 0; t < tokens; t++)
    for (int d = 0; d < head_size; d += 64) {
      const __m256i codes = load_codes(k.data_of(t) + d / 2, head_size - d);
      store_half(unpacked.values[t] + d, half_of<0>(codes));
      store_half(unpacked.values[t] + d + 32, half_of<1>(codes));
      unpacked.scales[t][d / 64] = load_scales(k.scales_of(t) + d / 16, head_size - d);
    }
}

// Up to eight tokens, from their bytes or from `unpacked`.
template <int ROWS>
TARGET void score_rows(const float* q, Rows k, int tokens, int head_size, const Unpacked* unpacked,
                       float* scores) {
  const int stride = sum_size(head_size);
  __m256 totals[ROWS][8];
  for (int i = 0; i < 8; i++) {
    const int t = i < tokens ? i : tokens - 1;
    __m256 total[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) total[r] = _mm256_setzero_ps();
    for (int d = 0; d < head_size; d += 64) {
      if (unpacked) {
        const Pair scales = unpacked->scales[t][d / 64];
        const float* x = unpacked->values[t] + d;
        score_half<ROWS>(q + d, stride, load_half(x), scales.first, total);
        score_half<ROWS>(q + d + 32, stride, load_half(x + 32), scales.second, total);
      } else {
        const __m256i codes = load_codes(k.data_of(t) + d / 2, head_size - d);
        const Pair scales = load_scales(k.scales_of(t) + d / 16, head_size - d);
        score_half<ROWS>(q + d, stride, half_of<0>(codes), scales.first, total);
        score_half<ROWS>(q + d + 32, stride, half_of<1>(codes), scales.second, total);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) totals[r][i] = total[r];
  }
  for (int r = 0; r < ROWS; r++) store(scores + r * kSpan, sum_lanes(totals[r]));
}

TARGET void score(const float* packed, int rows, Rows k, int tokens, int head_size, float* scores,
                  Rows next, int ahead) {
  const int stride = sum_size(head_size);
  Unpacked buffer;
  const Unpacked* unpacked = rows > 4 && head_size <= kMaxUnpacked ? &buffer : nullptr;
  for (int t = 0; t < tokens; t += 8) {
    for (int i = t; i < t + 8 && i < ahead; i++) prefetch(next, i, head_size);
    const int count = tokens - t < 8 ? tokens - t : 8;
    const Rows from = k.from(t);
    if (unpacked) unpack_tokens(from, count, head_size, buffer);
    const float* q = packed;
    float* out = scores + t;
    for (int left = rows; left > 0; left -= 4, q += 4 * stride, out += 4 * kSpan)
      with_rows(left < 4 ? left : 4, [&](auto number) TARGET {
        score_rows<decltype(number)::value>(q, from, count, head_size, unpacked, out);
      });
  }
}

// Two vectors of sums per row stay in registers over the tokens.
template <int HALF, int ODD, int ROWS>
TARGET void accumulate_quarter(const float* weights, Rows v, int tokens, int d, int head_size,
                               const Pair* scales, float* sums) {
  const int size = sum_size(head_size);
  const __m256i low = _mm256_set1_epi8(15);
  float* at = sums + d + (HALF * 4 + ODD * 2) * 8;
  __m256 first[ROWS], second[ROWS];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) {
    first[r] = load(at + r * size);
    second[r] = load(at + r * size + 8);
  }
  for (int t = 0; t < tokens; t++) {
    const __m256i codes = load_codes(v.data_of(t) + d / 2, head_size - d);
    const Pair x = look_up<HALF>(_mm256_and_si256(ODD ? _mm256_srli_epi16(codes, 4) : codes, low));
    const __m256 scale = HALF ? scales[t].second : scales[t].first;
    const __m256 y = _mm256_mul_ps(x.first, scale), z = _mm256_mul_ps(x.second, scale);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      const __m256 weight = _mm256_broadcast_ss(weights + r * kSpan + t);
      first[r] = _mm256_fmadd_ps(y, weight, first[r]);
      second[r] = _mm256_fmadd_ps(z, weight, second[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) {
    store(at + r * size, first[r]);
    store(at + r * size + 8, second[r]);
  }
}

template <int ROWS>
TARGET void accumulate_rows(const float* weights, Rows v, int tokens, int head_size, float* sums,
                            Rows next, int ahead) {
  Pair scales[kStep];
  for (int d = 0; d < head_size; d += 64) {
    for (int t = 0; t < tokens; t++) {
      if (d == 0 && t < ahead) prefetch(next, t, head_size);
      scales[t] = load_scales(v.scales_of(t) + d / 16, head_size - d);
    }
    accumulate_quarter<0, 0, ROWS>(weights, v, tokens, d, head_size, scales, sums);
    accumulate_quarter<0, 1, ROWS>(weights, v, tokens, d, head_size, scales, sums);
    accumulate_quarter<1, 0, ROWS>(weights, v, tokens, d, head_size, scales, sums);
    accumulate_quarter<1, 1, ROWS>(weights, v, tokens, d, head_size, scales, sums);
  }
}

TARGET void accumulate(const float* weights, int rows, Rows v, int tokens, int head_size,
                       float* sums, Rows next, int ahead) {
  const int size = sum_size(head_size);
  for (; rows > 0; rows -= 4, weights += 4 * kSpan, sums += 4 * size, ahead = 0)
    with_rows(rows < 4 ? rows : 4, [&](auto number) TARGET {
      accumulate_rows<decltype(number)::value>(weights, v, tokens, head_size, sums, next, ahead);
    });
}

constexpr PackedKernels kPacked = {1.0f, 8, pack, score, accumulate, nullptr, position};

}  // namespace

const Kernels kAvx2Kernels = {unpack,       transpose, multiply, logits, largest,
                              exponentials, addresses, &kPacked, nullptr};

}  // namespace halfbyte

#endif
