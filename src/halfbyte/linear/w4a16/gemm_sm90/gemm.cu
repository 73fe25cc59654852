// x times NVFP4 weights for many rows of x, on SM90: y[m, n] = sum over k of x[m, k] W[n, k].
//
// The product is computed transposed, W x^T: W is A of `wgmma` and comes from registers, where it was
// unpacked; x^T is B, from shared memory. 64 x 64 values of W take 60 instructions per thread, and as many
// again to ask for them and for the matmul: one warpgroup does so while another's matmul runs.
//
//   Tile       64 rows of W for each of GROUPS warpgroups x TOKENS rows of x, a step of k at a time.
//   Loads      Threads of one more warpgroup ask for the tiles of x, by TMA with 128-byte swizzle, and
//              for those of W, which a lane takes 16 bytes at a time, as packed_weight.py put them
//              together for it. Both go to a ring in shared memory: loads of W to registers would all
//              count on one scoreboard, so that a wait for the first of them is one for the last. The
//              first tiles of W are asked for before the kernel in front of this one has ended.
//   Clusters   of two CTAs have the same rows of x: each asks for half of them, for both.
//   Result     goes to shared memory, transposed by `stmatrix`, and from there by TMA while the next tile
//              is under way.
//   Split      work.cuh says who has which tiles, or which part of a tile's k, and
//              join.cuh how the parts become one.
//
// Macros:
//   X_BF16     see values.cuh
//   TOKENS     a multiple of 16 from 64 to 256; with three warpgroups, to 160, as registers allow
//   STEP       of k: 64 or 128
//   GROUPS     warpgroups that multiply: 2 or 3
//   STAGES     tiles in the ring, at least 3

#include "linear/w4a16/values.cuh"
#include "linear/w4a16/gemm_sm90/join.cuh"
#include "linear/w4a16/gemm_sm90/wgmma.cuh"

#define X_BYTES (TOKENS * STEP * 2)
#define BOXES (STEP / 64)               // of 64 k: what TMA brings of x, and a square of W, at a time
#define MATMULS (STEP / 16)             // to a step
#define BLOCK_BYTES (64 * STEP / 2)     // a warpgroup's rows of a step
#define BLOCK_SCALE_BYTES (64 * STEP / 16)
#define STAGE_BYTES (X_BYTES + GROUPS * (BLOCK_BYTES + BLOCK_SCALE_BYTES))
#define OUT_BYTES (TOKENS * 64 * 2)  // of a warpgroup
#define STRIP_BYTES (16 * 64 * 2)    // of these
#define OFF_OUT (STAGES * X_BYTES)
#define OFF_WEIGHT (OFF_OUT + GROUPS * OUT_BYTES)
#define OFF_SCALE (OFF_WEIGHT + STAGES * GROUPS * BLOCK_BYTES)
#define OFF_BARRIERS (OFF_SCALE + STAGES * GROUPS * BLOCK_SCALE_BYTES)
#define OFF_STAYS (OFF_BARRIERS + 16 * STAGES)  // a word of each group, see exchange_sums
#define GROUP 4  // matmuls to a commit, as registers allow
#define THREADS (WORKERS + 128)
// The loader's registers go to the workers; without that, wgmma is serialized.
#define LOADER_REGISTERS (GROUPS == 3 ? 32 : 40)
#define WORKER_REGISTERS (GROUPS == 3 ? 160 : 232)

__device__ __forceinline__ uint2 load_shared8(u32 address) {
  uint2 y;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(y.x), "=r"(y.y) : "r"(address));
  return y;
}

// A box of x to this address in both CTAs of the cluster, whose barriers count its bytes.
__device__ __forceinline__ void copy_x(u32 to, const TensorMap* map, int k, int token, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(k), "r"(token), "r"(barrier), "h"((u16)3)
      : "memory");
}

// Lower word of the descriptor of rows of x, 128 bytes each, swizzled by 128 bytes. It counts 16 bytes, so
// that one descriptor is another plus a constant. It comes from one lane: so the compiler knows that a
// warp's lanes have the same one, and keeps descriptors in uniform registers.
__device__ __forceinline__ u32 x_descriptor(u32 address) {
  return __shfl_sync(~0u, address / 16 | 1u << 16, 0);
}

// A stage of the ring, and the parity of its barriers.
struct Turn {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// What comes to the ring: one thread asks for W, another one for x, so that what each does for a step is
// less than a matmul takes. What they ask for first they find out while barriers are being made.
struct Loader {
  const Params& p;
  u32 shared, full, empty;

  // Until all have read what was in a stage before.
  __device__ __forceinline__ void wait_for_stage(const Turn& turn) const {
    barrier_wait(empty + 8 * turn.stage, turn.parity ^ 1);
  }

