// Adds up the results of a token's experts in the order of its ids.
//
// Macros:
//   X_BF16   see values.cuh
//   SORTED   0: results are weighted already, in the order of pairs; 1: they are sorted by expert

#include "linear/w4a16/values.cuh"
#include "moe/cuda/routing.cuh"

#define SUM_THREADS 128
#define LOADS 8  // in flight

struct Params {
  const u16* results;  // [pairs, n], or [rows, stride]; not written for pairs without an expert
  u16* out;            // [pairs / top_k, n]
  Pairs pairs;
  int n;       // a multiple of 4
  int blocks;  // CTAs per token
#if SORTED
  int stride;
  const int* positions;  // [pairs]: rows of results
#endif
};

// A thread has four columns of a token.
extern "C" __global__ void __launch_bounds__(SUM_THREADS) moe_sum(const __grid_constant__ Params p) {
  const int token = blockIdx.x / p.blocks;
  const int column = (blockIdx.x % p.blocks * SUM_THREADS + threadIdx.x) * 4;
  const int top_k = p.pairs.top_k;
  wait_for_previous();
  allow_next();
  if (column >= p.n) return;
  float sum[4] = {};
  for (int first = 0; first < top_k; first += LOADS) {
    uint2 x[LOADS];
    float weights[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int pair = token * top_k + first + i;
      x[i] = make_uint2(0, 0);
      weights[i] = 0.0f;
      if (first + i >= top_k || p.pairs.expert(pair) < 0) continue;
#if SORTED
      weights[i] = number_at(p.pairs.weights, pair, p.pairs.weights_dtype);
      x[i] = __ldcg((const uint2*)(p.results + (u64)__ldcg(p.positions + pair) * p.stride + column));
#else
      weights[i] = 1.0f;
      x[i] = __ldcg((const uint2*)(p.results + (u64)pair * p.n + column));
#endif
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      sum[0] = fmaf(lower_to_float(x[i].x & 0xFFFF), weights[i], sum[0]);
      sum[1] = fmaf(upper_to_float(x[i].x), weights[i], sum[1]);
      sum[2] = fmaf(lower_to_float(x[i].y & 0xFFFF), weights[i], sum[2]);
      sum[3] = fmaf(upper_to_float(x[i].y), weights[i], sum[3]);
    }
  }
  *(uint2*)(p.out + (u64)token * p.n + column) =
      make_uint2(pack_pair(sum[0], sum[1]), pack_pair(sum[2], sum[3]));
}
