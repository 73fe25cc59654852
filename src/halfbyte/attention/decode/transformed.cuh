// For K that a recipe changed (prepare.cu): the bias that K's means add to the logits of a tile, and a
// sequence's first token if the page marks it as a constant of the model.
//
// Macros:
//   SEGMENT      tokens that share a mean, a multiple of TILE or of 64; 0 where K is not centred
//   KNOWS_FIRST  1 if pages may mark the first token
//   INITIAL      1 if rows have an initial state from prepare.cu: attention to the recent tokens, and to the
//                first one if it is a constant. The sums of a work item's first tile start from it.
//
// The bias is equal for all tokens of a tile, so it is added to the shift in the exponent, not to logits.
// The unit with a work item's first tile starts its sums from the constant and masks its slot.

#pragma once
#include "attention/decode/values.cuh"

// Row of a column of a work item in tensors [tokens, heads]; columns past the last one get its row.
__device__ __forceinline__ u32 item_row(const WorkItem& item, int head, int column) {
  column = min(column, GROUP * item.queries - 1);
  return (u32)(item.q_begin + column / GROUP) * (KV_HEADS * GROUP) + head * GROUP + column % GROUP;
}

// Bias (q . mean) of a row for a segment. It is uninitialized where the row sees no token of the segment;
// the logits there are -inf, so any finite number will do.
__device__ __forceinline__ float load_bias(const Params& p, u64 row_begin, int segment) {
  return fmaxf(fminf(p.transformed.bias[row_begin + segment], 1e30f), -1e30f);
}

// Whether any column of a work item attends to a first token that is a constant, not in the page; false
// unless the unit has tile 0. Tests the first column whose query position is >= 0: its window reaches
// back the furthest.
__device__ __forceinline__ bool has_constant(const Params& p, const WorkItem& item, int head,
                                             int first_column, int first_tile) {
#if KNOWS_FIRST
  if (first_tile > 0) return false;
  first_column = max(first_column, (item.queries - item.length) * GROUP);
  return p.transformed.first_indices[item_row(item, head, first_column)] >= 0;
#else
  return false;
#endif
}

__device__ __forceinline__ float value_of(u16 x) { return query_value(x); }
__device__ __forceinline__ float value_of(float x) { return x; }

// A row's softmax state before its first tile: attention to all that is not read from the pages (INITIAL),
// or to a first token that is a constant.
struct InitialState {
  float lse;  // in base 2; -inf if empty
#if INITIAL
  const float* value;

  __device__ __forceinline__ InitialState(const Params& p, const WorkItem& item, int head, int column) {
    const u32 row = item_row(item, head, column);
    lse = p.transformed.initial_lse[row];
    value = p.transformed.initial_out + (u64)row * HEAD_SIZE_V;
  }
#else
  const u16* value;

  __device__ __forceinline__ InitialState(const Params& p, const WorkItem& item, int head, int column) {
    const u32 row = item_row(item, head, column);
    const int index = p.transformed.first_indices[row];
    lse = index < 0 ? NEG_INF : p.transformed.first_scores[row];
    value = (const u16*)p.transformed.first_values + ((u64)max(index, 0) * KV_HEADS + head) * HEAD_SIZE_V;
  }
#endif
};

// Whether a unit's share of a work item starts from an initial state.
__device__ __forceinline__ bool has_initial_state(const WorkItem& item, int first_tile, bool constant) {
#if INITIAL
  return first_tile == item.first_tile;
#elif KNOWS_FIRST
  return first_tile == 0 && constant;
#else
  return false;
#endif
}
