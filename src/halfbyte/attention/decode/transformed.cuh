// K that a recipe changed (prepare.cu): what its means add to the logits of a tile, and the first
// token of a sequence where the page says that it is a constant of the model.
//
// Macros:
//   SEGMENT      tokens that share a mean, a multiple of TILE or of 64; 0 where K is not centred
//   KNOWS_FIRST  1 if pages may mark the first token
//   INITIAL      1 if rows have attended to something already (the last tokens, the first one if it is a
//                constant): what that gave is where the sums of a piece's first tile begin
//
// The bias of a tile is the same for all of its tokens, so it joins the shift in the exponent and no logit
// changes. A unit that has a piece's first tile begins its sums with the constant, and masks its slot.

#pragma once
#include "attention/decode/values.cuh"

// The row of a column of a piece, in tensors [tokens, heads]; of the last one for columns beyond.
__device__ __forceinline__ u32 piece_row(const Piece& piece, int head, int column) {
  column = min(column, GROUP * piece.queries - 1);
  return (u32)(piece.q_begin + column / GROUP) * (KV_HEADS * GROUP) + head * GROUP + column % GROUP;
}

// q . mean of a row and a segment. Where the row attends to no token of the segment it was never
// computed, and may be anything; the logits there are -inf, to which any number can be added.
__device__ __forceinline__ float load_bias(const Params& p, u64 row_begin, int segment) {
  return fmaxf(fminf(p.transformed.bias[row_begin + segment], 1e30f), -1e30f);
}

// Whether any column of a piece attends to a first token that the page does not have; asked by who has the
// tile of it. The piece's first column that stands in the sequence is of the earliest query, whose window
// reaches back the furthest; all are of one KV head.
__device__ __forceinline__ bool has_constant(const Params& p, const Piece& piece, int head,
                                             int first_column, int first_tile) {
#if KNOWS_FIRST
  if (first_tile > 0) return false;
  first_column = max(first_column, (piece.queries - piece.length) * GROUP);
  return p.transformed.first_indices[piece_row(piece, head, first_column)] >= 0;
#else
  return false;
#endif
}

__device__ __forceinline__ float value_of(u16 x) { return query_value(x); }
__device__ __forceinline__ float value_of(float x) { return x; }

// What a row has attended to before it comes to its first tile: all that is not read from the pages, or a
// first token that is none of the page's.
struct Before {
  float lse;  // in base 2; -inf for nothing
#if INITIAL
  const float* value;

  __device__ __forceinline__ Before(const Params& p, const Piece& piece, int head, int column) {
    const u32 row = piece_row(piece, head, column);
    lse = p.transformed.initial_lse[row];
    value = p.transformed.initial_out + (u64)row * HEAD_SIZE_V;
  }
#else
  const u16* value;

  __device__ __forceinline__ Before(const Params& p, const Piece& piece, int head, int column) {
    const u32 row = piece_row(piece, head, column);
    const int index = p.transformed.first_indices[row];
    lse = index < 0 ? NEG_INF : p.transformed.first_scores[row];
    value = (const u16*)p.transformed.first_values + ((u64)max(index, 0) * KV_HEADS + head) * HEAD_SIZE_V;
  }
#endif
};

// Whether a unit's share of a piece is where its rows bring along what they have attended to.
__device__ __forceinline__ bool begins_with_something(const Piece& piece, int first_tile, bool constant) {
#if INITIAL
  return first_tile == piece.first_tile;
#elif KNOWS_FIRST
  return first_tile == 0 && constant;
#else
  return false;
#endif
}

// Column i of the accumulators of a row of values times a factor: what store_row would write back.
template <class Value>
__device__ __forceinline__ void load_row(float (*out)[4], const Value* row, int i, int g, float factor) {
#pragma unroll
  for (int j = 0; j < STEPS_V; j++) {
    if (V_KIND == 4) {
      if (j % 2 == 0) {
        const Value* at = row + 16 * j + 4 * g;
        out[j + 1][2 + i] = value_of(at[0]) * factor;
        out[j][2 + i] = value_of(at[1]) * factor;
        out[j + 1][i] = value_of(at[2]) * factor;
        out[j][i] = value_of(at[3]) * factor;
      }
    } else {
      const int low = V_KIND < 16 ? 16 * j + 2 * g : 16 * j + g;
      out[j][i] = value_of(row[low]) * factor;
      out[j][2 + i] = value_of(row[V_KIND < 16 ? low + 1 : low + 8]) * factor;
    }
  }
}
