// The lists of routing.cuh for at most 32 pairs, without shared memory and barriers: lane i of every warp has the i-th
// pair, and every warp finds all entries for itself. So little stands between the expert ids and a warp's first copies.
// Entries are numbered by their first pair.

#pragma once
#include "moe/cuda/routing.cuh"

struct FewPairs {
  // In shared memory, written by find_own.
  float* weights;   // [pairs.count]: of the router, if wanted
  int* own_counts;  // [max_own]: pairs of each of the CTA's own entries
  int* own_pairs;   // [max_own, columns]

  // In registers, of the lane's pair.
  int expert_of_lane = -1;
  int rank = 0;     // among the pairs of its expert
  int begins = -1;  // the entry whose first pair it is, or -1

  __device__ __forceinline__ FewPairs(const Pairs& pairs, int, int max_own, u8* shared) {
    weights = (float*)shared;
    own_counts = (int*)(weights + pairs.count);
    own_pairs = own_counts + max_own;
  }

  __device__ __forceinline__ void clear(const Pairs&) {}

  // Returns how many entries there are.
  __device__ __forceinline__ int find_entries(const Pairs& pairs) {
    const int lane = threadIdx.x & 31;
    const u32 below = (1u << lane) - 1;
    if (lane < pairs.count) expert_of_lane = pairs.expert(lane);
    rank = __popc(__match_any_sync(~0u, expert_of_lane) & below);
    const bool is_first = expert_of_lane >= 0 && (rank & ((1 << pairs.columns_log2) - 1)) == 0;
    const u32 firsts = __ballot_sync(~0u, is_first);
    if (is_first) begins = __popc(firsts & below);
    return __popc(firsts);
  }

  // The first pair of an entry. Called by whole warps, as all below.
  __device__ __forceinline__ int first_pair(int entry) const { return __ffs(__ballot_sync(~0u, begins == entry)) - 1; }
  __device__ __forceinline__ int expert(int entry) const {
    return __shfl_sync(~0u, expert_of_lane, first_pair(entry));
  }

  // The pair of column `row % columns` of own entry `row / columns`; beyond the entry's pairs the last one.
  __device__ __forceinline__ int pair_of_row(const Pairs& pairs, int row) const {
    const int own = row >> pairs.columns_log2, first = own << pairs.columns_log2;
    return own_pairs[min(row, first + own_counts[own] - 1)];
  }

  // A bit for every pair that has an expert.
  __device__ __forceinline__ u32 exist() const { return __ballot_sync(~0u, expert_of_lane >= 0); }

  // Finds the pairs of `own` entries from `first` on, and all weights if wanted. Called by all threads of the CTA.
  __device__ __forceinline__ void find_own(const Pairs& pairs, int first, int own, bool with_weights) const {
    const int lane = threadIdx.x & 31;
    if (with_weights && threadIdx.x < pairs.count)
      weights[threadIdx.x] = number_at(pairs.weights, threadIdx.x, pairs.weights_dtype);
    for (int i = threadIdx.x / 32; i < own; i += blockDim.x / 32) {
      const int source = first_pair(first + i);
      const int column = rank - __shfl_sync(~0u, rank, source);
      const bool is_expert = expert_of_lane == __shfl_sync(~0u, expert_of_lane, source);
      const bool is_own = is_expert && column >= 0 && column < 1 << pairs.columns_log2;
      if (is_own) own_pairs[(i << pairs.columns_log2) + column] = lane;
      const int count = __popc(__ballot_sync(~0u, is_own));
      if (lane == 0) own_counts[i] = count;
    }
    __syncthreads();
  }
};
