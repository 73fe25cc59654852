// Which experts are hit, by which pairs. A pair is a token and one of its experts, numbered token * top_k + j. For at
// most 32 pairs see few.cuh.
//
// Every CTA finds this out for itself, from all expert ids: with the few pairs of a decode step that takes less time
// than another kernel. An expert's pairs are cut into chunks of at most `columns`; an expert and one of its chunks is
// an entry. Entries are numbered by ascending expert and chunk, and an entry's pairs are in ascending order: every CTA
// gets the same list, in every run.

#pragma once
#include "kernels/runtime/basics.cuh"

// Dtypes of small vectors.
#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2

__device__ __forceinline__ float number_at(const void* vector, u64 i, int dtype) {
  if (dtype == FLOAT32) return ((const float*)vector)[i];
  const u16 bits = ((const u16*)vector)[i];
  if (dtype == BFLOAT16) return __int_as_float((u32)bits << 16);
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

struct Pairs {
  const void* ids;      // [count] of int32 or int64; those outside 0 .. num_experts - 1 have no expert
  const void* weights;  // [count] of the router
  int ids_are_64_bit, weights_dtype;
  int count, top_k, num_experts;
  int columns_log2;  // of the max pairs of an entry

  // The expert of a pair, or -1.
  __device__ __forceinline__ int expert(int pair) const {
    return expert_of(ids_are_64_bit ? ((const long long*)ids)[pair] : ((const int*)ids)[pair]);
  }
  __device__ __forceinline__ int expert_of(long long id) const { return id >= 0 && id < num_experts ? (int)id : -1; }
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

// In shared memory.
struct Routing {
  int* num_entries;
  int* own_counts;  // [max_own]: pairs of each of the CTA's own entries
  int* own_pairs;   // [max_own, columns]
  int* entries;     // [max_entries]: expert and chunk << 16
  int* counts;      // [num_experts]: pairs of each expert
  int* experts;     // [pairs.count]: of each pair, or -1
  float* weights;   // [pairs.count]: of the router

  __device__ __forceinline__ Routing(const Pairs& pairs, int max_entries, int max_own, u8* shared) {
    num_entries = (int*)shared;
    own_counts = num_entries + 1;
    own_pairs = own_counts + max_own;
    entries = own_pairs + (max_own << pairs.columns_log2);
    counts = entries + max_entries;
    experts = counts + pairs.num_experts;
    weights = (float*)(experts + pairs.count);
  }

  // Called by all threads of the CTA, before find_entries.
  __device__ __forceinline__ void clear(const Pairs& pairs) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < pairs.num_experts; i += blockDim.x) counts[i] = 0;
    __syncthreads();
  }

  // Called by all threads of the CTA. No copy of weights begins before it ends, so that its latencies count.
  // Returns how many entries there are.
  __device__ __forceinline__ int find_entries(const Pairs& pairs) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < pairs.count; i += blockDim.x) {
      const int expert = pairs.expert(i);
      experts[i] = expert;
      if (expert >= 0) atomicAdd(counts + expert, 1);
    }
    __syncthreads();
    for (int first = threadIdx.x & ~31u; first < max(pairs.num_experts, 1); first += blockDim.x)
      number_entries(pairs, first);
    __syncthreads();
    return *num_entries;
  }

  __device__ __forceinline__ int chunks_of(const Pairs& pairs, int expert) const {
    const int count = expert < pairs.num_experts ? counts[expert] : 0;
    return (count + (1 << pairs.columns_log2) - 1) >> pairs.columns_log2;
  }

  // Numbers the entries of 32 experts from `first` on. Called by one warp, which adds up all earlier experts' entries
  // itself: that takes less time than to wait for other warps.
  __device__ __forceinline__ void number_entries(const Pairs& pairs, int first) const {
    const int lane = threadIdx.x & 31, expert = first + lane, chunks = chunks_of(pairs, expert);
    int earlier = 0;
    for (int i = lane; i < first; i += 32) earlier += chunks_of(pairs, i);
    int total = __reduce_add_sync(~0u, earlier), begin = total;
    // Most experts have one chunk or none, so that two rounds tell how many entries the lanes below have.
    for (int chunk = 0;; chunk++) {
      const u32 more = __ballot_sync(~0u, chunks > chunk);
      if (!more) break;
      begin += __popc(more & ((1u << lane) - 1));
      total += __popc(more);
    }
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) entries[begin + chunk] = expert | chunk << 16;
    if (lane == 0 && first + 32 >= pairs.num_experts) *num_entries = total;
  }

  __device__ __forceinline__ int expert(int entry) const { return entries[entry] & 0xFFFF; }

  // Finds the pairs of `own` entries from `first` on, and all weights if wanted. Called by all threads of the CTA.
  __device__ __forceinline__ void find_own(const Pairs& pairs, int first, int own, bool with_weights) const {
    for (int i = threadIdx.x; with_weights && i < pairs.count; i += blockDim.x)
      weights[i] = number_at(pairs.weights, i, pairs.weights_dtype);
    for (int i = threadIdx.x / 32; i < own; i += blockDim.x / 32)
      own_counts[i] = find_pairs(pairs, entries[first + i], own_pairs + (i << pairs.columns_log2));
    __syncthreads();
  }

  // Finds the pairs of an entry, and returns how many there are. Called by one warp.
  __device__ __forceinline__ int find_pairs(const Pairs& pairs, int entry, int* found) const {
    const int lane = threadIdx.x & 31, columns = 1 << pairs.columns_log2;
    int rank = -(entry >> 16) * columns;  // of the next pair of the expert
    for (int first = 0; first < pairs.count && rank < columns; first += 32) {
      const int pair = first + lane;
      const bool own = pair < pairs.count && experts[pair] == (entry & 0xFFFF);
      const u32 owners = __ballot_sync(~0u, own);
      const int own_rank = rank + __popc(owners & ((1u << lane) - 1));
      if (own && own_rank >= 0 && own_rank < columns) found[own_rank] = pair;
      rank += __popc(owners);
    }
    return min(rank, columns);
  }
};
