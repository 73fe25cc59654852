// Decode attention on packed NVFP4 pages for CPUs, behind a plain C interface.
//
// Sixteen 4-bit codes become sixteen floats with one shift and one look-up (`vpermps`, AVX-512):
// a row of K is loaded as 32-bit words of eight codes each, and the look-up ignores all but the low
// four bits of its index. So lane i of the n-th look-up is element 8i + n, and q is permuted once to
// match. The eight values of a word share a scale block, so block scales multiply sums of eight
// products (K) or the probability (V), never single values. AVX2 looks up eight magnitudes and takes
// the sign from the code; other CPUs use plain loops over the same steps.
//
// Work is cut into units of one sequence, one KV head and 512 tokens, whatever the batch, and handed
// to a pool of threads; the cut does not depend on the batch, so neither do results.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define HALFBYTE_X86 1
#endif

namespace {

constexpr int kTile = 16;        // tokens scored at once
constexpr int kSplit = 512;      // tokens per unit
constexpr int kRows = 4;         // query rows per pass over a tile
constexpr int kMaxChunks = 4;    // 128 elements each: head sizes up to 512
constexpr int kChunk = 128;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

alignas(64) const float kE2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

struct ScaleTable {
  alignas(64) float value[256];
  ScaleTable() {
    for (int b = 0; b < 256; b++) {
      const int exponent = (b >> 3) & 15, mantissa = b & 7;
      float x = exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7)
                         : std::ldexp(mantissa / 8.0f, -6);
      if ((b & 127) == 127) x = std::numeric_limits<float>::quiet_NaN();
      value[b] = b & 128 ? -x : x;
    }
  }
};
const ScaleTable kE4M3;

}  // namespace

extern "C" {

// Field by field the `_Params` of decode_cpu.py.
struct HalfbyteDecodeParams {
  const float* query;  // [tokens, heads, head_size], contiguous
  const uint8_t* pages;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  const float* sinks;  // [heads] or null
  float* out;          // [tokens, heads, head_size_v], contiguous
  float* lse;          // [tokens, heads] or null
  int64_t page_stride;
  int64_t k_data, k_data_token, k_data_head;
  int64_t k_scale, k_scale_token, k_scale_head;
  int64_t v_data, v_data_token, v_data_head;
  int64_t v_scale, v_scale_token, v_scale_head;
  int32_t num_seqs, max_pages, heads, kv_heads, head_size, head_size_v, block_size, window, threads;
  float softmax_scale, k_global, v_global, softcap;
};
}

namespace {

using Params = HalfbyteDecodeParams;

// Where one token's row of a head lies.
struct TokenRow {
  const uint8_t* data;
  const uint8_t* scales;
};

// scores[r][t] of up to kRows rows and kTile tokens; q is [row][chunk][8][16], permuted.
using ScoreFn = void (*)(const float* q, int rows, const TokenRow* k, int tokens, int head_size,
                         float (*scores)[kTile]);
// x[t] = exp(x[t] - shift) for kTile values; their sum.
using ExpFn = float (*)(float* x, float shift);
// acc[row][chunk][8][16] += weights[r][t] * v.
using AccumulateFn = void (*)(const float (*weights)[kTile], int rows, const TokenRow* v, int tokens,
                              int head_size, float* acc);

inline int chunks_of(int head_size) { return (head_size + kChunk - 1) / kChunk; }

void score_portable(const float* q, int rows, const TokenRow* k, int tokens, int head_size,
                    float (*scores)[kTile]) {
  for (int t = 0; t < tokens; t++) {
    float values[kMaxChunks * kChunk];
    for (int d = 0; d < head_size; d++) {
      const int code = (k[t].data[d / 2] >> (d % 2 * 4)) & 15;
      values[d] = kE2M1[code] * kE4M3.value[k[t].scales[d / 16]];
    }
    for (int r = 0; r < rows; r++) {
      const float* row = q + r * chunks_of(head_size) * kChunk;
      float sum = 0.0f;
      for (int d = 0; d < head_size; d++)
        sum += values[d] * row[d / kChunk * kChunk + d % 8 * 16 + d % kChunk / 8];
      scores[r][t] = sum;
    }
  }
}

void accumulate_portable(const float (*weights)[kTile], int rows, const TokenRow* v, int tokens,
                         int head_size, float* acc) {
  for (int t = 0; t < tokens; t++) {
    float values[kMaxChunks * kChunk];
    for (int d = 0; d < head_size; d++) {
      const int code = (v[t].data[d / 2] >> (d % 2 * 4)) & 15;
      values[d] = kE2M1[code] * kE4M3.value[v[t].scales[d / 16]];
    }
    for (int r = 0; r < rows; r++) {
      float* row = acc + r * chunks_of(head_size) * kChunk;
      for (int d = 0; d < head_size; d++)
        row[d / kChunk * kChunk + d % 8 * 16 + d % kChunk / 8] += weights[r][t] * values[d];
    }
  }
}

float exp_portable(float* x, float shift) {
  float sum = 0.0f;
  for (int t = 0; t < kTile; t++) sum += x[t] = std::exp(x[t] - shift);
  return sum;
}

#if HALFBYTE_X86

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))

