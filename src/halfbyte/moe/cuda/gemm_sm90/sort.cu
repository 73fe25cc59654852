// Sorts pairs by expert and copies their tokens in that order, for gemm.cu; no sync, all sizes depend on shapes alone.
//
// The sorted pairs of an expert begin at a multiple of 16 rows, so that the 16 rows of a TMA store have one expert.
// Every CTA counts all expert ids, as in routing.cuh, which is faster than another kernel. Then it gives each pair of
// its own range the next row of the pair's expert, in ascending order of pairs, and copies the token there.

#include "moe/cuda/routing.cuh"

#define SORT_THREADS 512
#define WARPS (SORT_THREADS / 32)
#define IDS 16        // in flight, per thread
#define IDS_SMALL 2   // up to so many per thread are all in flight, beside a token
#define OCTETS 8      // of a token's x in flight, per lane; each 8 values

struct Params {
  Pairs pairs;
  const u16* x;    // [M, h]
  u16* sorted;     // [rows, 128 chunks]: h padded with zeros, permuted
  int2* places;    // [count]: row of a pair in `sorted`, -1 for pairs without an expert; bits of its weight
  int2* tiles;     // see Tile in work.cuh
  int* num_tiles;
  int h, chunks;   // a multiple of 32; of 128 values
  int tokens;      // of a tile
  u32 fraction;    // 2^32 / tokens, rounded up

  // Tiles of so many pairs.
  __device__ __forceinline__ int tiles_of(int count) const { return (int)__umulhi(count + tokens - 1, fraction); }
};

// In shared memory.
struct Counts {
  int* before;  // [num_experts]: pairs of an expert before this CTA's range
  int* from;    // [num_experts]: its other pairs; later the row of its first pair in this CTA's range
  int* own;     // [range]: experts of this CTA's range
};

template <class Id, int LOADS>
__device__ __forceinline__ void count_pairs(const Params& p, const Counts& counts, int begin, int end) {
  const Id* const ids = (const Id*)p.pairs.ids;
  for (int first = threadIdx.x; first < p.pairs.count; first += SORT_THREADS * LOADS) {
    // Loads all ids before it uses the first, so that their latencies overlap.
    Id own[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) own[i] = ids[min(first + i * SORT_THREADS, p.pairs.count - 1)];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int pair = first + i * SORT_THREADS;
      if (pair >= p.pairs.count) break;
      const int expert = p.pairs.expert_of(own[i]);
      if (pair >= begin && pair < end) counts.own[pair - begin] = expert;
      if (expert >= 0) atomicAdd((pair < begin ? counts.before : counts.from) + expert, 1);
    }
  }
}

template <int LOADS>
__device__ __forceinline__ void count_pairs(const Params& p, const Counts& counts, int begin, int end) {
  if (p.pairs.ids_are_64_bit)
    count_pairs<long long, LOADS>(p, counts, begin, end);
  else
    count_pairs<int, LOADS>(p, counts, begin, end);
}

