// The bias q . mean(s) that the means of K add to the logits of segment s, for decode.cu.
//
//   q . mean(s) = sum over pairs of  cosines[s] (q[low] m[low] + q[high] m[high])
//                                  + sines[s] (q[low] m[high] - q[high] m[low])
//
// is a matmul of cosines and sines, with segments as M, and of coefficients that depend on the work item, with
// its columns as N. A warp computes the biases of 16 segments at a time, and keeps them in shared memory. Both
// operands are split into two bf16 numbers, so that three products give 16 bits.
//
// Macros:
//   SEGMENT   tokens that share a mean, a multiple of TILE; 0 where K is not centred
//   PAIRS     channel pairs, a multiple of 16
//   PAIRS_ARE_HALVES  1 if pair i is channels i and PAIRS + i

#pragma once
#include "attention/decode/scores.cuh"

#if SEGMENT
// Splits x and y into sums of two bf16 numbers, packed as pairs.
__device__ __forceinline__ void split(u32& high, u32& low, float x, float y) {
  high = pack_bf162(x, y);
  low = pack_bf162(x - __int_as_float(high << 16), y - __int_as_float(high & 0xFFFF0000u));
}

__device__ __forceinline__ void load4(float* to, const float* from) {
  const float4 x = *(const float4*)from;
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

// Of every 16 pairs a lane has four: 4 c .. 4 c + 3. Two of them make a k step, k values 2 c and 2 c + 1 being
// the cosine and the sine of one pair.
__device__ __forceinline__ int first_pair(int sixteen) { return sixteen * 16 + (threadIdx.x & 3) * 4; }

// A lane's cosines and sines for segments g and g + 8 of 16, and LOADED of the pairs.
#define LOADED (PAIRS < 64 ? PAIRS : 64)
struct Angles {
  float cosine[2][LOADED / 4], sine[2][LOADED / 4];

  __device__ __forceinline__ void load(const Params& p, int first_segment, int first) {
    const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      // After the last mean, the last one applies, as in the store.
      const u32 row = min(first_segment + g + 8 * i, p.recipe.mean_segments - 1) * PAIRS + first;
#pragma unroll
      for (int j = 0; j < LOADED / 16; j++) {
        load4(cosine[i] + 4 * j, p.recipe.cosines + row + first_pair(j));
        load4(sine[i] + 4 * j, p.recipe.sines + row + first_pair(j));
      }
    }
  }
};
#endif

// What the coefficients and the first biases are computed from, loaded early to hide its latency.
struct MeanInputs {
#if SEGMENT
  u32 low[N_TILES][PAIRS / 8], high[N_TILES][PAIRS / 8];  // of q: two channels each
  float low_mean[PAIRS / 4], high_mean[PAIRS / 4];
#if DUPLICATE
  Angles angles;  // of the first LOADED pairs; other kernels have no registers left for them
#endif
  int first;  // segment

  __device__ __forceinline__ MeanInputs(const Params& p, const WorkItem& item, int head, Share share)
      : first(share.first * TILE / SEGMENT) {
    const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int j = 0; j < PAIRS / 16; j++) {
      const int pair = first_pair(j);
      load4(low_mean + 4 * j, p.recipe.low_mean + head * PAIRS + pair);
      load4(high_mean + 4 * j, p.recipe.high_mean + head * PAIRS + pair);
#if !PAIRS_ARE_HALVES
      const int4 lows = *(const int4*)(p.recipe.low + pair), highs = *(const int4*)(p.recipe.high + pair);
#endif
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        const u16* q = (const u16*)p.query + query_row(p, item, head, item.col_tile * COLS + 8 * n + g % COLS);
#if PAIRS_ARE_HALVES
        const uint2 x = *(const uint2*)(q + pair), y = *(const uint2*)(q + PAIRS + pair);
        low[n][2 * j] = x.x, low[n][2 * j + 1] = x.y;
        high[n][2 * j] = y.x, high[n][2 * j + 1] = y.y;
#else
        low[n][2 * j] = q[lows.x] | (u32)q[lows.y] << 16, low[n][2 * j + 1] = q[lows.z] | (u32)q[lows.w] << 16;
        high[n][2 * j] = q[highs.x] | (u32)q[highs.y] << 16;
        high[n][2 * j + 1] = q[highs.z] | (u32)q[highs.w] << 16;
#endif
      }
    }
