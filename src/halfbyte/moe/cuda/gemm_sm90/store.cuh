// The epilogue of gemm.cu and narrow.cu: from sums to strips of the output.

#pragma once
#include "moe/cuda/gemm_sm90/memory.cuh"
#include "moe/cuda/routing.cuh"

// A worker thread.
struct Place {
  int group, warp, lane;

  __device__ __forceinline__ Place()
      : group(__shfl_sync(~0u, threadIdx.x / 128 - 1, 0)),
        warp(__shfl_sync(~0u, threadIdx.x / 32 % 4, 0)),
        lane(threadIdx.x % 32) {}

  // Its warp's tile of the CTA's.
  __device__ __forceinline__ int tile() const { return 4 * group + warp; }
};

// What the results of two rows of W, g and g + 8 of a tile, need besides sums, loaded before the sums are there.
template <bool IS_GATED>
struct Vectors {
  float scale[2], bias[2];
  bool exists;  // gated: whether the channel exists

  Vectors() = default;

  __device__ __forceinline__ Vectors(const Params& p, int expert, int tile, int lane) {
    const int channel = channel_of(tile, lane / 4);
    exists = channel < p.n / 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int row = tile * 16 + lane / 4 + 8 * i;
      if (IS_GATED) row = exists ? INTERLEAVED ? 2 * channel + i : channel + i * (p.n / 2) : p.n;
      scale[i] = p.global_scale ? p.global_scale[expert * p.parts + i * (p.parts - 1)] : 1.0f;
      bias[i] = p.bias && row < p.n ? number_at(p.bias, (u64)expert * p.n + row, p.bias_dtype) : 0.0f;
    }
  }

  // Behind the matmuls, since the compiler waits for loads where it multiplies.
  __device__ __forceinline__ void complete() {
    hold<2>(scale);
    scale[0] *= OPERAND_SCALE, scale[1] *= OPERAND_SCALE;
  }
};

// Waits until the last tile's strips have left shared memory.
__device__ __forceinline__ void wait_for_strips(int group) {
  wait_for_stores();
  group_sync(group);
}

// Writes strips of `middle` to shared memory, at `out`. Of every 8 tokens a thread has 2c, 2c + 1.
__device__ __forceinline__ void write_strips(const Params& p, int strips, const Vectors<true>& v, const Place& place,
                                             u32 out, const float* sums) {
  const int lane = place.lane;
  // A token has 32 channels, 64 bytes, swizzled. `stmatrix` stores the warp's 8 channels of 32 tokens, as four matrices
  // of 8 tokens; each lane gives the address for one token.
  const u32 address = out + lane * 64 + ((place.warp ^ lane / 2 % 4) * 16);
#pragma unroll
  for (int strip = 0; strip < STRIPS; strip += 2) {
    if (strip >= strips) continue;
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      pairs[j] = 0;
      if (strip * 16 + j * 8 >= TOKENS) continue;
      const float* d = sums + strip * 8 + j * 4;
      float results[2];
#pragma unroll
      for (int i = 0; i < 2; i++)
        results[i] = p.activation(fmaf(d[i], v.scale[0], v.bias[0]), fmaf(d[2 + i], v.scale[1], v.bias[1]));
      if (v.exists) pairs[j] = pack_pair(results[0], results[1]);
    }
    stmatrix4_trans(address + strip * (16 * 64), pairs);
  }
}

// Writes strips of the second product.
__device__ __forceinline__ void write_strips(const Params&, int strips, const Vectors<false>& v, const Place& place,
                                             u32 out, const float* sums) {
  const int lane = place.lane;
  // A token has 64 rows of W, 128 bytes, swizzled. `stmatrix` stores the warp's 16 rows of 16 tokens, as four matrices: 8
  // tokens x 8 rows, the same tokens x 8 more rows, and both for 8 more tokens. Lanes give the addresses in this order.
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
    stmatrix4_trans(address + strip * (16 * 128), pairs);
  }
}

// Writes strips to the output.
template <bool IS_GATED>
__device__ __forceinline__ void store(const Params& p, const Tile& tile, int row_pair, int rank,
                                      const Vectors<IS_GATED>& v, const Place& place, const TensorMap* map, u32 shared,
                                      const float* sums) {
  const int strips = (tile.count + 15) / 16;
  const u32 out = shared + OFF_OUT + place.group * OUT_BYTES;
  write_strips(p, strips, v, place, out, sums);
  fence_async_proxy();
  group_sync(place.group);
  const int strip = threadIdx.x % 128;
  if (strip < strips) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"((2 * row_pair + rank) * (IS_GATED ? 64 : ROWS) + place.group * (IS_GATED ? 32 : 64)),
                 "r"(tile.first + strip * 16), "r"(out + strip * (16 * (IS_GATED ? 64 : 128)))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;");
  }
}
