// Attention to the keys of keys.cuh, for decode.cu.
//
// Tokens are processed in rounds of ROUND. Their K and V come through the loader's stages, before the tiles; where a
// stage is too small, they go from global memory straight to registers. Operands of `mma` have the dims in the order
// that Query and Sums have for pages.

#pragma once
#define SPLIT_ROUNDS 1
#include "attention/decode/keys.cuh"
#include "attention/decode/softmax.cuh"

// Groups of 16 tokens per round. Loads from global memory need two to hide their latency, if registers suffice.
#define ROUND_GROUPS (!STAGES_RECENT && N_TILES == 1 && HEAD_SIZE <= 128 && HEAD_SIZE_V <= 128 ? 2 : 1)
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

// A lane's words of V in 16 tokens. It has tokens 2c, 2c + 1, 2c + 8 and 2c + 9, dims in the order of Operands::of_v.
struct ValueWords {
  u32 of[4][HEAD_SIZE_V / 16];  // two dims each

  template <class Row>
  __device__ __forceinline__ void load(int token, Row row, int g) {
#pragma unroll
    for (int j = 0; j < STEPS_V; j++) {
      if (V_KIND == 4) {
        if (j % 2) continue;
        const uint2 x = row.two_words(16 * j + 4 * g);
        of[token][j] = x.x, of[token][j + 1] = x.y;
      } else if (V_KIND < 16) {
        of[token][j] = row.word(16 * j + 2 * g);
      } else {
        of[token][j] = row.value(16 * j + g) | (u32)row.value(16 * j + g + 8) << 16;
      }
    }
  }

