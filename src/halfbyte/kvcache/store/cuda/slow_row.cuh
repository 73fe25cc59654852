// Error feedback for a token and head of K by a warp, by the definition and without regard to speed: for global scales
// outside 2^-40 .. 2^40, and for rows that `feedback_row.cuh` rejects. Code that both need is here, too.

#pragma once
#include "kvcache/store/cuda/turns.cuh"

#define LANE_CHANNELS (HEAD_SIZE / 32)
#define BLOCK_LANES (BLOCK / LANE_CHANNELS)

// A lane's channels, from memory where they are a multiple of their size.
__device__ __forceinline__ void read_channels(float* to, const float* from) {
  if constexpr (LANE_CHANNELS == 2) {
    const float2 x = *(const float2*)from;
    to[0] = x.x, to[1] = x.y;
  } else {
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i += 4) load4(to + i, from + i);
  }
}
__device__ __forceinline__ void write_channels(float* to, const float* from) {
  if constexpr (LANE_CHANNELS == 2)
    *(float2*)to = make_float2(from[0], from[1]);
  else
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i += 4)
      *(float4*)(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
}

// Reads a lane's values of an input, from value i on.
template <int TYPE>
__device__ __forceinline__ void read_inputs(float* to, const void* x, u64 i) {
  if constexpr (TYPE == 0) {
    read_channels(to, (const float*)x + i);
  } else {
    const u32* from = (const u32*)((const u16*)x + i);
    u32 words[LANE_CHANNELS / 2];
    if constexpr (LANE_CHANNELS == 2) {
      words[0] = from[0];
    } else if constexpr (LANE_CHANNELS == 4) {
      const uint2 y = *(const uint2*)from;
      words[0] = y.x, words[1] = y.y;
    } else {
      const uint4 y = *(const uint4*)from;
      words[0] = y.x, words[1] = y.y, words[2] = y.z, words[3] = y.w;
    }
#pragma unroll
    for (int j = 0; j < LANE_CHANNELS / 2; j++) widen<TYPE>(to[2 * j], to[2 * j + 1], words[j]);
  }
}

// A lane's channels of K'; zeros for a token that is not there. Called by a whole warp.
__device__ __forceinline__ void load_channels(const Params& p, float* x, u32 token, u32 head, u32 position) {
  const u32 lane = threadIdx.x % 32, channel = lane * LANE_CHANNELS;
#pragma unroll
  for (int i = 0; i < LANE_CHANNELS; i++) x[i] = 0.0f;
  if (token < p.num_slots) {
    read_inputs<KEY_TYPE>(x, p.key, token * p.key_token + head * p.key_head + channel);
#if SEGMENT
    float cos[LANE_CHANNELS], sin[LANE_CHANNELS], mean[LANE_CHANNELS], partner[LANE_CHANNELS];
    const u64 of_segment = (u64)segment_of(p, position) * HEAD_SIZE + channel;
    read_channels(mean, p.mean + head * HEAD_SIZE + channel);
    read_channels(partner, p.partner_mean + head * HEAD_SIZE + channel);
    read_channels(cos, p.cos + of_segment), read_channels(sin, p.sin + of_segment);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) x[i] = sub(x[i], add(mul(cos[i], mean[i]), mul(sin[i], partner[i])));
#endif
  }
#if ROTATE
  rotate<LANE_CHANNELS, 32>(x, lane);
#endif
}

// Rounds a row, in place: leaves the values that were rounded (errors of earlier channels subtracted). Returns the
// scale of the block that has the lane's channels.
__device__ __forceinline__ Rounding round_row_slowly(const Params& p, float* row, u32 head, float g) {
  const u32 lane = threadIdx.x % 32;
  const float* factor = p.feedback + (u64)head * HEAD_SIZE * HEAD_SIZE;
  Rounding own = {};
#pragma unroll 1
  for (u32 b = 0; b < PARTS; b++) {
    float x[BLOCK];
    load_floats(x, row + b * BLOCK);
    const Rounding by = rounding_of_key<false>(p, x, head, b, g);
    if (lane / BLOCK_LANES == b) own = by;
#pragma unroll 1
    for (u32 c = b * BLOCK; c < (b + 1) * BLOCK; c++) {
      const float error = error_of<false>(row[c], by);
      __syncwarp();
#pragma unroll
      for (u32 i = 0; i < LANE_CHANNELS; i++) {
        const u32 channel = lane * LANE_CHANNELS + i;
        if (channel > c) row[channel] = sub(row[channel], mul(error, factor[c * HEAD_SIZE + channel]));
      }
      __syncwarp();
    }
  }
  return own;
}

// Stores a row's codes and scales; `by` is of the block that has the lane's channels.
template <bool EASY>
__device__ __forceinline__ void store_row(const Place& place, u32 head, const float* row, const Rounding& by,
                                          int first) {
  const u32 lane = threadIdx.x % 32, part = lane / BLOCK_LANES;
  float x[LANE_CHANNELS];
  read_channels(x, row + lane * LANE_CHANNELS);
  u32 codes = 0;
#pragma unroll
  for (int i = 0; i < LANE_CHANNELS; i++) codes |= (signed_code_bits<EASY>(x[i], by) - FIRST_CODE) << 4 * i;
  int scale = by.is_zero ? 0 : by.scale;
  if (by.is_zero || by.scale == NAN_SCALE) codes = 0;
  if (first >= 0) codes = lane ? 0 : first, scale = part ? 0 : MARK;
  if (!place.keep) return;
  u8* to = key_codes(place, head, 0) + lane * (LANE_CHANNELS / 2);
#pragma unroll
  for (int i = 0; i < LANE_CHANNELS / 2; i++) to[i] = codes >> 8 * i;
  if (lane % BLOCK_LANES == 0) *key_scale(place, head, part) = scale;
}
