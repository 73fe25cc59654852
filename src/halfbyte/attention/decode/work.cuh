// How the work of a decode step is split; shared by plan.cu, the decode kernels and merge.cu.
//
// A work item is one sequence with one block of COLS query columns (heads of a KV head's group x query
// tokens). Work items are laid out on a line of positions, where a position is a tile of TILE tokens.
// The line is split into units of `span` positions. One warp (decode_wgmma.cu: one warpgroup) processes one unit for one
// KV head.
// Two layouts of the line:
//
//   aligned     every work item starts a new unit: no unit has two, an item's last unit may be short
//   continuous  as in Stream-K: work items follow each other; a unit may hold the end of one and the next ones
//
// A work item's tiles come after `lead` positions, which only stand for cost: the time to start it (continuous layout
// only) and to read its recent tokens. Aligned units of up to SHORT_SPAN tiles have none. A unit that has lead positions
// of a work item but none of its tiles computes nothing for it.
//
// Unit u's share of work item i is row u + i of the partial results. u and i only grow along the line,
// so rows are unique, and the rows of a work item are contiguous.

#pragma once
#include "kernels/runtime/basics.cuh"

#define SHORT_SPAN 8  // tiles

struct WorkItem {
  int begin;       // first position on the line
  int seq;
  int col_tile;    // index of its block of COLS columns
  int first_tile;  // > 0 if the window hides the tiles before it
  int num_tiles;
  int length;      // tokens in the cache
  int q_begin;     // first query token of the sequence
  int queries;     // query tokens of the sequence
};

// The plan is one int32 array: PlanHeader, TokenItems per query token, Units, WorkItems.
struct PlanHeader {
  int span, units;
  int signed_lead;  // -lead (0 or less) in the aligned layout, lead (1 or more) in the continuous one
  int items;

  __device__ __forceinline__ int lead() const { return signed_lead < 0 ? -signed_lead : signed_lead; }
  __device__ __forceinline__ bool is_aligned() const { return signed_lead <= 0; }
};

// The work items of a query token's sequence. They are contiguous and of equal cost, so that one load
// is enough to find the partial results of the token's rows.
struct TokenItems {
  int first;      // index of the first one
  int begin;      // its first position on the line
  int cost;       // positions from one to the next
  int num_tiles;  // of each
  int q_begin;    // the sequence's first query token
};

// The work item in which a unit starts, as a copy, so that a warp finds its work in one load.
struct Unit {
  WorkItem item;
  int index;  // of the work item
};

struct PlanView {
  const int* data;
  int units_offset, items_offset;  // in ints, multiples of 8

  __device__ __forceinline__ PlanHeader header() const {
    const int4 x = *(const int4*)data;
    return {x.x, x.y, x.z, x.w};
  }
  __device__ __forceinline__ TokenItems items_of(int token) const {
    const int4* x = (const int4*)(data + 4) + 2 * token;
    const int4 a = x[0];
    return {a.x, a.y, a.z, a.w, x[1].x};
  }
  __device__ __forceinline__ WorkItem item(int i) const {
    const int4* x = (const int4*)(data + items_offset) + 2 * i;
    const int4 a = x[0], b = x[1];
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  }
  __device__ __forceinline__ Unit unit(int u) const {
    const int4* x = (const int4*)(data + units_offset) + 3 * u;
    const int4 a = x[0], b = x[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, x[2].x};
  }
};
