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
#define LAST_ITEM_BYTES (TILE_BYTES - (ITEMS - 1) * ITEM_BYTES)
#define IS_RAGGED (LAST_ITEM_BYTES != ITEM_BYTES)
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
  int* tickets;    // [num_tickets], a tile of the second product each; only for few pairs, as `sum`
  u16* sum;        // [M, N], of the second product
  int num_tickets;
  u32 fraction;  // 2^32 / CTAs of the launch, rounded up, but at most 2^32 - 1

  __device__ __forceinline__ const u8* tile(int expert, int tile) const {
    return weight + ((u64)expert * TILES + tile) * TILE_BYTES;
  }

  // The first of `total` that a CTA has; the next CTA's first one is its end. Shares are equal, plus or minus one. No
  // division, because these instructions stand between the expert ids and the first copies.
  __device__ __forceinline__ int share(int total, u32 cta) const {
    return cta == gridDim.x ? total : (int)__umulhi((u32)total, cta * fraction);
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

  template <int BYTES>
  __device__ __forceinline__ void copy(u32 slot) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int at = 0; at < BYTES; at += 512)
      if (at + 512 <= BYTES || lane * 16 + at < BYTES)
        copy16(slot + lane * 16 + at, tile + item * ITEM_BYTES + at);
  }

  // Copies the next item to a slot, and advances.
  __device__ __forceinline__ void step(u32 slot) {
    if (tiles.valid()) {
      if (IS_RAGGED && item == ITEMS - 1)
        copy<LAST_ITEM_BYTES>(slot);
      else
        copy<ITEM_BYTES>(slot);
      item += SPLIT;
      if (item >= ITEMS) {
        tiles.advance();
        enter_tile();
      }
    }
    commit_copies();
  }
};
