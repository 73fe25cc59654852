// The matmul that gives the bias q . mean(s), which the means of K add to the logits of segment s:
//
//   q . mean(s) = sum over pairs of  cosines[s] (q[low] m[low] + q[high] m[high])
//                                  + sines[s] (q[low] m[high] - q[high] m[low])
//
// A has cosines and sines, with 16 segments as M; B has coefficients that depend on the work item, with its columns
// as N. Both are split into two bf16 numbers, so that three products give 16 bits.
//
// Macros:
//   SEGMENT           tokens that share a mean, a multiple of 64; 0 where K is not centred
//   PAIRS             channel pairs, a power of two from 16 on
//   PAIRS_ARE_HALVES  1 if pair i is channels i and PAIRS + i

#pragma once
#include "attention/decode/values.cuh"

#if SEGMENT
// Splits x and y into sums of two bf16 numbers, packed as pairs.
__device__ __forceinline__ void split(u32& high, u32& low, float x, float y) {
  high = pack_bf162(x, y);
  low = pack_bf162(x - __int_as_float(high << 16), y - __int_as_float(high & 0xFFFF0000u));
}

// A lane has four of every 16 pairs: 4 c .. 4 c + 3. A k step takes two of them: the cosine and the sine of one are its k
// values 2 c and 2 c + 1, those of the other 2 c + 8 and 2 c + 9.
__device__ __forceinline__ int first_pair(int sixteen) { return sixteen * 16 + (threadIdx.x & 3) * 4; }

#define ANGLE_CHUNKS (PAIRS / 2)  // a segment's angles in chunks of 16 bytes
// Offset of a chunk in a copy of 16 segments' angles; the XOR avoids bank conflicts between neighbouring rows.
__device__ __forceinline__ u32 angle_offset(int row, int chunk) {
  return (row * ANGLE_CHUNKS + (chunk ^ (row & 1))) * 16;
}

// Asynchronously copies the angles of 16 segments to shared memory; a warp calls it. After the last mean, the last one
// applies, as in the store: the table repeats it for 15 segments.
__device__ __forceinline__ void prefetch_angles(const Params& p, u32 copy, int first_segment) {
  constexpr int ROWS = ANGLE_CHUNKS < 32 ? 32 / ANGLE_CHUNKS : 1, TURNS = ANGLE_CHUNKS < 32 ? 1 : ANGLE_CHUNKS / 32;
  const int lane = lane_of_now();
  const int row = ROWS > 1 ? lane / ANGLE_CHUNKS : 0, chunk = ROWS > 1 ? lane % ANGLE_CHUNKS : lane;
  const u32* from = p.recipe.angles + min(first_segment, p.recipe.mean_segments - 1) * (PAIRS * 2) + lane * 4;
#pragma unroll
  for (int i = 0; i < 16; i += ROWS)
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
      cp_async16_cached(copy + angle_offset(row + i, chunk + 32 * turn), from + (i * TURNS / ROWS + turn) * 128);
}

// A lane's words of A: cosine and sine of its pairs out of COUNT, for segments g and g + 8.
template <int COUNT>
struct Angles {
  u32 words[2][COUNT / 4][2];  // [segment][pair]: the higher bf16 parts, the lower ones

  __device__ __forceinline__ void load(const Params& p, int first_segment, int first) {
    const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      // After the last mean, the last one applies, as in the store.
      const u32 row = min(first_segment + g + 8 * i, p.recipe.mean_segments - 1) * PAIRS + first;
#pragma unroll
      for (int j = 0; j < COUNT / 16; j++)
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
          const uint4 x = *(const uint4*)(p.recipe.angles + 2 * (row + first_pair(j) + k));
          keep(i, 4 * j + k, x.x, x.y, x.z, x.w);
        }
    }
  }

  // The same from a copy that prefetch_angles made.
  __device__ __forceinline__ void load_copy(u32 copy, int first) {
    const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < COUNT / 16; j++)
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
          u32 x[4];
          load_words<4>(x, copy + angle_offset(g + 8 * i, (first + first_pair(j) + k) / 2));
          keep(i, 4 * j + k, x[0], x[1], x[2], x[3]);
        }
  }

  __device__ __forceinline__ void keep(int i, int pair, u32 high, u32 low, u32 next_high, u32 next_low) {
    words[i][pair][0] = high, words[i][pair][1] = low;
    words[i][pair + 1][0] = next_high, words[i][pair + 1][1] = next_low;
  }

  // Operand A of a k step, as sums of two numbers.
  __device__ __forceinline__ void operands(u32* high, u32* low, int step) const {
#pragma unroll
    for (int i = 0; i < 4; i++)
      high[i] = words[i % 2][2 * step + i / 2][0], low[i] = words[i % 2][2 * step + i / 2][1];
  }
};

