// Error feedback for few tokens: one warp per token and head of K.
//
// A lane has LANE_CHANNELS adjacent channels and subtracts the errors of all earlier channels from them. For a block's
// scale, four lanes evaluate each candidate, a quarter of the block per lane. To round a block, TURNS channels at a time
// are broadcast to all lanes, which all round them one after the other: no exchange per channel. All warps of a CTA have
// the same head; its factors are prefetched to shared memory, two blocks of rows ahead.
//
// Macros:
//   WARPS         of a CTA
//   K_WEIGHTED    1 if K's block scales are chosen by weighted error

#pragma once
#include "kvcache/store/cuda/turns.cuh"

#define LANE_CHANNELS (HEAD_SIZE / 32)
#define BLOCK_LANES (BLOCK / LANE_CHANNELS)
#define STAGES 4
#define TURNS 8  // channels that are broadcast to all lanes at a time
#define QUARTER (BLOCK / 4)

struct SharedRows {
  float factors[STAGES][BLOCK][HEAD_SIZE];
  float weights[HEAD_SIZE];
  float keys[WARPS][HEAD_SIZE];  // K of a row; then, channel by channel, the values that were rounded
};

__device__ __forceinline__ void copy16(void* to, const float* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
}

// Rows of block b of the factor, from its own channels on; one group of copies, which may be empty.
__device__ __forceinline__ void copy_factors(SharedRows& shared, const float* factor, int b) {
  constexpr int LANES = 32 * WARPS / BLOCK;  // of a row
  const int row = threadIdx.x / LANES, channel = threadIdx.x % LANES * 4;
  const float* from = factor + (b * BLOCK + row) * HEAD_SIZE + channel;
  float* to = &shared.factors[b % STAGES][row][channel];
  if (b < PARTS)
#pragma unroll
    for (int i = 0; i < HEAD_SIZE; i += LANES * 4)
      if (channel + i >= b * BLOCK) copy16(to + i, from + i);
  asm volatile("cp.async.commit_group;");
}

// Values of COUNT channels of a row from `first` on, a multiple of LANE_CHANNELS.
template <int COUNT>
__device__ __forceinline__ void fetch(float* to, const float* y, int first) {
#pragma unroll
  for (int j = 0; j < COUNT; j++)
    to[j] = __shfl_sync(~0u, y[j % LANE_CHANNELS], first / LANE_CHANNELS + j / LANE_CHANNELS);
}

// The largest magnitude of block b; NaN if it holds one, whose bits are larger than those of numbers.
__device__ __forceinline__ float amax_of_row(const float* y, int b) {
  const float own = threadIdx.x % 32 / BLOCK_LANES == b ? amax_of<LANE_CHANNELS>(y) : 0.0f;
  return float_of(__reduce_max_sync(~0u, bits_of(own) & 0x7FFFFFFF));
}

// The four channels of quarter q of block b, q being the lane's own.
__device__ __forceinline__ void fetch_quarter(float* to, const float* y, int b, int q) {
  if (LANE_CHANNELS <= QUARTER) {
    fetch<QUARTER>(to, y, b * BLOCK + q * QUARTER);
  } else {  // a lane has two quarters
    float both[2 * QUARTER];
    fetch<2 * QUARTER>(both, y, b * BLOCK + q / 2 * 2 * QUARTER);
#pragma unroll
    for (int i = 0; i < QUARTER; i++) to[i] = q % 2 ? both[QUARTER + i] : both[i];
  }
}

// The scale of block b with the smallest weighted error. Lanes 4n to 4n + 3 evaluate candidate n, a quarter of the
// block each; lanes 16 to 31 do the same as lanes 0 to 15.
template <bool EASY>
__device__ __forceinline__ Rounding best_of_row(const float* y, int b, const float* weights, float g) {
  static_assert(CANDIDATES == 4, "lanes have four candidates");
  const int n = threadIdx.x % 16 / 4, quarter = threadIdx.x % 4;
  float x[QUARTER], w[QUARTER];
  const float amax = amax_of_row(y, b);
  fetch_quarter(x, y, b, quarter);
  load4(w, weights + b * BLOCK + quarter * QUARTER);
  const float ratio = ratio_of_amax<EASY>(amax, g);
  const Candidate c = Candidate::near<EASY>(ratio == ratio ? byte_of_ratio(ratio) : 0, n, g);
  float error = weighted_error<EASY, true, QUARTER>(x, w, c.r);
  error = add(error, __shfl_xor_sync(~0u, error, 1));
  error = add(error, __shfl_xor_sync(~0u, error, 2));
  error = mul(mul(error, c.s), c.s);
  // Non-negative floats compare like their bits. NaN never wins, except for candidate 0, which wins if all are NaN.
  const u32 key = error == error ? bits_of(error) : n == 0 ? 0 : ~0u;
  const int best = __ffs(__ballot_sync(~0u, key == __reduce_min_sync(~0u, key))) - 1;
  const int byte = __shfl_sync(~0u, c.byte, best);
  const float d = __shfl_sync(~0u, c.d, best), r = __shfl_sync(~0u, c.r, best);
  if (ratio == ratio) return {byte, d, r, amax == 0.0f};
  return Rounding::of<EASY>(NAN_SCALE, amax, g);
}

// The scale of block b as the format chooses it.
template <bool EASY>
__device__ __forceinline__ Rounding scale_of_row(const float* y, int b, float g) {
  float x[BLOCK];
  fetch<BLOCK>(x, y, b * BLOCK);
  return Rounding::of<EASY>(encode_as_format<EASY, FOUR_OVER_SIX>(x, g).scale, amax_of<BLOCK>(x), g);
}

