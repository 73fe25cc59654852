// Keys that are not in the pages: the recent tokens, in 16 bits, and a first token that the page marks as a constant
// of the model. The unit with a work item's first tile starts its sums with them (recent.cuh, recent_wgmma.cuh); short
// units share the recent tokens with the unit that has the last tile.
//
// Macros:
//   RECENT       recent tokens, read in 16 bits; 0 for none
//   KNOWS_FIRST  1 if pages may mark the first token
//   SPLIT_ROUNDS 1 if short units share the rounds (decode.cu)
//   MARK         block scale of K at position 0 that marks a constant, whose index is K's first byte

#pragma once
#include "attention/decode/values.cuh"

#define HAS_INITIAL (RECENT || KNOWS_FIRST)

#if defined(Q_BF16)
#define OF_BF16 true
#else
#define OF_BF16 false
#endif

#if HAS_INITIAL
// Whether a column attends to position 0 in the pages.
__device__ __forceinline__ bool sees_first(const Params& p, const WorkItem& item, int column) {
  const int limit = item.length - item.queries + column / GROUP;
  return limit >= 0 && (p.window == 0 || limit < p.window);
}
#endif

// Which rounds of recent tokens a unit adds. The unit with the work item's first tile adds all. If units are short (up to
// SHORT_SPAN tiles), that unit would finish last, so the unit with the last tile adds the odd rounds; with long units
// this made bandwidth-bound steps 1 to 2 % slower. Batch-invariant steps never split: sums must not depend on the number
// of units.
struct Rounds {
  bool even, odd;

  __device__ __forceinline__ Rounds(const Params& p, const WorkItem& item, Share share, int span) {
    even = odd = share.first == item.first_tile;
#if SPLIT_ROUNDS && RECENT
    if (span <= SHORT_SPAN && p.recipe.align == 1) odd = share.stop == item.first_tile + item.num_tiles;
#endif
  }
  __device__ __forceinline__ bool any() const { return even || odd; }
};

// What the addresses of these keys depend on, loaded early to hide its latency.
struct KeyInputs {
  u32 page;           // of position 0
  int entry, length;  // index of the sequence in ring_keys; tokens, recent ones included

  __device__ __forceinline__ KeyInputs(const Params& p, const WorkItem& item, Share share, int span)
      : page(0), entry(0), length(0) {
    const Rounds rounds(p, item, share, span);
    if (!rounds.any()) return;
#if KNOWS_FIRST
    if (rounds.even && item.length > 0) page = p.block_tables[(u64)item.seq * p.max_pages];
#endif
#if RECENT
    entry = p.recipe.entries[item.seq], length = p.recipe.seq_lens[item.seq];
#endif
  }
};

// First block scale and byte of K at position 0, if any column attends to it. The constructor only issues the loads.
struct FirstMark {
#if KNOWS_FIRST
  u32 mark = 0, index;

  __device__ __forceinline__ FirstMark(const Params& p, const WorkItem& item, const KeyInputs& from, int head,
                                       int first_tile) {
    // The first column with a query position >= 0 has the earliest window: if it does not see position 0, none does.
    const int columns = GROUP * item.queries, first = max(item.col_tile * COLS, (item.queries - item.length) * GROUP);
    if (first_tile > 0 || first >= min((item.col_tile + 1) * COLS, columns) || !sees_first(p, item, first)) return;
    const u8* start = (const u8*)page_address((u64)p.pages, from.page, p.page_stride);
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(mark) : "l"(start + K_SCALE + head * K_SCALE_HEAD));
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(index) : "l"(start + K_DATA + head * K_DATA_HEAD));
  }
  // Index of the constant that is marked; -1 for none.
  __device__ __forceinline__ int constant() const { return mark == MARK ? (int)index : -1; }
#else
  __device__ __forceinline__ FirstMark(const Params&, const WorkItem&, const KeyInputs&, int, int) {}
  __device__ __forceinline__ int constant() const { return -1; }
