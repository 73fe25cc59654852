// experts.cu: which tiles and k a warp has, and how their weights are loaded.
//
// The macros are those of experts.cu.

#pragma once
#include "kernels/runtime/copies.cuh"
#include "moe/cuda/activation.cuh"
#include "moe/cuda/routing.cuh"
#include "moe/cuda/values.cuh"

#define THREADS (32 * SPLIT * GROUPS)
#define CHUNKS_OF_K ((K + CHUNK_K - 1) / CHUNK_K)
#define PARTS_OF_K ((CHUNKS_OF_K + 1) / 2)
#define ITEMS ((PARTS_OF_K + PARTS - 1) / PARTS)
#define ITEM_BYTES (PARTS * PART_BYTES)
#define TILE_BYTES (CHUNKS_OF_K * CHUNK_BYTES + PARTS_OF_K * SCALE_BYTES)
#define IS_RAGGED (TILE_BYTES % ITEM_BYTES != 0)
#define CHANNELS (N / 2)  // if GATED
#define TILES (GATED ? (CHANNELS + 63) / 64 * 8 : N / 16)  // of 16 rows, per expert
#define UNITS ((TILES + GROUPS - 1) / GROUPS)  // of GROUPS tiles

struct Params {
  const u8* weight;           // [E, TILES, TILE_BYTES]
  const float* global_scale;  // [E, parts], or null
  const void* bias;           // [E, N], or null
  const u16* x;               // [M, K], or [pairs, K] if not GATED
  u16* out;                   // [pairs, N/2], or [pairs, N] if not GATED
  Pairs pairs;
  int parts, bias_dtype, max_entries;
  Activation activation;
};

// The tile that a group of warps computes in a unit. In the last unit of an entry it may be TILES or more: none.
__device__ __forceinline__ int tile_of_unit(int unit, int group) { return unit % UNITS * GROUPS + group; }

// Prefetches a warp's items, 16 rows x PARTS * 128 k each, into its ring, unit after unit.
struct Loader {
  const Params& p;
  const Routing& routing;
  int unit, end, group, split, item;
  const u8* tile;  // this lane's first 16 bytes of the tile

  __device__ __forceinline__ Loader(const Params& p, const Routing& routing, int begin, int end, int group, int split)
      : p(p), routing(routing), unit(begin), end(end), group(group), split(split) {
    enter_unit();
  }

  __device__ __forceinline__ void enter_unit() {
    if (TILES % GROUPS && unit < end && tile_of_unit(unit, group) >= TILES) unit++;
    if (unit >= end) return;
    const u64 first = (u64)routing.entry(unit / UNITS).expert * TILES;
    tile = p.weight + (first + tile_of_unit(unit, group)) * TILE_BYTES + threadIdx.x % 32 * 16;
    item = split;
  }

  // Copies the next item to a slot, and advances.
  __device__ __forceinline__ void step(u32 slot) {
    if (unit < end) {
      const int lane = threadIdx.x & 31;
      const u32 to = slot + lane * 16;
      const u8* from = tile + item * ITEM_BYTES;
      // Bytes of the item, or more.
      const int left = IS_RAGGED ? TILE_BYTES - item * ITEM_BYTES : ITEM_BYTES;
#pragma unroll
      for (int at = 0; at < ITEM_BYTES; at += 512)
        if (IS_RAGGED || at + 512 > ITEM_BYTES ? lane * 16 + at < min(left, ITEM_BYTES) : true)
          copy16(to + at, from + at);
      item += SPLIT;
      if (item >= ITEMS) {
        unit++;
        enter_unit();
      }
    }
    commit_copies();
  }
};
