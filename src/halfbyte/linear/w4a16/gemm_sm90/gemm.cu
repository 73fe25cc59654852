// W4A16 GEMM on SM90: y[m, n] = sum over k of x[m, k] W[n, k], W in NVFP4.
//
// Computed transposed, W x^T: W is A of `wgmma`, unpacked in registers; x^T is B, in shared memory. To unpack
// 64 x 64 values of W takes 60 instructions per thread, and as many for loads and the issue of the matmul: one
// warpgroup does so while another's matmul runs, where there are several.
//
//   Tile       64 rows of W for each of GROUPS warpgroups x TOKENS tokens, STEP of k at a time.
//   Loads      by a producer warpgroup, to a ring in shared memory: x by TMA with 128-byte swizzle, W by bulk
//              copies, in the order of packed_weight.py, so that a lane reads 16 bytes at a time. (Loads
//              of W to registers would share one scoreboard: waiting for the first would wait for the
//              last.) The first tiles of W are loaded before the previous kernel has ended.
//   Clusters   Two CTAs have the same tokens: each loads half of x for both (multicast).
//   Output     goes to shared memory, transposed by `stmatrix`, and from there by TMA while the next tile
//              is computed.
//   Split      work.cuh assigns tiles, or parts of their k, to clusters; join.cuh adds the parts.
//
// Macros:
//   X_BF16     see values.cuh
//   TOKENS     a multiple of 16 from 64 to 256; with three warpgroups, to 160, as registers allow
//   STEP       of k: 64 or 128
//   GROUPS     warpgroups that multiply: 1, 2 or 3
//   STAGES     tiles in the ring, at least 3
//   SWIGLU     1: W is gate and up, the output silu(gate x) * (up x). Of two warpgroups the first has rows of gate, the
//              second the same of up. N is a multiple of 128.

#include "linear/w4a16/values.cuh"
#include "linear/w4a16/gemm_sm90/ring.cuh"
#include "linear/w4a16/gemm_sm90/store.cuh"
#include "kernels/runtime/wgmma.cuh"

#define X_BYTES (TOKENS * STEP * 2)
#define BOXES (STEP / 64)               // of 64 k, per step: a TMA box of x, a 64 x 64 block of W
#define MATMULS (STEP / 16)             // per step
#define BLOCK_BYTES (64 * STEP / 2)     // per warpgroup and step
#define BLOCK_SCALE_BYTES (64 * STEP / 16)
#define STAGE_BYTES (X_BYTES + GROUPS * (BLOCK_BYTES + BLOCK_SCALE_BYTES))
#define OFF_OUT (STAGES * X_BYTES)
#define OFF_WEIGHT (OFF_OUT + GROUPS * OUT_BYTES)
#define OFF_SCALE (OFF_WEIGHT + STAGES * GROUPS * BLOCK_BYTES)
#define OFF_BARRIERS (OFF_SCALE + STAGES * GROUPS * BLOCK_SCALE_BYTES)
#define OFF_STAYS (OFF_BARRIERS + 16 * STAGES)  // a word per warpgroup, see exchange_sums
#define GROUP 4  // wgmmas per commit; registers do not allow more
#define THREADS (WORKERS + 128)
// Per thread. A tile of up to 128 tokens and two warpgroups starts with few, so that its CTAs find room beside those of a
// small kernel in front (512 threads of a norm of 4,096 have 16,384), and load weights while that runs. Then the producer
// gives registers to the workers; with fewer ptxas serializes wgmma.
#define LAUNCH_REGISTERS (GROUPS == 3 ? 128 : TOKENS <= 64 ? 96 : TOKENS <= 128 ? (SWIGLU ? 120 : 112) : 168)
#define LOADER_REGISTERS (GROUPS == 2 && TOKENS > 128 ? 40 : 32)
#define WORKER_REGISTERS (GROUPS == 3 ? 160 : TOKENS <= 64 ? 128 : TOKENS <= 128 ? (SWIGLU ? 160 : 152) : 232)

__device__ __forceinline__ uint2 load_shared8(u32 address) {
  uint2 y;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(y.x), "=r"(y.y) : "r"(address));
  return y;
}

// The producer: one thread loads W, another x, so that issuing a step's loads takes less than its matmuls. They
// compute their first addresses while another warp initializes the barriers.
struct Loader {
  const Params& p;
  u32 shared, full, empty;

  // Waits until all workers have read the previous contents of a stage.
  __device__ __forceinline__ void wait_for_stage(const PipelineState& state) const {
    barrier_wait(empty + 8 * state.stage, state.parity ^ 1);
  }

