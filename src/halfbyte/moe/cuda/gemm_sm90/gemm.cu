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
//   Loads      by a producer warpgroup: x by TMA with 128-byte swizzle to a ring of stages of 64 k, W by TMA to its own
//              ring, block scales of all k of a tile by bulk copies of rows. With up to 128
//              TOKENS, if shared memory has room, a copy takes 256 k of each row of W, a whole cache line of 128 bytes:
//              L2 needs as long for half a line.
//   Clusters   Two CTAs have the same tokens: each loads half of x for both (multicast).
//   Output     goes to shared memory, transposed by `stmatrix`, and from there by TMA while the next tile is
//              computed, 16 tokens at a time: the sorted pairs of an expert begin at multiples of 16.
//   Sums       of a token are in order of k and do not depend on the other tokens.
//
// Macros:
//   X_BF16, MX            see moe/cuda/values.cuh
//   GATED, INTERLEAVED    1 for the first product; whether its rows of gate and up alternate
//   TOKENS                16, or a multiple of 32 up to 256
//   WIDTH_STEP            a `wgmma` takes a multiple of this many tokens, up to TOKENS
//   WEIGHT_K              of a copy of W: 128, or 256, whole lines of the cache
//   WEIGHT_SLOTS          copies of W in their ring
//   STAGES                of 64 k in the ring of x, an even number, at least 4
//   CTAS                  per SM: 1, 2 or 3
//   SCALE_SLOTS           tiles whose block scales have room: 1 or 2

#include "linear/w4a16/gemm_sm90/wgmma.cuh"
#include "moe/cuda/gemm_sm90/loader.cuh"
#include "moe/cuda/gemm_sm90/store.cuh"
#include "moe/cuda/values.cuh"

