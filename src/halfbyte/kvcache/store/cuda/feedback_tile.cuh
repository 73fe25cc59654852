// Error feedback for many tokens: one warp per head and 32 tokens, whose K and errors are in shared memory.
//
// Block by block. First, a lane subtracts the errors of all earlier channels, in order, from four channels of four
// tokens: two loads for sixteen products. Then a lane has all channels of one token: it chooses the scale, rounds
// the channels one after the other, and overwrites them with their errors.
//
// For very many tokens the first block never is in shared memory, so that 16 warps of heads of 128 instead of 12 fit an SM of
// 228 KiB: shuffles bring it to the lanes that round it, and these subtract its errors from all later channels at once.
//
// Macros:
//   WARPS         of a CTA
//   K_WEIGHTED    1 if K's block scales are chosen by weighted error
//   LEFT_OUT      first blocks that are not in shared memory, 0 or 1

#pragma once
#include "kvcache/store/cuda/turns.cuh"

#define TILE 32                                     // tokens of a warp
#define TILE_ROWS (TILE / PARTS)                    // tokens that are centred and rotated at once
#define TILE_SHIFT (TILE_ROWS > 4 ? TILE_ROWS : 4)  // of each block's tokens, against bank conflicts; a multiple of 4
#define TILE_FLOATS ((HEAD_SIZE - LEFT_OUT * BLOCK) * TILE)

// A channel that is in the tile, and a token. Four tokens from a multiple of four on are side by side, and channels
// of a block TILE apart.
__device__ __forceinline__ int at(int channel, int row) {
  return (channel - LEFT_OUT * BLOCK) * TILE + (row + channel / BLOCK * TILE_SHIFT) % TILE;
}

// Centres and rotates the tile. `first` gets the first block of the lane's token if that is left out.
__device__ __forceinline__ void load_tile(const Params& p, float* tile, float* first, u32 token, u32 head,
                                          u32 position) {
  const u32 lane = threadIdx.x % 32, part = lane % PARTS, begin = token - lane;
  Mean mean;
#pragma unroll 1
  for (u32 rows = 0; rows < TILE; rows += TILE_ROWS) {
    const u32 row = rows + lane / PARTS;  // of this lane
    float x[BLOCK];
    load_key(p, x, mean, begin + row, head, part, __shfl_sync(~0u, position, row));
#pragma unroll
    for (int i = 0; i < BLOCK * LEFT_OUT; i++) {
      const float y = __shfl_sync(~0u, x[i], lane % TILE_ROWS * PARTS);
      if (lane / TILE_ROWS * TILE_ROWS == rows) first[i] = y;
    }
    if (part >= LEFT_OUT)
#pragma unroll
      for (int i = 0; i < BLOCK; i++) tile[at(part * BLOCK + i, row)] = x[i];
  }
  __syncwarp();
}

// Subtracts the errors of all earlier blocks in the tile from block b.
__device__ __forceinline__ void gather(float* tile, const float* factor, int b) {
  const int rows = threadIdx.x % 8 * 4, channels = b * BLOCK + threadIdx.x % 32 / 8 * 4;
  float x[4][4];
#pragma unroll
  for (int i = 0; i < 4; i++) load4(x[i], tile + at(channels + i, rows));
#pragma unroll 1
  for (int before = LEFT_OUT; before < b; before++) {
    const float* errors = tile + at(before * BLOCK, rows);
    const float* factors = factor + before * BLOCK * HEAD_SIZE + channels;
#pragma unroll 8
    for (int c = 0; c < BLOCK; c++) {
      float error[4], f[4];
      load4(error, errors + c * TILE), load4(f, factors + c * HEAD_SIZE);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) x[i][j] = sub(x[i][j], mul(error[j], f[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    *(float4*)(tile + at(channels + i, rows)) = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
  __syncwarp();
}

// Subtracts the errors of the first block from all later ones. A lane has a token, as in `round_in_turn`.
__device__ __forceinline__ void scatter(float* tile, const float* factor, const float* errors) {
#pragma unroll 1
  for (int k = BLOCK; k < HEAD_SIZE; k += 4) {
    float* column = tile + at(k, threadIdx.x % 32);
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = column[i * TILE];
#pragma unroll
    for (int c = 0; c < BLOCK; c++) {
      float f[4];
      load4(f, factor + c * HEAD_SIZE + k);
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = sub(x[i], mul(errors[c], f[i]));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) column[i * TILE] = x[i];
  }
}

// Rounds a block of each lane's token, and overwrites it with its errors.
template <bool EASY>
__device__ __forceinline__ uint2 round_in_turn(float* x, const Rounding& by, const float* factor) {
  u32 words[2] = {FIRST_CODES, FIRST_CODES};
#pragma unroll
  for (int c = 0; c < BLOCK; c++) {
    const float error = error_of<EASY>(x[c], by);
    words[c / 8] += signed_code_bits<EASY>(x[c], by) << 4 * (c % 8);
    float f[BLOCK];
#pragma unroll
    for (int i = c / 4 * 4; i < BLOCK; i += 4) load4(f + i, factor + c * HEAD_SIZE + i);
    x[c] = error;
#pragma unroll
    for (int i = c + 1; i < BLOCK; i++) x[i] = sub(x[i], mul(error, f[i]));
  }
  return make_uint2(words[0], words[1]);
}

template <bool EASY>
__device__ __forceinline__ void store_key_tile(const Params& p, u32 number, float g, float* tile) {
  const u32 tiles = (p.num_slots + TILE - 1) / TILE, head = number / tiles, lane = threadIdx.x % 32;
  const u32 token = number % tiles * TILE + lane;
  if (head >= KV_HEADS) return;
  const float* factor = p.feedback + (u64)head * HEAD_SIZE * HEAD_SIZE;
  const u32 position = position_of(p, token);
  float x[BLOCK];
  load_tile(p, tile, x, token, head, position);
  int first = -1;
#if FIRST_TYPE >= 0
  first = find_first_of(p, token, head, position == 0 && Place::of(p, token).keep, 1);
#endif
#pragma unroll 1
  for (int b = 0; b < PARTS; b++) {
    float* column = tile + at(b * BLOCK, lane);
    if (b >= LEFT_OUT) {
      gather(tile, factor, b);
#pragma unroll
      for (int i = 0; i < BLOCK; i++) x[i] = column[i * TILE];
    }
    const Rounding by = rounding_of_key<EASY>(p, x, head, b, g);
    uint2 words = round_in_turn<EASY>(x, by, factor + b * BLOCK * (HEAD_SIZE + 1));
    if (by.is_zero || by.scale == NAN_SCALE) words = make_uint2(0, 0);
    // The place is found again for each block, as registers to keep it lack.
    store_key(Place::of(p, token), head, b, {words, by.is_zero ? 0 : by.scale}, first);
    if (b >= LEFT_OUT) {
#pragma unroll
      for (int i = 0; i < BLOCK; i++) column[i * TILE] = x[i];
    } else {
      scatter(tile, factor, x);
    }
    __syncwarp();
  }
}
