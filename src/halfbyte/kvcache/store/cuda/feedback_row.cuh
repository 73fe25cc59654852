// Error feedback for few tokens: one warp per token and head of K.
//
// A lane has LANE_CHANNELS adjacent channels and subtracts the errors of all earlier channels from them. For a
// block's scale, four lanes evaluate each candidate, a quarter of the block per lane. To round a block, TURNS channels
// at a time are broadcast to all lanes, which all round them one after the other: no exchange per channel. All warps
// of a CTA have the same head; its factors are copied to shared memory, all at once if they fit.
//
// The chain of operations from one channel to the next sets the time, so it is kept short: x * r is not rounded to
// float32 before it is rounded to E2M1, and nothing is checked. Afterwards `is_exact` finds the few rows where this
// may change bits. They are rounded again by `slow_row.cuh`, like those with values that are not finite.
//
// Macros:
//   WARPS         of a CTA
//   STAGES        blocks of the factor in shared memory: PARTS, or fewer, but two at least
//   K_WEIGHTED    1 if K's block scales are chosen by weighted error

#pragma once
#include "kvcache/store/cuda/slow_row.cuh"

#define TURNS 8  // channels that are broadcast to all lanes at a time
#define QUARTER (BLOCK / 4)
#define ENTRIES 132
#define MIN_SHIFT 4194308.0f  // 2^22 and more than any t below 1.75

struct SharedRows {
  float factors[STAGES][BLOCK][HEAD_SIZE];
  float weights[HEAD_SIZE];
  float4 scales[ENTRIES];             // `Scale`s of bytes from -1 on
  float keys[WARPS][HEAD_SIZE];       // K of a row; then, channel by channel, the values that were rounded
  float errors[WARPS][CANDIDATES * 4];  // of a block's quarters
};

// A block scale, as one vector: d (times the global scale), its reciprocal, the scale, and 2^22 times the reciprocal.
__device__ __forceinline__ float4 scale_entry(int byte, float g) {
  const float s = scale_of_byte(min(max(byte, 1), LARGEST_SCALE)), d = mul(s, g), r = inverse<true>(d);
  return make_float4(d, r, s, mul(r, 0x1p22f));
}

// Rows of block b of the factor, from its own channels on.
__device__ __forceinline__ void copy_factors(SharedRows& shared, const float* factor, int b) {
  constexpr int LANES = 32 * WARPS / BLOCK;  // of a row
  const int row = threadIdx.x / LANES, channel = threadIdx.x % LANES * 4;
  const float* from = factor + (b * BLOCK + row) * HEAD_SIZE + channel;
  float* to = &shared.factors[b % STAGES][row][channel];
#pragma unroll
  for (int i = 0; i < HEAD_SIZE; i += LANES * 4)
    if (channel + i >= b * BLOCK) copy16(shared_address(to + i), from + i);
}

// Copies are in groups: with all factors in shared memory those of blocks 0, 1, 2 to 3, and 4 to 7; else one per block.
#define AT_ONCE (STAGES == PARTS)
#define GROUPS (!AT_ONCE ? STAGES - 1 : PARTS == 4 ? 3 : 4)

__device__ __forceinline__ void copy_first_factors(SharedRows& shared, const float* factor) {
#pragma unroll
  for (int b = 0; b < (AT_ONCE ? PARTS : STAGES - 1); b++) {
    copy_factors(shared, factor, b);
    if (!AT_ONCE || !(b & (b + 1))) commit_copies();
  }
}

// Waits for the factors of block b. All warps are done with block b - 1.
__device__ __forceinline__ void wait_for_factors(SharedRows& shared, const float* factor, int b) {
  if (AT_ONCE && b & (b - 1)) return;
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS - 1));
  __syncthreads();
  if (!AT_ONCE && b + STAGES - 1 < PARTS) copy_factors(shared, factor, b + STAGES - 1);
  commit_copies();  // may be empty, so that the number of later groups stays the same
}

// The scale that a block's values are rounded with, and multiples of d.
struct Steps {
  float d, r;
  float fourfold, limit;  // from 4 d on the step between values is 2 d; from 6.5 d on a value becomes 6 d
  float zero;             // -d 2^24

  __device__ __forceinline__ Steps(float d, float r) : d(d), r(r) {
    fourfold = mul(d, 4.0f), limit = mul(d, 6.5f), zero = mul(d, -0x1p24f);
  }
};

// Floats next to t + SMALL_SHIFT are 1/2 apart for t below 2, then 1; next to t + LARGE_SHIFT they are 2 apart. For a
// t of 3.5 to 4.5 either will do: the nearest value is 4. Ties go to the even code.
#define SMALL_SHIFT (0x1p23f - 2.0f)
#define LARGE_SHIFT 0x1p24f

