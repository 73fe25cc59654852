// Lists pairs by expert for narrow.cu, which reads tokens where they are. One CTA; sizes depend on shapes alone.
//
// The pairs of an expert have successive rows from a multiple of 16 on, those of its tiles. Their order differs from
// run to run; no result depends on it.
//
// Macro: PAIRS per thread, at most

#include "moe/cuda/routing.cuh"

#define LIST_THREADS 1024
#define TILE 16  // rows

struct Params {
  Pairs pairs;
  int2* places;  // [count]: row of a pair, -1 for pairs without an expert; bits of its weight
  int* tokens;   // [rows]: token of a row's pair; not set where a row has none
  int2* tiles;   // see Tile in work.cuh
  int* num_tiles;
  u64* written;  // [tiles], cleared, as are two counters; see narrow_work.cuh
  int* counters;
};

__device__ __forceinline__ int pair_of_thread(int i) { return (int)threadIdx.x + i * LIST_THREADS; }
__device__ __forceinline__ int rounded(int count) { return (count + TILE - 1) / TILE * TILE; }

// Gives each expert its rows, and lists their tiles. Called by all threads.
__device__ __forceinline__ void place_experts(const Params& p, const int* counts, int* rows) {
  const int lane = threadIdx.x & 31, num_experts = p.pairs.num_experts;
#pragma unroll 1
  for (int first = threadIdx.x & ~31u; first < num_experts; first += LIST_THREADS) {
    // A warp adds up all earlier experts itself, instead of waiting for other warps.
    int earlier = 0;
#pragma unroll 1
    for (int i = lane; i < first; i += 32) earlier += rounded(counts[i]);
    const int expert = first + lane, count = expert < num_experts ? counts[expert] : 0;
    const int end = sum_of_lanes(rounded(count)) + __reduce_add_sync(~0u, earlier);  // of the expert's rows
    int row = end - rounded(count);
    if (expert < num_experts) rows[expert] = row;
#pragma unroll 1
    for (int left = count; left > 0; left -= TILE, row += TILE) {
      p.tiles[row / TILE] = make_int2(row, expert << 16 | min(TILE, left));
      p.written[row / TILE] = 0;
    }
    if (expert == num_experts - 1) {
      *p.num_tiles = end / TILE;
      p.counters[0] = p.counters[1] = 0;
    }
  }
}

extern "C" __global__ void __launch_bounds__(LIST_THREADS) moe_list(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  int* const counts = (int*)shared;                // [num_experts]: pairs
  int* const rows = counts + p.pairs.num_experts;  // [num_experts]: first rows
  for (int i = threadIdx.x; i < p.pairs.num_experts; i += LIST_THREADS) counts[i] = 0;
  __syncthreads();
  wait_for_previous();
  allow_next();
  int expert[PAIRS], number[PAIRS];  // among the expert's pairs
  float weight[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const int pair = min(pair_of_thread(i), p.pairs.count - 1);
    expert[i] = p.pairs.expert(pair);
    weight[i] = number_at(p.pairs.weights, pair, p.pairs.weights_dtype);
  }
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    if (pair_of_thread(i) >= p.pairs.count) expert[i] = -1;
    number[i] = expert[i] < 0 ? 0 : atomicAdd(counts + expert[i], 1);
  }
  __syncthreads();
  place_experts(p, counts, rows);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const int pair = pair_of_thread(i);
    if (pair >= p.pairs.count) break;
    const int row = expert[i] < 0 ? -1 : rows[expert[i]] + number[i];
    p.places[pair] = make_int2(row, __float_as_int(weight[i]));
    if (row >= 0) p.tokens[row] = pair / p.pairs.top_k;
  }
}
