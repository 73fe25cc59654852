// Adds up the results of a token's experts in the order of its ids.
//
// Macros:
//   X_BF16   see values.cuh
//   SORTED   0: results are weighted already, in the order of pairs; 1: they are sorted by expert

#include "linear/w4a16/values.cuh"
#include "moe/cuda/routing.cuh"

#define SUM_THREADS 128
#define LOADS 8              // in flight
#define WORDS (SORTED ? 4 : 2)  // of two columns, per thread; unsorted (few tokens) fewer, for more threads

struct Params {
  const u16* results;  // [pairs, n], or [rows, stride]; not written for pairs without an expert
  u16* out;            // [pairs / top_k, n]
  Pairs pairs;
  int n;       // a multiple of 2 WORDS
  int blocks;  // CTAs per token
#if SORTED
  int stride;
  const int2* places;  // [pairs]: row of results, or -1; bits of the weight
#endif
};

// Two columns per word.
struct Columns {
  u32 words[WORDS];

  __device__ __forceinline__ void load(const u16* from) {
#if SORTED
    const uint4 x = __ldcg((const uint4*)from);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
#else
    const uint2 x = __ldcg((const uint2*)from);
    words[0] = x.x, words[1] = x.y;
#endif
  }

  __device__ __forceinline__ void store(u16* to) const {
#if SORTED
    *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
#else
    *(uint2*)to = make_uint2(words[0], words[1]);
#endif
  }
};

// Where a pair's result is (-1 if it has none), and its weight.
struct Place {
  int row = -1;
  float weight = 1.0f;

  __device__ __forceinline__ void load(const Params& p, int pair) {
#if SORTED
    const int2 place = __ldcg(p.places + pair);
    row = place.x, weight = row < 0 ? 0.0f : __int_as_float(place.y);  // that of a pair without an expert may be NaN
#else
    if (p.pairs.expert(pair) >= 0) row = pair;
#endif
  }
};

// All places before the first result, so that latencies overlap; those beyond a token's pairs have no row.
__device__ __forceinline__ void load_places(Place* places, const Params& p, int pair, int first) {
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    places[i] = {};
    if (first + i < p.pairs.top_k) places[i].load(p, pair + first + i);
  }
}

__device__ __forceinline__ int stride_of(const Params& p) {
#if SORTED
  return p.stride;
#else
  return p.n;
#endif
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) moe_sum(const __grid_constant__ Params p) {
  const int token = blockIdx.x / p.blocks;
  const int column = (blockIdx.x % p.blocks * SUM_THREADS + threadIdx.x) * (2 * WORDS);
  const int top_k = p.pairs.top_k;
  Place places[LOADS];
  // Expert ids may be read before the wait: down lets this kernel start after its own wait, when all kernels before
  // gate_up have ended.
  if (!SORTED) load_places(places, p, token * top_k, 0);
  wait_for_previous();
  allow_next();
  if (column >= p.n) return;
  float sum[2 * WORDS] = {};
  for (int first = 0; first < top_k; first += LOADS) {
    if (SORTED || first > 0) load_places(places, p, token * top_k, first);
    Columns x[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      x[i] = {};
      if (places[i].row >= 0) x[i].load(p.results + (u64)places[i].row * stride_of(p) + column);
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
#pragma unroll
      for (int j = 0; j < WORDS; j++) {
        sum[2 * j] = fmaf(lower_to_float(x[i].words[j] & 0xFFFF), places[i].weight, sum[2 * j]);
        sum[2 * j + 1] = fmaf(upper_to_float(x[i].words[j]), places[i].weight, sum[2 * j + 1]);
      }
    }
  }
  Columns out;
#pragma unroll
  for (int j = 0; j < WORDS; j++) out.words[j] = pack_pair(sum[2 * j], sum[2 * j + 1]);
  out.store(p.out + (u64)token * p.n + column);
}