// Words of eight codes of one chunk, and the scale of each word; lanes past the head are 0.
AVX512 inline __m512i load_words(const uint8_t* data, int words) {
  return _mm512_maskz_loadu_epi32((__mmask16)((1u << words) - 1), data);
}

// Each scale twice: a word of eight codes is half a block. As fp16 an E4M3 scale is itself times
// 2^-8, subnormals included, and the conversion to float is exact.
AVX512 inline __m512 load_scales(const uint8_t* scales, int words) {
  const __m128i bytes = _mm_maskz_loadu_epi8((__mmask16)((1u << (words / 2)) - 1), scales);
  const __m128i twice = _mm_unpacklo_epi8(bytes, bytes);
  const __mmask16 nan = _mm_cmpeq_epi8_mask(_mm_and_si128(twice, _mm_set1_epi8(127)),
                                            _mm_set1_epi8(127));
  const __m512 x = _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(twice), 7));
  return _mm512_mask_mov_ps(_mm512_mul_ps(x, _mm512_set1_ps(256.0f)), nan,
                            _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()));
}

// Sums of the lanes of sixteen vectors, one per lane.
AVX512 inline __m512 sum_lanes(const float (*x)[16]) {
  __m512 a[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_load_ps(x[i]);
  // Neighbouring vectors share a register after each step: 2, 4, 8, 16 of them.
  for (int i = 0; i < 16; i += 2)
    a[i / 2] = _mm512_add_ps(_mm512_unpacklo_ps(a[i], a[i + 1]), _mm512_unpackhi_ps(a[i], a[i + 1]));
  for (int i = 0; i < 8; i += 2)
    a[i / 2] = _mm512_add_ps(
        _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a[i]), _mm512_castps_pd(a[i + 1]))),
        _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a[i]), _mm512_castps_pd(a[i + 1]))));
  for (int i = 0; i < 4; i += 2)
    a[i / 2] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 1], 0x88),
                             _mm512_shuffle_f32x4(a[i], a[i + 1], 0xDD));
  return _mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x88),
                       _mm512_shuffle_f32x4(a[0], a[1], 0xDD));
}

