// Attention to the keys of keys.cuh, for decode.cu.
//
// Tokens are processed in rounds of ROUND. K and V go from global memory straight to operands of `mma`, with the dims
// in the order that Query and Sums have for pages.

#pragma once
#define SPLIT_ROUNDS 1
#include "attention/decode/keys.cuh"
#include "attention/decode/softmax.cuh"

// Groups of 16 tokens per round: more hide more latency, and take more registers.
#define ROUND_GROUPS (N_TILES == 1 && HEAD_SIZE <= 128 && HEAD_SIZE_V <= 128 ? 2 : 1)
#define ROUND (16 * ROUND_GROUPS)
// Whether registers suffice for K or for V of a round, but not for both.
#define LATE_VALUES (HEAD_SIZE + HEAD_SIZE_V > 256)

#if HAS_INITIAL
// Logits of these keys are in base 2 already, and no mean was subtracted.
struct Unscaled {
  __device__ __forceinline__ static float scale_of(int, int) { return 1.0f; }
  __device__ __forceinline__ static float shifted(float shift, int, int) { return shift; }
};

// Adds a row of values, times a weight, to column i of the accumulators, in the order of store_row.
__device__ __forceinline__ void add_row(float (*out)[4], const u16* row, int i, int g, float weight) {
#pragma unroll
  for (int j = 0; j < STEPS_V; j++) {
    if (V_KIND == 4) {
      if (j % 2) continue;
      const uint2 x = *(const uint2*)(row + 16 * j + 4 * g);
      out[j + 1][2 + i] += query_value((u16)x.x) * weight;
      out[j][2 + i] += query_value((u16)(x.x >> 16)) * weight;
      out[j + 1][i] += query_value((u16)x.y) * weight;
      out[j][i] += query_value((u16)(x.y >> 16)) * weight;
    } else {
      const int low = V_KIND < 16 ? 16 * j + 2 * g : 16 * j + g;
      out[j][i] += query_value(row[low]) * weight;
      out[j][2 + i] += query_value(row[V_KIND < 16 ? low + 1 : low + 8]) * weight;
    }
  }
}

// A lane's words of V for 16 tokens: of tokens 2c, 2c + 1, 2c + 8 and 2c + 9, in the order of Operands::of_v.
struct ValueWords {
  u32 of[4][HEAD_SIZE_V / 16];  // two dims each

  __device__ __forceinline__ void load(int token, const u16* row) {
    const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int j = 0; j < STEPS_V; j++) {
      if (V_KIND == 4) {
        if (j % 2) continue;
        const uint2 x = *(const uint2*)(row + 16 * j + 4 * g);
        of[token][j] = x.x, of[token][j + 1] = x.y;
      } else if (V_KIND < 16) {
        of[token][j] = *(const u32*)(row + 16 * j + 2 * g);
      } else {
        of[token][j] = row[16 * j + g] | (u32)row[16 * j + g + 8] << 16;
      }
    }
  }

  // Operand A of the 16 dims of step j.
  __device__ __forceinline__ void operand(u32* a, int j) const {
    // The dims of rows g and g + 8, in the order of store_row: which word, and which half of it.
    const int word = V_KIND == 4 ? j | 1 : j, word8 = V_KIND == 4 ? j & ~1 : j;
    const u32 low = 0x5410, high = 0x7632;
    const u32 half = V_KIND == 4 && j % 2 == 0 ? high : low, half8 = V_KIND == 4 ? half : high;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a[2 * i] = __byte_perm(of[2 * i][word], of[2 * i + 1][word], half);
      a[2 * i + 1] = __byte_perm(of[2 * i][word8], of[2 * i + 1][word8], half8);
    }
  }
};

// Prefetches a row of a round: those of K, then those of V.
__device__ __forceinline__ void prefetch_row(const RecentRows& rows, int start, int i) {
  const u16* row = i < ROUND ? rows.key(start + i) : rows.value(start + i - ROUND);
  const int size = i < ROUND ? HEAD_SIZE : HEAD_SIZE_V;
#pragma unroll 1
  for (int at = 0; at < size; at += 64) prefetch_l2(row + at);
}

