// One of the two products of a mixture-of-experts layer, for many tokens, on SM90; weights as loaded, NVFP4 or MXFP4.
//
//   GATED      middle[i, f] = activation(gate_f x[i], up_f x[i]), of the expert of sorted pair i
//   otherwise  out[i, n] = W_n middle[i] + bias_n
//
// Computed transposed, W x^T, as in linear/w4a16/gemm_sm90: W is A of `wgmma`, unpacked in registers, x^T is B, in
// shared memory. x is sorted by expert (sort.cu), so that tiles of tokens are boxes of TMA.
//
//   Tile       64 rows of W for each of two warpgroups x TOKENS tokens of one expert, 128 k at a time. Gated, a warp
//              has 8 rows of gate and the 8 of up that belong to them: the activation needs no other thread.
//   Loads      by a producer warpgroup: x by TMA with 128-byte swizzle to a ring of stages of 64 k, W by TMA with
//              64-byte swizzle, 128 k for every second stage, block scales of all k of a tile by bulk copies of rows.
//   Clusters   Two CTAs have the same tokens: each loads half of x for both (multicast).
//   Output     goes to shared memory, transposed by `stmatrix`, and from there by TMA while the next tile is
//              computed, 16 tokens at a time: the sorted pairs of an expert begin at multiples of 16.
//   Sums       of a token are in order of k and do not depend on the other tokens.
//
// Macros:
//   X_BF16, MX            see moe/cuda/values.cuh
//   GATED, INTERLEAVED    1 for the first product; whether its rows of gate and up take turns
//   TOKENS                a multiple of 32 from 64 to 256
//   STAGES                of 64 k in the ring, an even number, at least 4
//   SCALE_SLOTS           tiles whose block scales have room: 1 or 2

#include "linear/w4a16/gemm_sm90/ring.cuh"
#include "linear/w4a16/gemm_sm90/wgmma.cuh"
#include "moe/cuda/gemm_sm90/work.cuh"
#include "moe/cuda/routing.cuh"
#include "moe/cuda/values.cuh"

#define GROUPS 2
#define WORKERS (128 * GROUPS)
#define THREADS (WORKERS + 128)
#define VALUES (TOKENS / 2)   // accumulators per thread
#define STRIPS (TOKENS / 16)  // of 16 tokens, which are stored at a time
#define X_BYTES (TOKENS * 128)
#define WEIGHT_BYTES (ROWS * 64)              // 128 k
#define OUT_ROW_BYTES (GATED ? 64 : 128)      // of a token and a warpgroup
#define OUT_BYTES (TOKENS * OUT_ROW_BYTES)    // per warpgroup
#define OFF_OUT (STAGES * X_BYTES)
#define OFF_WEIGHT (OFF_OUT + GROUPS * OUT_BYTES)
#define OFF_BARRIERS (OFF_WEIGHT + STAGES / 2 * WEIGHT_BYTES)
#define OFF_SCALE (OFF_BARRIERS + 256)  // SCALE_SLOTS x 128 rows
#define MATMULS 4                       // per stage
#define STEP_SCALES (128 / BLOCK)       // bytes of a row
#define LOADER_REGISTERS 40
#define WORKER_REGISTERS 232

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
      // Tokens of another expert may follow; their results are not written. The second half is not needed if the
      // first one has all: it is loaded again, which is faster than another.
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

// A worker thread's two rows of W, g and g + 8 of its warp's 16.
struct Place {
  int group, warp, lane;
  int channel;        // gated: of both rows, in the pair of tiles; otherwise of the first row
  int rows[2];        // in shared memory: of weights
  int scale_rows[2];  // and of block scales

