// The sum over a token's experts in the second product, for few pairs: the warp that computes a tile for the last
// of the entries adds all tokens' results of that tile's rows. It saves a launch, and what its start waits for: the end of
// all CTAs. Results are rounded and added as by sum.cu, in the order of a token's ids: which warp is the last changes no
// bits.

#pragma once
#include "moe/cuda/few.cuh"
#include "moe/cuda/loader.cuh"

#define RESULTS 8  // loads in flight

// Adds a token's results of two rows of W.
__device__ __forceinline__ u32 sum_of_token(const Params& p, u32 exist, int token, int row) {
  const int top_k = p.pairs.top_k;
  float sum[2] = {};
#pragma unroll 1
  for (int first = 0; first < top_k; first += RESULTS) {
    u32 x[RESULTS];
#pragma unroll
    for (int i = 0; i < RESULTS; i++) {
      const int pair = token * top_k + first + i;
      x[i] = 0;
      if (first + i < top_k && exist >> pair & 1) x[i] = __ldcg((const u32*)(p.out + (u64)pair * N + row));
    }
#pragma unroll
    for (int i = 0; i < RESULTS; i++) sum[0] += lower_to_float(x[i] & 0xFFFF), sum[1] += upper_to_float(x[i]);
  }
  return pack_pair(sum[0], sum[1]);
}

// Called by a whole warp.
__device__ __forceinline__ void sum_tile(const Params& p, u32 exist, int tile) {
  for (int at = threadIdx.x & 31; at < p.pairs.count / p.pairs.top_k * 8; at += 32) {
    const int token = at / 8, row = tile * 16 + at % 8 * 2;
    *(u32*)(p.sum + (u64)token * N + row) = sum_of_token(p, exist, token, row);
  }
}

// Called by all lanes of all warps, when the warp's tiles are written. Each lane passes another one of these tiles; TILES
// or more for none. Tickets count a tile's entries; the first product has made them 0.
__device__ __forceinline__ void sum_last_tiles(const Params& p, u32 exist, int entries, int tile) {
  __syncwarp();
  __threadfence();
  const bool is_last = tile < TILES && atomicAdd(p.tickets + tile, 1) == entries - 1;
  u32 lasts = __ballot_sync(~0u, is_last);
  if (!lasts) return;
  __threadfence();
  __syncwarp();
#pragma unroll 1
  for (; lasts; lasts &= lasts - 1) sum_tile(p, exist, __shfl_sync(~0u, tile, __ffs(lasts) - 1));
}

// Where no pair has an expert.
__device__ __forceinline__ void write_zeros(const Params& p) {
  const int words = p.pairs.count / p.pairs.top_k * (N / 2);
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < words; i += gridDim.x * THREADS) ((u32*)p.sum)[i] = 0;
}

// Called by all threads of the first product, after its wait.
__device__ __forceinline__ void clear_tickets(const Params& p) {
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < p.num_tickets; i += gridDim.x * THREADS) p.tickets[i] = 0;
}