// Turns counts into positions; one CTA also lists the tiles. Called by one warp, a lane of which has successive experts.
__device__ __forceinline__ void place_experts(const Params& p, const Counts& counts) {
  const int lane = threadIdx.x & 31, of_lane = (p.pairs.num_experts + 31) / 32;
  const int begin = min(lane * of_lane, p.pairs.num_experts), end = min(begin + of_lane, p.pairs.num_experts);
  int row = 0, tile = 0;
#pragma unroll 4
  for (int expert = begin; expert < end; expert++) {
    const int count = counts.before[expert] + counts.from[expert];
    row += (count + 15) / 16 * 16, tile += p.tiles_of(count);
  }
  const int rows_end = sum_of_lanes(row), tiles_end = sum_of_lanes(tile);
  if (blockIdx.x == 0 && lane == 31) *p.num_tiles = tiles_end;
  row = rows_end - row, tile = tiles_end - tile;
#pragma unroll 4
  for (int expert = begin; expert < end; expert++) {
    const int before = counts.before[expert], count = before + counts.from[expert];
    counts.from[expert] = row + before;
    if (blockIdx.x == 0)
      for (int left = count, first = row; left > 0; left -= p.tokens, first += p.tokens, tile++)
        p.tiles[tile] = make_int2(first, expert << 16 | min(p.tokens, left));
    row += (count + 15) / 16 * 16;
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

// A warp's copy of a token. Four times 64 values at a time: lane 2 c + j of 8 reads octet 2 c + j and writes octet 4 j + c.
struct Token {
  uint4 x[OCTETS];

  // From octet `first` on.
  __device__ __forceinline__ void load(const Params& p, int pair, int first) {
    const u16* const from = p.x + (u64)(pair / p.pairs.top_k) * p.h;
#pragma unroll
    for (int i = 0; i < OCTETS; i++) {
      const int octet = first + 32 * i + (threadIdx.x & 31);
      x[i] = make_uint4(0, 0, 0, 0);
      if (octet * 8 < p.h) x[i] = __ldcg((const uint4*)(from + octet * 8));
    }
  }

  __device__ __forceinline__ void store(const Params& p, int position, int first) const {
    const int lane = threadIdx.x & 31;
    u16* const to = p.sorted + (u64)position * (p.chunks * 128);
#pragma unroll
    for (int i = 0; i < OCTETS; i++) {
      const uint4 y = in_order(x[i]);
      const int octet = first + 32 * i + (lane & 24) + lane % 2 * 4 + lane / 2 % 4;
      if (octet < p.chunks * 16) *(uint4*)(to + octet * 8) = y;
    }
  }
};

extern "C" __global__ void __launch_bounds__(SORT_THREADS, 2) moe_sort(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  const Counts counts{(int*)shared, (int*)shared + p.pairs.num_experts, (int*)shared + 2 * p.pairs.num_experts};
  const int begin = (int)((long long)p.pairs.count * blockIdx.x / gridDim.x);
  const int end = (int)((long long)p.pairs.count * (blockIdx.x + 1) / gridDim.x);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  for (int i = threadIdx.x; i < p.pairs.num_experts; i += SORT_THREADS) counts.before[i] = counts.from[i] = 0;
  __syncthreads();
  wait_for_previous();
  allow_next();
  // A warp takes every WARPS-th pair, and prefetches a pair's token before it knows where the pair goes.
  Token token;
  float weight = 0.0f;
  auto load = [&](int i, bool is_counted) {
    if (i >= end - begin) return;
    weight = number_at(p.pairs.weights, begin + i, p.pairs.weights_dtype);
    // Without an expert it is not needed, once that is known.
    if (!is_counted || counts.own[i] >= 0) token.load(p, begin + i, 0);
  };
  const bool is_small = p.pairs.count <= SORT_THREADS * IDS_SMALL;
  if (is_small) {
    load(warp, false);
    count_pairs<IDS_SMALL>(p, counts, begin, end);
  } else {
    count_pairs<IDS>(p, counts, begin, end);
  }
  __syncthreads();
  if (!is_small) load(warp, true);
  if (warp == 0) place_experts(p, counts);
  __syncthreads();
#pragma unroll 1
  for (int i = warp; i < end - begin; i += WARPS) {
    const int expert = counts.own[i], pair = begin + i;
    int position = expert < 0 ? -1 : counts.from[expert];
    // Its lanes count the pairs of the same expert before it.
    for (int first = 0; expert >= 0 && first < i; first += 32)
      position += __popc(__ballot_sync(~0u, first + lane < i && counts.own[first + lane] == expert));
    if (lane == 0) p.places[pair] = make_int2(position, __float_as_int(weight));
    if (expert >= 0) {
      token.store(p, position, 0);
      for (int first = 32 * OCTETS; first < p.chunks * 16; first += 32 * OCTETS) {
        token.load(p, pair, first);
        token.store(p, position, first);
      }
    }
    load(i + WARPS, true);
  }
}