// Adds the recent tokens of some rounds to empty sums.
__device__ __forceinline__ void add_recent(const RecentRows& rows, Rounds rounds, const QueryWords& words,
                                           Sums& sums) {
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int step = rounds.even && rounds.odd ? ROUND : 2 * ROUND;
#pragma unroll 1
  for (int start = rows.first_round() + (rounds.even ? 0 : ROUND); start < rows.stop; start += step) {
    if (start + step < rows.stop)
#pragma unroll 1
      for (int i = lane; i < 2 * ROUND; i += 32) prefetch_row(rows, start + step, i);
    u32 k[ROUND_GROUPS][2][STEPS_K][2];
    ValueWords v[ROUND_GROUPS];
#pragma unroll
    for (int group = 0; group < ROUND_GROUPS; group++)
#pragma unroll
      for (int i = 0; i < 2; i++) load_query(k[group][i], rows.key(start + 16 * group + 8 * i + g), 0, c);
    auto load_values = [&]() {
#pragma unroll
      for (int group = 0; group < ROUND_GROUPS; group++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          v[group].load(i, rows.value(start + 16 * group + 2 * c + i % 2 + i / 2 * 8));
    };
    if (!LATE_VALUES) load_values();

    float s[ROUND_GROUPS][N_TILES][4];
#pragma unroll
    for (int group = 0; group < ROUND_GROUPS; group++)
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) s[group][n][i] = 0.0f;
#pragma unroll
        for (int j = 0; j < STEPS_K; j++) {
          const u32 a[4] = {k[group][0][j][0], k[group][1][j][0], k[group][0][j][1], k[group][1][j][1]};
          mma<OF_BF16>(s[group][n], a, words.of[n][j][0], words.of[n][j][1]);
        }
      }
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int2 visible = rows.visible(8 * n + (2 * c + i) % COLS);
#pragma unroll
        for (int group = 0; group < ROUND_GROUPS; group++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float& y = s[group][n][2 * half + i];
            y = rows.logit(y, start + 16 * group + 8 * half + g, visible);
          }
      }
    if (LATE_VALUES) load_values();
    sums.rescale<ROUND_GROUPS>(s, Unscaled(), Unscaled());
#pragma unroll
    for (int group = 0; group < ROUND_GROUPS; group++) {
      u32 p0[N_TILES], p1[N_TILES];
      sums.weigh<OF_BF16>(p0, p1, s[group], Unscaled(), Unscaled());
#pragma unroll
      for (int j = 0; j < STEPS_V; j++) {
        u32 a[4];
        v[group].operand(a, j);
#pragma unroll
        for (int n = 0; n < N_TILES; n++) mma<OF_BF16>(sums.out[n][j], a, p0[n], p1[n]);
      }
    }
  }
}

// Adds the constant. All rows of A are its key, so that every lane has the logits of its columns.
__device__ __forceinline__ void add_constant(const RecentRows& rows, const QueryWords& words, Sums& sums) {
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  u32 k[STEPS_K][2];
  load_query(k, rows.constant_key(), 0, c);
  const u16* row = rows.constant_value();
  float s[1][N_TILES][4];
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) s[0][n][i] = 0.0f;
#pragma unroll
    for (int j = 0; j < STEPS_K; j++) {
      const u32 a[4] = {k[j][0], k[j][0], k[j][1], k[j][1]};
      mma<OF_BF16>(s[0][n], a, words.of[n][j][0], words.of[n][j][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) s[0][n][i] = rows.constant_logit(s[0][n][i], 8 * n + (2 * c + i % 2) % COLS);
  }
  sums.rescale<1>(s, Unscaled(), Unscaled());
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float e = ex2(s[0][n][i] + sums.shift[n][i]);
      if (g == 0) sums.sum[n][i] += e;  // one lane only: sums are added across lanes
      add_row(sums.out[n], row, i, g, e);
    }
}

// Adds these keys to empty sums.
__device__ __forceinline__ void add_keys(const RecentRows& rows, Rounds rounds, const QueryWords& words, Sums& sums) {
  if (RECENT) add_recent(rows, rounds, words, sums);
  if (rows.constant >= 0) add_constant(rows, words, sums);
  // The sums are in units of the stored V.
  const float unit = 1.0f / ((V_KIND < 16 ? *rows.p.v_scale : 1.0f) * Operands<V_KIND>::UNIT);
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int j = 0; j < STEPS_V; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums.out[n][j][i] *= unit;
}
#endif