#if DUPLICATE
    angles.load(p, first, 0);
#endif
  }
#else
  __device__ __forceinline__ MeanInputs(const Params&, const WorkItem&, int, Share) {}
#endif
};

// Biases of a lane's columns for the current tile.
struct Bias {
#if SEGMENT
  u32 coefficients;  // address of this lane's
  u32 table;         // floats [16, COLS]: biases of the segments from `first` on
  int first;
  float scale;       // from q . mean to a logit
  float of[N_TILES][2];

  // `behind_query`: shared-memory address of COEFFICIENT_BYTES + BIAS_BYTES.
  __device__ __forceinline__ Bias(const Params& p, const MeanInputs& from, u32 behind_query)
      : first(from.first), scale(p.softmax_scale * (SOFTCAP ? 1.0f : LOG2E)) {
    const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    coefficients = behind_query + (g % COLS * 4 + c) * 16;
    table = behind_query + COEFFICIENT_BYTES;
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int step = 0; step < PAIRS / 8; step++) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float x = query_value((u16)(from.low[n][step] >> 16 * i));
          const float y = query_value((u16)(from.high[n][step] >> 16 * i));
          const float m = from.low_mean[2 * step + i], o = from.high_mean[2 * step + i];
          split(words[i], words[2 + i], x * m + y * o, x * o - y * m);
        }
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address(n, step)), "r"(words[0]),
                     "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
      }
    __syncwarp();
#if DUPLICATE
    fill(p, from.angles);
#else
    first = -16;
#endif
  }

  __device__ __forceinline__ u32 address(int n, int step) const {
    return coefficients + (n * (PAIRS / 8) + step) * (MEAN_LANES * 16);
  }

  // Computes the biases of 16 segments. `angles`: theirs, of the first LOADED pairs.
  __device__ __forceinline__ void fill(const Params& p, const Angles& angles) {
    const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    float sums[N_TILES][4] = {};
    add(sums, angles, 0);
#pragma unroll 1
    for (int pair = LOADED; pair < PAIRS; pair += LOADED) {
      Angles next;
      next.load(p, first, pair);
      add(sums, next, pair / 8);
    }
    __syncwarp();  // all lanes have read the earlier ones
    if (2 * c < COLS)
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(table + ((g + 8 * i) * COLS + 8 * n + 2 * c) * 4),
                       "f"(sums[n][2 * i] * scale), "f"(sums[n][2 * i + 1] * scale)
                       : "memory");
    __syncwarp();
  }

  __device__ __forceinline__ void add(float (*sums)[4], const Angles& angles, int first_step) const {
#pragma unroll
    for (int step = 0; step < LOADED / 8; step++) {
      u32 high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        split(high[i], low[i], angles.cosine[i % 2][2 * step + i / 2], angles.sine[i % 2][2 * step + i / 2]);
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        u32 b[4];
        load_words<4>(b, address(n, first_step + step));
        mma<true>(sums[n], low, b[0], b[1]);
        mma<true>(sums[n], high, b[2], b[3]);
        mma<true>(sums[n], high, b[0], b[1]);
      }
    }
  }

  // Moves to the tile at a position.
  __device__ __forceinline__ void step(const Params& p, int position) {
    const int segment = position / SEGMENT;
    if ((u32)(segment - first) >= 16) {
      first = segment;
      Angles angles;
      angles.load(p, first, 0);
      fill(p, angles);
    }
    const u32 row = table + ((segment - first) * COLS + 2 * (threadIdx.x & 3) % COLS) * 4;
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(of[n][0]), "=f"(of[n][1])
                   : "r"(row + 32 * n)
                   : "memory");
  }

  // Adds the bias to a logit that is not yet scaled to base 2.
  __device__ __forceinline__ float plus(float logit, int n, int i) const { return logit + of[n][i]; }
  // Shift from logits of the tile to exponents; with a soft-cap the logits include the bias already.
  __device__ __forceinline__ float shifted(float shift, int n, int i) const {
    return SOFTCAP ? shift : shift + of[n][i];
  }
#else
  __device__ __forceinline__ Bias(const Params&, const MeanInputs&, u32) {}
  __device__ __forceinline__ void step(const Params&, int) {}
  __device__ __forceinline__ float plus(float logit, int, int) const { return logit; }
  __device__ __forceinline__ float shifted(float shift, int, int) const { return shift; }
#endif
};