// Two tokens at a time share the loads of q.
template <int ROWS, int TOKENS>
AVX512 inline void score_tokens(const float* q, const TokenRow* k, int head_size, int t,
                                float (*lanes)[kTile][16]) {
  const int chunks = chunks_of(head_size);
  const __m512 table = _mm512_load_ps(kE2M1);
  __m512 total[TOKENS][ROWS];
  for (int i = 0; i < TOKENS; i++)
    for (int r = 0; r < ROWS; r++) total[i][r] = _mm512_setzero_ps();
  for (int c = 0; c < chunks; c++) {
    const int words = std::min(16, (head_size - c * kChunk) / 8);
    __m512i w[TOKENS];
    __m512 sum[TOKENS][ROWS];
#pragma GCC unroll 2
    for (int i = 0; i < TOKENS; i++) {
      w[i] = load_words(k[t + i].data + c * kChunk / 2, words);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) sum[i][r] = _mm512_setzero_ps();
    }
#pragma GCC unroll 8
    for (int n = 0; n < 8; n++) {
      __m512 x[TOKENS];
#pragma GCC unroll 2
      for (int i = 0; i < TOKENS; i++) {
        x[i] = _mm512_permutexvar_ps(w[i], table);
        w[i] = _mm512_srli_epi32(w[i], 4);
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        const __m512 y = _mm512_loadu_ps(q + ((r * chunks + c) * 8 + n) * 16);
#pragma GCC unroll 2
        for (int i = 0; i < TOKENS; i++) sum[i][r] = _mm512_fmadd_ps(x[i], y, sum[i][r]);
      }
    }
#pragma GCC unroll 2
    for (int i = 0; i < TOKENS; i++) {
      const __m512 s = load_scales(k[t + i].scales + c * kChunk / 16, words);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) total[i][r] = _mm512_fmadd_ps(sum[i][r], s, total[i][r]);
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < TOKENS; i++)
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) _mm512_store_ps(lanes[r][t + i], total[i][r]);
}

template <int ROWS>
AVX512 void score_rows(const float* q, const TokenRow* k, int tokens, int head_size,
                       float (*scores)[kTile]) {
  alignas(64) float lanes[ROWS][kTile][16];
  int t = 0;
  for (; t + 2 <= tokens; t += 2) score_tokens<ROWS, 2>(q, k, head_size, t, lanes);
  if (t < tokens) score_tokens<ROWS, 1>(q, k, head_size, t++, lanes);
  for (; t < kTile; t++)
    for (int r = 0; r < ROWS; r++) std::memset(lanes[r][t], 0, sizeof lanes[r][t]);
  for (int r = 0; r < ROWS; r++) _mm512_store_ps(scores[r], sum_lanes(lanes[r]));
}

// exp by 2^i * e^f, |f| <= ln 2 / 2; relative error below 3e-7.
AVX512 float exp_avx512(float* x, float shift) {
  const __m512 y = _mm512_max_ps(_mm512_sub_ps(_mm512_load_ps(x), _mm512_set1_ps(shift)),
                                 _mm512_set1_ps(-120.0f));
  const __mmask16 nan = _mm512_cmp_ps_mask(_mm512_load_ps(x), _mm512_load_ps(x), _CMP_UNORD_Q);
  const __m512 i = _mm512_roundscale_ps(_mm512_mul_ps(y, _mm512_set1_ps(1.44269504f)), 0);
  __m512 f = _mm512_fnmadd_ps(i, _mm512_set1_ps(0.693359375f), y);
  f = _mm512_fnmadd_ps(i, _mm512_set1_ps(-2.12194440e-4f), f);
  __m512 e = _mm512_set1_ps(1.9875691500e-4f);
  for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                            5.0000001201e-1f, 1.0f, 1.0f})
    e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(coefficient));
  e = _mm512_scalef_ps(e, i);
  // Masked scores are -inf: exactly 0, not exp(-120).
  e = _mm512_mask_mov_ps(e, _mm512_cmp_ps_mask(y, _mm512_set1_ps(-119.0f), _CMP_LT_OQ),
                         _mm512_setzero_ps());
  e = _mm512_mask_mov_ps(e, nan, _mm512_load_ps(x));
  _mm512_store_ps(x, e);
  return _mm512_reduce_add_ps(e);
}

AVX512 void score_avx512(const float* q, int rows, const TokenRow* k, int tokens, int head_size,
                         float (*scores)[kTile]) {
  if (rows == 4) return score_rows<4>(q, k, tokens, head_size, scores);
  if (rows == 3) return score_rows<3>(q, k, tokens, head_size, scores);
  if (rows == 2) return score_rows<2>(q, k, tokens, head_size, scores);
  score_rows<1>(q, k, tokens, head_size, scores);
}

