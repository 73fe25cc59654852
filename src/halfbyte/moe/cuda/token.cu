// The two products of a mixture-of-experts layer for one token, see experts.cu; NVFP4 or MXFP4 weights in the order of
// packed.py.
//
//   GATED      middle[pair, f] = activation(gate_f x, up_f x), of the pair's expert
//   otherwise  out[n] = sum over pairs of weight of the pair * (W_n middle[pair] + bias_n)
//
// With so few bytes latencies count more than bandwidth. So nothing stands between the expert ids and the first copies
// of weights but one load per warp: there are no lists of experts. The second product starts beside the first (their
// plans leave each other room on an SM), and when the first ends, most of its weights are in shared memory. It adds a
// token's experts itself, in float32, which saves a third launch.
//
//   Work       A CTA has an equal share of the tiles. GATED: of all pairs, one behind the other; a group of SPLIT warps
//              computes a tile. Otherwise of one matrix; the groups of a CTA compute the same tile of GROUPS experts at a
//              time. The warps of a group split k, as in experts.cu.
//   Sums       of experts and parts of k are added in an order that depends on shapes and on which ids have no expert.
//
// Macros: those of experts.cu; COLUMN_TILES is 1.

#include "moe/cuda/stream.cuh"
#include "moe/cuda/tokens.cuh"

// The pairs that have an expert, in registers: lane i has the i-th.
struct Hits {
  int count, expert_of_lane, pair_of_lane;

  __device__ __forceinline__ explicit Hits(const Pairs& pairs) {
    const int lane = threadIdx.x & 31;
    const int expert = lane < pairs.count ? pairs.expert(lane) : -1;
    const u32 exist = __ballot_sync(~0u, expert >= 0);
    count = __popc(exist);
    // As many pairs below this one have an expert as lanes are below this one.
    pair_of_lane = 0;
#pragma unroll
    for (int step = 16; step; step /= 2)
      if (__popc(exist & ((1u << (pair_of_lane + step)) - 1)) <= lane) pair_of_lane += step;
    expert_of_lane = __shfl_sync(~0u, expert, pair_of_lane);
  }

  __device__ __forceinline__ int expert(int i) const { return __shfl_sync(~0u, expert_of_lane, i); }
  __device__ __forceinline__ int pair(int i) const { return __shfl_sync(~0u, pair_of_lane, i); }
};

#if GATED
// A group's tiles of a range of all hits' tiles.
struct TokenTiles {
  const Params& p;
  const Hits& hits;
  int at, end;

  __device__ __forceinline__ bool valid() const { return at < end; }
  __device__ __forceinline__ const u8* begin() const { return p.tile(hits.expert(at / TILES), at % TILES); }
  __device__ __forceinline__ void advance() { at += GROUPS; }
};
#else
// A range of tiles, each of a group's hits: `first`, first + GROUPS, ...
struct TokenTiles {
  const Params& p;
  const Hits& hits;
  int at, end, first, hit;

  __device__ __forceinline__ bool valid() const { return at < end && hit < hits.count; }
  __device__ __forceinline__ const u8* begin() const { return p.tile(hits.expert(hit), at); }
  __device__ __forceinline__ void advance() {
    hit += GROUPS;
    if (hit < hits.count) return;
    hit = first;
    at++;
  }
};
#endif

#if GATED
#define X_ROWS 1