  // Operand A of the 16 dims of step j.
  __device__ __forceinline__ void operand(u32* a, int j) const {
    // Where the dims of rows g and g + 8 are (the order of store_row): in which word, and in which half of it.
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

// A row of K or V in global memory, or in a stage of the ring; `at` is the index of a dim.
struct GlobalRow {
  const u16* row;

  __device__ __forceinline__ uint2 two_words(int at) const { return *(const uint2*)(row + at); }
  __device__ __forceinline__ u32 word(int at) const { return *(const u32*)(row + at); }
  __device__ __forceinline__ u16 value(int at) const { return row[at]; }
  __device__ __forceinline__ void load_key(u32 (*w)[2], int c) const { load_query(w, row, 0, c); }
};

template <int SIZE>
struct StagedRow {
  u32 rows;  // address of the stage's rows of K or of V
  int row;

  __device__ __forceinline__ u32 address(int at) const {
    return rows + swizzle<SIZE / 8>(row, at / 8) + at % 8 * 2;
  }
  __device__ __forceinline__ uint2 two_words(int at) const {
    u32 x[2];
    load_words<2>(x, address(at));
    return make_uint2(x[0], x[1]);
  }
  __device__ __forceinline__ u32 word(int at) const {
    u32 x;
    load_words<1>(&x, address(at));
    return x;
  }
  __device__ __forceinline__ u16 value(int at) const { return (u16)(word(at & ~1) >> at % 2 * 16); }

  // As load_query does.
  __device__ __forceinline__ void load_key(u32 (*w)[2], int c) const {
#pragma unroll
    for (int j = 0; j < STEPS_K; j += 2) {
      if (K_KIND == 4) {
        load_words<4>(w[j], address(16 * j + 8 * c));
        continue;
      }
#pragma unroll
      for (int k = j; k < j + 2; k++) {
        if (K_KIND < 16) {
          load_words<2>(w[k], address(16 * k + 4 * c));
        } else {
          w[k][0] = word(16 * k + 2 * c), w[k][1] = word(16 * k + 2 * c + 8);
        }
      }
    }
  }
};

// The rows of a round that starts at a position, in global memory.
struct GlobalRound {
  const RecentRows& rows;
  int start;

  __device__ __forceinline__ GlobalRow key(int i) const { return {rows.key(start + i)}; }
  __device__ __forceinline__ GlobalRow value(int i) const { return {rows.value(start + i)}; }

  // Prefetches row i: those of K, then those of V.
  __device__ __forceinline__ void prefetch(int i) const {
    const u16* row = i < ROUND ? rows.key(start + i) : rows.value(start + i - ROUND);
    const int size = i < ROUND ? HEAD_SIZE : HEAD_SIZE_V;
#pragma unroll 1
    for (int at = 0; at < size; at += 64) prefetch_l2(row + at);
  }
};

// The same in a stage of the ring: 16 rows of K, then 16 of V.
struct StagedRound {
  u32 stage;

  __device__ __forceinline__ StagedRow<HEAD_SIZE> key(int i) const { return {stage, i}; }
  __device__ __forceinline__ StagedRow<HEAD_SIZE_V> value(int i) const { return {stage + 32 * HEAD_SIZE, i}; }

  // Loads the rows asynchronously.
  __device__ __forceinline__ void load(const RecentRows& rows, int start) const {
    load_rows<HEAD_SIZE>(stage, start, [&](int position) { return rows.key(position); });
    load_rows<HEAD_SIZE_V>(stage + 32 * HEAD_SIZE, start, [&](int position) { return rows.value(position); });
  }

  template <int SIZE, class RowAt>
  __device__ __forceinline__ static void load_rows(u32 to, int start, RowAt row_at) {
    constexpr int CHUNKS = SIZE / 8, ROWS = 32 / CHUNKS;  // of 16 bytes; rows at a time
    static_assert(CHUNKS <= 32);
    const int lane = lane_of_now();
    // Each lane computes one row's address and gets the others by shuffles: computing all addresses of its copies takes
    // more instructions than adding the round.
    const u64 own = (u64)row_at(start + lane % 16);
#pragma unroll
    for (int i = 0; i < 16; i += ROWS) {
      const int row = i + lane / CHUNKS, chunk = lane % CHUNKS;
      cp_async16(to + swizzle<CHUNKS>(row, chunk), (const u8*)__shfl_sync(~0u, own, row) + chunk * 16);
    }
  }
};

// Adds the recent tokens of a round that starts at a position.
template <class Round>
__device__ __forceinline__ void add_round(const RecentRows& rows, int start, Round round, const QueryWords& words,
                                          Sums& sums) {
  const int lane = lane_of_now(), g = lane >> 2, c = lane & 3;
  u32 k[ROUND_GROUPS][2][STEPS_K][2];
  ValueWords v[ROUND_GROUPS];
#pragma unroll
  for (int group = 0; group < ROUND_GROUPS; group++)
#pragma unroll
    for (int i = 0; i < 2; i++) round.key(16 * group + 8 * i + g).load_key(k[group][i], c);
  auto load_values = [&]() {
#pragma unroll
    for (int group = 0; group < ROUND_GROUPS; group++)
#pragma unroll
      for (int i = 0; i < 4; i++) v[group].load(i, round.value(16 * group + 2 * c + i % 2 + i / 2 * 8), g);
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

// The rounds of recent tokens that a unit adds: `count` of them, `step` positions apart.
struct OwnRounds {
  int first, step, count;

  __device__ __forceinline__ OwnRounds(const RecentRows& rows, Rounds rounds) {
    step = rounds.even && rounds.odd ? ROUND : 2 * ROUND;
    first = rows.first_round() + (rounds.even ? 0 : ROUND);
    count = RECENT && rounds.any() ? max(0, (rows.stop - first + step - 1) / step) : 0;
  }
  __device__ __forceinline__ int start(int i) const { return first + i * step; }
};

// Adds rounds from global memory.
__device__ __forceinline__ void add_rounds(const RecentRows& rows, OwnRounds own, const QueryWords& words, Sums& sums) {
#pragma unroll 1
  for (int i = 0; i < own.count; i++) {
    if (i + 1 < own.count)
#pragma unroll 1
      for (int row = threadIdx.x & 31; row < 2 * ROUND; row += 32) GlobalRound{rows, own.start(i + 1)}.prefetch(row);
    add_round(rows, own.start(i), GlobalRound{rows, own.start(i)}, words, sums);
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

// Prefetches the constant's K and V.
__device__ __forceinline__ void prefetch_constant(const RecentRows& rows) {
  const int at = (threadIdx.x & 31) * 64;  // values of a line of 128 bytes
  if (at < HEAD_SIZE) prefetch_l2(rows.constant_key() + at);
  if (at < HEAD_SIZE_V) prefetch_l2(rows.constant_value() + at);
}

// Until here the sums are of V itself. Tiles of pages add stored codes, so the sums are divided by V's global scale and the
// unit of unpacked codes.
__device__ __forceinline__ void to_stored_units(const Params& p, Sums& sums) {
  const float unit = 1.0f / ((V_KIND < 16 ? *p.v_scale : 1.0f) * Operands<V_KIND>::UNIT);
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int j = 0; j < STEPS_V; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums.out[n][j][i] *= unit;
}
#endif