// condition >= limit ? x - y : otherwise, as a predicated subtraction: a select would add its latency.
__device__ __forceinline__ float sub_if_not_less(float condition, float limit, float x, float y, float otherwise) {
  asm("{.reg .pred p; setp.ge.f32 p, %1, %2; @p sub.rn.f32 %0, %3, %4;}"
      : "+f"(otherwise)
      : "f"(condition), "f"(limit), "f"(x), "f"(y));
  return otherwise;
}

// |x| less its rounded value.
__device__ __forceinline__ float size_of_error(float x, const Steps& by) {
  const float size = fabsf(x), shifted = __fmaf_rn(fminf(size, by.limit), by.r, LARGE_SHIFT);
  const float small = mul(sub(__fmaf_rn(size, by.r, SMALL_SHIFT), SMALL_SHIFT), by.d);
  const float large = __fmaf_rn(shifted, by.d, by.zero);  // d 2^24 is a float, so this is rounded once
  return sub_if_not_less(size, by.fourfold, size, large, sub(size, small));
}

// Whether rounding |x| r to float32 first, as defined, gives the same value.
__device__ __forceinline__ bool is_exact(float x, const Steps& by) {
  const float size = fminf(fabsf(x), by.limit), shift = size >= by.fourfold ? LARGE_SHIFT : SMALL_SHIFT;
  return __fmaf_rn(size, by.r, shift) == add(mul(size, by.r), shift);
}

// The largest magnitude of block b. A mask has lower latency than a predicate.
__device__ __forceinline__ float amax_of_row(const float* y, int b) {
  const int mask = ((int)(threadIdx.x % 32 / BLOCK_LANES ^ b) - 1) >> 31;
  return float_of(__reduce_max_sync(~0u, bits_of(amax_of<LANE_CHANNELS>(y)) & mask & 0x7FFFFFFF));
}

// The scale of block b with the smallest weighted error. Lanes 4n to 4n + 3 evaluate candidate n, a quarter of the
// block each; lanes 16 to 31 do the same as lanes 0 to 15. `mine` is the candidate's scale for a byte of 0.
__device__ __forceinline__ Rounding best_of_row(SharedRows& shared, const float* y, const float* row, int b,
                                                const float4* mine, const Inverse& unit, float limit) {
  static_assert(CANDIDATES == 4, "lanes have four candidates");
  const int warp = threadIdx.x / 32, quarter = threadIdx.x % 4;
  float x[QUARTER], w[QUARTER], sums[QUARTER], errors[CANDIDATES];
  load4(x, row + b * BLOCK + quarter * QUARTER), load4(w, shared.weights + b * BLOCK + quarter * QUARTER);
  const float amax = amax_of_row(y, b);
  const int byte = byte_of_ratio_fast(unit.of(fminf(amax, limit)));
  const float4 own = mine[byte];
  float4 scales[CANDIDATES];
#pragma unroll
  for (int i = 0; i < CANDIDATES; i++) scales[i] = shared.scales[1 + byte + candidate_step(i)];
#pragma unroll
  for (int i = 0; i < QUARTER; i++) {
    // As `distance`, for any t, which is rounded to float32 first, as in the definition. The shift is at least MIN_SHIFT.
    const float t = mul(fabsf(x[i]), own.y), shift = fmaxf(mul(fabsf(x[i]), own.w), MIN_SHIFT);
    const float off = sub(fminf(sub(shift, sub(shift, t)), 6.0f), t);
    sums[i] = mul(mul(off, off), w[i]);
  }
  shared.errors[warp][threadIdx.x % 16] = pairwise_sum<QUARTER>(sums);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < CANDIDATES; i++) {
    float quarters[4];
    load4(quarters, shared.errors[warp] + 4 * i);
    errors[i] = mul(mul(pairwise_sum<4>(quarters), scales[i].z), scales[i].z);
  }
  // NaN never wins, except for candidate 0, which wins if its error is NaN.
  const bool second = errors[1] < errors[0];
  const float first_two = second ? errors[1] : errors[0], last_two = fminf(errors[2], errors[3]);
  const bool last = last_two < first_two, third = errors[2] == last_two;
  const float4 low = second ? scales[1] : scales[0], high = third ? scales[2] : scales[3];
  const int low_step = second ? candidate_step(1) : candidate_step(0);
  const int high_step = third ? candidate_step(2) : candidate_step(3);
  const int best = min(max(byte + (last ? high_step : low_step), 1), LARGEST_SCALE);
  return {best, last ? high.x : low.x, last ? high.y : low.y, amax == 0.0f};
}

// The scale of block b as the format chooses it.
__device__ __forceinline__ Rounding scale_of_row(const float* row, int b, float g) {
  float x[BLOCK];
  load_floats(x, row + b * BLOCK);
  return Rounding::of<true>(encode_as_format<true, FOUR_OVER_SIX>(x, g).scale, amax_of<BLOCK>(x), g);
}

