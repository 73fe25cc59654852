// gemv.cu: which CTA and warp does what part of the work, and how weights are loaded.
//
// The macros are those of gemv.cu.

#pragma once
#include "kernels/runtime/copies.cuh"
#include "linear/w4a16/values.cuh"

#define THREADS (32 * WARPS)
#define COLUMNS (8 * COLUMN_TILES)
#define X_TILES ((COLUMN_TILES + 1) / 2)  // ldmatrix.x4 per step: two column tiles, or two steps of one
#define ITEM_WEIGHTS 2048
#define ITEM_BYTES 2304
// Before SM90: items per warp whose copies are issued before those of x. About what memory delivers until x has
// arrived; more would only delay x.
#define COPIES_BEFORE_X (WARPS * CTAS > 8 || STAGES == 1 ? 1 : 2)

struct Params {
  const u8* weight;        // [N/64, K/64, 2048], K padded to 128
  const u8* weight_scale;  // [N/64, K/64, 256]
  const float* row_scale;  // [N padded to 64]
  const u16* x;            // [m, k], rows x_stride values apart, aligned to 16 bytes
  const u16* bias;         // [n] or null
  u16* out;                // [m, n]
  float* partial;          // [SPLIT, m, units * 32], where JOIN is 2
  u64 x_stride;
  int m, n, k;
  int units;   // of 32 rows, in N padded to 64
  int blocks;  // of 128 k, in K padded
  int groups;  // of SPLIT CTAs
  int round_units;
};

// Fields that may be compiled in: divisions at run time are too slow for a kernel of a few µs.
#ifndef UNITS
#define UNITS p.units
#define BLOCKS p.blocks
#define GROUPS p.groups
#define ROUND_UNITS p.round_units
#define SINGLE (p.m == 1)
#elif BLOCKS % SPLIT == 0 && ROUND_UNITS * GROUPS >= UNITS
#define FIXED_ROUND  // a CTA has one round, of the max number of units or one less
#define CTA_ITEMS (UNITS / GROUPS * (BLOCKS / SPLIT))
#if UNITS % GROUPS == 0 && CTA_ITEMS % WARPS == 0 && BLOCKS / SPLIT * WARPS % CTA_ITEMS == 0
#define EVEN_ITEMS (CTA_ITEMS / WARPS)
#endif
#endif
// Items per warp, if all warps have the same number and no segment crosses units: then it is a compile-time
// constant and the loop over items is unrolled. Otherwise 0.
#if !defined EVEN_ITEMS || EVEN_ITEMS > 8
#undef EVEN_ITEMS
#define EVEN_ITEMS 0
#endif

// Division of 0 .. 2^24 by a number that is not known at compile time.
struct Divisor {
  int by;
  float inverse;

  __device__ __forceinline__ explicit Divisor(int by) : by(by) {
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"((float)by));
  }

  __device__ __forceinline__ int quotient(int x) const {
    const int q = (int)((float)x * inverse), rest = x - q * by;  // at most one off
    return rest < 0 ? q - 1 : rest >= by ? q + 1 : q;
  }
};

// Division by the items of a round.
struct RoundDivisor {
#ifdef FIXED_ROUND
  static constexpr int ITEMS = UNITS / GROUPS * (BLOCKS / SPLIT);
  static constexpr int MORE = (UNITS + GROUPS - 1) / GROUPS * (BLOCKS / SPLIT);
  bool more;

  __device__ __forceinline__ explicit RoundDivisor(int items) : more(items > ITEMS) {}
  __device__ __forceinline__ int quotient(int x) const { return MORE > ITEMS && more ? x / MORE : x / ITEMS; }
#else
  Divisor divisor;

  __device__ __forceinline__ explicit RoundDivisor(int items) : divisor(items) {}
  __device__ __forceinline__ int quotient(int x) const { return divisor.quotient(x); }
#endif
};

// How `total` items are cut into segments, one per warp; with fewer items than warps, one item each.
struct Segments {
  int total;

  __device__ __forceinline__ explicit Segments(int total) : total(total) {}

  __device__ __forceinline__ int begin(int warp) const {
    return total < WARPS ? min(warp, total) : warp * total / WARPS;
  }

  // The unit that a segment begins in, for so many blocks of k in each.
  __device__ __forceinline__ int unit(int warp, int units, int blocks) const {
    return total < WARPS ? Divisor(blocks).quotient(begin(warp)) : warp * units / WARPS;
  }

  // The warp whose segment has an item.
  __device__ __forceinline__ int warp_of(int item, const RoundDivisor& by_total) const {
    return total < WARPS ? item : by_total.quotient((item + 1) * WARPS - 1);
  }
};

// A CTA's part of the work: units, blocks of k, columns.
struct Place {
  int warp;  // of the CTA; known to the compiler to be uniform
  int rank, first_column;
  int first_unit, units;
  int first_block, blocks;

  __device__ __forceinline__ explicit Place(const Params& p)
      : warp(__shfl_sync(~0u, threadIdx.x >> 5, 0)), rank(blockIdx.x % SPLIT) {
    const int index = blockIdx.x / SPLIT, pass = p.m <= COLUMNS ? 0 : index / GROUPS;
    const int group = index - pass * GROUPS;
    // The remainder: one more unit for each of the first groups.
    const int each = UNITS / GROUPS, more = UNITS % GROUPS;
    first_column = pass * COLUMNS;
    first_unit = group * each + (more ? min(group, more) : 0);
    units = more ? each + (group < more) : each;
    first_block = first_block_of(p, rank);
    blocks = blocks_of(p, rank);
  }