#endif
};

#if HAS_INITIAL
// Rows of K and V of a work item's recent tokens.
struct RecentRows {
  const Params& p;
  const WorkItem& item;
  int head, begin, stop;  // positions that any column sees: begin <= position < stop
  int first_query;        // position of the sequence's first query token
  int constant;           // index of the first token's constant; -1 for none or not known
  u32 ring_row, slot;     // first row of this head's ring, and in it the slot of `begin`

  __device__ __forceinline__ RecentRows(const Params& p, const WorkItem& item, const KeyInputs& from, int head)
      : p(p), item(item), head(head), begin(0), stop(0), first_query(0), constant(-1), ring_row(0), slot(0) {
#if RECENT
    first_query = from.length - item.queries;
    const int columns = GROUP * item.queries, column = item.col_tile * COLS;
    begin = max(0, position_of(column) - p.recipe.reach + 1);
    stop = position_of(min(column + COLS, columns) - 1) + 1;
    ring_row = (from.entry * KV_HEADS + head) * p.recipe.ring;
    slot = (u32)begin % p.recipe.ring;
#endif
  }

  // Position of a column's query token.
  __device__ __forceinline__ int position_of(int column) const { return first_query + column / GROUP; }

  // Row of K or V at a position, clamped to begin .. stop - 1; clamped rows are masked later.
  __device__ __forceinline__ const u16* row(int position, const u16* ring, const u16* news, u64 stride_token,
                                            u64 stride_head, int size) const {
    position = max(min(position, stop - 1), begin);
    const u32 ahead = slot + position - begin, in_ring = ahead - (ahead >= p.recipe.ring ? p.recipe.ring : 0);
    return position < first_query ? ring + (u64)(ring_row + in_ring) * size
                                  : news + (u64)(item.q_begin + position - first_query) * stride_token + head * stride_head;
  }
  __device__ __forceinline__ const u16* key(int position) const {
    const Recipe& r = p.recipe;
    return row(position, r.ring_keys, r.new_keys, r.key_stride_token, r.key_stride_head, HEAD_SIZE);
  }
  __device__ __forceinline__ const u16* value(int position) const {
    const Recipe& r = p.recipe;
    return row(position, r.ring_values, r.new_values, r.value_stride_token, r.value_stride_head, HEAD_SIZE_V);
  }
  __device__ __forceinline__ const u16* constant_key() const {
    return p.recipe.first_keys + ((u64)constant * KV_HEADS + head) * HEAD_SIZE;
  }
  __device__ __forceinline__ const u16* constant_value() const {
    return p.recipe.first_values + ((u64)constant * KV_HEADS + head) * HEAD_SIZE_V;
  }

  // The first round's first position.
  __device__ __forceinline__ int first_round() const { return begin & -p.recipe.align; }

  // The item's column for column `i` of COLS; the last one for those past it.
  __device__ __forceinline__ int column_of(int i) const {
    return min(item.col_tile * COLS + i, GROUP * item.queries - 1);
  }

  // Positions of recent tokens that a column sees: from x to y.
  __device__ __forceinline__ int2 visible(int i) const {
    const int own = position_of(column_of(i));
    return make_int2(max(begin, own - p.recipe.reach + 1), own);
  }

  // Logits, in base 2, from q . k.
  __device__ __forceinline__ float logit(float score, bool sees) const {
    score *= p.softmax_scale;
    if (SOFTCAP) score = p.softcap * tanhf(score / p.softcap);
    return sees ? score * LOG2E : NEG_INF;
  }
  __device__ __forceinline__ float logit(float score, int position, int2 visible) const {
    return logit(score, position >= visible.x && position <= visible.y);
  }
  __device__ __forceinline__ float constant_logit(float score, int i) const {
    return logit(score, sees_first(p, item, column_of(i)));
  }
};
#endif
