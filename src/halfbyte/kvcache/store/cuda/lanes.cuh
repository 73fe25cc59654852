// Blocks rounded by weighted error, for launches that do not fill the GPU: several lanes share a block, so that each has
// a short chain of instructions. Sums and maxima over a block are made as for one thread: neighbours first.
//
// Macros:
//   LANE_VALUES    values of K per lane, such that a head fits in one warp
//   LANE_VALUES_V  values of V per lane

#pragma once
#include "kvcache/store/cuda/values.cuh"

#define HEAD_LANES (HEAD_SIZE / LANE_VALUES)
#define HEAD_LANES_V (HEAD_SIZE_V / LANE_VALUES_V)

// A lane's values at value i, a multiple of COUNT.
template <int TYPE, int COUNT>
__device__ __forceinline__ void load_lane(float* to, const void* x, u64 i) {
#pragma unroll
  for (int j = 0; j < COUNT; j += 4) {
    if constexpr (TYPE == 0) {
      load4(to + j, (const float*)x + i + j);
    } else {
      const uint2 words = *(const uint2*)((const u16*)x + i + j);
      widen<TYPE>(to[j], to[j + 1], words.x), widen<TYPE>(to[j + 2], to[j + 3], words.y);
    }
  }
}

// A lane's part of a block that is rounded by weighted error. Its functions are called by whole warps.
template <int COUNT>
struct LaneBlock {
  static constexpr int LANES = BLOCK / COUNT;
  float x[COUNT], w[COUNT];

  __device__ __forceinline__ void load_weights(const float* from) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) load4(w + i, from + i);
  }
  __device__ __forceinline__ float amax() const {
    float y = amax_of<COUNT>(x);
#pragma unroll
    for (int h = 1; h < LANES; h *= 2) y = larger(y, __shfl_xor_sync(~0u, y, h));
    return y;
  }
  template <bool EASY>
  __device__ __forceinline__ int best_scale(float amax, float g) const {
    return exact_scale<EASY>(amax, g, [&](float r) {
      float error = weighted_error<EASY, true, COUNT>(x, w, r);
#pragma unroll
      for (int h = 1; h < LANES; h *= 2) error = add(error, __shfl_xor_sync(~0u, error, h));
      return error;
    });
  }
  // As encode_weighted; `codes` gets the lane's.
  template <bool EASY>
  __device__ __forceinline__ int encode(u32& codes, float g) const {
    const float amax = this->amax();
    const int scale = best_scale<EASY>(amax, g);
    const float r = inverse<EASY>(mul(scale_of_byte(scale), g));
    codes = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const u32 code = code_bits(fminf(fabsf(ratio_of<EASY>(x[i], r)), 6.0f)) - FIRST_CODE;
      codes |= (code | (x[i] < 0.0f ? 8 : 0)) << 4 * i;
    }
    if (!(amax > 0.0f)) codes = 0;
    return amax == 0.0f ? 0 : scale;
  }
};

// Stores the codes of a lane's values.
template <int COUNT>
__device__ __forceinline__ void store_lane_codes(u8* to, u32 codes) {
#if IN_WORDS
  if (COUNT == 8)
    *(u32*)to = codes;
  else
    *(u16*)to = (u16)codes;
#else
#pragma unroll
  for (int i = 0; i < COUNT / 2; i++) to[i] = codes >> 8 * i;
#endif
}

template <bool EASY>
__device__ __forceinline__ void store_key_lane(const Params& p, u32 number, float g) {
  constexpr int COUNT = LANE_VALUES, LANES = BLOCK / COUNT;
  const u32 lane = number % HEAD_LANES, head = number / HEAD_LANES % KV_HEADS, token = number / (HEAD_LANES * KV_HEADS);
  const u32 channel = lane * COUNT, part = channel / BLOCK;
  const bool exists = token < p.num_slots;
  const u32 position = position_of(p, token);
  const Place place = Place::of(p, token);
  LaneBlock<COUNT> block;
  block.load_weights(p.k_weights + head * HEAD_SIZE + channel);
#pragma unroll
  for (int i = 0; i < COUNT; i++) block.x[i] = 0.0f;
  if (exists) load_lane<KEY_TYPE, COUNT>(block.x, p.key, token * p.key_token + head * p.key_head + channel);
#if SEGMENT
  if (exists) {
    const u64 at = (u64)segment_of(p, position) * HEAD_SIZE + channel;
    float cos[COUNT], sin[COUNT], mean[COUNT], partner[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      load4(cos + i, p.cos + at + i), load4(sin + i, p.sin + at + i);
      load4(mean + i, p.mean + head * HEAD_SIZE + channel + i);
      load4(partner + i, p.partner_mean + head * HEAD_SIZE + channel + i);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      block.x[i] = sub(block.x[i], add(mul(cos[i], mean[i]), mul(sin[i], partner[i])));
  }
#endif
  int first = -1;
#if FIRST_TYPE >= 0
  first = find_first_of(p, token, head, place.keep && position == 0, HEAD_LANES);
#endif
#if ROTATE
  rotate<COUNT, HEAD_LANES>(block.x, lane);
#endif
  u32 codes;
  int scale = block.template encode<EASY>(codes, g);
  if (!place.keep) return;
  if (first >= 0) codes = lane ? 0 : first, scale = part ? 0 : MARK;
  store_lane_codes<COUNT>(key_codes(place, head, part) + lane % LANES * (COUNT / 2), codes);
  if (lane % LANES == 0) *key_scale(place, head, part) = scale;
}

#if V_WEIGHTED
template <bool EASY>
__device__ __forceinline__ void store_value_lane(const Params& p, u32 number, float g) {
  constexpr int COUNT = LANE_VALUES_V, LANES = BLOCK / COUNT;
  const u32 lane = number % HEAD_LANES_V, head = number / HEAD_LANES_V % KV_HEADS;
  const u32 token = number / (HEAD_LANES_V * KV_HEADS), channel = lane * COUNT, part = channel / BLOCK;
  const Place place = Place::of(p, token);
  LaneBlock<COUNT> block;
  block.load_weights(p.v_weights + head * HEAD_SIZE_V + channel);
#pragma unroll
  for (int i = 0; i < COUNT; i++) block.x[i] = 0.0f;
  if (token < p.num_slots)
    load_lane<VALUE_TYPE, COUNT>(block.x, p.value, token * p.value_token + head * p.value_head + channel);
  u32 codes;
  const int scale = block.template encode<EASY>(codes, g);
  if (!place.keep) return;
  const ValueBlock of_page(head, part);
  store_lane_codes<COUNT>(of_page.codes_of(place) + lane % LANES * (COUNT / 2), codes);
  if (lane % LANES == 0) *of_page.scale_of(place) = scale;
}
#endif

__device__ __forceinline__ void store_key_lanes(const Params& p, u32 number) {
  const float g = p.k_scale ? *p.k_scale : p.k_scale_number;
  if (is_easy(g))
    store_key_lane<true>(p, number, g);
  else
    store_key_lane<false>(p, number, g);
}

__device__ __forceinline__ void store_value_lanes(const Params& p, u32 number, unsigned char* memory) {
#if V_WEIGHTED
  const float g = p.v_scale ? *p.v_scale : p.v_scale_number;
  if (is_easy(g))
    store_value_lane<true>(p, number, g);
  else
    store_value_lane<false>(p, number, g);
#else
  store_values(p, number, memory);
#endif
}
