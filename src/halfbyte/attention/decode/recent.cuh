// Attention to keys that are not in the pages, for decode.cu: the recent tokens, in 16 bits, and a first token
// that the page marks as a constant of the model. The unit with a work item's first tile starts its sums with
// them.
//
// Tokens are taken in rounds of ROUND, at multiples of ROUND, so that a row's sums do not depend on other rows.
// K and V go from memory to the operands of the matmuls that pages go to, in the order of dims of Query and Sums.
//
// Macros:
//   RECENT       recent tokens, read in 16 bits; 0 for none
//   KNOWS_FIRST  1 if pages may mark the first token
//   MARK         block scale of K at position 0 that marks a constant, whose index is K's first byte

#pragma once
#include "attention/decode/softmax.cuh"

#define HAS_INITIAL (RECENT || KNOWS_FIRST)
// Groups of 16 tokens per round: more hide more latency, and take more registers.
#define ROUND_GROUPS (N_TILES == 1 && HEAD_SIZE <= 128 && HEAD_SIZE_V <= 128 ? 2 : 1)
#define ROUND (16 * ROUND_GROUPS)
// Whether registers suffice for K or for V of a round, but not for both.
#define LATE_VALUES (HEAD_SIZE + HEAD_SIZE_V > 256)

#if defined(Q_BF16)
#define OF_BF16 true
#else
#define OF_BF16 false
#endif

#if HAS_INITIAL
// Logits of these keys are in base 2 already, and no mean was subtracted.
struct Unscaled {
  __device__ __forceinline__ static float scale_of(int, int) { return 1.0f; }
  __device__ __forceinline__ static float shifted(float shift, int, int) { return shift; }
};

// Whether a column attends to position 0 in the pages.
__device__ __forceinline__ bool sees_first(const Params& p, const WorkItem& item, int column) {
  const int limit = item.length - item.queries + column / GROUP;
  return limit >= 0 && (p.window == 0 || limit < p.window);
}
#endif

// Index of the constant that the page marks at position 0, if any column attends to it; else -1.
__device__ __forceinline__ int find_constant(const Params& p, const WorkItem& item, int head, int first_tile) {
#if KNOWS_FIRST
  // Of the columns whose query position is >= 0, the first one's window reaches back the furthest.
  const int columns = GROUP * item.queries, first = max(item.col_tile * COLS, (item.queries - item.length) * GROUP);
  if (first_tile > 0 || first >= min((item.col_tile + 1) * COLS, columns) || !sees_first(p, item, first)) return -1;
  const u32 page = p.block_tables[(u64)item.seq * p.max_pages];
  const u8* start = (const u8*)page_address((u64)p.pages, page, p.page_stride);
  const int mark = start[K_SCALE + head * K_SCALE_HEAD], index = start[K_DATA + head * K_DATA_HEAD];
  return mark == MARK ? index : -1;
#else
  return -1;
#endif
}

#if HAS_INITIAL
// Rows of K and V of a work item's recent tokens.
struct RecentRows {
  const Params& p;
  const WorkItem& item;
  int head, begin, stop;  // positions that any column sees: begin <= position < stop
  int first_query;        // position of the sequence's first query token
  int constant;           // index of the first token's constant; -1 for none
  u64 ring_row;

  __device__ __forceinline__ RecentRows(const Params& p, const WorkItem& item, int head, int constant)
      : p(p), item(item), head(head), begin(0), stop(0), first_query(0), constant(constant), ring_row(0) {
#if RECENT
    first_query = p.recipe.seq_lens[item.seq] - item.queries;
    const int columns = GROUP * item.queries, column = item.col_tile * COLS;
    begin = max(0, position_of(column) - p.recipe.reach + 1);
    stop = position_of(min(column + COLS, columns) - 1) + 1;
    ring_row = ((u64)p.recipe.entries[item.seq] * KV_HEADS + head) * p.recipe.ring;
#endif
  }

