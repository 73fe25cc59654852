// One of the two products of a mixture-of-experts layer, for many tokens, on SM90; weights as loaded, NVFP4 or MXFP4.
//
//   GATED      middle[i, f] = activation(gate_f x[i], up_f x[i]), of the expert of sorted pair i
//   otherwise  out[i, n] = W_n middle[i] + bias_n
//
// Computed transposed, W x^T, as in linear/w4a16/gemm_sm90: W is A of `wgmma`, unpacked in registers, x^T is B, in
// shared memory. x is sorted by expert (sort.cu), so that tiles of tokens are boxes of TMA.
//
//   Tile       64 rows of W for each of two warpgroups x up to TOKENS tokens of one expert, 128 k at a time. Gated, a
//              warp has 8 rows of gate and the 8 of up that belong to them: the activation needs no other thread. An
//              expert's last tile has narrower matmuls if these suffice.
//   Loads      by a producer warpgroup: x by TMA with 128-byte swizzle to a ring of stages of 64 k, W by TMA with
//              64-byte swizzle, 128 k for every second stage, block scales of all k of a tile by bulk copies of rows.
//   Clusters   Two CTAs have the same tokens: each loads half of x for both (multicast).
//   Output     goes to shared memory, transposed by `stmatrix`, and from there by TMA while the next tile is
//              computed, 16 tokens at a time: the sorted pairs of an expert begin at multiples of 16.
//   Sums       of a token are in order of k and do not depend on the other tokens.
//
// Macros:
//   X_BF16, MX            see moe/cuda/values.cuh
//   GATED, INTERLEAVED    1 for the first product; whether its rows of gate and up alternate
//   TOKENS                16, or a multiple of 32 up to 256
//   WIDTH_STEP            tokens of matmuls are its multiples up to TOKENS
//   STAGES                of 64 k in the ring, an even number, at least 4
//   CTAS                  per SM: 1, 2 or 3
//   SCALE_SLOTS           tiles whose block scales have room: 1 or 2

#include "linear/w4a16/gemm_sm90/wgmma.cuh"
#include "moe/cuda/gemm_sm90/loader.cuh"
#include "moe/cuda/gemm_sm90/store.cuh"
#include "moe/cuda/values.cuh"

// A lane's block scales of a row and a step: two bytes, or one.
__device__ __forceinline__ u32 load_scales(u32 address) {
  u32 y;
#if MX
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(y) : "r"(address));
#else
  asm volatile("{.reg .u16 x; ld.shared.u16 x, [%1]; cvt.u32.u16 %0, x;}" : "=r"(y) : "r"(address));
#endif
  return y;
}

// A worker's part of all tiles.
struct Worker {
  const Params& p;
  u32 shared;
  Barriers barriers;
  Place place;
  u32 peer_empty, weights[2], lane_scale;
  PipelineState state;  // of the next matmuls
  u32 read;             // byte offset of the last multiplied stage's barrier

  __device__ __forceinline__ Worker(const Params& p, u32 shared, const Barriers& barriers, int rank)
      : p(p), shared(shared), barriers(barriers), place(rank) {
    peer_empty = map_to_rank(barriers.empty, rank ^ 1);
#pragma unroll
    for (int i = 0; i < 2; i++) weights[i] = shared + OFF_WEIGHT + place.weight_offset(i);
    lane_scale = shared + OFF_SCALE + place.lane % 4 * (32 / BLOCK);
  }

  // A stage that was read is released by all lanes in this CTA, and by one lane per warp in the other CTA, which
  // writes x here, too (multicast).
  __device__ __forceinline__ void release(u32 barrier) const {
    barrier_arrive(barriers.empty + barrier);
    if (place.lane == 0) barrier_arrive_mapped(peer_empty + barrier);
  }

