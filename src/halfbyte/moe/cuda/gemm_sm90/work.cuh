// What gemm.cu computes: tiles of sorted pairs, which the sort kernel has listed, times pairs of tiles of rows.

#pragma once
#include "kernels/runtime/sm90.cuh"
#include "moe/cuda/activation.cuh"
#include "moe/cuda/gemm_sm90/order.cuh"

#define BLOCK (MX ? 32 : 16)
#define ROWS 128  // of W, in a CTA's tile

struct Params {
  const u8* scales;           // [E, n, k / BLOCK]
  const float* global_scale;  // [E, parts], or null
  const void* bias;           // [E, n], or null
  const int2* tiles;          // see Tile
  const int* num_tiles;
  int parts, bias_dtype;
  int n, k;       // of an expert's matrix: multiples of 32
  int steps;      // of 128 k
  int row_pairs;  // pairs of tiles of rows
  Activation activation;
};

// Up to TOKENS sorted pairs of one expert.
struct Tile {
  int first, expert, count;

  __device__ __forceinline__ Tile(int2 packed)
      : first(packed.x), expert(packed.y >> 16), count(packed.y & 0xFFFF) {}
};

// Iterates over the work of a cluster. Neighbours have the same pairs, or the same expert.
struct Work {
  int item, items;
  int2 tile, ahead;  // the next tile, loaded one tile ahead to hide its latency
  int row_pair;

  // After the kernel that has written the tiles.
  __device__ __forceinline__ Work(const Params& p) : item(blockIdx.x / 2) {
    items = __ldcg(p.num_tiles) * p.row_pairs;
    load(p);
  }

  __device__ __forceinline__ void load(const Params& p) {
    if (item < items) ahead = __ldcg(p.tiles + item / p.row_pairs);
  }

  __device__ __forceinline__ bool next(const Params& p) {
    if (item >= items) return false;
    tile = ahead;
    row_pair = item % p.row_pairs;
    item += gridDim.x / 2;
    load(p);
    return true;
  }
};

// A run of rows is stored in ROW_PARTS parts, a dimension of the tensor map: gate and up, or rows i, i + ROW_PARTS, ...
// Eight lanes load 64 bytes of each of two rows at a time, which should be in different banks. In rows of 128 bytes the
// swizzle swaps halves every four rows, so the two rows must be four apart. Gated, Channel sees to that; otherwise a part
// has four rows.
#define ROW_PARTS (GATED ? 2 : WEIGHT_K == 256 ? 8 : 1)

// Place in shared memory of a row that is not gated.
__device__ __forceinline__ int place_of_row(int row) {
  return row / RUN_ROWS * RUN_ROWS + row % ROW_PARTS * (RUN_ROWS / ROW_PARTS) + row % RUN_ROWS / ROW_PARTS;
}

// First row of a run of this CTA; gated, its first channel.
__device__ __forceinline__ int run_begin(int row_pair, int rank, int run) {
#if GATED
  return 128 * row_pair + 32 * run + 16 * rank;
#else
  return (2 * row_pair + rank) * ROWS + RUN_ROWS * run;
#endif
}