  // Position of a column's query token.
  __device__ __forceinline__ int position_of(int column) const { return first_query + column / GROUP; }

  // Row of K or V of the token at a position; of the constant at `stop` rounded up; else null.
  __device__ __forceinline__ const u16* row(int position, bool is_constant, const u16* constants, const u16* ring,
                                            const u16* news, u64 stride_token, u64 stride_head, int size) const {
    if (is_constant) return position == 0 ? constants + ((u64)constant * KV_HEADS + head) * size : nullptr;
    if (position < begin || position >= stop) return nullptr;
    if (position < first_query) return ring + (ring_row + position % p.recipe.ring) * size;
    return news + (u64)(item.q_begin + position - first_query) * stride_token + head * stride_head;
  }
  __device__ __forceinline__ const u16* key(int position, bool is_constant) const {
    const Recipe& r = p.recipe;
    return row(position, is_constant, r.first_keys, r.ring_keys, r.new_keys, r.key_stride_token, r.key_stride_head,
               HEAD_SIZE);
  }
  __device__ __forceinline__ const u16* value(int position, bool is_constant) const {
    const Recipe& r = p.recipe;
    return row(position, is_constant, r.first_values, r.ring_values, r.new_values, r.value_stride_token,
               r.value_stride_head, HEAD_SIZE_V);
  }
};

// A lane's words of V for 16 tokens: of tokens 2c, 2c + 1, 2c + 8 and 2c + 9, in the order of Operands::of_v.
struct ValueWords {
  u32 of[4][HEAD_SIZE_V / 16];  // two dims each

  __device__ __forceinline__ void load(int token, const u16* row) {
    const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int j = 0; j < STEPS_V; j++) of[token][j] = 0;
    if (!row) return;
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

// Adds attention to these keys to empty sums.
__device__ __forceinline__ void attend_to_recent(const Params& p, const WorkItem& item, const RecentRows& rows,
                                                 const QueryWords& words, Sums& sums) {
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  for (int start = rows.begin / ROUND * ROUND;; start += ROUND) {
    const bool is_constant = start >= rows.stop;
    if (is_constant && rows.constant < 0) break;
    const int from = is_constant ? 0 : start;
    u32 k[ROUND_GROUPS][2][STEPS_K][2];
    ValueWords v[ROUND_GROUPS];
#pragma unroll
    for (int group = 0; group < ROUND_GROUPS; group++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u16* row = rows.key(from + 16 * group + 8 * i + g, is_constant);
#pragma unroll
        for (int j = 0; j < STEPS_K; j++) k[group][i][j][0] = k[group][i][j][1] = 0;
        if (row) load_query(k[group][i], row, 0, c);
      }
    auto load_values = [&]() {
#pragma unroll
      for (int group = 0; group < ROUND_GROUPS; group++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          v[group].load(i, rows.value(from + 16 * group + 2 * c + i % 2 + i / 2 * 8, is_constant));
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
        const int column = min(item.col_tile * COLS + 8 * n + (2 * c + i) % COLS, GROUP * item.queries - 1);
        const int position = rows.position_of(column);
#pragma unroll
        for (int group = 0; group < ROUND_GROUPS; group++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int at = from + 16 * group + 8 * half + g;
            const bool sees = is_constant ? at == 0 && sees_first(p, item, column)
                                          : at >= max(rows.begin, position - p.recipe.reach + 1) && at <= position;
            float& y = s[group][n][2 * half + i];
            y *= p.softmax_scale;
            if (SOFTCAP) y = p.softcap * tanhf(y / p.softcap);
            y = sees ? y * LOG2E : NEG_INF;
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
    if (is_constant) break;
  }
  // The sums are in units of the stored V.
  const float unit = 1.0f / ((V_KIND < 16 ? *p.v_scale : 1.0f) * Operands<V_KIND>::UNIT);
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int j = 0; j < STEPS_V; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums.out[n][j][i] *= unit;
}
#endif
