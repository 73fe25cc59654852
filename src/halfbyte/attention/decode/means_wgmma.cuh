// Biases by K's means (mean_operands.cuh) for decode_wgmma.cu: the warps compute those of 16 segments at a time, and
// keep them in shared memory.

#pragma once
#include "attention/decode/mean_operands.cuh"
#include "attention/decode/wgmma_operands.cuh"

struct Bias {
#if SEGMENT
  int first = -16;  // segment
  float scale;      // from q . mean to a logit

  __device__ __forceinline__ explicit Bias(const Params& p) : scale(p.softmax_scale * (SOFTCAP ? 1.0f : LOG2E)) {}

  // Copies the biases of a tile's subtiles to where `of` reads them. All threads call it, and wait afterwards.
  __device__ __forceinline__ void publish(const Params& p, const WorkItem& item, int head, int position) {
    const int segment = position / SEGMENT, last = (position + TILE - 64) / SEGMENT;
    if (segment < first || last >= first + 16) {
      first = segment;
      fill(p, item, head);
    }
    const int subtile = threadIdx.x / COLS;
    if (subtile >= SUBTILES) return;
    const int row = (position + 64 * subtile) / SEGMENT - first;
    u32 x;
    load_words<1>(&x, ring_address() + OFF_TABLE + (row * COLS + threadIdx.x % COLS) * 4);
    store_float(ring_address() + OFF_BIAS + 4 * threadIdx.x, __int_as_float(x));
  }

  // Computes the biases of 16 segments; a warp has every fourth group of eight columns.
  __device__ __forceinline__ void fill(const Params& p, const WorkItem& item, int head) {
    constexpr int LOADED = PAIRS < 32 ? PAIRS : 32;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
    __syncthreads();  // all have read the earlier ones
#pragma unroll 1
    for (int n = warp; n < N_TILES; n += WARPS) {
      const u64 row = query_row(p, item, head, item.col_tile * COLS + 8 * n + g);
      ProductSums<1> sums;
#pragma unroll 1
      for (int pair = 0; pair < PAIRS; pair += LOADED) {
        Angles<LOADED> angles;
        angles.load(p, first, pair);
#pragma unroll
        for (int i = 0; i < LOADED; i += 16) add_pairs(p, sums, angles, i / 8, row, head, pair + i);
      }
#pragma unroll
      for (int i = 0; i < 2; i++)
        store_float2(ring_address() + OFF_TABLE + ((g + 8 * i) * COLS + 8 * n + 2 * c) * 4, sums.total(2 * i) * scale,
                     sums.total(2 * i + 1) * scale);
    }
    __syncthreads();
  }

  __device__ __forceinline__ static float2 of(int subtile, int n, int c) {
    return load_float2(ring_address() + OFF_BIAS + 4 * (subtile * COLS + 8 * n + 2 * c));
  }
#else
  __device__ __forceinline__ explicit Bias(const Params&) {}
  __device__ __forceinline__ void publish(const Params&, const WorkItem&, int, int) {}
  __device__ __forceinline__ static float2 of(int, int, int) { return make_float2(0.0f, 0.0f); }
#endif
};