  __device__ __forceinline__ Place(int rank) {
    group = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    lane = threadIdx.x % 32;
    const int g = lane / 4;
#if GATED
    const Channel at(group * 32 + warp * 8 + g);
    channel = 32 * at.run + 16 * rank + at.place;
    rows[0] = RUN_ROWS * at.run + at.place, rows[1] = rows[0] + 16;
    scale_rows[0] = RUN_ROWS * at.run + (INTERLEAVED ? 2 : 1) * at.place;
    scale_rows[1] = scale_rows[0] + (INTERLEAVED ? 1 : 16);
#else
    rows[0] = group * 64 + warp * 16 + g, rows[1] = rows[0] + 8;
    channel = rank * ROWS + rows[0];
    scale_rows[0] = rows[0], scale_rows[1] = rows[1];
#endif
  }

  // Address of a row's 16 bytes of this lane in a slot of W, 64-byte swizzle.
  __device__ __forceinline__ u32 weight_offset(int i) const {
    return rows[i] * 64 + ((lane % 4 ^ rows[i] / 2 % 4) * 16);
  }
};

// What results need besides sums, loaded before the sums are there.
struct Vectors {
  float scale[2], bias[2];
  bool exists;  // gated: whether the channel exists

  __device__ __forceinline__ Vectors(const Params& p, int expert, int row_pair, const Place& place) {
    const int channel = row_pair * (GATED ? 128 : 2 * ROWS) + place.channel;
    exists = channel < (GATED ? p.n / 2 : p.n);
#pragma unroll
    for (int i = 0; i < 2; i++) {
#if GATED
      const int row = INTERLEAVED ? 2 * channel + i : channel + i * (p.n / 2);
#else
      const int row = channel + 8 * i;
#endif
      scale[i] = OPERAND_SCALE * (p.global_scale ? p.global_scale[expert * p.parts + i * (p.parts - 1)] : 1.0f);
      bias[i] = p.bias && row < p.n ? number_at(p.bias, (u64)expert * p.n + row, p.bias_dtype) : 0.0f;
    }
  }
};

// Writes strips of the output. Of every 8 tokens a thread has 2c, 2c + 1.
__device__ __forceinline__ void store(const Params& p, const Tile& tile, int row_pair, int rank, const Vectors& v,
                                      const Place& place, const TensorMap* map, u32 shared, const float* sums) {
  const int lane = place.lane, strips = (tile.count + 15) / 16;
  const u32 out = shared + OFF_OUT + place.group * OUT_BYTES;
  wait_for_stores();
  group_sync(place.group);
#if GATED
  // Of a token 32 channels, 64 bytes, swizzled. Lanes give the row addresses of four matrices of 8 channels: 32 tokens.
  const u32 address = out + lane * 64 + ((place.warp ^ lane / 2 % 4) * 16);
#pragma unroll
  for (int strip = 0; strip < STRIPS; strip += 2) {
    if (strip >= strips) continue;
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float* d = sums + strip * 8 + j * 4;
      float results[2];
#pragma unroll
      for (int i = 0; i < 2; i++)
        results[i] = p.activation(fmaf(d[i], v.scale[0], v.bias[0]), fmaf(d[2 + i], v.scale[1], v.bias[1]));
      pairs[j] = v.exists ? pack_pair(results[0], results[1]) : 0;
    }
    const u32 to = address + strip * (16 * 64);
#else
  // Of a token 64 rows of W, 128 bytes, swizzled. Lanes give the row addresses of four matrices: 8 tokens x 8 rows of
  // W, 8 more rows, both of 8 more tokens.
  const u32 token = (lane & 7) + (lane >> 4) * 8, chunk = 2 * place.warp + (lane >> 3 & 1);
  const u32 address = out + token * 128 + ((chunk ^ (token & 7)) * 16);
#pragma unroll
  for (int strip = 0; strip < STRIPS; strip++) {
    if (strip >= strips) continue;
    const float* d = sums + strip * 8;
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      pairs[j] = pack_pair(fmaf(d[2 * j], v.scale[j & 1], v.bias[j & 1]),
                           fmaf(d[2 * j + 1], v.scale[j & 1], v.bias[j & 1]));
    const u32 to = address + strip * (16 * 128);
#endif
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[0]),
                 "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
  }
  fence_async_proxy();
  group_sync(place.group);
  const int strip = threadIdx.x % 128;
  if (strip < strips) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"((2 * row_pair + rank) * (GATED ? 64 : ROWS) + place.group * (GATED ? 32 : 64)),
                 "r"(tile.first + strip * 16), "r"(out + strip * (16 * OUT_ROW_BYTES))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;");
  }
}

