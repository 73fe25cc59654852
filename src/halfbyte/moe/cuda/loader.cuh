// experts.cu: which rows and k a warp has, and how their weights are loaded.
//
// The macros are those of experts.cu.

#pragma once
#include "kernels/runtime/copies.cuh"
#include "moe/cuda/activation.cuh"
#include "moe/cuda/routing.cuh"

#define THREADS (32 * SPLIT * GROUPS)
#define PART_K 256
#define PARTS_OF_K ((K + PART_K - 1) / PART_K)
#define ITEM_K (PARTS * PART_K)
#define ITEMS ((K + ITEM_K - 1) / ITEM_K)
#define TILES (N / 16)  // of 16 rows, per expert
#define UNITS ((TILES + GROUPS - 1) / GROUPS)  // of GROUPS tiles
#define BLOCK (MX ? 32 : 16)
#define ROW_SCALES (K / BLOCK)        // bytes
#define ITEM_SCALES (ITEM_K / BLOCK)  // bytes of a row
// cp.async copies from multiples of 4 bytes, but a row of scales begins at any even byte (NVFP4) or any byte (MXFP4): a
// row that is not aligned takes one more word.
#define SCALES_ARE_ALIGNED (ROW_SCALES % 4 == 0)
#define SCALE_WORDS (ITEM_SCALES / 4 + !SCALES_ARE_ALIGNED)
#define SCALE_ROW_BYTES (4 * SCALE_WORDS)
#define PART_WEIGHTS 2048
#define ITEM_WEIGHTS (PARTS * PART_WEIGHTS)
#define ITEM_BYTES (ITEM_WEIGHTS + 16 * SCALE_ROW_BYTES)
#define IS_RAGGED (K % ITEM_K != 0)

struct Params {
  const u8* weight;           // [E, N, K/2]
  const u8* scales;           // [E, N, K/BLOCK]
  const float* global_scale;  // [E, parts], or null
  const void* bias;           // [E, N], or null
  const u16* x;               // [M, K], or [pairs, K] if not GATED
  u16* out;                   // [pairs, N/2], or [pairs, N] if not GATED
  Pairs pairs;
  int parts, bias_dtype, max_entries;
  Activation activation;
};

// The row of the expert's matrix that is row `i` (0 .. 15) of a tile. A gated tile has 8 rows of gate, then the 8
// rows of up that belong to them.
__device__ __forceinline__ int row_of_tile(int tile, int i) {
#if GATED && INTERLEAVED
  return tile * 16 + i % 8 * 2 + i / 8;
#elif GATED
  return tile * 8 + i % 8 + i / 8 * (N / 2);
#else
  return tile * 16 + i;
#endif
}

#define ROW_STRIDE (GATED && INTERLEAVED ? 2 : 1)  // between rows i and i + 1 of a tile, except 7 and 8

// The tile that a group of warps computes in a unit. In the last unit of an entry it may be TILES or more: none.
__device__ __forceinline__ int tile_of_unit(int unit, int group) { return unit % UNITS * GROUPS + group; }

// Prefetches a warp's items, 16 rows x ITEM_K each, into its ring, unit after unit. An instruction copies 128 bytes from
// each of four rows: whole cache lines, because a request for half a line takes L2 as long.
struct Loader {
  const Params& p;
  const Routing& routing;
  int unit, end, group, split, item;
  const u8 *upper, *lower;  // this lane's bytes of rows lane / 8 and lane / 8 + 8
  const u8* scale;          // the words of scales that this lane copies
  int scales_left;          // bytes from there to the end of all scales; capped at more than a row's copies read

  __device__ __forceinline__ Loader(const Params& p, const Routing& routing, int begin, int end, int group, int split)
      : p(p), routing(routing), unit(begin), end(end), group(group), split(split) {
    enter_unit();
  }

  __device__ __forceinline__ void enter_unit() {
    if (TILES % GROUPS && unit < end && tile_of_unit(unit, group) >= TILES) unit++;
    if (unit >= end) return;
    const int lane = threadIdx.x & 31, tile = tile_of_unit(unit, group);
    const u64 first = (u64)routing.entry(unit / UNITS).expert * N;
    upper = p.weight + (first + row_of_tile(tile, lane / 8)) * (K / 2) + lane % 8 * 16;
    lower = p.weight + (first + row_of_tile(tile, lane / 8 + 8)) * (K / 2) + lane % 8 * 16;
    scale = p.scales + (first + row_of_tile(tile, lane & 15)) * ROW_SCALES;
    if (!SCALES_ARE_ALIGNED) scale -= (u64)scale & 3;
    // Copies may read past a row into the next one, but not past the last row of the last expert.
    const u8* const scales_end = p.scales + (u64)p.pairs.num_experts * N * ROW_SCALES;
    scales_left = (int)min((long long)(scales_end - scale), (long long)ROW_SCALES + ITEM_SCALES + 8);
    item = split;
  }

  // Copies the next item to a slot, and advances.
  __device__ __forceinline__ void step(u32 slot) {
    if (unit < end) {
      const int lane = threadIdx.x & 31;
      // Where `Part` reads the 16 bytes.
      const u32 to = slot + (lane / 8 * 4 + lane % 4) * 16 + lane / 4 % 2 * 512;
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        const int at = item * (ITEM_K / 2) + part * (PART_K / 2);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const u32 place = to + part * PART_WEIGHTS + i * 256;
          const int row = i * 4 * ROW_STRIDE * (K / 2);
          if (IS_RAGGED) {
            const bool exists = at + lane % 8 * 16 < K / 2;
            copy16_or_zeros(place, upper + row + at, exists);
            copy16_or_zeros(place + 1024, lower + row + at, exists);
          } else {
            copy16(place, upper + row + at);
            copy16(place + 1024, lower + row + at);
          }
        }
      }
      copy_scales(slot + ITEM_WEIGHTS + (lane & 15) * SCALE_ROW_BYTES);
      item += SPLIT;
      if (item >= ITEMS) {
        unit++;
        enter_unit();
      }
    }
    commit_copies();
  }

  // Copies the block scales of 16 rows: lanes 0 to 15 the even units of a row each, lanes 16 to 31 the odd ones. A unit is
  // 16 bytes for NVFP4 with rows of a multiple of 16 bytes of scales, else a word of 4 bytes.
  __device__ __forceinline__ void copy_scales(u32 to) const {
    const u8* from = scale + item * ITEM_SCALES;
    const int odd = threadIdx.x >> 4 & 1;
#if !MX && ROW_SCALES % 16 == 0
#pragma unroll
    for (int i = 0; i < PARTS; i += 2)
      if (i + odd < PARTS && (!IS_RAGGED || item * ITEM_SCALES + (i + odd) * 16 < ROW_SCALES))
        copy16(to + (i + odd) * 16, from + (i + odd) * 16);
#else
#pragma unroll
    for (int i = 0; i < SCALE_WORDS; i += 2) {
      const int at = (i + odd) * 4;
      if (i + odd >= SCALE_WORDS) continue;
      if (IS_RAGGED || !SCALES_ARE_ALIGNED) {
        copy4_or_zeros(to + at, from + at, max(min(scales_left - item * ITEM_SCALES - at, 4), 0));
      } else {
        copy4(to + at, from + at);
      }
    }
#endif
  }
};
