// Shared memory of gemm.cu, and its barriers.
//
// The macros are those of gemm.cu.

#pragma once
#include "linear/w4a16/gemm_sm90/ring.cuh"
#include "moe/cuda/gemm_sm90/work.cuh"

#define GROUPS 2
#define WORKERS (128 * GROUPS)
#define THREADS (WORKERS + 128)
#define VALUES (TOKENS / 2)   // accumulators per thread
#define STRIPS (TOKENS / 16)  // of 16 tokens, which are stored at a time
#define X_BYTES (TOKENS * 128)
#define WEIGHT_BYTES (ROWS * 64)              // 128 k
#define OUT_ROW_BYTES (GATED ? 64 : 128)      // of a token and a warpgroup
#define OUT_BYTES ((GATED && TOKENS < 32 ? 32 : TOKENS) * OUT_ROW_BYTES)  // per warpgroup; gated, it is written 32 tokens at a time
#define OFF_OUT (STAGES * X_BYTES)
#define OFF_WEIGHT (OFF_OUT + GROUPS * OUT_BYTES)
#define OFF_BARRIERS (OFF_WEIGHT + STAGES / 2 * WEIGHT_BYTES)
#define OFF_SCALE (OFF_BARRIERS + 256)  // SCALE_SLOTS x 128 rows, and as many bytes as a lane may read beyond
#define MATMULS 4                       // per stage
#define STEP_SCALES (128 / BLOCK)       // bytes of a row
// The producer gives registers to the workers. Their sum is that of the threads at the start, 168, 80 or 56 each.
#define LOADER_REGISTERS (CTAS == 1 ? 40 : CTAS == 2 ? 32 : 24)
#define WORKER_REGISTERS (CTAS == 1 ? 232 : CTAS == 2 ? 104 : 72)

struct Barriers {
  u32 full, empty, scale_full, scale_empty;

  __device__ __forceinline__ Barriers(u32 shared)
      : full(shared + OFF_BARRIERS),
        empty(full + 8 * STAGES),
        scale_full(empty + 8 * STAGES),
        scale_empty(scale_full + 8 * SCALE_SLOTS) {}
};

// A slot for block scales, and the parity of its barriers.
struct ScaleSlot {
  int slot = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++slot == SCALE_SLOTS) slot = 0, parity ^= 1;
  }
};