// Half of the look-ups at a time, so that four rows' sums stay in registers over a tile.
template <int ROWS>
AVX512 void accumulate_rows(const float (*weights)[kTile], const TokenRow* v, int tokens,
                            int head_size, float* acc) {
  const int chunks = chunks_of(head_size);
  const __m512 table = _mm512_load_ps(kE2M1);
  for (int c = 0; c < chunks; c++) {
    const int words = std::min(16, (head_size - c * kChunk) / 8);
    alignas(64) float scales[kTile][16];
    for (int t = 0; t < tokens; t++)
      _mm512_store_ps(scales[t], load_scales(v[t].scales + c * kChunk / 16, words));
    for (int half = 0; half < 2; half++) {
      __m512 sum[ROWS][4];
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++)
          sum[r][n] = _mm512_loadu_ps(acc + ((r * chunks + c) * 8 + half * 4 + n) * 16);
      for (int t = 0; t < tokens; t++) {
        __m512i w = load_words(v[t].data + c * kChunk / 2, words);
        if (half) w = _mm512_srli_epi32(w, 16);
        const __m512 s = _mm512_load_ps(scales[t]);
        __m512 weight[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
          weight[r] = _mm512_mul_ps(s, _mm512_set1_ps(weights[r][t]));
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
          const __m512 x = _mm512_permutexvar_ps(w, table);
          w = _mm512_srli_epi32(w, 4);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; r++) sum[r][n] = _mm512_fmadd_ps(x, weight[r], sum[r][n]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++)
          _mm512_storeu_ps(acc + ((r * chunks + c) * 8 + half * 4 + n) * 16, sum[r][n]);
    }
  }
}

AVX512 void accumulate_avx512(const float (*weights)[kTile], int rows, const TokenRow* v, int tokens,
                              int head_size, float* acc) {
  if (rows == 4) return accumulate_rows<4>(weights, v, tokens, head_size, acc);
  if (rows == 3) return accumulate_rows<3>(weights, v, tokens, head_size, acc);
  if (rows == 2) return accumulate_rows<2>(weights, v, tokens, head_size, acc);
  accumulate_rows<1>(weights, v, tokens, head_size, acc);
}

#define AVX2 __attribute__((target("avx2,fma,f16c")))

// Eight words are half a chunk: lanes 8h .. 8h + 7 of the sixteen.
AVX2 inline __m256i load_words8(const uint8_t* data, int words) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(words), lane);
  return _mm256_maskload_epi32((const int*)data, mask);
}

AVX2 inline __m256 load_scales8(const uint8_t* scales, int words) {
  uint32_t four = 0;
  std::memcpy(&four, scales, words / 2);
  const __m128i bytes = _mm_cvtsi32_si128((int)four);
  const __m128i twice = _mm_cvtepu8_epi16(_mm_unpacklo_epi8(bytes, bytes));
  const __m256 x = _mm256_mul_ps(_mm256_cvtph_ps(_mm_slli_epi16(twice, 7)), _mm256_set1_ps(256.0f));
  const __m256i nan = _mm256_cmpeq_epi32(_mm256_cvtepi16_epi32(twice), _mm256_set1_epi32(127));
  return _mm256_or_ps(x, _mm256_castsi256_ps(nan));  // all ones are a NaN
}

AVX2 inline __m256 look_up8(__m256i w) {
  const __m256 x = _mm256_permutevar8x32_ps(_mm256_load_ps(kE2M1), w);
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(w, 28), _mm256_set1_epi32(INT32_MIN));
  return _mm256_or_ps(x, _mm256_castsi256_ps(sign));
}