  // W does not come from the kernel in front of this one, which may still run. The barrier waits for all
  // bytes of the stage, those of x, too.
  __device__ __forceinline__ void load_weights() const {
    Work work(p);
    bool more = work.next(p);
    u32 blocks[GROUPS];
    begin(blocks, work);
    cluster_wait();
    if (!elect_one()) return;
    Turn turn;
    while (more) {
      for (int k = work.first; k < work.stop; k++, turn.next()) {
        const u32 barrier = full + 8 * turn.stage;
        wait_for_stage(turn);
        barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
          const u32 slot = GROUPS * turn.stage + i;
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

  // Where each warpgroup's part of W begins, in blocks of 64 rows and a step of k.
  __device__ __forceinline__ void begin(u32* blocks, const Work& work) const {
    const Place place(p, work.tile);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      // Rows beyond the last are read as the last ones, and not written.
      blocks[i] = min(place.row_block + i, p.blocks_n - 1) * p.steps + work.first;
      asm volatile("" : "+r"(blocks[i]));  // here, not where it is used
    }
  }

  __device__ __forceinline__ void load_x(const TensorMap* map) const {
    const int rank = cluster_rank();
    Work work(p);
    bool more = work.next(p);
    int token = token_of(work, rank);
    asm volatile("" : "+r"(token));  // here, not where it is used
    cluster_wait();
    if (!elect_one()) return;
    wait_for_previous();
    Turn turn;
    while (more) {
      for (int k = work.first; k < work.stop; k++, turn.next()) {
        wait_for_stage(turn);
#pragma unroll
        for (int i = 0; i < BOXES; i++)
          copy_x(shared + turn.stage * X_BYTES + i * (TOKENS * 128) + rank * (TOKENS * 64), map,
                 k * STEP + i * 64, token, full + 8 * turn.stage);
      }
      more = work.next(p);
      token = token_of(work, rank);
    }
    // Until the other CTA has told all it will tell barriers here.
#pragma unroll 1
    for (int i = 0; i < STAGES; i++, turn.next()) wait_for_stage(turn);
    // Not before the last matmul: where only some CTAs have ended, all of the next kernel's would
    // crowd onto their SMs.
    allow_next();
  }

  // The first row of x that this CTA asks for. A box wholly beyond the rows takes TMA longer than any other,
  // and what is in it is not used.
  __device__ __forceinline__ int token_of(const Work& work, int rank) const {
    const int first = Place(p, work.tile).token + rank * (TOKENS / 2);
    return first < p.m ? first : 0;
  }
};

// Factors and biases of a thread's rows (of W), g and g + 8 of its warp's 16; biases as loaded, so that nothing
// waits for them before they are used.
struct Rows {
  float scale[2];
  u32 bias[2];

  __device__ __forceinline__ Rows(const Params& p, int first) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = first + 8 * i;
      scale[i] = row < 64 * p.blocks_n ? p.row_scale[row] : 0.0f;
      bias[i] = p.bias && row < p.n ? p.bias[row] : 0;
    }
  }
};

// What a worker is. Asked for anew with every tile: in between it is not worth registers.
struct Worker {
  int group, warp, lane;

  __device__ __forceinline__ Worker() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int warps = __shfl_sync(~0u, thread / 32, 0);  // known to be the same for a warp
    group = warps / 4 - 1, warp = warps % 4, lane = thread % 32;
  }
};

// Results that a thread has sent off have left shared memory.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Of every 8 tokens a thread has 2c, 2c + 1. In shared memory a token's 64 rows are 128 bytes, swizzled.
__device__ __forceinline__ void store(const Place& place, const Share& share, const Rows& rows,
                                      const TensorMap* map, u32 shared, const float* sums,
                                      const Worker& self) {
  const int group = self.group, lane = self.lane;
  const u32 out = shared + OFF_OUT + group * OUT_BYTES;
  wait_for_stores();
  group_sync(group);
  const float bias[2] = {lower_to_float(rows.bias[0]), lower_to_float(rows.bias[1])};
  // Lanes name rows of four matrices: 8 tokens x 8 rows of W, 8 more rows, and both of 8 more tokens.
  const u32 token = (lane & 7) + (lane >> 4) * 8, chunk = 2 * self.warp + (lane >> 3 & 1);
  const u32 address = out + token * 128 + ((chunk ^ (token & 7)) * 16);
#pragma unroll
  for (int strip = 0; strip < STRIPS; strip++) {
    if (!share.has(strip)) continue;
    const float* d = sums + strip * 8;
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      pairs[j] = pack_pair(d[2 * j] * rows.scale[j & 1] + bias[j & 1],
                           d[2 * j + 1] * rows.scale[j & 1] + bias[j & 1]);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     address + strip * STRIP_BYTES),
                 "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
  }
  fence_async_proxy();
  group_sync(group);
  const u32 strip = threadIdx.x % 128;
  if (share.has(strip)) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"((place.row_block + group) * 64), "r"(place.token + (int)strip * 16),
                 "r"(out + strip * STRIP_BYTES)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;");
  }
}

