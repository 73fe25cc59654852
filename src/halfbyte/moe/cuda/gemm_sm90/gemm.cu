// One of the two products of a mixture-of-experts layer, for many tokens, on SM90; NVFP4 or MXFP4 weights
// in the order of packed.py.
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
//   Loads      by a producer warpgroup: x by TMA with 128-byte swizzle to a ring of stages of 64 k, W with its block scales
//              by bulk copies of parts, 16 rows x 128 k, to its own ring.
//   Clusters   Two CTAs have the same tokens: each loads half of x for both (multicast).
//   Output     goes to shared memory, transposed by `stmatrix`, and from there by TMA while the next tile is
//              computed, 16 tokens at a time: the sorted pairs of an expert begin at multiples of 16.
//   Sums       of a token are in order of k and do not depend on the other tokens.
//
// Macros:
//   X_BF16, MX            see moe/cuda/values.cuh
//   GATED, INTERLEAVED    1 for the first product; whether biases of gate and up alternate
//   TOKENS                a multiple of 32 up to 256; narrow.cu has tiles of 16
//   WIDTH_STEP            a `wgmma` takes a multiple of this many tokens, up to TOKENS
//   WEIGHT_SLOTS          steps of 128 k in the ring of W
//   STAGES                of 64 k in the ring of x, an even number, at least 4
//   CTAS                  per SM: 1 or 2

#include "kernels/runtime/wgmma.cuh"
#include "moe/cuda/gemm_sm90/loader.cuh"
#include "moe/cuda/gemm_sm90/store.cuh"

// A worker's part of all tiles.
struct Worker {
  const Params& p;
  u32 shared;
  Barriers barriers;
  Place place;
  u32 peer_empty, weights, lane_scale, first_x, exponent;
  int zero;       // see Work
  WeightState w;  // the slot that is read
  XState x;       // the step that is multiplied
  u32 read;       // byte offset of the last multiplied stage's barrier

  __device__ __forceinline__ Worker(const Params& p, u32 shared, const Barriers& barriers, int rank, int zero)
      : p(p), shared(shared), barriers(barriers), zero(zero) {
    peer_empty = map_to_rank(barriers.empty, rank ^ 1);
    const u32 tile = shared + OFF_WEIGHT + place.tile() * PART_BYTES;
    weights = tile + SCALE_BYTES + place.lane * 16;
    lane_scale = tile + scale_offset(place.lane);
    first_x = x_descriptor(shared);
    exponent = SCALE_EXPONENT | rank >> 1;  // hides it from the compiler, see unpack_scales
  }

  // One lane releases a warp's stage of x, which its matmuls have read, in both CTAs: both write it (multicast).
  __device__ __forceinline__ void release_x(u32 barrier, bool exists) const {
    if (place.lane != 0 || !exists) return;
    barrier_arrive(barriers.empty + barrier);
    barrier_arrive_mapped(peer_empty + barrier);
  }

  // When this lane has read its part.
  __device__ __forceinline__ void release_weights() {
    barrier_arrive(barriers.weight_empty + 8 * w.stage);
    w.next();
  }

  // The sums of a tile with up to WIDTH tokens.
  template <int WIDTH>
  __device__ __forceinline__ void multiply_tile(float* sums) {
    u32 a[2][MATMULS][4];
    uint4 chunks[2];
    u32 scale_word;
    Scales scales;
    // Waits for a step's weights and reads them.
    auto fetch = [&] {
      const u32 offset = w.stage * WEIGHT_BYTES;
      barrier_wait(barriers.weight_full + 8 * w.stage, w.parity);
      chunks[0] = load16(weights + offset);
      chunks[1] = load16(weights + offset + CHUNK_BYTES);
      scale_word = load_shared_word(lane_scale + offset);
    };
    // Unpacks the operands of half a step, a chunk.
    auto unpack = [&](int half) {
      if (half == 0) scales.unpack(scale_word, exponent);
      const uint4 words = chunks[half];
      scales.operands(a[half], words.x, words.z, half);
      scales.operands(a[half] + 2, words.y, words.w, half);
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
    fetch();
    unpack(0);
#pragma unroll 1
    for (int step = 0; step < p.steps; step++) {
      const bool last = step + 1 == p.steps;
      barrier_wait(barriers.full + 8 * x.stage, x.parity);
      multiply(0, step == 0);
      release_weights();
      unpack(1);
      if (!last) fetch();
      multiply(1, false);
      x.next();
      if (!last) unpack(0);
    }
    wgmma_wait();
    release_x(read, true);
  }

  // The same by the narrowest matmuls that suffice; sums do not depend on their width.
  template <int WIDTH = WIDTH_STEP>
  __device__ __forceinline__ void multiply_tile(int count, float* sums) {
    if constexpr (WIDTH < TOKENS)
      if (count > WIDTH) return multiply_tile<WIDTH + WIDTH_STEP>(count, sums);
    multiply_tile<WIDTH>(sums);
  }

  __device__ __forceinline__ void multiply_tiles(const TensorMap* out_map, int rank) {
    Work work(p, zero);
    while (work.next(p)) {
      // Known to be the same for a warp, now that it is needed.
      const Tile tile(make_int2(__shfl_sync(~0u, work.tile.x, 0), __shfl_sync(~0u, work.tile.y, 0)));
      Vectors<GATED> vectors(p, tile.expert, first_tile(work.row_pair, rank) + place.tile(), place.lane);
      float sums[VALUES];
      multiply_tile(tile.count, sums);
      vectors.complete();
      wait_for_strips(place.group);
      store(p, tile, work.row_pair, rank, vectors, place, out_map, shared, sums);
    }
    wait_for_stores();
  }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, CTAS)
    moe_gemm(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap out_map,
             const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];  // period of the swizzle
  const u32 base = shared_address(shared);
  const Barriers barriers(base);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same for a warp
  if (threadIdx.x == 96) {
    for (int i = 0; i < STAGES / 2; i++) barrier_init(barriers.full + 8 * i, 1);
    for (int i = 0; i < STAGES; i++) barrier_init(barriers.empty + 8 * i, 2 * WORKERS / 32);
    for (int i = 0; i < WEIGHT_SLOTS; i++) {
      barrier_init(barriers.weight_full + 8 * i, 1);
      barrier_init(barriers.weight_empty + 8 * i, WORKERS);
    }
    fence_barrier_init();
  }
  if (threadIdx.x == 32) prefetch_map(&x_map);
  if (threadIdx.x == 128) prefetch_map(&out_map);
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();
  // The sort kernel lists the tiles. gate_up must wait for it here; it has ended before down starts.
  if (GATED) wait_for_previous();
  const int zero = hidden_zero(p);
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
    const Loader loader{p, base, barriers, (int)cluster_rank(), zero};
    if (warp == 0) {
      if (elect_one()) loader.load_weights();
    } else if (warp == 1) {
      if (!GATED) wait_for_previous();
      if (elect_one()) loader.load_x(&x_map);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WORKER_REGISTERS));
    if (!GATED) wait_for_previous();
    const int rank = cluster_rank();
    Worker(p, base, barriers, rank, zero).multiply_tiles(&out_map, rank);
  }
}
