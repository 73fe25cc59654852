// Sorts pairs by expert and copies their tokens in that order, for gemm.cu; no sync, all sizes depend on shapes alone.
//
// The sorted pairs of an expert begin at a multiple of 16 rows, so that the 16 rows of a TMA store have one expert.
// Every CTA counts all expert ids, as in routing.cuh, which is faster than another kernel. Then it gives each pair of
// its own range the next row of the pair's expert, in ascending order of pairs, and copies the token there.

#include "moe/cuda/routing.cuh"

#define SORT_THREADS 512
#define IDS 16   // in flight, per thread
#define LOADS 4  // of x

struct Params {
  Pairs pairs;
  const u16* x;    // [M, h]
  u16* sorted;     // [rows, 128 chunks]: h padded with zeros, permuted
  int2* places;    // [count]: row of a pair in `sorted`, -1 for pairs without an expert; bits of its weight
  int2* tiles;     // see Tile in work.cuh
  int* num_tiles;
  u64* written;    // [tiles], cleared, as are two counters; see narrow_work.cuh
  int* counters;
  int h, chunks;   // a multiple of 32; of 128 values
  int tokens;      // of a tile
};

// In shared memory.
struct Counts {
  int* before;  // [num_experts]: pairs of an expert before this CTA's range
  int* from;    // [num_experts]: its other pairs; later the row of its first pair in this CTA's range
  int* own;     // [range]: experts of this CTA's range
};

// Inclusive prefix sum over the lanes of a warp.
__device__ __forceinline__ int sum_of_lanes(int x) {
#pragma unroll
  for (int delta = 1; delta < 32; delta *= 2) {
    const int before = __shfl_up_sync(~0u, x, delta);
    if ((threadIdx.x & 31) >= delta) x += before;
  }
  return x;
}

template <class Id>
__device__ __forceinline__ void count_pairs(const Params& p, const Counts& counts, int begin, int end) {
  for (int i = threadIdx.x; i < p.pairs.num_experts; i += SORT_THREADS) counts.before[i] = counts.from[i] = 0;
  __syncthreads();
  const Id* const ids = (const Id*)p.pairs.ids;
  for (int first = threadIdx.x; first < p.pairs.count; first += SORT_THREADS * IDS) {
    // Loads all ids before it uses the first, so that their latencies overlap.
    Id own[IDS];
#pragma unroll
    for (int i = 0; i < IDS; i++) own[i] = ids[min(first + i * SORT_THREADS, p.pairs.count - 1)];
#pragma unroll
    for (int i = 0; i < IDS; i++) {
      const int pair = first + i * SORT_THREADS;
      if (pair >= p.pairs.count) break;
      const int expert = p.pairs.expert_of(own[i]);
      if (pair >= begin && pair < end) counts.own[pair - begin] = expert;
      if (expert >= 0) atomicAdd((pair < begin ? counts.before : counts.from) + expert, 1);
    }
  }
  __syncthreads();
}

// Turns counts into positions; one CTA also lists the tiles. Called by one warp.
__device__ __forceinline__ void place_experts(const Params& p, const Counts& counts) {
  const int lane = threadIdx.x & 31;
  int position = 0, num_tiles = 0;
  for (int first = 0; first < p.pairs.num_experts; first += 32) {
    const int expert = first + lane;
    const bool exists = expert < p.pairs.num_experts;
    const int count = exists ? counts.before[expert] + counts.from[expert] : 0;
    const int rows = (count + 15) / 16 * 16, tiles = (count + p.tokens - 1) / p.tokens;
    const int rows_end = position + sum_of_lanes(rows), tiles_end = num_tiles + sum_of_lanes(tiles);
    if (exists) counts.from[expert] = rows_end - rows + counts.before[expert];
    if (blockIdx.x == 0)
      for (int i = 0; i < tiles; i++) {
        p.tiles[tiles_end - tiles + i] =
            make_int2(rows_end - rows + i * p.tokens, expert << 16 | min(p.tokens, count - i * p.tokens));
        p.written[tiles_end - tiles + i] = 0;
      }
    position = __shfl_sync(~0u, rows_end, 31);
    num_tiles = __shfl_sync(~0u, tiles_end, 31);
  }
  if (blockIdx.x == 0 && lane == 0) {
    *p.num_tiles = num_tiles;
    p.counters[0] = p.counters[1] = 0;
  }
}

// Position 16 (2 j + h) + 8 q + 2 c + b of 64 gets value 16 c + 8 j + 4 h + 2 q + b: in this order the words of W are
// operands of matmuls (moe/cuda/values.cuh). The first product's channels are in it, too (channel_of).
//
// Lane 2 c + j of 8 has values 8 (2 c + j) .. + 7. The four lanes with the same j exchange them, so that this lane has
// positions 8 (4 j + c) .. + 7.
__device__ __forceinline__ uint4 in_order(uint4 x) {
  u32 w[4] = {x.x, x.y, x.z, x.w};
  transpose_words<2>(w);
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// Copies a token; called by one warp.
__device__ __forceinline__ void copy_token(const Params& p, int pair, int position) {
  const int lane = threadIdx.x & 31;
  const u16* const from = p.x + (u64)(pair / p.pairs.top_k) * p.h;
  u16* const to = p.sorted + (u64)position * (p.chunks * 128);
  // Four times 64 values at a time. Lane 2 c + j of 8 reads octet 2 c + j and writes octet 4 j + c.
  for (int first = 0; first < p.chunks * 16; first += 32 * LOADS) {
    uint4 x[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int octet = first + 32 * i + lane;
      x[i] = make_uint4(0, 0, 0, 0);
      if (octet * 8 < p.h) x[i] = __ldcg((const uint4*)(from + octet * 8));
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const uint4 y = in_order(x[i]);
      const int octet = first + 32 * i + (lane & 24) + lane % 2 * 4 + lane / 2 % 4;
      if (octet < p.chunks * 16) *(uint4*)(to + octet * 8) = y;
    }
  }
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS, 2) moe_sort(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  const Counts counts{(int*)shared, (int*)shared + p.pairs.num_experts, (int*)shared + 2 * p.pairs.num_experts};
  const int begin = (int)((long long)p.pairs.count * blockIdx.x / gridDim.x);
  const int end = (int)((long long)p.pairs.count * (blockIdx.x + 1) / gridDim.x);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  wait_for_previous();
  allow_next();
  if (p.pairs.ids_are_64_bit)
    count_pairs<long long>(p, counts, begin, end);
  else
    count_pairs<int>(p, counts, begin, end);
  if (warp == 0) place_experts(p, counts);
  __syncthreads();
  // A warp takes one pair after the other; its lanes count the pairs of the same expert before it.
  for (int i = warp; i < end - begin; i += SORT_THREADS / 32) {
    const int expert = counts.own[i];
    int position = expert < 0 ? -1 : counts.from[expert];
    for (int first = 0; expert >= 0 && first < i; first += 32)
      position += __popc(__ballot_sync(~0u, first + lane < i && counts.own[first + lane] == expert));
    const float weight = number_at(p.pairs.weights, begin + i, p.pairs.weights_dtype);
    if (lane == 0) p.places[begin + i] = make_int2(position, __float_as_int(weight));
    if (expert >= 0) copy_token(p, begin + i, position);
  }
}