__device__ __forceinline__ void multiply(const Params& p, u8* x, u8* rings, u8* sums) {
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int group = warp / SPLIT, split = warp % SPLIT;
  // In this order: the second product reads the expert ids, a result of earlier kernels, before it waits.
  wait_for_previous();
  allow_next();
  copy_token<THREADS>(x, p.x, threadIdx.x);
  commit_copies();
  const Hits hits(p.pairs);
  const int total = hits.count * TILES, end = p.share(total, blockIdx.x + 1);
  int at = p.share(total, blockIdx.x) + group;
  Stream<TokenTiles> stream(p, {p, hits, at, end}, rings + warp * STAGES * ITEM_BYTES, split);
  wait_for_copies<STAGES>();
  __syncthreads();
  const u8* const x_at = x + lane % 4 * 16;
  for (int turn = 0; at < end; at += GROUPS, turn++) {
    // The warps of a group take turns in writing results.
    const bool finishes = turn % SPLIT == split;
    const int hit = at / TILES, pair = hits.pair(hit), expert = hits.expert(hit);
    Vectors vectors;
    if (finishes) vectors.load(p, expert, at % TILES);
    float acc[1][4] = {};
    stream.multiply_tile(acc, &x_at, 1);
    if (SPLIT > 1) add_group(acc, sums, turn, group, split, finishes);
    if (finishes && lane % 4 == 0 && vectors.exists) {
      const float gate = fmaf(acc[0][0], vectors.scale[0], vectors.bias[0]);
      const float up = fmaf(acc[0][2], vectors.scale[1], vectors.bias[1]);
      p.out[pair * CHANNELS + vectors.row] = (u16)pack_pair(p.activation(gate, up), 0.0f);
    }
  }
}

#else
#define X_ROWS p.pairs.count

// What sums of a hit are multiplied by, in registers: lane i has the i-th hit's. Loaded before the first product has
// ended, because that takes longer than a hit's matmuls.
struct Factors {
  float weight = 0.0f, scale[2] = {};  // of the router; of rows 0 to 7 and 8 to 15

  __device__ __forceinline__ Factors(const Params& p, const Hits& hits) {
    if ((threadIdx.x & 31) >= hits.count) return;
    Vectors vectors;
    vectors.load(p, hits.expert_of_lane, 0);
    weight = number_at(p.pairs.weights, hits.pair_of_lane, p.pairs.weights_dtype);
    scale[0] = vectors.scale[0], scale[1] = vectors.scale[1];
  }
};

__device__ __forceinline__ void multiply(const Params& p, u8* x, u8* rings, u8* sums) {
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int group = warp / SPLIT, split = warp % SPLIT;
  const Hits hits(p.pairs);
  const int begin = p.share(TILES, blockIdx.x), end = p.share(TILES, blockIdx.x + 1);
  Stream<TokenTiles> stream(p, {p, hits, begin, end, group, group}, rings + warp * STAGES * ITEM_BYTES, split);
  const Factors factors(p, hits);
  wait_for_previous();
  allow_next();
  // A group needs its own hits' rows only.
  for (int hit = group; hit < hits.count; hit += GROUPS)
    copy_token<32 * SPLIT>(x + hit * X_ROW_BYTES, p.x + (u64)hits.pair(hit) * K, threadIdx.x % (32 * SPLIT));
  commit_copies();
  wait_for_copies<0>();
  wait_for_group(group);
  for (int tile = begin; tile < end; tile++) {
    float sum[2] = {};  // of rows g and g + 8
    for (int hit = group; hit < hits.count; hit += GROUPS) {
      Vectors vectors;
      vectors.load(p, hits.expert(hit), tile);
      const float weight = __shfl_sync(~0u, factors.weight, hit);
      const u8* const x_at = x + hit * X_ROW_BYTES + lane % 4 * 16;
      float acc[1][4] = {};
      stream.multiply_tile(acc, &x_at, 1);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float scale = __shfl_sync(~0u, factors.scale[i], hit);
        sum[i] = fmaf(fmaf(acc[0][2 * i], scale, split == 0 ? vectors.bias[i] : 0.0f), weight, sum[i]);
      }
    }
    // Two sets, so that a warp may begin the next tile while a set is read.
    float* const set = (float*)sums + (tile & 1) * (THREADS / 32) * 16;
    if (lane % 4 == 0) set[warp * 16 + lane / 4] = sum[0], set[warp * 16 + 8 + lane / 4] = sum[1];
    __syncthreads();
    if (threadIdx.x < 16) {
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < THREADS / 32; i++) total += set[i * 16 + threadIdx.x];
      p.out[tile * 16 + threadIdx.x] = (u16)pack_pair(total, 0.0f);
    }
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) moe_token(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  u8* const rings = shared + X_ROWS * X_ROW_BYTES;
  multiply(p, shared, rings, rings + SPLIT * GROUPS * STAGES * ITEM_BYTES);
}
