// Error feedback for many tokens: one warp per head and 32 tokens, whose K and errors are in shared memory.
//
// Block by block. First, a lane subtracts the errors of all earlier channels, in order, from four channels of four
// tokens: two loads for sixteen products. Then a lane has all channels of one token: it chooses the scale, rounds
// the channels one after the other, and overwrites them with their errors.
//
// Macros:
//   WARPS         of a CTA
//   K_WEIGHTED    1 if K's block scales are chosen by weighted error

#pragma once
#include "kvcache/store/cuda/turns.cuh"

#define TILE 32                                                // tokens of a warp
#define TILE_ROWS (TILE / PARTS)                               // tokens that are centred and rotated at once
#define PADDING (TILE_ROWS > 4 ? TILE_ROWS : 4)                // after the channels of a block, against bank conflicts
#define TILE_FLOATS (PARTS * (BLOCK * TILE + PADDING))

__device__ __forceinline__ int at(int channel, int row) { return channel * TILE + channel / BLOCK * PADDING + row; }

// Centres and rotates the tile.
__device__ __forceinline__ void load_tile(const Params& p, float* tile, u32 token, u32 head, u32 position) {
  const u32 lane = threadIdx.x % 32, part = lane % PARTS, begin = token - lane;
  Mean mean;
#pragma unroll 1
  for (u32 row = lane / PARTS; row < TILE; row += TILE_ROWS) {
    float x[BLOCK];
    load_key(p, x, mean, begin + row, head, part, __shfl_sync(~0u, position, row));
#pragma unroll
    for (int i = 0; i < BLOCK; i++) tile[at(part * BLOCK + i, row)] = x[i];
  }
  __syncwarp();
}

// Subtracts the errors of all earlier blocks from block b.
__device__ __forceinline__ void gather(float* tile, const float* factor, int b) {
  const int rows = threadIdx.x % 8 * 4, channels = b * BLOCK + threadIdx.x % 32 / 8 * 4;
  float x[4][4];
#pragma unroll
  for (int i = 0; i < 4; i++) load4(x[i], tile + at(channels + i, rows));
#pragma unroll 1
  for (int before = 0; before < b; before++) {
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

// Rounds a block of each lane's token; `column` is its first channel in the tile, which gets the errors.
template <bool EASY>
__device__ __forceinline__ uint2 round_in_turn(float* x, const Rounding& by, const float* factor, float* column) {
  u32 words[2] = {FIRST_CODES, FIRST_CODES};
#pragma unroll
  for (int c = 0; c < BLOCK; c++) {
    const float error = error_of<EASY>(x[c], by);
    words[c / 8] += signed_code_bits<EASY>(x[c], by) << 4 * (c % 8);
    column[c * TILE] = error;
    float f[BLOCK];
#pragma unroll
    for (int i = c / 4 * 4; i < BLOCK; i += 4) load4(f + i, factor + c * HEAD_SIZE + i);
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
  const Place place = Place::of(p, token);
  load_tile(p, tile, token, head, position);
  int first = -1;
#if FIRST_TYPE >= 0
  first = find_first_of(p, token, head, place.keep && position == 0, 1);
#endif
#pragma unroll 1
  for (int b = 0; b < PARTS; b++) {
    gather(tile, factor, b);
    float* column = tile + at(b * BLOCK, lane);
    float x[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) x[i] = column[i * TILE];
    const Rounding by = rounding_of_key<EASY>(p, x, head, b, g);
    uint2 words = round_in_turn<EASY>(x, by, factor + b * BLOCK * (HEAD_SIZE + 1), column);
    if (by.is_zero || by.scale == NAN_SCALE) words = make_uint2(0, 0);
    store_key(place, head, b, {words, by.is_zero ? 0 : by.scale}, first);
    __syncwarp();
  }
}
