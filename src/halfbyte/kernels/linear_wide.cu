// x times NVFP4 weights for many rows of x, on SM90: y[m, n] = sum over k of x[m, k] W[n, k].
//
// The product is computed transposed, W x^T: W is A of `wgmma` and comes from registers, where it was
// unpacked; x^T is B, from shared memory. 64 x 64 values of W take 60 instructions per thread, a
// sixteenth of the time of their matmul with 256 rows of x; two warpgroups take turns, so that one
// unpacks while the other's matmul runs.
//
//   Tile       128 rows of W (a warpgroup has 64) x TOKENS rows of x, 64 k at a time.
//   Loads      One thread of a third warpgroup asks for the tiles of x in a ring in shared memory, by
//              TMA with 128-byte swizzle. W needs no shared memory: a lane loads the 16 bytes that
//              linear_weights.py put together for it, AHEAD steps before it needs them.
//   Clusters   of two CTAs have the same rows of x: each asks for half of them, for both.
//   Result     goes to shared memory, transposed by `stmatrix`, and from there by TMA while the next tile
//              is under way.
//   Split      Tiles go to the clusters in turn, those of a turn side by side, so that what they read is
//              read at the same time. The first `cut_tiles`, which would not fill the last turn, are
//              cut: their steps lie on a line, of which every cluster has an equal span. A tile that
//              is cut belongs to the cluster that has its first step, the last of that cluster's span;
//              the others did their parts first, left them in `partial`, and raised a flag. The order
//              of sums depends on the shape alone.
//
// Macros:
//   X_BF16     see linear_values.cuh
//   TOKENS     64, 128 or 256
//   STAGES     tiles in the ring
//   CTAS       CTAs on a multiprocessor

#include "linear_values.cuh"
#include "sm90.cuh"

#define ROWS 128
#define STEP 64
#define X_BYTES (TOKENS * STEP * 2)
#define BLOCK_BYTES (STEP * STEP / 2)        // of 64 x 64 values
#define BLOCK_SCALE_BYTES (STEP * STEP / 16)
#define OUT_BYTES (TOKENS * 64 * 2)  // of a warpgroup
#define OFF_OUT (STAGES * X_BYTES)
#define OFF_BARRIERS (OFF_OUT + 2 * OUT_BYTES)
#define AHEAD (TOKENS == 64 ? 2 : 4)  // as registers allow: spilling costs more than it hides
#define WGMMA_TOKENS (TOKENS < 128 ? TOKENS : 128)
#define PARTS (TOKENS / WGMMA_TOKENS)
#define VALUES (WGMMA_TOKENS / 2)  // of an accumulator, per thread
#define WORKERS 256
#define THREADS (WORKERS + 128)
// The loader's registers go to the workers; without that, wgmma is serialized.
#define LOADER_REGISTERS (CTAS == 2 ? 24 : 40)
#define WORKER_REGISTERS (CTAS == 2 ? 104 : 232)

struct __align__(64) TensorMap {
  u64 opaque[16];
};

struct Params {
  const u8* weight;        // [blocks_n, blocks_k, 2048]
  const u8* weight_scale;  // [blocks_n, blocks_k, 256]
  const float* row_scale;  // [64 blocks_n]
  const u16* bias;         // [n] or null
  float* partial;          // [clusters, 2, TOKENS / 8, WORKERS, 4]
  u64* flags;              // [clusters, 2, 2], raised by the value `raised`, which lies there never else
  u64 raised;
  int m, n;
  int blocks_n, blocks_k;  // of 64
  int row_pairs, tiles, cut_tiles;
};

__device__ __forceinline__ uint4 load_once16(const u8* p) {
  uint4 y;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
               : "l"(p));
  return y;
}

__device__ __forceinline__ uint2 load_once8(const u8* p) {
  uint2 y;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(y.x), "=r"(y.y) : "l"(p));
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

// Rows of x, 128 bytes each, swizzled by 128 bytes.
__device__ __forceinline__ u64 x_descriptor(u32 address) {
  u64 y;
  asm("mov.b64 %0, {%1, %2};" : "=l"(y) : "r"(address / 16 | 1u << 16), "r"(1024u / 16 | 1u << 30));
  return y;
}

#if X_BF16
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)