__device__ __forceinline__ void multiply_tiles(const Params& p, const TensorMap* out_map, const u8* scales, u32 shared,
                                               const Barriers& barriers) {
  const int rank = cluster_rank();
  const Place place(rank);
  const u32 row_bytes = p.k / BLOCK;
  const u32 upper_weight = shared + OFF_WEIGHT + place.weight_offset(0);
  const u32 lower_weight = shared + OFF_WEIGHT + place.weight_offset(1);
  const u32 lane_scale = place.lane % 4 * (32 / BLOCK);
  // A stage that was read is released by all lanes in this CTA, and by one lane per warp in the other CTA, which
  // writes x here, too (multicast).
  const u32 peer_empty = map_to_rank(barriers.empty, rank ^ 1);
  auto release = [&](u32 barrier) {
    barrier_arrive(barriers.empty + barrier);
    if (place.lane == 0) barrier_arrive_mapped(peer_empty + barrier);
  };
  Work work(p);
  PipelineState state;  // of the next matmuls
  ScaleSlot at;
  for (; work.next(p); at.next()) {
    const Tile tile(work.tile);
    const Vectors vectors(p, tile.expert, work.row_pair, place);
    const u8* const upper_scale = scales + (at.slot * ROWS + place.scale_rows[0]) * row_bytes + lane_scale;
    const u8* const lower_scale = scales + (at.slot * ROWS + place.scale_rows[1]) * row_bytes + lane_scale;
    float sums[VALUES];
    u32 a[2][MATMULS][4];
    uint4 upper, lower;
    u32 upper_bytes, lower_bytes;  // block scales
    Scales factors;
    // Waits for a step's weights, and for half of its x; `next` is its first stage.
    auto fetch = [&](const PipelineState& next, int step) {
      barrier_wait(barriers.full + 8 * next.stage, next.parity);
      upper = load16(upper_weight + next.stage / 2 * WEIGHT_BYTES);
      lower = load16(lower_weight + next.stage / 2 * WEIGHT_BYTES);
      // Beyond K lie other scales, which may be NaN.
      const bool exists = step * 128 + place.lane % 4 * 32 < p.k;
#if MX
      upper_bytes = exists ? upper_scale[step * STEP_SCALES] : 0;
      lower_bytes = exists ? lower_scale[step * STEP_SCALES] : 0;
#else
      upper_bytes = exists ? *(const u16*)(upper_scale + step * STEP_SCALES) : 0;
      lower_bytes = exists ? *(const u16*)(lower_scale + step * STEP_SCALES) : 0;
#endif
    };
    // Unpacks the operands of half a step, from two words of each row.
    auto unpack = [&](int half) {
      if (half == 0) factors.unpack(upper_bytes, lower_bytes);
      factors.operands(a[half], half ? upper.z : upper.x, half ? lower.z : lower.x, 2 * half);
      factors.operands(a[half] + 2, half ? upper.w : upper.y, half ? lower.w : lower.y, 2 * half + 1);
    };
    u32 read;  // byte offset of the last multiplied stage's barrier
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
      for (int j = 0; j < MATMULS; j++) wgmma(sums, a[half][j], x + 2 * j, !first || j > 0);
      wgmma_commit();
    };
    barrier_wait(barriers.scale_full + 8 * at.slot, at.parity);
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
    barrier_arrive(barriers.scale_empty + 8 * at.slot);
    wgmma_wait();
    release(read);
    store(p, tile, work.row_pair, rank, vectors, place, out_map, shared, sums);
  }
  wait_for_stores();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
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
  // The tiles are known once the kernel before the previous one has ended; gated, the previous one has written them.
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
    multiply_tiles(p, &out_map, shared + OFF_SCALE, base, barriers);
  }
}
