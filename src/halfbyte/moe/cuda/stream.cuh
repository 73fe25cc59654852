// A warp's weights, streamed through a ring in shared memory, times the tokens.
//
// The macros are those of experts.cu and token.cu.

#pragma once
#include "moe/cuda/loader.cuh"
#include "moe/cuda/single.cuh"

#if SINGLE
#define RESULT_SCALE SINGLE_SCALE
#else
#define RESULT_SCALE OPERAND_SCALE
#endif

#define SUM_BYTES (COLUMN_TILES * 512)  // of a warp's sums of a tile

// A lane's values of a part, 16 rows x 128 k.
struct Part {
  uint4 words[2];  // of each chunk: two of row g, two of row g + 8
  Scales scales;

  // `from` is the part in shared memory.
  __device__ __forceinline__ void load(u32 from, u32 exponent) {
    const int lane = threadIdx.x & 31;
    const u32 word = load_shared_word(from + scale_offset(lane));
#pragma unroll
    for (int i = 0; i < 2; i++) words[i] = load16(from + SCALE_BYTES + i * CHUNK_BYTES + lane * 16);
    scales.unpack(word, exponent);
  }

  // Adds the part times `count` columns. `x_at`: where this lane's bytes of its row of x begin, for each tile of columns.
  __device__ __forceinline__ void multiply(float (*acc)[4], const u8* const* x_at, u32 offset, int count) const {
#if MX
    // Not where operands are made: branches there would keep the compiler from mixing unpacking and matmuls.
    if (scales.large) return multiply_if<true>(acc, x_at, offset, count);
#endif
    multiply_if<false>(acc, x_at, offset, count);
  }

  // A chunk that K does not have is multiplied, too: it has scales 0 and old codes, all finite, and zeros as tokens.
  template <bool LARGE>
  __device__ __forceinline__ void multiply_if(float (*acc)[4], const u8* const* x_at, u32 offset, int count) const {
#pragma unroll
    for (int chunk = 0; chunk < 2; chunk++) {
      const u32 upper[2] = {words[chunk].x, words[chunk].y}, lower[2] = {words[chunk].z, words[chunk].w};
#pragma unroll
      for (int j = 0; j < 2; j++) {
        u32 a[2][4];
        scales.operands_if<LARGE>(a, upper[j], lower[j], chunk);
#pragma unroll
        for (int i = 0; i < COLUMN_TILES; i++) {
          if (i > 0 && count <= 8 * i) break;
          const uint4 x = *(const uint4*)(x_at[i] + offset + chunk * 128 + j * 64);
          matmul(acc[i], a[0], x.x, x.y);
          matmul(acc[i], a[1], x.z, x.w);
        }
      }
    }
  }
};

// A warp's ring, which runs ahead over tiles: STAGES items are in flight.
template <class Tiles>
struct Stream {
  Loader<Tiles> loader;
  const u32 ring, exponent;
  int slot = 0;

  __device__ __forceinline__ Stream(const Params& p, const Tiles& tiles, const u8* ring, int split)
      : loader(tiles, split), ring(shared_address(ring)), exponent(p.max_entries > 0 ? SCALE_EXPONENT : 0) {
#pragma unroll
    for (int i = 0; i < STAGES; i++) loader.step(this->ring + i * ITEM_BYTES);
  }