  __device__ __forceinline__ static int first_block_of(const Params& p, int rank) {
    return rank * (BLOCKS / SPLIT) + rank * (BLOCKS % SPLIT) / SPLIT;
  }
  __device__ __forceinline__ static int blocks_of(const Params& p, int rank) {
    return BLOCKS % SPLIT ? first_block_of(p, rank + 1) - first_block_of(p, rank) : BLOCKS / SPLIT;
  }
};

// Units of a CTA whose sums are joined together, and this warp's segment of their items.
struct Round {
  int first, units;
  Segments segments;
  int begin, end;  // of this warp's segment
  int unit;        // that it begins in
  int turn;        // first item to process: from here to the segment's end, then from its begin to here

  __device__ __forceinline__ Round(const Params& p, const Place& place, int first)
      : first(first),
        units(min(ROUND_UNITS, place.units - first)),
        segments(units * place.blocks),
        begin(segments.begin(place.warp)),
        end(EVEN_ITEMS ? begin + EVEN_ITEMS : segments.begin(place.warp + 1)),
        unit(segments.unit(place.warp, units, place.blocks)) {
    const int next = (unit + 1) * place.blocks;
    turn = !EVEN_ITEMS && begin > unit * place.blocks && next < end ? next : begin;
  }
};

// Prefetches the items of a warp's segments into its ring.
struct Loader {
  const Params& p;
  const Place& place;
  // This lane's base addresses; `weight` is 2,048 bytes ahead, so that copies have offsets from -2048 on.
  const u8 *weight, *scale;
  u64 policy;
  u32 to_scale;  // shared-memory offset from this lane's weights to its scales in a slot
  u32 at;        // offset of the next item's scales, in bytes; its weights are at 8 times that
  const u8 *item, *item_scale;  // addresses of the current item, kept by step_first for step_second
  int round;     // its first unit
  int unit;      // of the next item
  int run;       // items left to copy in the current unit
  int left;      // items of the segment after `run`, without the tail
  int tail;      // items before `Round::turn`, which are copied last
  int tail_unit;

  __device__ __forceinline__ Loader(const Params& p, const Place& place, u32 slot)
      : p(p), place(place) {
    const int lane = threadIdx.x & 31;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    weight = p.weight + lane * 16 + 2048;  // copies use offsets of up to 2048 bytes either way
    scale = p.weight_scale + lane * 4;
    // Keeps the addresses in registers instead of recomputing them for every item.
    to_scale = ITEM_WEIGHTS - lane * 12;
    asm volatile("" : "+l"(weight), "+l"(scale), "+r"(to_scale));
    run = left = tail = 0;
    enter_round(0);
#pragma unroll
    for (int i = 0; i < COPIES_BEFORE_X; i++) step(slot + i * ITEM_BYTES);
  }

  // Fills the rest of the ring, before the first item is used.
  __device__ __forceinline__ void fill(u32 slot) {
#pragma unroll
    for (int i = COPIES_BEFORE_X; i < STAGES; i++) step(slot + i * ITEM_BYTES);
  }

  __device__ __forceinline__ void enter_round(int first) {
    for (round = first; run == 0 && round < place.units; round += ROUND_UNITS) {
      const Round next(p, place, round);
      tail_unit = round + next.unit;
      tail = next.turn - next.begin;
      unit = tail_unit + (tail > 0);
      left = next.end - next.turn;
      enter_unit(next.turn - (unit - round) * place.blocks);
    }
  }

  __device__ __forceinline__ void enter_unit(int block) {
    const u32 row_unit = place.first_unit + unit;
    const u32 square = row_unit / 2 * (2 * BLOCKS) + 2 * (place.first_block + block);
    at = square * 256 + row_unit % 2 * 128;
    run = EVEN_ITEMS ? left : min(place.blocks - block, left);
    left -= run;
  }

  // Copies the next item to a slot; `slot` is this lane's address in it.
  __device__ __forceinline__ void step(u32 slot) {
    step_first(slot);
    step_second(slot);
  }

  // Its first 64 k.
  __device__ __forceinline__ void step_first(u32 slot) {
    if (run > 0) {
      item = weight + (u64)at * 8;
      item_scale = scale + at;
      asm volatile("" : "+l"(item), "+l"(item_scale));  // not recomputed for the second half
      copy16(slot, item - 2048, policy);
      copy16(slot + 512, item - 1536, policy);
      copy4(slot + to_scale, item_scale, policy);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Its other 64 k; then advances to the next item.
  __device__ __forceinline__ void step_second(u32 slot) {
    if (run > 0) {
      copy16(slot + 1024, item, policy);
      copy16(slot + 1536, item + 512, policy);
      copy4(slot + to_scale + 128, item_scale + 256, policy);
      at += 512;
      if (--run == 0) {
        if (left > 0) {
          unit++;
          enter_unit(0);
        } else if (tail > 0) {
          unit = tail_unit;
          left = tail;
          tail = 0;
          enter_unit(place.blocks - left);
        } else {
#ifndef FIXED_ROUND
          enter_round(round);
#endif
        }
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
};
