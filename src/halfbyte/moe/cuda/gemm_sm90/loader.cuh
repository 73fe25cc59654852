// The producer warpgroup of gemm.cu.

#pragma once
#include "moe/cuda/gemm_sm90/memory.cuh"

// The producer: one thread each loads W and x.
struct Loader {
  const Params& p;
  u32 shared;
  Barriers barriers;
  int rank;
  int zero;  // see Work

  __device__ __forceinline__ void load_weights() const {
    Work work(p, zero);
    WeightState at;
    while (work.next(p)) {
      const int first = first_tile(work.row_pair, rank), tiles = min(max(p.matrix_tiles - first, 0), CTA_TILES);
      const u8* from = p.weight + ((u64)Tile(work.tile).expert * p.matrix_tiles + first) * p.tile_bytes;
      for (int step = 0; step < p.steps; step++, at.next()) {
        const u32 barrier = barriers.weight_full + 8 * at.stage;
        const u32 to = shared + OFF_WEIGHT + at.stage * WEIGHT_BYTES;
        // Of the last part only one chunk may exist. What is in its place for the other is a finite number, times x = 0.
        const int bytes = min(PART_BYTES, p.tile_bytes - step * PART_BYTES);
        barrier_wait(barriers.weight_empty + 8 * at.stage, at.parity ^ 1);
        barrier_expect(barrier, tiles * bytes);
        for (int i = 0; i < tiles; i++)
          copy_bulk(to + i * PART_BYTES, from + i * p.tile_bytes + step * PART_BYTES, bytes, barrier);
      }
    }
  }

  // Waits until all workers of the cluster have read the previous contents of a stage, the first or second of a step.
  __device__ __forceinline__ void wait_for_stage(const XState& at, int half) const {
    barrier_wait(barriers.empty + 16 * at.stage + 8 * half, at.parity ^ 1);
  }

  __device__ __forceinline__ void load_x(const TensorMap* map) const {
    Work work(p, zero);
    XState at;
    while (work.next(p)) {
      const Tile tile(work.tile);
      // Tokens of another expert may follow; their results are not written. If the tile has at most TOKENS / 2
      // tokens, both CTAs load the first half; that is faster than loading unused rows.
      const int token = tile.first + (tile.count > TOKENS / 2 ? rank * (TOKENS / 2) : 0);
      for (int step = 0; step < p.steps; step++, at.next()) {
        const u32 barrier = barriers.full + 8 * at.stage;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          wait_for_stage(at, half);
          if (half == 0) barrier_expect(barrier, 2 * X_BYTES);
          copy_x(shared + (2 * at.stage + half) * X_BYTES + rank * (X_BYTES / 2), map, step * 128 + half * 64, token,
                 barrier);
        }
      }
    }
    // Waits for the other CTA's last arrivals at barriers here, before this CTA may exit.
#pragma unroll 1
    for (int i = 0; i < STAGES / 2; i++, at.next()) wait_for_stage(at, 0), wait_for_stage(at, 1);
    // Not before the last matmul: otherwise all CTAs of the next kernel would start on the few SMs whose CTAs
    // have ended.
    allow_next();
  }
};