// d = a b, or d += a b.
__device__ __forceinline__ void wgmma(float* d, const u32* a, u64 b, bool add) {
#if TOKENS == 64
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_TYPES " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
      : D8(0), D8(8), D8(16), D8(24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
#else
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_TYPES " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
      "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 0;}"
      : D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
#endif
}

// A cluster's number. Later ones start earlier, so that nobody waits for one that has not started.
__device__ __forceinline__ u32 cluster_number() { return (gridDim.x - 1 - blockIdx.x) / 2; }

// A cluster's span of the line of steps.
struct Span {
  u32 first, stop;

  __device__ __forceinline__ Span(const Params& p, u32 number) {
    const u64 steps = (u64)p.cut_tiles * p.blocks_k;
    first = (u32)(steps * number / (gridDim.x / 2));
    stop = (u32)(steps * (number + 1) / (gridDim.x / 2));
  }
};

// What a CTA does next: a tile, or a part of its k.
struct Work {
  int row_block;  // of 64 rows
  int token, first, stop;
  u32 at, span_stop, tile;

  __device__ __forceinline__ Work(const Params& p) {
    const Span span(p, cluster_number());
    at = span.first;
    span_stop = span.stop;
    tile = p.cut_tiles + cluster_number();
  }

  __device__ __forceinline__ bool next(const Params& p) {
    u32 own = tile;
    first = 0;
    stop = p.blocks_k;
    if (at < span_stop) {
      own = at / p.blocks_k;
      first = at - own * p.blocks_k;
      stop = min(p.blocks_k, first + (int)(span_stop - at));
      at += stop - first;
    } else {
      tile += gridDim.x / 2;
    }
    row_block = 2 * (2 * (int)(own % p.row_pairs) + (int)cluster_rank());
    token = own / p.row_pairs * TOKENS;
    return own < p.tiles;
  }
};

// A stage of the ring, and the parity of its barriers.
struct Turn {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void load_tiles(const Params& p, const TensorMap* map, u32 shared,
                                           u32 full, u32 empty) {
  const u32 rank = cluster_rank();
  Turn turn;
  for (Work work(p); work.next(p);) {
    for (int k = work.first; k < work.stop; k++, turn.next()) {
      const u32 barrier = full + 8 * turn.stage;
      barrier_wait(empty + 8 * turn.stage, turn.parity ^ 1);
      barrier_expect(barrier, X_BYTES);
      copy_x(shared + turn.stage * X_BYTES + rank * (X_BYTES / 2), map, k * STEP,
             work.token + (int)rank * (TOKENS / 2), barrier);
    }
  }
}

// A CTA's threads of a warpgroup.
__device__ __forceinline__ void group_sync(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

// Factors and biases of a thread's rows (of W), g and g + 8 of its warp's 16.
struct Rows {
  float scale[2], bias[2];

  __device__ __forceinline__ Rows(const Params& p, int first) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = first + 8 * i;
      scale[i] = row < 64 * p.blocks_n ? p.row_scale[row] : 0.0f;
      bias[i] = p.bias && row < p.n ? lower_to_float(p.bias[row]) : 0.0f;
    }
  }
};

// Of every 8 tokens a thread has 2c, 2c + 1. In shared memory a token's 64 rows are 128 bytes, swizzled.
__device__ __forceinline__ void store(const Work& work, const Rows& rows, const TensorMap* map,
                                      u32 out, float (*sums)[VALUES], int group, int warp, int lane) {
  if (threadIdx.x % 128 == 0)  // the result before has left
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  group_sync(group);
  // Lanes name rows of four matrices: 8 tokens x 8 rows of W, 8 more rows, and both of 8 more tokens.
  const u32 token = (lane & 7) + (lane >> 4) * 8, chunk = 2 * warp + (lane >> 3 & 1);
  const u32 address = out + token * 128 + ((chunk ^ (token & 7)) * 16);
#pragma unroll
  for (int i = 0; i < PARTS * VALUES; i += 8) {
    const float* d = sums[i / VALUES] + i % VALUES;
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      pairs[j] = pack_pair(d[2 * j] * rows.scale[j & 1] + rows.bias[j & 1],
                           d[2 * j + 1] * rows.scale[j & 1] + rows.bias[j & 1]);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     address + i / 8 * (16 * 128)),
                 "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
  }
  fence_async_proxy();
  group_sync(group);
  if (threadIdx.x % 128 == 0) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"((work.row_block + group) * 64), "r"(work.token), "r"(out)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;");
  }
}

// A thread's sums of a part of a tile, left for the cluster that the tile belongs to.
__device__ __forceinline__ float* partial_of(const Params& p, u32 cluster, u32 rank) {
  return p.partial + (u64)(2 * cluster + rank) * (TOKENS * ROWS) + (threadIdx.x - 128) * 4;
}

__device__ __forceinline__ void leave_sums(const Params& p, u32 number, u32 rank, int group,
                                           const float (*sums)[VALUES]) {
  float* const partial = partial_of(p, number, rank);
#pragma unroll
  for (int i = 0; i < PARTS * VALUES; i += 4) {
    const float* d = sums[i / VALUES] + i % VALUES;
    *(float4*)(partial + i * WORKERS) = make_float4(d[0], d[1], d[2], d[3]);
  }
  __threadfence();
  group_sync(group);
  if (threadIdx.x % 128 == 0)
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p.flags + 4 * number + 2 * rank + group),
                 "l"(p.raised)
                 : "memory");
}