  // Does not wait for the previous kernel, which does not write W. The barrier expects all bytes of the stage,
  // including those of x.
  __device__ __forceinline__ void load_weights() const {
    Work work(p);
    bool more = work.next(p);
    u32 blocks[GROUPS];
    begin(blocks, work);
    cluster_wait();
    if (!elect_one()) return;
    PipelineState state;
    while (more) {
      for (int k = work.first; k < work.stop; k++, state.next()) {
        const u32 barrier = full + 8 * state.stage;
        wait_for_stage(state);
        barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
          const u32 slot = GROUPS * state.stage + i;
          copy_bulk(shared + OFF_WEIGHT + slot * BLOCK_BYTES, p.weight + (u64)blocks[i] * BLOCK_BYTES,
                    BLOCK_BYTES, barrier);
          copy_bulk(shared + OFF_SCALE + slot * BLOCK_SCALE_BYTES,
                    p.weight_scale + (u64)blocks[i] * BLOCK_SCALE_BYTES, BLOCK_SCALE_BYTES, barrier);
          blocks[i]++;
        }
      }
      more = work.next(p);
      begin(blocks, work);
    }
  }

  // First block (64 rows of W x STEP k) of each warpgroup.
  __device__ __forceinline__ void begin(u32* blocks, const Work& work) const {
    const Place place(p, work.tile);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      // Blocks beyond N load the last block instead; their output is not written.
      blocks[i] = min(place.weight_block(p, i), p.blocks_n - 1) * p.steps + work.first;
      asm volatile("" : "+r"(blocks[i]));  // computed here, not sunk to its use
    }
  }

  __device__ __forceinline__ void load_x(const TensorMap* map) const {
    const int rank = cluster_rank();
    Work work(p);
    bool more = work.next(p);
    int token = token_of(work, rank);
    asm volatile("" : "+r"(token));  // computed here, not sunk to its use
    cluster_wait();
    if (!elect_one()) return;
    wait_for_previous();
    PipelineState state;
    while (more) {
      for (int k = work.first; k < work.stop; k++, state.next()) {
        wait_for_stage(state);
#pragma unroll
        for (int i = 0; i < BOXES; i++)
          copy_x(shared + state.stage * X_BYTES + i * (TOKENS * 128) + rank * (TOKENS * 64), map,
                 k * STEP + i * 64, token, full + 8 * state.stage);
      }
      more = work.next(p);
      token = token_of(work, rank);
    }
    // Waits for the other CTA's last arrivals at barriers here, before this CTA may exit.
#pragma unroll 1
    for (int i = 0; i < STAGES; i++, state.next()) wait_for_stage(state);
    // Not before the last matmul: otherwise all CTAs of the next kernel would start on the few SMs whose CTAs
    // have ended.
    allow_next();
  }

  // The first token that this CTA loads. A box entirely beyond M is slower to load by TMA and not used: token 0
  // is loaded instead.
  __device__ __forceinline__ int token_of(const Work& work, int rank) const {
    const int first = Place(p, work.tile).token + rank * (TOKENS / 2);
    return first < p.m ? first : 0;
  }
};

// Epilogue of a tile; of a part of a tile, together with other clusters.
__device__ __forceinline__ void finish(const Params& p, const Epilogue& epilogue, const Rows& rows,
                                       const TensorMap* map, u32 shared, float* sums) {
  const Worker self;
  const int group = self.group;
  const u32 rank = cluster_rank();
  if (!epilogue.is_part) {
    store(epilogue.place, Share(0, epilogue.strips), rows, map, shared + OFF_OUT, sums, self);
  } else if (epilogue.is_tail) {
    store_sums(partial_of(p, true, cluster_number(), rank), epilogue.strips, Share(0, 0), sums);
    notify_flag_warp(group, true);
  } else {
    u32 gone = 0;  // bits of clusters that left their shares to this one
    if (!exchange_sums(p, epilogue, rank, group, shared + OFF_STAYS, sums, gone)) return;
    Share share = epilogue.share;
    while (true) {
      add_sums(p, epilogue.join, epilogue.own, rank, share, sums);
      store(epilogue.place, share, rows, map, shared + OFF_OUT, sums, self);
      if (!gone) break;
      share = Share(epilogue.join, epilogue.strips, __ffs(gone) - 1);
      gone &= gone - 1;
    }
  }
}

