// The producer warpgroup of gemm.cu.

#pragma once
#include "moe/cuda/gemm_sm90/memory.cuh"

// Loads a box of W: k, rows of a part, parts, and expert.
__device__ __forceinline__ void copy_weights(u32 to, const TensorMap* map, int k, int row, int expert, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(k), "r"(row), "r"(0), "r"(expert), "r"(barrier)
      : "memory");
}

// The producer: one thread each loads W, x and block scales.
struct Loader {
  const Params& p;
  u32 shared;
  Barriers barriers;
  int rank;

  __device__ __forceinline__ void load_weights(const TensorMap* map) const {
    Work work(p);
    WeightState at;
    while (work.next(p)) {
      const int expert = Tile(work.tile).expert;
      for (int step = 0; step < p.steps; step += WEIGHT_STEPS, at.next()) {
        const u32 barrier = barriers.weight_full + 8 * at.stage;
        const u32 to = shared + OFF_WEIGHT + at.stage * WEIGHT_BYTES;
        barrier_wait(barriers.weight_empty + 8 * at.stage, at.parity ^ 1);
        barrier_expect(barrier, WEIGHT_BYTES);
#pragma unroll
        for (int run = 0; run < RUNS; run++)
          copy_weights(to + run * (RUN_ROWS * WEIGHT_ROW_BYTES), map, step * 64,
                       run_begin(work.row_pair, rank, run) / (GATED ? 1 : ROW_PARTS), expert, barrier);
      }
    }
  }

  // Waits until all workers of the cluster have read the previous contents of a stage, the first or second of a step.
  __device__ __forceinline__ void wait_for_stage(const XState& at, int half) const {
    barrier_wait(barriers.empty + 16 * at.stage + 8 * half, at.parity ^ 1);
  }

  __device__ __forceinline__ void load_x(const TensorMap* map) const {
    Work work(p);
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

  // Rows lie next to each other, so that copies are aligned though rows need not be.
  __device__ __forceinline__ void load_scales() const {
    const u32 row_bytes = p.k / BLOCK;
    Work work(p);
    ScaleState at;
    for (; work.next(p); at.next()) {
      const u32 barrier = barriers.scale_full + 8 * at.stage, to = shared + OFF_SCALE + at.stage * ROWS * row_bytes;
      const u8* const expert = p.scales + (u64)Tile(work.tile).expert * p.n * row_bytes;
      const int rows = GATED ? p.n / 2 : p.n;
      u32 runs = 0;
#pragma unroll
      for (int run = 0; run < RUNS; run++) runs += run_begin(work.row_pair, rank, run) < rows;
      barrier_wait(barriers.scale_empty + 8 * at.stage, at.parity ^ 1);
      barrier_expect(barrier, runs * RUN_ROWS * row_bytes);
#pragma unroll
      for (int run = 0; run < RUNS; run++) {
        const int row = run_begin(work.row_pair, rank, run);
        if (row >= rows) continue;
#if GATED && !INTERLEAVED
#pragma unroll
        for (int part = 0; part < 2; part++)
          copy_bulk(to + (run * RUN_ROWS + part * 16) * row_bytes, expert + (u64)(part * rows + row) * row_bytes,
                    16 * row_bytes, barrier);
#else
        copy_bulk(to + run * RUN_ROWS * row_bytes, expert + (u64)(GATED ? 2 * row : row) * row_bytes,
                  RUN_ROWS * row_bytes, barrier);
#endif
      }
    }
  }
};
