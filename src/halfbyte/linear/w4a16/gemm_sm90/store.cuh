// Stores a tile's output, or some of its tokens: y, or with SwiGLU silu(gate) * up.

#pragma once
#include "elementwise/silu.cuh"
#include "linear/w4a16/gemm_sm90/join.cuh"
#include "linear/w4a16/values.cuh"

#define OUT_BYTES (TOKENS * 64 * 2)  // per warpgroup
#define STRIP_BYTES (16 * 64 * 2)    // of 16 tokens

// Global scales and biases of a thread's rows of W, g and g + 8 of its warp's 16. Biases are the loaded bits: the
// conversion, which waits for them, comes later.
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

// A worker thread's indices. Recomputed for every tile rather than kept in registers.
struct Worker {
  int group, warp, lane;

  __device__ __forceinline__ Worker() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int warps = __shfl_sync(~0u, thread / 32, 0);  // known to be the same for a warp
    group = warps / 4 - 1, warp = warps % 4, lane = thread % 32;
  }
};

// Barrier of all workers.
__device__ __forceinline__ void sync_workers() {
  asm volatile("bar.sync %0, %1;" ::"n"(ALL_WORKERS), "n"(WORKERS) : "memory");
}

// Pair i of a thread's four of a strip, rounded: two neighbouring tokens in a row of W. Pairs 0 and 1 are rows g and
// g + 8 with tokens 2c and 2c + 1, pairs 2 and 3 the same rows with tokens 2c + 8 and 2c + 9. `second`: of the next
// strip.
__device__ __forceinline__ u32 rounded_pair(int i, const float* sums, bool second, const Rows& rows,
                                            const float* biases) {
  const float scale = rows.scale[i & 1], bias = biases[i & 1];
  float x[2];
#pragma unroll
  for (int j = 0; j < 2; j++) x[j] = second ? sums[8 + 2 * i + j] : sums[2 * i + j];
  return pack_pair(x[0] * scale + bias, x[1] * scale + bias);
}

// Writes strips of the output by way of shared memory, OUT_BYTES at `outs` for each warpgroup. There a token's 64 rows of
// W are 128 bytes, swizzled.
//
// With SwiGLU a warpgroup finishes every second strip. Of the others it leaves its values, rounded as a layer's result is, for
// the other warpgroup.
__device__ __forceinline__ void store(const Place& place, const Share& share, const Rows& rows,
                                      const TensorMap* map, u32 outs, const float* sums,
                                      const Worker& self) {
  const int group = self.group, lane = self.lane;
  const u32 out = outs + group * OUT_BYTES;
  wait_for_stores();
  if (SWIGLU)
    sync_workers();  // what was left here before has been read
  else
    group_sync(group);
  const float bias[2] = {lower_to_float(rows.bias[0]), lower_to_float(rows.bias[1])};
  // Lanes give the row addresses of four matrices: 8 tokens x 8 rows of W, 8 more rows, both of 8 more tokens.
  const u32 token = (lane & 7) + (lane >> 4) * 8, chunk = 2 * self.warp + (lane >> 3 & 1);
  const u32 to = out + token * 128 + ((chunk ^ (token & 7)) * 16);
#if SWIGLU
  // One body of code per pair of strips, that both warpgroups run, here each for the other's strip: less code, because
  // it is not in the instruction cache when it is reached.
#pragma unroll
  for (int first = 0; first < STRIPS; first += 2) {
    const int strip = first + 1 - group;
    if (!share.has(strip)) continue;
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      pairs[i] = rounded_pair(i, sums + 8 * first, first + 1 < STRIPS && group == 0, rows, bias);
    stmatrix4_trans(to + strip * STRIP_BYTES, pairs);
  }
  sync_workers();
  const u32 left = to + (1 - 2 * group) * OUT_BYTES;  // by the other warpgroup
#pragma unroll
  for (int first = 0; first < STRIPS; first += 2) {
    const int strip = first + group;
    if (!share.has(strip)) continue;
    u32 pairs[4];
    ldmatrix4_trans(pairs, left + strip * STRIP_BYTES);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 own = rounded_pair(i, sums + 8 * first, first + 1 < STRIPS && group == 1, rows, bias);
      const u32 gate = group == 0 ? own : pairs[i], up = group == 0 ? pairs[i] : own;
      pairs[i] = pack_pair(silu_and_multiply(lower_to_float(gate), lower_to_float(up)),
                           silu_and_multiply(upper_to_float(gate), upper_to_float(up)));
    }
    stmatrix4_trans(to + strip * STRIP_BYTES, pairs);
  }
#else
#pragma unroll
  for (int strip = 0; strip < STRIPS; strip++) {
    if (!share.has(strip)) continue;
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = rounded_pair(i, sums + 8 * strip, false, rows, bias);
    stmatrix4_trans(to + strip * STRIP_BYTES, pairs);
  }
#endif
  fence_async_proxy();
  group_sync(group);
  const u32 strip = threadIdx.x % 128;
  if (share.has(strip) && (!SWIGLU || strip % 2 == group)) {
    const int row_block = place.row_block + (SWIGLU ? 0 : group);
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"(row_block * 64), "r"(place.token + (int)strip * 16), "r"(out + strip * STRIP_BYTES)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;");
  }
}
