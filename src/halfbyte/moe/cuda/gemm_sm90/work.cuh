// What gemm.cu and narrow.cu compute: tiles of sorted pairs, which the kernel in front has listed, times pairs of tiles
// of rows.

#pragma once
#include "kernels/runtime/sm90.cuh"
#include "moe/cuda/activation.cuh"
#include "moe/cuda/values.cuh"

#define ROWS 128  // of W, in a CTA's tile
#define CTA_TILES (ROWS / 16)
#define CLUSTER (TOKENS > 16 ? 2 : 1)  // CTAs that share a pair of tiles of rows

// A product.
struct Params {
  const u8* weight;           // [E, matrix_tiles, tile_bytes]
  const float* global_scale;  // [E, parts], or null
  const void* bias;           // [E, n], or null
  const int2* tiles;          // see Tile
  const int* num_tiles;
  int parts, bias_dtype;
  int n;          // rows of an expert's matrix, a multiple of 32
  int steps;      // of 128 k
  int matrix_tiles, tile_bytes;  // tiles of an expert's matrix, see packed.py
  int row_pairs;  // pairs of tiles of rows
  int max_tiles;  // that there is memory for
  Activation activation;
};

// Up to TOKENS sorted pairs of one expert.
struct Tile {
  int first, expert, count;

  __device__ __forceinline__ Tile(int2 packed)
      : first(packed.x), expert(packed.y >> 16), count(packed.y & 0xFFFF) {}
};

// Iterates over the work of a cluster, or of a CTA that has none, without a division for every tile. Neighbours have
// the same pairs, or the same expert. `zero` is 0. As the compiler does not know that, it does not move `ahead` to
// uniform registers, for which it would wait at once.
struct Work {
  int2 tile, ahead;  // the next tile, loaded one tile ahead to hide its latency
  int row_pair;
  int next_tile;     // number of the next tile

  // After the kernel that has written the tiles.
  __device__ __forceinline__ Work(const Params& p, int zero)
      : next_tile(blockIdx.x / CLUSTER / p.row_pairs),
        next_row_pair(blockIdx.x / CLUSTER % p.row_pairs),
        tiles_ahead(gridDim.x / CLUSTER / p.row_pairs),
        row_pairs_ahead(gridDim.x / CLUSTER % p.row_pairs),
        num_tiles(__ldcg(p.num_tiles)),
        zero(zero) {
    // Before it is known whether there are so many, so that both loads are under way; otherwise what it finds is not used.
    ahead = __ldcg(p.tiles + min(next_tile, p.max_tiles - 1) + zero);
  }

  __device__ __forceinline__ bool next(const Params& p) {
    if (next_tile >= num_tiles) return false;
    tile = ahead;
    row_pair = next_row_pair;
    next_tile += tiles_ahead;
    next_row_pair += row_pairs_ahead;
    if (next_row_pair >= p.row_pairs) next_row_pair -= p.row_pairs, next_tile++;
    load(p);
    return true;
  }

 private:
  int next_row_pair, tiles_ahead, row_pairs_ahead, num_tiles, zero;

  __device__ __forceinline__ void load(const Params& p) {
    if (next_tile < num_tiles) ahead = __ldcg(p.tiles + next_tile + zero);
  }
};

// Always 0, for there are steps; the compiler does not know.
__device__ __forceinline__ int hidden_zero(const Params& p) { return (int)(threadIdx.x % 32) >= 32 + p.steps; }

// First tile of 16 rows of a CTA, or of a half of its rows.
__device__ __forceinline__ int first_tile(int row_pair, int rank) { return (2 * row_pair + rank) * CTA_TILES; }