template <int ROWS>
AVX2 void score_rows8(const float* q, const TokenRow* k, int tokens, int head_size,
                      float (*scores)[kTile]) {
  const int chunks = chunks_of(head_size);
  for (int t = 0; t < tokens; t++) {
    __m256 total[ROWS];
    for (int r = 0; r < ROWS; r++) total[r] = _mm256_setzero_ps();
    for (int block = 0; block * 64 < head_size; block++) {
      const int words = std::min(8, (head_size - block * 64) / 8);
      __m256i w = load_words8(k[t].data + block * 32, words);
      const float* base = q + block / 2 * kChunk + block % 2 * 8;
      __m256 sum[ROWS];
      for (int r = 0; r < ROWS; r++) sum[r] = _mm256_setzero_ps();
#pragma GCC unroll 8
      for (int n = 0; n < 8; n++) {
        const __m256 x = look_up8(w);
        w = _mm256_srli_epi32(w, 4);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
          sum[r] = _mm256_fmadd_ps(x, _mm256_loadu_ps(base + r * chunks * kChunk + n * 16), sum[r]);
      }
      const __m256 s = load_scales8(k[t].scales + block * 4, words);
      for (int r = 0; r < ROWS; r++) total[r] = _mm256_fmadd_ps(sum[r], s, total[r]);
    }
    for (int r = 0; r < ROWS; r++) {
      __m128 x = _mm_add_ps(_mm256_castps256_ps128(total[r]), _mm256_extractf128_ps(total[r], 1));
      x = _mm_add_ps(x, _mm_movehl_ps(x, x));
      scores[r][t] = _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }
  }
}

AVX2 void score_avx2(const float* q, int rows, const TokenRow* k, int tokens, int head_size,
                     float (*scores)[kTile]) {
  if (rows == 4) return score_rows8<4>(q, k, tokens, head_size, scores);
  if (rows == 3) return score_rows8<3>(q, k, tokens, head_size, scores);
  if (rows == 2) return score_rows8<2>(q, k, tokens, head_size, scores);
  score_rows8<1>(q, k, tokens, head_size, scores);
}

// Two look-ups of half a chunk at a time, so that four rows' sums stay in registers over a tile.
template <int ROWS>
AVX2 void accumulate_rows8(const float (*weights)[kTile], const TokenRow* v, int tokens,
                           int head_size, float* acc) {
  const int chunks = chunks_of(head_size);
  for (int block = 0; block * 64 < head_size; block++) {
    const int words = std::min(8, (head_size - block * 64) / 8);
    alignas(32) float scales[kTile][8];
    for (int t = 0; t < tokens; t++)
      _mm256_store_ps(scales[t], load_scales8(v[t].scales + block * 4, words));
    for (int n = 0; n < 8; n += 2) {
      __m256 sum[ROWS][2];
      float* at = acc + (block / 2 * 8 + n) * 16 + block % 2 * 8;
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        sum[r][0] = _mm256_loadu_ps(at + r * chunks * kChunk);
        sum[r][1] = _mm256_loadu_ps(at + r * chunks * kChunk + 16);
      }
      for (int t = 0; t < tokens; t++) {
        const __m256i w =
            _mm256_srlv_epi32(load_words8(v[t].data + block * 32, words), _mm256_set1_epi32(4 * n));
        const __m256 s = _mm256_load_ps(scales[t]);
        const __m256 x = _mm256_mul_ps(look_up8(w), s);
        const __m256 y = _mm256_mul_ps(look_up8(_mm256_srli_epi32(w, 4)), s);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
          const __m256 weight = _mm256_broadcast_ss(&weights[r][t]);
          sum[r][0] = _mm256_fmadd_ps(x, weight, sum[r][0]);
          sum[r][1] = _mm256_fmadd_ps(y, weight, sum[r][1]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        _mm256_storeu_ps(at + r * chunks * kChunk, sum[r][0]);
        _mm256_storeu_ps(at + r * chunks * kChunk + 16, sum[r][1]);
      }
    }
  }
}

AVX2 void accumulate_avx2(const float (*weights)[kTile], int rows, const TokenRow* v, int tokens,
                          int head_size, float* acc) {
  if (rows == 4) return accumulate_rows8<4>(weights, v, tokens, head_size, acc);
  if (rows == 3) return accumulate_rows8<3>(weights, v, tokens, head_size, acc);
  if (rows == 2) return accumulate_rows8<2>(weights, v, tokens, head_size, acc);
  accumulate_rows8<1>(weights, v, tokens, head_size, acc);
}