__device__ __forceinline__ void multiply_tiles(const Params& p, const TensorMap* out_map, u32 shared,
                                               u32 full, u32 empty) {
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const u32 weight = shared + OFF_WEIGHT + group * BLOCK_BYTES + warp * 512 + lane * 16;
  const u32 scale = shared + OFF_SCALE + group * BLOCK_SCALE_BYTES + warp / 2 * 128 + lane / 4 * 16 +
                    warp % 2 * 8;
  // A stage that was read is released by all lanes in this CTA, and by one lane per warp in the other CTA, which
  // writes x here, too (multicast).
  const u32 peer_empty = map_to_rank(empty, cluster_rank() ^ 1);
  auto release = [&](u32 barrier) {
    barrier_arrive(empty + barrier);
    if (lane == 0) barrier_arrive_mapped(peer_empty + barrier);
  };
  // Hides the constant from the compiler, see unpack_scales: ranks are 0 and 1.
  const u32 exponent = SCALE_EXPONENT | cluster_rank() >> 1;
  Work work(p);
  bool more = work.next(p);
  asm volatile("" : "+r"(work.tile), "+r"(work.first), "+r"(work.stop));  // computed here
  cluster_wait();
  wait_for_previous();
  PipelineState state;  // of the next fetch
  int stage = 0;  // of the next matmuls
  for (; more; more = work.next(p)) {
    const Rows rows(p, Place(p, work.tile).weight_block(p, group) * 64 + warp * 16 + lane / 4);
    float sums[VALUES];
    u32 a[2][GROUP][4];
    uint4 words[BOXES];
    uint2 scales[BOXES];
    auto fetch = [&] {
      barrier_wait(full + 8 * state.stage, state.parity);
#pragma unroll
      for (int i = 0; i < BOXES; i++) {
        words[i] = load16(weight + state.stage * (GROUPS * BLOCK_BYTES) + i * 2048);
        scales[i] = load_shared8(scale + state.stage * (GROUPS * BLOCK_SCALE_BYTES) + i * 256);
      }
      state.next();
    };
    // Unpacks the operands of GROUP matmuls from the fetched words.
    auto unpack = [&](u32(*operands)[4], int first) {
      u32 factors[2];
#pragma unroll
      for (int j = 0; j < GROUP; j++) {
        const int at = first + j, i = at / 4;
        const u32 word[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
        const u32 packed[2] = {scales[i].x, scales[i].y};
        if (j % 2 == 0) unpack_scales(factors, packed[at / 2 % 2], exponent);
        unpack_operand(operands[j], word[at % 4], factors[at % 2]);
      }
    };
    u32 read;  // byte offset of the last multiplied stage's barrier
    // The matmuls of a step, GROUP at a time. While they run, the operands of the next group are unpacked (two
    // buffers).
    auto step = [&](int i, bool first, bool last) {
      const u32 x = x_descriptor(shared + stage * X_BYTES), done = read;
      read = 8 * stage;
      stage = stage == STAGES - 1 ? 0 : stage + 1;
#pragma unroll
      for (int at = 0; at < MATMULS; at += GROUP) {
        const int parity = (MATMULS / GROUP * i + at / GROUP) & 1, next = (at + GROUP) % MATMULS;
        if (next == 0 && !last) fetch();
        wgmma_wait();
        if (!first && at == 0) release(done);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < GROUP; j++)
          wgmma<TOKENS>(sums, a[parity][j], x + (at + j) / 4 * (TOKENS * 128 / 16) + (at + j) % 4 * 2,
                !first || at + j > 0);
        wgmma_commit();
        unpack(a[1 - parity], next);
      }
    };
    const int steps = __shfl_sync(~0u, work.stop - work.first, 0);
    fetch();
    unpack(a[0], 0);
    step(0, true, steps == 1);
    for (int left = steps - 1; left > 0; left -= 2) {
      step(1, false, left == 1);
      if (left > 1) step(2, false, left == 2);
    }
    // Computed while the last matmul runs.
    const Epilogue epilogue(p, work, group);
    wgmma_wait();
    release(read);
    finish(p, epilogue, rows, out_map, shared, sums);
  }
  wait_for_stores();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __maxnreg__(LAUNCH_REGISTERS)
    linear_gemm(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap out_map,
                const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];  // period of the swizzle
  const u32 base = shared_address(shared), full = base + OFF_BARRIERS, empty = full + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same for a warp
  // By a warp that is otherwise idle at first: initializing barriers is slow.
  if (threadIdx.x == 96) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, WORKERS + WORKERS / 32);  // see multiply_tiles
    }
    fence_barrier_init();
    prefetch_map(&out_map);
  }
  if (threadIdx.x == 32) prefetch_map(&x_map);
  __syncwarp();
  cluster_arrive_relaxed();
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
    const Loader loader{p, base, full, empty};
    // In this order, and with a number unknown to the compiler: otherwise it emits a jump table, which has to be
    // loaded from memory.
    int flag_warp = warp - 2;
    asm volatile("" : "+r"(flag_warp));
    if (warp == 1)
      loader.load_x(&x_map);
    else if (flag_warp >= 0)
      run_flag_warp(p, base + OFF_STAYS, flag_warp);
    else
      loader.load_weights();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WORKER_REGISTERS));
    multiply_tiles(p, &out_map, base, full, empty);
  }
}