// The channels of q in a lane's four pairs of 16.
struct QueryPairs {
  u32 low[2], high[2];  // two channels each

  // `row`: where the row of q begins, in elements; `pair`: the first of the four.
  __device__ __forceinline__ void load(const Params& p, u64 row, int pair) {
    const u16* q = (const u16*)p.query + row;
#if PAIRS_ARE_HALVES
    const uint2 x = *(const uint2*)(q + pair), y = *(const uint2*)(q + PAIRS + pair);
    low[0] = x.x, low[1] = x.y, high[0] = y.x, high[1] = y.y;
#else
    const int4 x = *(const int4*)(p.recipe.low + pair), y = *(const int4*)(p.recipe.high + pair);
    low[0] = q[x.x] | (u32)q[x.y] << 16, low[1] = q[x.z] | (u32)q[x.w] << 16;
    high[0] = q[y.x] | (u32)q[y.y] << 16, high[1] = q[y.z] | (u32)q[y.w] << 16;
#endif
  }
};

// The means in a lane's four pairs of 16.
struct MeanPairs {
  float low[4], high[4];

  __device__ __forceinline__ void load(const Params& p, int head, int pair) {
    load4(low, p.recipe.low_mean + head * PAIRS + pair);
    load4(high, p.recipe.high_mean + head * PAIRS + pair);
  }
};

// Operand B of k step 0 or 1 of 16 pairs: two words of the higher bf16 parts, then two of the lower ones.
__device__ __forceinline__ void coefficient_words(u32* words, const QueryPairs& query, const MeanPairs& mean, int step) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float x = query_value((u16)(query.low[step] >> 16 * i)), y = query_value((u16)(query.high[step] >> 16 * i));
    const float m = mean.low[2 * step + i], n = mean.high[2 * step + i];
    split(words[i], words[2 + i], x * m + y * n, x * n - y * m);
  }
}

#if COLS == 4
// Sums of A B over k steps, for four columns. The matmul's other four columns have the lower parts of the coefficients,
// so two matmuls suffice instead of three. Even and odd steps have separate accumulators: matmuls wait for fewer others.
struct PairedSums {
  float of[4][4] = {};

  // Adds a k step; `b` is of the higher parts in lanes 0 to 15, of the lower parts in the other lanes.
  __device__ __forceinline__ void add(const u32* high, const u32* low, const u32* b, int step) {
    mma<true>(of[step % 2], low, b[0], b[1]);
    mma<true>(of[2 + step % 2], high, b[0], b[1]);
  }
  // Called by a whole warp. Lanes with index 0 or 1 modulo 4 have the four columns.
  __device__ __forceinline__ float total(int i) const {
    const float x = (of[0][i] + of[1][i]) + (of[2][i] + of[3][i]);
    return x + __shfl_xor_sync(~0u, x, 2);
  }
};
#endif

// Sums of A B over k steps. If APART is 1, products with lower parts have separate accumulators, so that no matmul waits
// for another; it is 0 where registers do not suffice.
template <int APART>
struct ProductSums {
  float of[1 + 2 * APART][4] = {};

  // Adds a k step, with both operands split.
  __device__ __forceinline__ void add(const u32* high, const u32* low, const u32* b) {
    mma<true>(of[APART], low, b[0], b[1]);
    mma<true>(of[2 * APART], high, b[2], b[3]);
    mma<true>(of[0], high, b[0], b[1]);
  }
  __device__ __forceinline__ float total(int i) const {
    return APART ? (of[APART][i] + of[2 * APART][i]) + of[0][i] : of[0][i];
  }
};

// Adds 16 pairs from `pair` on to the sums of eight columns; `step` is their first k step in `angles`.
template <int COUNT, int APART>
__device__ __forceinline__ void add_pairs(const Params& p, ProductSums<APART>& sums, const Angles<COUNT>& angles,
                                          int step, u64 row, int head, int pair) {
  QueryPairs query;
  MeanPairs mean;
  query.load(p, row, pair + first_pair(0));
  mean.load(p, head, pair + first_pair(0));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 high[4], low[4], b[4];
    angles.operands(high, low, step + i);
    coefficient_words(b, query, mean, i);
    sums.add(high, low, b);
  }
}
#endif