// Rounds TURNS channels of block b, `x`, from its channel `first` on, and subtracts their errors from the lanes' later
// channels `y`. Writes the values that were rounded (errors of earlier channels subtracted) to `turned`.
template <bool EASY>
__device__ __forceinline__ void take_turns(float* x, float* y, const Rounding& by, const float (*factors)[HEAD_SIZE],
                                           int b, int first, float* turned) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < TURNS; c++) {
    const float* factor = factors[first + c];
    const float error = error_of<EASY>(x[c], by);
    float f[TURNS], own[LANE_CHANNELS];
#pragma unroll
    for (int i = c / 4 * 4; i < TURNS; i += 4) load4(f + i, factor + b * BLOCK + first + i);
#pragma unroll
    for (int i = c + 1; i < TURNS; i++) x[i] = sub(x[i], mul(error, f[i]));
    // Factors of earlier channels are 0, or were not copied; those values of y are not used any more.
    if (LANE_CHANNELS == 2) {
      const float2 two = *(const float2*)(factor + lane * 2);
      own[0] = two.x, own[1] = two.y;
    } else {
#pragma unroll
      for (int i = 0; i < LANE_CHANNELS; i += 4) load4(own + i, factor + lane * LANE_CHANNELS + i);
    }
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) y[i] = sub(y[i], mul(error, own[i]));
  }
  if (lane == 0)
#pragma unroll
    for (int i = 0; i < TURNS; i += 4)
      *(float4*)(turned + b * BLOCK + first + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
}

// A lane's channels.
__device__ __forceinline__ void read_channels(float* to, const float* row) {
#pragma unroll
  for (int i = 0; i < LANE_CHANNELS; i++) to[i] = row[threadIdx.x % 32 * LANE_CHANNELS + i];
}

// Stores a row's codes and scales; `by` is of the block that has the lane's channels.
template <bool EASY>
__device__ __forceinline__ void store_row(const Place& place, u32 head, const float* turned, const Rounding& by,
                                          int first) {
  const int lane = threadIdx.x % 32, part = lane / BLOCK_LANES;
  float x[LANE_CHANNELS];
  read_channels(x, turned);
  u32 codes = 0;
#pragma unroll
  for (int i = 0; i < LANE_CHANNELS; i++) codes |= code_of<EASY>(x[i], by) << 4 * i;
  int scale = by.is_zero ? 0 : by.scale;
  if (by.is_zero || by.scale == NAN_SCALE) codes = 0;
  if (first >= 0) codes = lane ? 0 : first, scale = part ? 0 : MARK;
  if (!place.keep) return;
  u8* to = key_codes(place, head, 0) + lane * (LANE_CHANNELS / 2);
#pragma unroll
  for (int i = 0; i < LANE_CHANNELS / 2; i++) to[i] = codes >> 8 * i;
  if (lane % BLOCK_LANES == 0) *key_scale(place, head, part) = scale;
}

template <bool EASY>
__device__ __forceinline__ void store_key_row(const Params& p, u32 cta, float g, SharedRows& shared) {
  const u32 tiles = (p.num_slots + WARPS - 1) / WARPS, head = cta / tiles;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = cta % tiles * WARPS + warp;
  const float* factor = p.feedback + (u64)head * HEAD_SIZE * HEAD_SIZE;
#if K_WEIGHTED
  if (threadIdx.x < HEAD_SIZE / 4) copy16(shared.weights + 4 * threadIdx.x, p.k_weights + head * HEAD_SIZE + 4 * threadIdx.x);
#endif
  copy_factors(shared, factor, 0);
  copy_factors(shared, factor, 1);
  float* row = shared.keys[warp];
  float y[LANE_CHANNELS];
  const i64 position = position_of(p, token);
  const Place place = Place::of(p, token);
  {
    float x[BLOCK];
    const u32 part = lane % PARTS;  // several lanes load the same block
    load_key(p, x, token, head, part, position);
    if (lane < PARTS)
#pragma unroll
      for (int i = 0; i < BLOCK; i += 4)
        *(float4*)(row + part * BLOCK + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
  __syncwarp();
  read_channels(y, row);
  int first = -1;
#if FIRST_TYPE >= 0
  first = find_first_of(p, token, head, place.keep && position == 0, 32);
#endif
  asm volatile("cp.async.wait_group %0;" ::"n"(1));
  __syncthreads();
  Rounding own = {};
#pragma unroll 1
  for (int b = 0; b < PARTS; b++) {
    float x[TURNS];
    fetch<TURNS>(x, y, b * BLOCK);
#if K_WEIGHTED
    const Rounding by = best_of_row<EASY>(y, b, shared.weights, g);
#else
    const Rounding by = scale_of_row<EASY>(y, b, g);
#endif
    if (lane / BLOCK_LANES == b) own = by;
    copy_factors(shared, factor, b + 2);
    const float(*factors)[HEAD_SIZE] = shared.factors[b % STAGES];
#pragma unroll
    for (int i = 0; i < BLOCK; i += TURNS) {
      if (i) fetch<TURNS>(x, y, b * BLOCK + i);
      take_turns<EASY>(x, y, by, factors, b, i, row);
    }
    asm volatile("cp.async.wait_group %0;" ::"n"(1));
    __syncthreads();  // the next block's factors are there, and all warps are done with this block's
  }
  __syncwarp();
  store_row<EASY>(place, head, row, own, first);
}