#endif  // HALFBYTE_X86

struct Kernels {
  const char* name;
  ScoreFn score;
  ExpFn exp;
  AccumulateFn accumulate;
};

Kernels choose(int level) {
#if HALFBYTE_X86
  __builtin_cpu_init();
  if (level >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return {"avx512", score_avx512, exp_avx512, accumulate_avx512};
  if (level >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    return {"avx2", score_avx2, exp_portable, accumulate_avx2};
#endif
  (void)level;
  return {"portable", score_portable, exp_portable, accumulate_portable};
}

int g_level = 2;

// Threads that sleep between calls; the caller works along.
class Pool {
 public:
  void run(int count, int threads, void (*work)(void*, int), void* context) {
    if (count <= 0) return;
    threads = std::min({threads, count, 256});
    if (threads <= 1) {
      for (int i = 0; i < count; i++) work(context, i);
      return;
    }
    std::lock_guard<std::mutex> one_call_at_a_time(call_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while ((int)workers_.size() < threads - 1) {
        const int id = (int)workers_.size();
        workers_.emplace_back([this, id] { loop(id); });
        workers_.back().detach();
      }
      work_ = work;
      context_ = context;
      count_ = count;
      next_ = 0;
      invited_ = threads - 1;
      busy_ = threads - 1;
      round_++;
    }
    wake_.notify_all();
    drain();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void drain() {
    for (int i = next_++; i < count_; i = next_++) work_(context_, i);
  }
  void loop(int id) {
    uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return round_ != seen; });
        seen = round_;
        if (id >= invited_) continue;
      }
      drain();
      std::lock_guard<std::mutex> lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex call_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  void (*work_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int count_ = 0, invited_ = 0, busy_ = 0;
  std::atomic<int> next_{0};
  uint64_t round_ = 0;
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: its threads outlive static destructors
  return *instance;
}

struct Unit {
  int seq, kv_head, begin, end, slot;
};

struct Call {
  const Params* p;
  Kernels kernels;
  std::vector<Unit> units;
  std::vector<int64_t> first_slot;  // per sequence: partials of its first unit's first row
  std::vector<float> partial;       // [rows of units][chunks_v * 128 + 2]
  int width;                        // of a row of partials
};

void run_unit(void* context, int index) {
  Call& call = *(Call*)context;
  const Params& p = *call.p;
  const Unit& unit = call.units[index];
  const int group = p.heads / p.kv_heads;
  const int q_begin = p.query_start_loc[unit.seq];
  const int queries = p.query_start_loc[unit.seq + 1] - q_begin;
  const int rows = queries * group;
  const int length = p.seq_lens[unit.seq];
  const int chunks_k = chunks_of(p.head_size), chunks_v = chunks_of(p.head_size_v);
  const int32_t* table = p.block_tables + (int64_t)unit.seq * p.max_pages;
  const float multiplier = p.softmax_scale * p.k_global;

  std::vector<float> q((size_t)rows * chunks_k * kChunk, 0.0f);
  for (int r = 0; r < rows; r++) {
    const float* source =
        p.query + ((int64_t)(q_begin + r / group) * p.heads + unit.kv_head * group + r % group) *
                      p.head_size;
    float* row = q.data() + (size_t)r * chunks_k * kChunk;
    for (int d = 0; d < p.head_size; d++)
      row[d / kChunk * kChunk + d % 8 * 16 + d % kChunk / 8] = source[d] * multiplier;
  }
  float* partial = call.partial.data() + (size_t)unit.slot * call.width;
  for (int r = 0; r < rows; r++) {
    float* row = partial + (size_t)r * call.width;
    std::fill(row, row + call.width, 0.0f);
    row[chunks_v * kChunk] = kNegInf;
  }
  std::vector<float> acc((size_t)kRows * chunks_v * kChunk);

  // Rows of the tokens from t0 on, fetched ahead: hardware follows within a page, not to the next.
  const uint8_t* base_k = p.pages + p.k_data + unit.kv_head * p.k_data_head;
  const uint8_t* base_ks = p.pages + p.k_scale + unit.kv_head * p.k_scale_head;
  const uint8_t* base_v = p.pages + p.v_data + unit.kv_head * p.v_data_head;
  const uint8_t* base_vs = p.pages + p.v_scale + unit.kv_head * p.v_scale_head;
  auto find_rows = [&](int t0, TokenRow* k, TokenRow* v) {
    int page_index = t0 / p.block_size, in_page = t0 % p.block_size;
    const int tokens = std::min(kTile, unit.end - t0);
    for (int t = 0; t < tokens; t++) {
      const int64_t page = (int64_t)table[page_index] * p.page_stride;
      k[t] = {base_k + page + in_page * p.k_data_token, base_ks + page + in_page * p.k_scale_token};
      v[t] = {base_v + page + in_page * p.v_data_token, base_vs + page + in_page * p.v_scale_token};
      for (int line = 0; line < p.head_size / 2; line += 64) __builtin_prefetch(k[t].data + line);
      for (int line = 0; line < p.head_size_v / 2; line += 64) __builtin_prefetch(v[t].data + line);
      if (t % 4 == 0) {
        __builtin_prefetch(k[t].scales);
        __builtin_prefetch(v[t].scales);
      }
      if (++in_page == p.block_size) in_page = 0, page_index++;
    }
  };

  // Rows outside, tiles inside: a few rows' sums stay in cache while a unit's pages are read.
  for (int r0 = 0; r0 < rows; r0 += kRows) {
    const int count = std::min(kRows, rows - r0);
    std::fill(acc.begin(), acc.end(), 0.0f);
    float maximum[kRows], sum[kRows];
    std::fill(maximum, maximum + kRows, kNegInf);
    std::fill(sum, sum + kRows, 0.0f);
    TokenRow k[kTile], v[kTile], next_k[kTile], next_v[kTile];
    if (unit.begin < unit.end) find_rows(unit.begin, next_k, next_v);
    for (int t0 = unit.begin; t0 < unit.end; t0 += kTile) {
      const int tokens = std::min(kTile, unit.end - t0);
      std::swap(k, next_k);
      std::swap(v, next_v);
      if (t0 + kTile < unit.end) find_rows(t0 + kTile, next_k, next_v);
      alignas(64) float scores[kRows][kTile];
      call.kernels.score(q.data() + (size_t)r0 * chunks_k * kChunk, count, k, tokens, p.head_size,
                         scores);
      for (int r = 0; r < count; r++) {
        const int position = length - queries + (r0 + r) / group;
        const int from = p.window > 0 ? position - p.window + 1 : 0;
        float top = kNegInf;
        for (int t = 0; t < kTile; t++) {
          float x = scores[r][t];
          if (p.softcap > 0) x = p.softcap * std::tanh(x / p.softcap);
          const int at = t0 + t;
          scores[r][t] = x = t < tokens && at <= position && at >= from ? x : kNegInf;
          top = x > top ? x : top;
        }
        if (top > maximum[r]) {
          const float factor = std::exp(maximum[r] - top);
          sum[r] *= factor;
          float* row = acc.data() + (size_t)r * chunks_v * kChunk;
          if (maximum[r] != kNegInf)
            for (int d = 0; d < chunks_v * kChunk; d++) row[d] *= factor;
          maximum[r] = top;
        }
        sum[r] += call.kernels.exp(scores[r], maximum[r] == kNegInf ? 0.0f : maximum[r]);
      }
      call.kernels.accumulate(scores, count, v, tokens, p.head_size_v, acc.data());
    }
    for (int r = 0; r < count; r++) {
      float* row = partial + (size_t)(r0 + r) * call.width;
      std::memcpy(row, acc.data() + (size_t)r * chunks_v * kChunk, chunks_v * kChunk * sizeof(float));
      row[chunks_v * kChunk] = maximum[r];
      row[chunks_v * kChunk + 1] = sum[r];
    }
  }
}

void merge_row(const Call& call, int seq, int token, int head, int splits, int64_t stride) {
  const Params& p = *call.p;
  const int group = p.heads / p.kv_heads, chunks_v = chunks_of(p.head_size_v);
  const int queries = p.query_start_loc[seq + 1] - p.query_start_loc[seq];
  const int row = (token - p.query_start_loc[seq]) * group + head % group;
  const int64_t base = call.first_slot[seq] + (int64_t)(head / group) * splits * queries * group + row;
  const float sink = p.sinks ? p.sinks[head] : kNegInf;
  float maximum = sink;
  for (int s = 0; s < splits; s++)
    maximum = std::max(maximum, call.partial[(base + s * stride) * call.width + chunks_v * kChunk]);
  float total = sink == kNegInf ? 0.0f : std::exp(sink - maximum);
  float* out = p.out + ((int64_t)token * p.heads + head) * p.head_size_v;
  std::fill(out, out + p.head_size_v, 0.0f);
  for (int s = 0; s < splits; s++) {
    const float* part = call.partial.data() + (base + s * stride) * call.width;
    if (part[chunks_v * kChunk] == kNegInf) continue;
    const float weight = std::exp(part[chunks_v * kChunk] - maximum);
    total += weight * part[chunks_v * kChunk + 1];
    for (int d = 0; d < p.head_size_v; d++)
      out[d] += weight * part[d / kChunk * kChunk + d % 8 * 16 + d % kChunk / 8];
  }
  const float scale = total > 0 ? p.v_global / total : (total == 0 ? 0.0f : total);
  for (int d = 0; d < p.head_size_v; d++) out[d] *= scale;
  if (p.lse) p.lse[(int64_t)token * p.heads + head] = total > 0 ? maximum + std::log(total) : kNegInf;
}

}  // namespace

extern "C" {

// 2: AVX-512 if there is any, 1: at most AVX2, 0: plain loops. Returns what will run.
const char* halfbyte_cpu_level(int level) {
  g_level = level;
  return choose(level).name;
}

void halfbyte_decode_nvfp4(const HalfbyteDecodeParams* params) {
  const Params& p = *params;
  Call call{params, choose(g_level), {}, {}, {}, chunks_of(p.head_size_v) * kChunk + 2};
  const int group = p.heads / p.kv_heads;
  int64_t slots = 0;
  std::vector<int> splits(p.num_seqs);
  for (int seq = 0; seq < p.num_seqs; seq++) {
    const int queries = p.query_start_loc[seq + 1] - p.query_start_loc[seq];
    const int length = p.seq_lens[seq];
    const int first = p.window > 0 ? std::max(0, length - queries - p.window + 1) : 0;
    // Splits lie at multiples of their size, so that a longer sequence adds, never moves, a cut.
    const int from = first / kSplit, to = queries > 0 ? (length + kSplit - 1) / kSplit : from;
    splits[seq] = std::max(0, to - from);
    call.first_slot.push_back(slots);
    for (int head = 0; head < p.kv_heads; head++)
      for (int s = 0; s < splits[seq]; s++) {
        const int begin = std::max(first, (from + s) * kSplit);
        const int end = std::min(length, (from + s + 1) * kSplit);
        call.units.push_back({seq, head, begin, end, (int)slots});
        slots += queries * group;
      }
  }
  call.partial.resize((size_t)slots * call.width);
  pool().run((int)call.units.size(), p.threads, run_unit, &call);
  for (int seq = 0; seq < p.num_seqs; seq++) {
    const int queries = p.query_start_loc[seq + 1] - p.query_start_loc[seq];
    for (int token = p.query_start_loc[seq]; token < p.query_start_loc[seq + 1]; token++)
      for (int head = 0; head < p.heads; head++)
        merge_row(call, seq, token, head, splits[seq], (int64_t)queries * group);
  }
}
}