  // The sums of a tile with up to WIDTH tokens.
  template <int WIDTH>
  __device__ __forceinline__ void multiply_tile(int slot, float* sums) {
    const u32 row_bytes = p.k / BLOCK;
    const u32 scales = lane_scale + slot * ROWS * row_bytes;
    const u32 upper_scale = scales + place.scale_rows[0] * row_bytes;
    const u32 lower_scale = scales + place.scale_rows[1] * row_bytes;
    u32 a[2][MATMULS][4];
    uint4 upper, lower;
    u32 upper_bytes, lower_bytes;  // block scales
    Scales factors;
    // Waits for a step's weights, and for half of its x; `next` is its first stage.
    auto fetch = [&](const PipelineState& next, int step) {
      barrier_wait(barriers.full + 8 * next.stage, next.parity);
      upper = load16(weights[0] + next.stage / 2 * WEIGHT_BYTES);
      lower = load16(weights[1] + next.stage / 2 * WEIGHT_BYTES);
      // Beyond K lie other bytes, which may be NaN.
      const bool exists = step * 128 + place.lane % 4 * 32 < p.k;
      const u32 above = load_scales(upper_scale + step * STEP_SCALES);
      const u32 below = load_scales(lower_scale + step * STEP_SCALES);
      upper_bytes = exists ? above : 0, lower_bytes = exists ? below : 0;
    };
    // Unpacks the operands of half a step, from two words of each row.
    auto unpack = [&](int half) {
      if (half == 0) factors.unpack(upper_bytes, lower_bytes);
      factors.operands(a[half], half ? upper.z : upper.x, half ? lower.z : lower.x, 2 * half);
      factors.operands(a[half] + 2, half ? upper.w : upper.y, half ? lower.w : lower.y, 2 * half + 1);
    };
    // The matmuls of half a step. While they run, the operands of the next half are unpacked (two buffers).
    auto multiply = [&](int half, bool first, int next_step) {
      const u32 x = x_descriptor(shared + state.stage * X_BYTES), done = read;
      read = 8 * state.stage;
      state.next();
      if (half == 1 && next_step < p.steps) fetch(state, next_step);
      wgmma_wait();
      if (!first) release(done);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < MATMULS; j++) wgmma<WIDTH>(sums, a[half][j], x + 2 * j, !first || j > 0);
      wgmma_commit();
    };
    fetch(state, 0);
    unpack(0);
    for (int step = 0; step < p.steps; step++) {
      multiply(0, step == 0, 0);
      unpack(1);
      barrier_wait(barriers.full + 8 * state.stage, state.parity);
      const bool last = step + 1 == p.steps;
      multiply(1, false, step + 1);
      if (!last) unpack(0);
    }
    wgmma_wait();
    release(read);
  }

  // The same by the narrowest matmuls that suffice; sums do not depend on their width.
  template <int WIDTH = WIDTH_STEP>
  __device__ __forceinline__ void multiply_tile(int count, int slot, float* sums) {
    if constexpr (WIDTH < TOKENS)
      if (count > WIDTH) return multiply_tile<WIDTH + WIDTH_STEP>(count, slot, sums);
    multiply_tile<WIDTH>(slot, sums);
  }

  __device__ __forceinline__ void multiply_tiles(const TensorMap* out_map, int rank) {
    Work work(p);
    ScaleSlot at;
    for (; work.next(p); at.next()) {
      const Tile tile(work.tile);
      const Vectors vectors(p, tile.expert, work.row_pair, place);
      float sums[VALUES];
      barrier_wait(barriers.scale_full + 8 * at.slot, at.parity);
      multiply_tile(tile.count, at.slot, sums);
      barrier_arrive(barriers.scale_empty + 8 * at.slot);
      store(p, tile, work.row_pair, rank, vectors, place, out_map, shared, sums);
    }
    wait_for_stores();
  }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, CTAS)
    moe_gemm(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap x_map,
             const __grid_constant__ TensorMap out_map, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];  // period of the swizzle
  const u32 base = shared_address(shared);
  const Barriers barriers(base);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same for a warp
  if (threadIdx.x == 96) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(barriers.full + 8 * i, 1);
      barrier_init(barriers.empty + 8 * i, WORKERS + WORKERS / 32);  // see multiply_tiles
    }
    for (int i = 0; i < SCALE_SLOTS; i++) {
      barrier_init(barriers.scale_full + 8 * i, 1);
      barrier_init(barriers.scale_empty + 8 * i, WORKERS);
    }
    fence_barrier_init();
  }
  if (threadIdx.x == 0) prefetch_map(&weight_map);
  if (threadIdx.x == 32) prefetch_map(&x_map);
  if (threadIdx.x == 128) prefetch_map(&out_map);
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();
  // The sort kernel lists the tiles. gate_up must wait for it here; it has ended before down starts.
  if (GATED) wait_for_previous();
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
    const Loader loader{p, base, barriers, (int)cluster_rank()};
    if (warp == 0) {
      if (elect_one()) loader.load_weights(&weight_map);
    } else if (warp == 1) {
      if (!GATED) wait_for_previous();
      if (elect_one()) loader.load_x(&x_map);
    } else if (warp == 2) {
      if (elect_one()) loader.load_scales();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WORKER_REGISTERS));
    if (!GATED) wait_for_previous();
    const int rank = cluster_rank();
    Worker(p, base, barriers, rank).multiply_tiles(&out_map, rank);
  }
}