// Steps that are unrolled. With MXFP4's branch for large scales, ptxas would serialize the matmuls of two.
constexpr int UNROLLED_STEPS = MX ? 1 : WEIGHT_STEPS;

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
  u32 peer_empty, weights, lane_scale, first_x;
  WeightState w;  // the slot that is read
  XState x;       // the step that is multiplied
  u32 read;       // byte offset of the last multiplied stage's barrier

  __device__ __forceinline__ Worker(const Params& p, u32 shared, const Barriers& barriers, int rank)
      : p(p), shared(shared), barriers(barriers), place(rank) {
    peer_empty = map_to_rank(barriers.empty, rank ^ 1);
    weights = shared + OFF_WEIGHT + place.weight_offset();
    first_x = x_descriptor(shared);
    lane_scale = shared + OFF_SCALE + place.lane % 4 * (32 / BLOCK);
  }

  // One lane releases a warp's stage of x, which its matmuls have read, in both CTAs: both write it (multicast).
  __device__ __forceinline__ void release_x(u32 barrier, bool exists) const {
    if (place.lane != 0 || !exists) return;
    barrier_arrive(barriers.empty + barrier);
    barrier_arrive_mapped(peer_empty + barrier);
  }

  // After matmuls that took what all lanes have read.
  __device__ __forceinline__ void release_weights() {
    if (place.lane == 0) barrier_arrive(barriers.weight_empty + 8 * w.stage);
    w.next();
  }

  // The sums of a tile with up to WIDTH tokens.
  template <int WIDTH>
  __device__ __forceinline__ void multiply_tile(const ScaleState& slot, float* sums) {
    const u32 row_bytes = p.k / BLOCK;
    const u32 scales = lane_scale + slot.stage * ROWS * row_bytes;
    const u32 upper_scale = scales + place.scale_rows[0] * row_bytes;
    const u32 lower_scale = scales + place.scale_rows[1] * row_bytes;
    u32 a[2][MATMULS][4];
    uint4 upper, lower;
    u32 upper_bytes, lower_bytes;  // block scales
    Scales factors;
    // Waits for a step's weights and reads them; `part` is the step's in its slot.
    auto fetch = [&](int step, int part) {
      if (part == 0) barrier_wait(barriers.weight_full + 8 * w.stage, w.parity);
      const u32 address = (weights ^ part * 64) + w.stage * WEIGHT_BYTES;
      upper = load16(address);
      lower = load16(Place::second_row(address));
      upper_bytes = load_scales(upper_scale + step * STEP_SCALES);
      lower_bytes = load_scales(lower_scale + step * STEP_SCALES);
    };
    // Unpacks the operands of half a step, from two words of each row.
    auto unpack = [&](int step, int half) {
      if (half == 0) {
#if MX
        // Beyond K lie other bytes. As MXFP4's scales they may be NaN; NVFP4's are numbers (Scales), and W is zero there.
        const int lane_steps = (p.k + 127 - place.lane % 4 * 32) / 128;
        if (step >= lane_steps) upper_bytes = lower_bytes = 0;
#endif
        factors.unpack(upper_bytes, lower_bytes);
      }
      factors.operands(a[half], half ? upper.z : upper.x, half ? lower.z : lower.x, 2 * half);
      factors.operands(a[half] + 2, half ? upper.w : upper.y, half ? lower.w : lower.y, 2 * half + 1);
    };
    // The matmuls of half a step. While they run, the operands of the next half are unpacked (two buffers).
    auto multiply = [&](int half, bool first) {
      const u32 operand = first_x + (2 * x.stage + half) * (X_BYTES / 16);
      wgmma_wait();
      release_x(read, !first);
      read = 16 * x.stage + 8 * half;
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < MATMULS; j++) wgmma<WIDTH>(sums, a[half][j], operand + 2 * j, !first || j > 0);
      wgmma_commit();
    };
    fetch(0, 0);
    unpack(0, 0);
    for (int begin = 0; begin < p.steps; begin += WEIGHT_STEPS) {
#pragma unroll UNROLLED_STEPS
      for (int part = 0; part < WEIGHT_STEPS; part++) {
        const int step = begin + part;
        const bool last = step + 1 == p.steps;
        barrier_wait(barriers.full + 8 * x.stage, x.parity);
        multiply(0, step == 0);
        if (part == WEIGHT_STEPS - 1) release_weights();
        unpack(step, 1);
        if (!last) fetch(step + 1, (part + 1) % WEIGHT_STEPS);
        multiply(1, false);
        x.next();
        if (last) break;
        unpack(step + 1, 0);
      }
    }
    // A row's last half line.
    if (p.steps % WEIGHT_STEPS) release_weights();
    barrier_arrive(barriers.scale_empty + 8 * slot.stage);
    wgmma_wait();
    release_x(read, true);
  }

  // The same by the narrowest matmuls that suffice; sums do not depend on their width.
  template <int WIDTH = WIDTH_STEP>
  __device__ __forceinline__ void multiply_tile(int count, const ScaleState& slot, float* sums) {
    if constexpr (WIDTH < TOKENS)
      if (count > WIDTH) return multiply_tile<WIDTH + WIDTH_STEP>(count, slot, sums);
    multiply_tile<WIDTH>(slot, sums);
  }

  __device__ __forceinline__ void multiply_tiles(const TensorMap* out_map, int rank) {
    Work work(p);
    ScaleState at;
    for (; work.next(p); at.next()) {
      const Tile tile(work.tile);
      const Vectors vectors(p, tile.expert, work.row_pair, place);
      float sums[VALUES];
      barrier_wait(barriers.scale_full + 8 * at.stage, at.parity);
      multiply_tile(tile.count, at, sums);
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
    for (int i = 0; i < STAGES / 2; i++) barrier_init(barriers.full + 8 * i, 1);
    for (int i = 0; i < STAGES; i++) barrier_init(barriers.empty + 8 * i, 2 * WORKERS / 32);
    for (int i = 0; i < WEIGHT_SLOTS; i++) {
      barrier_init(barriers.weight_full + 8 * i, 1);
      barrier_init(barriers.weight_empty + 8 * i, WORKERS / 32);
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
