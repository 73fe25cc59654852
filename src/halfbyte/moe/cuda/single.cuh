// A warp's item times one token, MXFP4: the columns of the matmul are blocks of k instead of tokens.
//
// An item has 256 k: 8 blocks of 32. Column b of operand B has the token's values of block b and zeros elsewhere, so that
// column b of the result is a row's unscaled sum over block b, which takes its block scale in float32: 4 multiplications
// per lane and item instead of 64 of pairs of values, and no scale is too large for bfloat16.
//
// In a matmul, lane c of four has values of block c / 2 of a chunk (values.cuh). So a lane of column g has values in one of
// an item's four chunks, if c / 2 is g % 2, and otherwise in none.
//
// Weights are unpacked to values times 2^-126, so the token is multiplied by 2^64, or sums would leave float32's
// range: with values from 2^64 on, results are infinite or NaN. Scales of 2^-127 become 0.

#pragma once
#include "moe/cuda/loader.cuh"

#define SINGLE_FACTOR 0x5F805F80u            // 2^64 twice, in bfloat16
#define SINGLE_SCALE 4611686018427387904.0f  // 2^(126 - 64)

struct SingleToken {
  const u8 *x, *zeros;  // of the lane, in shared memory
  int chunk;            // in which it has values, or -1

  // `row` is the token's, followed by 144 bytes of zeros. They are read in other banks than the values.
  __device__ __forceinline__ explicit SingleToken(const u8* row, int row_bytes) {
    const int g = (threadIdx.x & 31) / 4, c = threadIdx.x & 3;
    chunk = c / 2 == g % 2 ? g / 2 : -1;
    x = row + max(chunk, 0) * 128 + c * 16;
    zeros = row + row_bytes + 64;
  }

  __device__ __forceinline__ static float scale_of(u32 e) {
    return __int_as_float(e == 255 ? 0x7FFFFFFF : e << 23);  // 255 is NaN
  }

  // The scales of this lane's sums of an item: of rows g and g + 8, blocks 2 c and 2 c + 1. `from` is the item in shared
  // memory, `exists` whether it has the blocks' part.
  __device__ __forceinline__ void load_scales(float* scales, u32 from, bool exists) const {
    const int g = (threadIdx.x & 31) / 4, c = threadIdx.x & 3;
    const u32 at = from + c / 2 * PART_BYTES + g * 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 word = exists ? load_shared_word(at + i * 4) >> c % 2 * 16 : 0;
      scales[i] = scale_of(word & 255);
      scales[2 + i] = scale_of(word >> 8 & 255);
    }
  }

  // Adds words of rows g and g + 8 of a chunk of an item, times the token.
  __device__ __forceinline__ void multiply(float* acc, const uint4& words, int item, int chunk_of_item) const {
    const u8* const from = chunk == chunk_of_item ? x + item * (PARTS * PART_K * 2) : zeros;
    const u32 upper[2] = {words.x, words.y}, lower[2] = {words.z, words.w};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      u32 a[2][4], b[2][4];
      unpack_values(a[0], upper[j]);
      unpack_values(a[1], lower[j]);
#pragma unroll
      for (int i = 0; i < 4; i++) b[i / 2][i % 2 * 2] = a[0][i], b[i / 2][i % 2 * 2 + 1] = a[1][i];
      const uint4 v = *(const uint4*)(from + j * 64);
      matmul(acc, b[0], v.x, v.y);
      matmul(acc, b[1], v.z, v.w);
    }
  }

  // The sums of all blocks, for column 0 of the tile.
  __device__ __forceinline__ static void add_blocks(float* acc) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      acc[i] += acc[i + 1];
      acc[i] += __shfl_xor_sync(~0u, acc[i], 1);
      acc[i] += __shfl_xor_sync(~0u, acc[i], 2);
    }
  }
};