// Adds what the next clusters did of a tile, one after the other.
__device__ __forceinline__ void add_sums(const Params& p, u32 number, u32 rank, int group, int done,
                                         float (*sums)[VALUES]) {
  while (done < p.blocks_k) {
    const Span span(p, ++number);
    u64* const flag = p.flags + 4 * number + 2 * rank + group;
    u64 found;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(flag) : "memory");
    } while (found != p.raised);
    const float* const partial = partial_of(p, number, rank);
#pragma unroll
    for (int i = 0; i < PARTS * VALUES; i += 4) {
      float* d = sums[i / VALUES] + i % VALUES;
      const float4 x = __ldcg((const float4*)(partial + i * WORKERS));
      d[0] += x.x, d[1] += x.y, d[2] += x.z, d[3] += x.w;
    }
    group_sync(group);
    if (threadIdx.x % 128 == 0) *flag = 0;
    done += span.stop - span.first;
  }
}

__device__ __forceinline__ void multiply_tiles(const Params& p, const TensorMap* out_map, u32 shared,
                                               u32 full, u32 empty) {
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const u32 rank = cluster_rank();
  const u32 number = cluster_number();
  Turn turn;
  for (Work work(p); work.next(p);) {
    // Rows beyond the last are read as the last ones, and not written.
    const u64 block = (u64)min(work.row_block + group, p.blocks_n - 1) * p.blocks_k;
    const u8* const weight = p.weight + block * BLOCK_BYTES + warp * 512 + lane * 16;
    const u8* const scale = p.weight_scale + block * BLOCK_SCALE_BYTES + warp / 2 * 128 +
                            lane / 4 * 16 + warp % 2 * 8;
    const Rows rows(p, (work.row_block + group) * 64 + warp * 16 + lane / 4);
    uint4 w[AHEAD];
    uint2 packed_scales[AHEAD];
    auto load = [&](int slot, int k) {
      k = min(k, work.stop - 1);
      w[slot] = load_once16(weight + (u64)k * BLOCK_BYTES);
      packed_scales[slot] = load_once8(scale + (u64)k * BLOCK_SCALE_BYTES);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) load(i, work.first + i);
    u32 a[2][4][4];
    auto unpack = [&](u32 (*to)[4], int slot, int k) {
      u32 scales[4], exponent = SCALE_EXPONENT;
      asm("" : "+r"(exponent));
      unpack_scales(scales, packed_scales[slot].x, exponent);
      unpack_scales(scales + 2, packed_scales[slot].y, exponent);
      unpack_operand(to[0], w[slot].x, scales[0]);
      unpack_operand(to[1], w[slot].y, scales[1]);
      unpack_operand(to[2], w[slot].z, scales[2]);
      unpack_operand(to[3], w[slot].w, scales[3]);
      load(slot, k + AHEAD);
    };
    unpack(a[0], 0, work.first);
    barrier_wait(full + 8 * turn.stage, turn.parity);
    float sums[PARTS][VALUES];
    // The next operands are unpacked while the matmul runs. The wait for x behind them keeps the
    // compiler from doing it later.
    auto step = [&](int i, int k) {
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int part = 0; part < PARTS; part++)
          wgmma(sums[part], a[i & 1][j],
                x_descriptor(shared + turn.stage * X_BYTES + part * (WGMMA_TOKENS * STEP * 2) + j * 32),
                k > work.first || j > 0);
      wgmma_commit();
      const u32 done = empty + 8 * turn.stage;
      turn.next();
      if (k + 1 < work.stop) {
        unpack(a[(i + 1) & 1], (i + 1) % AHEAD, k + 1);
        barrier_wait(full + 8 * turn.stage, turn.parity);
      }
      wgmma_wait();
      if (lane < 2) barrier_arrive(done, lane);
    };
    for (int k = work.first; k < work.stop; k += AHEAD)
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (k + i < work.stop) step(i, k + i);
    if (work.first > 0) {
      leave_sums(p, number, rank, group, sums);
    } else {
      add_sums(p, number, rank, group, work.stop, sums);
      store(work, rows, out_map, shared + OFF_OUT + group * OUT_BYTES, sums, group, warp, lane);
    }
  }
  if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, CTAS)
    linear_wide(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap out_map,
                const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = (shared_address(shared) + 1023) & ~1023u;  // of the swizzle's pattern
  const u32 full = base + OFF_BARRIERS, empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 16);  // eight warps of two CTAs
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();
  wait_for_previous();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
    if (threadIdx.x == 0) load_tiles(p, &x_map, base, full, empty);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WORKER_REGISTERS));
    multiply_tiles(p, &out_map, base, full, empty);
  }
  cluster_sync();  // the other CTA may still write here
}
