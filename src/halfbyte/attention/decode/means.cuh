// Biases by K's means (mean_operands.cuh) for decode.cu: a warp computes those of 16 segments at a time, and keeps them
// in shared memory.
//
// Macros: those of mean_operands.cuh.
//   KEEPS_COEFFICIENTS  1 to compute the coefficients once per work item and keep them in shared memory, too
//   KEEPS_ANGLES        1 to copy cosines and sines of the next 16 segments to shared memory while the tiles before them
//                       are processed, so that no warp waits for them; needs KEEPS_COEFFICIENTS

#pragma once
#include "attention/decode/mean_operands.cuh"
#include "attention/decode/scores.cuh"

// Channel pairs whose angles are loaded at once. Loads from global memory need more of them to hide their latency.
#define LOADED (!KEEPS_COEFFICIENTS || KEEPS_ANGLES ? 16 : PAIRS < 64 ? PAIRS : 64)

// What the coefficients and the first biases are computed from, loaded early to hide its latency.
struct MeanInputs {
#if KEEPS_COEFFICIENTS
  QueryPairs query[N_TILES][PAIRS / 16];
  MeanPairs mean[PAIRS / 16];
#endif
  // `behind_query`: as for Bias. All lanes must have read the earlier angles there.
  __device__ __forceinline__ MeanInputs(const Params& p, const WorkItem& item, int head, Share share,
                                        u32 behind_query) {
#if KEEPS_COEFFICIENTS
    const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int j = 0; j < PAIRS / 16; j++) {
      mean[j].load(p, head, first_pair(j));
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        const u64 row = query_row(p, item, head, item.col_tile * COLS + 8 * n + g % COLS);
        query[n][j].load(p, row, first_pair(j));
      }
    }
#endif
#if KEEPS_ANGLES
    if (share.first < share.stop)
      prefetch_angles(p, behind_query + COEFFICIENT_BYTES + BIAS_BYTES, share.first * TILE / SEGMENT);
    asm volatile("cp.async.commit_group;");
#endif
  }
};

#if SEGMENT
// Whether eight columns of a matmul are four and their lower parts.
#define PAIRED_SUMS (COLS == 4 && KEEPS_COEFFICIENTS)
#if PAIRED_SUMS
using BiasSums = PairedSums;
#else
using BiasSums = ProductSums<N_TILES == 1>;
#endif
#endif

// Biases of a lane's columns for the current tile.
struct Bias {
#if SEGMENT
  const WorkItem& item;
  int head;
  u32 coefficients;  // address of this lane's
  u32 table;         // floats [16, COLS]: biases of the segments from `first` on; behind it angles
  int first, last;   // segments: the first one in the table, and the share's last one
  float scale;       // from q . mean to a logit
  float of[N_TILES][2];

  // `behind_query`: shared-memory address, with COEFFICIENT_BYTES + BIAS_BYTES + ANGLE_BYTES from there on.
  __device__ __forceinline__ Bias(const Params& p, const WorkItem& item, int head, Share share, const MeanInputs& from,
                                  u32 behind_query)
      : item(item), head(head), first(-16), last((share.stop - 1) * TILE / SEGMENT),
        scale(p.softmax_scale * (SOFTCAP ? 1.0f : LOG2E)) {
    const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    coefficients = behind_query + (g % COLS * 4 + c) * 16;
    table = behind_query + COEFFICIENT_BYTES;
#if KEEPS_COEFFICIENTS
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int step = 0; step < PAIRS / 8; step++) {
        u32 words[4];
        coefficient_words(words, from.query[n][step / 2], from.mean[step / 2], step % 2);
        store_words4(address(n, step), words);
      }
    __syncwarp();
#endif
  }

  __device__ __forceinline__ u32 address(int n, int step) const {
    return coefficients + (n * (PAIRS / 8) + step) * (MEAN_LANES * 16);
  }

  // Computes the biases of 16 segments.
  __device__ __forceinline__ void fill(const Params& p) {
    const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    BiasSums sums[N_TILES];
#pragma unroll(KEEPS_ANGLES ? 2 : 1)
    for (int pair = 0; pair < PAIRS; pair += LOADED) {
      Angles<LOADED> angles;
      if (KEEPS_ANGLES)
        angles.load_copy(table + BIAS_BYTES, pair);
      else
        angles.load(p, first, pair);
      add(p, sums, angles, pair / 8);
    }
    __syncwarp();  // all lanes have read the earlier biases, and the angles
    if (KEEPS_ANGLES && first + 16 <= last) prefetch_angles(p, table + BIAS_BYTES, first + 16);
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float x = sums[n].total(2 * i), y = sums[n].total(2 * i + 1);
        if (2 * c < COLS) store_float2(table + ((g + 8 * i) * COLS + 8 * n + 2 * c) * 4, x * scale, y * scale);
      }
    __syncwarp();
  }

  __device__ __forceinline__ void add(const Params& p, BiasSums* sums, const Angles<LOADED>& angles, int first_step) {
#if KEEPS_COEFFICIENTS
#pragma unroll
    for (int step = 0; step < LOADED / 8; step++) {
      u32 high[4], low[4];
      angles.operands(high, low, step);
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
#if PAIRED_SUMS
        u32 b[2];
        load_words<2>(b, address(n, first_step + step) + (threadIdx.x & 16) / 2);
        sums[n].add(high, low, b, step);
#else
        u32 b[4];
        load_words<4>(b, address(n, first_step + step));
        sums[n].add(high, low, b);
#endif
      }
    }
#else
    const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      const u64 row = query_row(p, item, head, item.col_tile * COLS + 8 * n + g % COLS);
      add_pairs(p, sums[n], angles, 0, row, head, first_step * 8);
    }
#endif
  }

  // Moves to the tile at a position.
  __device__ __forceinline__ void step(const Params& p, int position) {
    const int segment = position / SEGMENT;
    if ((u32)(segment - first) >= 16) {
      first = segment;
      fill(p);
    }
    const u32 row = table + ((segment - first) * COLS + 2 * (threadIdx.x & 3) % COLS) * 4;
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      const float2 x = load_float2(row + 32 * n);
      of[n][0] = x.x, of[n][1] = x.y;
    }
  }

  // Adds the bias to a logit that is not yet scaled to base 2.
  __device__ __forceinline__ float plus(float logit, int n, int i) const { return logit + of[n][i]; }
  // Shift from logits of the tile to exponents; with a soft-cap the logits include the bias already.
  __device__ __forceinline__ float shifted(float shift, int n, int i) const {
    return SOFTCAP ? shift : shift + of[n][i];
  }
#else
  __device__ __forceinline__ Bias(const Params&, const WorkItem&, int, Share, const MeanInputs&, u32) {}
  __device__ __forceinline__ void step(const Params&, int) {}
  __device__ __forceinline__ float plus(float logit, int, int) const { return logit; }
  __device__ __forceinline__ float shifted(float shift, int, int) const { return shift; }
#endif
};