  // Adds to `acc` the warp's items of its next tile, times `count` columns.
  __device__ __forceinline__ void multiply_tile(float (*acc)[4], const u8* const* x_at, int count) {
#pragma unroll 1
    for (int i = loader.split; i < ITEMS; i += SPLIT) {
      const u32 from = ring + slot * ITEM_BYTES;
      wait_for_copies<STAGES - 1>();
      __syncwarp();
#pragma unroll
      for (int j = 0; j < PARTS; j++) {
        const int at = i * PARTS + j;
        const bool is_last = j == PARTS - 1 || (IS_RAGGED && at == PARTS_OF_K - 1);
        Part part;
        part.load(from + j * PART_BYTES, exponent);
        if (is_last) {
          __syncwarp();  // all lanes have read the item
          loader.step(from);
        }
        part.multiply(acc, x_at, at * (PART_K * 2), count);
        if (is_last) break;
      }
      slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
  }
};

#if SINGLE
// The same for one token, whose row of x in shared memory has X_OCTETS.
template <class Tiles>
__device__ __forceinline__ void multiply_single(Stream<Tiles>& stream, float* acc, const SingleToken& token) {
#pragma unroll 1
  for (int i = stream.loader.split; i < ITEMS; i += SPLIT) {
    const u32 from = stream.ring + stream.slot * ITEM_BYTES;
    wait_for_copies<STAGES - 1>();
    __syncwarp();
    float scales[4], sums[4] = {};
    token.load_scales(scales, from, !IS_RAGGED || i * PARTS + threadIdx.x % 4 / 2 < PARTS_OF_K);
    uint4 words[2 * PARTS];  // of each chunk; of a part that the item lacks, not used
#pragma unroll
    for (int j = 0; j < 2 * PARTS; j++)
      words[j] = load16(from + (j / 2 + 1) * SCALE_BYTES + j * CHUNK_BYTES + threadIdx.x % 32 * 16);
    __syncwarp();  // all lanes have read the item
    stream.loader.step(from);
#pragma unroll
    for (int j = 0; j < 2 * PARTS; j++) {
      if (j == 2 && PARTS_OF_K % PARTS && i == ITEMS - 1) break;
      token.multiply(sums, words[j], i, j);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) acc[k] = fmaf(sums[k], scales[k], acc[k]);
    stream.slot = stream.slot == STAGES - 1 ? 0 : stream.slot + 1;
  }
  SingleToken::add_blocks(acc);
}
#endif

// Waits for all warps of a group.
__device__ __forceinline__ void wait_for_group(int group) {
  if (SPLIT == 1)
    __syncwarp();
  else
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(32 * SPLIT) : "memory");
}

// Adds the sums of the SPLIT warps of a group, in order of k; only the warp that `finishes` gets the result. `sums`: two
// sets of all warps' SUM_BYTES, so that a warp may begin the next tile while a set is read; `turn` alternates them.
__device__ __forceinline__ void add_group(float (*acc)[4], u8* sums, int turn, int group, int split, bool finishes) {
  u8* const set = sums + ((turn & 1) * GROUPS + group) * SPLIT * SUM_BYTES + threadIdx.x % 32 * 16;
#pragma unroll
  for (int i = 0; i < COLUMN_TILES; i++)
    *(float4*)(set + split * SUM_BYTES + i * 512) = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
  wait_for_group(group);
  if (!finishes) return;
#pragma unroll
  for (int i = 0; i < COLUMN_TILES; i++) {
    acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
#pragma unroll
    for (int j = 0; j < SPLIT; j++) {
      const float4 sum = *(const float4*)(set + j * SUM_BYTES + i * 512);
      acc[i][0] += sum.x, acc[i][1] += sum.y, acc[i][2] += sum.z, acc[i][3] += sum.w;
    }
  }
}

// What a group's result needs besides sums, loaded before the sums are there.
struct Vectors {
  int row;      // of this lane's first sums: its channel if GATED
  bool exists;  // whether the expert has such a channel
  float scale[2], bias[2];

  __device__ __forceinline__ void load(const Params& p, int expert, int tile) {
    const int g = (threadIdx.x & 31) / 4;
    row = GATED ? channel_of(tile, g) : tile * 16 + g;
    exists = !GATED || CHANNELS % 64 == 0 || row < CHANNELS;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      scale[i] = RESULT_SCALE * (p.global_scale ? p.global_scale[expert * p.parts + i * (p.parts - 1)] : 1.0f);
      const int loaded = !GATED ? row + 8 * i : INTERLEAVED ? 2 * row + i : row + i * CHANNELS;
      bias[i] = p.bias && exists ? number_at(p.bias, (u64)expert * N + loaded, p.bias_dtype) : 0.0f;
    }
  }
};