// Rounds TURNS channels of block b from its channel `first` on, and subtracts their errors from the lanes' later
// channels `y`. Leaves the values that were rounded (errors of earlier channels subtracted) in `row`.
__device__ __forceinline__ void take_turns(float* y, const Steps& by, const float (*factors)[HEAD_SIZE], int b,
                                           int first, float* row) {
  const int lane = threadIdx.x % 32;
  float x[TURNS];
#pragma unroll
  for (int i = 0; i < TURNS; i += 4) load4(x + i, row + b * BLOCK + first + i);
#pragma unroll
  for (int c = 0; c < TURNS; c++) {
    const float* factor = factors[first + c];
    const float error = size_of_error(x[c], by);
    const float sign = copysignf(1.0f, x[c]);
    float f[TURNS], own[LANE_CHANNELS];
#pragma unroll
    for (int i = c / 4 * 4; i < TURNS; i += 4) load4(f + i, factor + b * BLOCK + first + i);
#pragma unroll
    for (int i = c + 1; i < TURNS; i++) x[i] = __fmaf_rn(-mul(error, f[i]), sign, x[i]);
    // Factors of earlier channels are 0, or were not copied; those values of y are not used any more.
    read_channels(own, factor + lane * LANE_CHANNELS);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) y[i] = __fmaf_rn(-mul(error, own[i]), sign, y[i]);
  }
  __syncwarp();
  if (lane == 0)
#pragma unroll
    for (int i = 0; i < TURNS; i += 4)
      *(float4*)(row + b * BLOCK + first + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
}

// Rounds a row that is in `row`, and in lanes' `y`. Leaves the values that were rounded in `row`; returns the scale of
// the block that has the lane's channels. Called by a whole CTA.
__device__ __forceinline__ Rounding round_row(SharedRows& shared, const float* factor, float* row, float* y, float g) {
  const int lane = threadIdx.x % 32;
  const Inverse unit(mul(6.0f, g));
  const float limit = mul(448.0f, mul(6.0f, g));
  const float4* mine = shared.scales + 1 + candidate_step(lane % 16 / 4);
  static_assert(32 * WARPS == 128, "a thread for each byte from -1 on");
  shared.scales[threadIdx.x] = scale_entry(threadIdx.x - 1, g);
  if (threadIdx.x < ENTRIES - 128) shared.scales[128 + threadIdx.x] = scale_entry(LARGEST_SCALE, g);
  Rounding own = {};
#pragma unroll 1
  for (int b = 0; b < PARTS; b++) {
    wait_for_factors(shared, factor, b);
#if K_WEIGHTED
    const Rounding by = best_of_row(shared, y, row, b, mine, unit, limit);
#else
    const Rounding by = scale_of_row(row, b, g);
#endif
    if (lane / BLOCK_LANES == b) own = by;
    const Steps steps(by.d, by.r);
#pragma unroll
    for (int i = 0; i < BLOCK; i += TURNS) {
      take_turns(y, steps, shared.factors[b % STAGES], b, i, row);
      // Channels of the next turns have all errors of earlier ones subtracted.
      const int next = b * BLOCK + i + TURNS;
      const int end = next + (i + TURNS < BLOCK ? BLOCK - TURNS : BLOCK), channel = lane * LANE_CHANNELS;
      if (channel >= next && channel < end) write_channels(row + channel, y);
      __syncwarp();
    }
  }
  return own;
}

__device__ __forceinline__ void store_key_row(const Params& p, u32 cta, SharedRows& shared) {
  const u32 head = cta % KV_HEADS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 token = cta / KV_HEADS * WARPS + warp;
  const float* factor = p.feedback + (u64)head * HEAD_SIZE * HEAD_SIZE;
  const float g = p.k_scale ? *p.k_scale : p.k_scale_number;
  const u32 position = position_of(p, token);
  const Place place = Place::of(p, token);
#if K_WEIGHTED
  const u32 weight = 4 * threadIdx.x;
  if (weight < HEAD_SIZE) copy16(shared_address(shared.weights + weight), p.k_weights + head * HEAD_SIZE + weight);
#endif
  copy_first_factors(shared, factor);
  float *row = shared.keys[warp], *own = row + lane * LANE_CHANNELS, x[LANE_CHANNELS];
  load_channels(p, x, token, head, position);
  write_channels(own, x);
  __syncwarp();
  int first = -1;
#if FIRST_TYPE >= 0
  first = find_first_of(p, token, head, place.keep && position == 0, 32);
#endif
  if (is_easy(g)) {
    const Rounding by = round_row(shared, factor, row, x, g);
    read_channels(x, own);
    const Steps steps(by.d, by.r);
    // NaN or infinity in any error propagates to the last channel, so checking that one suffices.
    bool is_done = fabsf(row[HEAD_SIZE - 1]) < INF;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) is_done &= is_exact(x[i], steps);  // && would branch for each
    if (!__any_sync(~0u, !is_done)) {
      store_row<true>(place, head, row, by, first);
      return;
    }
    __syncwarp();
    load_channels(p, x, token, head, position);
    write_channels(own, x);
    __syncwarp();
  }
  store_row<false>(place, head, row, round_row_slowly(p, row, head, g), first);
}
