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

  // Waits until all workers have read the previous contents of a stage.
  __device__ __forceinline__ void wait_for_stage(const PipelineState& state) const {
    barrier_wait(barriers.empty + 8 * state.stage, state.parity ^ 1);
  }

  // The barriers expect all bytes of their stages, including those of x.
  __device__ __forceinline__ void load_weights(const TensorMap* map) const {
    Work work(p);
    PipelineState state;
    while (work.next(p)) {
      const int expert = Tile(work.tile).expert;
      for (int step = 0; step < p.steps; step++) {
        wait_for_stage(state);
        const u32 barrier = barriers.full + 8 * state.stage;
        const u32 to = shared + OFF_WEIGHT + state.stage / 2 * WEIGHT_BYTES;
        barrier_expect(barrier, X_BYTES + WEIGHT_BYTES);
#pragma unroll
        for (int run = 0; run < RUNS; run++)
          copy_weights(to + run * (RUN_ROWS * 64), map, step * 64, run_begin(work.row_pair, rank, run), expert,
                       barrier);
        state.next();
        wait_for_stage(state);
        barrier_expect(barriers.full + 8 * state.stage, X_BYTES);
        state.next();
      }
    }
  }

  __device__ __forceinline__ void load_x(const TensorMap* map) const {
    Work work(p);
    PipelineState state;
    while (work.next(p)) {
      const Tile tile(work.tile);
      // Tokens of another expert may follow; their results are not written. If the tile has at most TOKENS / 2
      // tokens, both CTAs load the first half; that is faster than loading unused rows.
      const int token = tile.first + (tile.count > TOKENS / 2 ? rank * (TOKENS / 2) : 0);
      for (int stage = 0; stage < 2 * p.steps; stage++, state.next()) {
        wait_for_stage(state);
        copy_x(shared + state.stage * X_BYTES + rank * (X_BYTES / 2), map, stage * 64, token,
               barriers.full + 8 * state.stage);
      }
    }
    // Waits for the other CTA's last arrivals at barriers here, before this CTA may exit.
#pragma unroll 1
    for (int i = 0; i < STAGES; i++, state.next()) wait_for_stage(state);
    // Not before the last matmul: otherwise all CTAs of the next kernel would start on the few SMs whose CTAs
    // have ended.
    allow_next();
  }

  // Rows lie next to each other, so that copies are aligned though rows need not be.
  __device__ __forceinline__ void load_scales() const {
    const u32 row_bytes = p.k / BLOCK;
    Work work(p);
    ScaleSlot at;
    for (; work.next(p); at.next()) {
      const u32 barrier = barriers.scale_full + 8 * at.slot, to = shared + OFF_SCALE + at.slot * ROWS * row_bytes;
      const u8* const expert = p.scales + (u64)Tile(work.tile).expert * p.n * row_bytes;
      const int rows = GATED ? p.n / 2 : p.n;
      u32 runs = 0;
#pragma unroll
      for (int run = 0; run < RUNS; run++) runs += run_begin(work.row_pair, rank, run) < rows;
      barrier_wait(barriers.scale_empty + 8 * at.slot, at.parity ^ 1);
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
