// Shared memory of gemm.cu and narrow.cu, and their barriers.
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
#define WEIGHT_BYTES (CTA_TILES * PART_BYTES)
#if TOKENS > 16
#define OUT_BYTES (TOKENS * (GATED ? 64 : 128))  // of a warpgroup
#define OFF_OUT (STAGES * X_BYTES)
#define OFF_WEIGHT (OFF_OUT + GROUPS * OUT_BYTES)
#define OFF_BARRIERS (OFF_WEIGHT + WEIGHT_SLOTS * WEIGHT_BYTES)
#else
#define OUT_BYTES 2048  // of a warpgroup and half of the rows: 16 tokens, or gated 32, which are written at a time
#define SLOT_BYTES (2 * WEIGHT_BYTES + 2 * X_BYTES)  // a step of W and of x
#define OFF_OUT (WEIGHT_SLOTS * SLOT_BYTES)
#define OFF_BARRIERS (OFF_OUT + 2 * GROUPS * OUT_BYTES)
#endif
#define BARRIER_BYTES 256
#define MATMULS 4                       // per stage
// The producer gives registers to the workers. Their sum is that of the threads at the start, 168 or 80 each.
#define LOADER_REGISTERS (CTAS == 1 ? 40 : 32)
#define WORKER_REGISTERS (CTAS == 1 ? 232 : 104)

#if TOKENS > 16
// The two stages of x of a step are waited for together, and released one by one.
struct Barriers {
  u32 full, empty, weight_full, weight_empty;

  __device__ __forceinline__ Barriers(u32 shared)
      : full(shared + OFF_BARRIERS),
        empty(full + 8 * (STAGES / 2)),
        weight_full(empty + 8 * STAGES),
        weight_empty(weight_full + 8 * WEIGHT_SLOTS) {
    static_assert(8 * (STAGES / 2 + STAGES + 2 * WEIGHT_SLOTS) <= BARRIER_BYTES, "barriers fit");
  }
};

typedef RingState<STAGES / 2> XState;
typedef RingState<WEIGHT_SLOTS> WeightState;
#else
struct SlotBarriers {
  u32 full, empty;

  __device__ __forceinline__ SlotBarriers(u32 shared) : full(shared + OFF_BARRIERS), empty(full + 8 * WEIGHT_SLOTS) {}
};

typedef RingState<WEIGHT_SLOTS> SlotState;
#endif