// A tile's result from its sums; of a part, together with other clusters.
__device__ __forceinline__ void finish(const Params& p, const Ending& ending, const Rows& rows,
                                       const TensorMap* map, u32 shared, float* sums) {
  const Worker self;
  const int group = self.group;
  const u32 rank = cluster_rank();
  if (!ending.is_part) {
    store(ending.place, Share(0, ending.strips), rows, map, shared, sums, self);
  } else if (ending.is_tail) {
    leave_sums(partial_of(p, true, cluster_number(), rank), ending.strips, Share(0, 0), sums);
    tell_keeper(group, true);
  } else {
    u32 gone = 0;  // by those whose shares are finished here, too
    if (!exchange_sums(p, ending, rank, group, shared + OFF_STAYS, sums, gone)) return;
    Share share = ending.share;
    while (true) {
      add_sums(p, ending.join, ending.own, rank, share, sums);
      store(ending.place, share, rows, map, shared, sums, self);
      if (!gone) break;
      share = Share(ending.join, ending.strips, __ffs(gone) - 1);
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
  // All lanes tell their CTA that they have read a stage, and one for its warp the other CTA, whose copies of x
  // come here, too.
  const u32 empty_of_other = map_to_rank(empty, cluster_rank() ^ 1);
  auto release = [&](u32 barrier) {
    barrier_arrive(empty + barrier);
    if (lane == 0) barrier_arrive_mapped(empty_of_other + barrier);
  };
  // From where the compiler does not see its value, see unpack_scales. No cluster has rank 2.
  const u32 exponent = SCALE_EXPONENT | cluster_rank() >> 1;
  Work work(p);
  bool more = work.next(p);
  asm volatile("" : "+r"(work.tile), "+r"(work.first), "+r"(work.stop));  // here, not where they are used
  cluster_wait();
  wait_for_previous();
  Turn turn;  // of what is fetched next
  int stage = 0;  // of what is multiplied next
  for (; more; more = work.next(p)) {
    const Rows rows(p, (Place(p, work.tile).row_block + group) * 64 + warp * 16 + lane / 4);
    float sums[VALUES];
    u32 a[2][GROUP][4];
    uint4 words[BOXES];
    uint2 scales[BOXES];
    auto fetch = [&] {
      barrier_wait(full + 8 * turn.stage, turn.parity);
#pragma unroll
      for (int i = 0; i < BOXES; i++) {
        words[i] = load16(weight + turn.stage * (GROUPS * BLOCK_BYTES) + i * 2048);
        scales[i] = load_shared8(scale + turn.stage * (GROUPS * BLOCK_SCALE_BYTES) + i * 256);
      }
      turn.next();
    };
    // The operands of GROUP matmuls, of those whose words are here.
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
    u32 read;  // the stage that was multiplied last, by its place among barriers
    // The matmuls of a step, GROUP at a time. What the next group needs is unpacked while they run, in
    // place of the operands of the group before them.
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
          wgmma(sums, a[parity][j], x + (at + j) / 4 * (TOKENS * 128 / 16) + (at + j) % 4 * 2,
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
    // While the last matmul runs.
    const Ending ending(p, work);
    wgmma_wait();
    release(read);
    finish(p, ending, rows, out_map, shared, sums);
  }
  wait_for_stores();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    linear_wide(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap out_map,
                const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];  // where the swizzle's pattern begins anew
  const u32 base = shared_address(shared), full = base + OFF_BARRIERS, empty = full + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same for a warp
  // By a warp that has nothing else to do first, because to make barriers takes a while.
  if (threadIdx.x == 96) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, WORKERS + WORKERS / 32);  // see multiply_tiles
    }
    tell_of_barriers();
    prefetch_map(&out_map);
  }
  if (threadIdx.x == 32) prefetch_map(&x_map);
  __syncwarp();
  cluster_arrive_relaxed();
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
    const Loader loader{p, base, full, empty};
    // In this order, and with a number that the compiler does not know, or it makes a table of places to
    // jump to, which has to come from memory.
    int keeper = warp - 2;
    asm volatile("" : "+r"(keeper));
    if (warp == 1)
      loader.load_x(&x_map);
    else if (keeper >= 0)
      keep_flags(p, base + OFF_STAYS, keeper);
    else
      loader.load_weights();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WORKER_REGISTERS));
    multiply_tiles(p, &out_map, base, full, empty);
  }
}
