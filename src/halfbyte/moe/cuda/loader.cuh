// The experts' streaming kernels: their sizes and parameters, and how a warp's weights are loaded.
//
// The macros are those of experts.cu and token.cu.

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

struct Params {
  const u8* weight;           // [E, TILES, TILE_BYTES]
  const float* global_scale;  // [E, parts], or null
  const void* bias;           // [E, N], or null
  const u16* x;               // [M, K], or [pairs, K] if not GATED
  u16* out;                   // [pairs, N/2]; if not GATED [pairs, N], of token.cu [N]
  Pairs pairs;
  int parts, bias_dtype, max_entries;
  Activation activation;

  __device__ __forceinline__ const u8* tile(int expert, int tile) const {
    return weight + ((u64)expert * TILES + tile) * TILE_BYTES;
  }
};

// Prefetches a warp's items, 16 rows x PARTS * 128 k each, tile after tile. `Tiles` are the warp's: `valid()` until all
// are passed, `begin()` of the present one in memory, `advance()`.
template <class Tiles>
struct Loader {
  Tiles tiles;
  int split, item;
  const u8* tile;  // this lane's first 16 bytes of the tile

  __device__ __forceinline__ Loader(const Tiles& tiles, int split) : tiles(tiles), split(split) { enter_tile(); }

  __device__ __forceinline__ void enter_tile() {
    if (!tiles.valid()) return;
    tile = tiles.begin() + threadIdx.x % 32 * 16;
    item = split;
  }

  // Copies the next item to a slot, and advances.
  __device__ __forceinline__ void step(u32 slot) {
    if (tiles.valid()) {
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
        tiles.advance();
        enter_tile();
      }
    }
    commit_copies();
  }
};
