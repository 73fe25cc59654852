// How gemm.cu splits its work: whole tiles, and tiles that are cut along k (stream-K).
//
//   Waves      Whole tiles go to the clusters round-robin. Those of a wave are neighbours, so that they
//              read the same data at the same time.
//   Cuts       The first `cut_tiles`, as many as the last two waves have or all (plan.py), are laid out
//              on a line: a tile takes `crossing` places, for the cost of starting it, then one place
//              per step. Every cluster gets an equal span of the line.
//   Parts      A cluster's span is the end of a tile (its tail), whole tiles, and the start of a tile.

#pragma once
#include "kernels/runtime/sm90.cuh"

#define ROWS (64 * GROUPS)    // of W, in a CTA's tile
#define STRIPS (TOKENS / 16)  // of 16 tokens, which are finished and stored at a time

// Division by a number that the launcher knows: the kernel must not spend its first µs on divisions.
struct KnownDivisor {
  u32 by, inverse;  // 2^31 / by, rounded up

  // Exact where x * by < 2^31, which the launcher checks.
  __device__ __forceinline__ u32 quotient(u32 x) const { return (u64)x * inverse >> 31; }
};

struct Params {
  const u8* weight;        // [blocks_n, k / 64, 2048]
  const u8* weight_scale;  // [blocks_n, k / 64, 256]
  const float* row_scale;  // [64 blocks_n]
  const u16* bias;         // [n] or null
  float* partial;          // [2, clusters, 2, TOKENS / 8, WORKERS, 4]: of tails, then of other parts
  u64* flags;              // [clusters, 2, GROUPS, MAX_SHARERS], see Flags
  u64 flag_epoch;
  int m, n;
  int blocks_n;            // of 64 rows of W
  int steps;               // of STEP k
  int tiles, cut_tiles;
  int crossing;              // cost of starting a tile, in steps
  KnownDivisor row_pairs;    // pairs of tiles along the rows of W
  KnownDivisor line;         // places per tile
  KnownDivisor clusters;
  u32 span, more;            // places per cluster, and the remainder: some clusters have one more
  float clusters_per_place;
};

// A cluster's number, in reverse order of start, as join.cuh needs it. CUDA does not guarantee that CTAs start
// in order of blockIdx, but every GPU so far does so.
__device__ __forceinline__ u32 cluster_number() { return (gridDim.x - 1 - blockIdx.x) / 2; }

// Where a tile starts on the line.
__device__ __forceinline__ u32 line_place(const Params& p, u32 tile) { return tile * p.line.by; }

// Where a cluster's span of the line starts; it ends where the next one's starts.
__device__ __forceinline__ u32 span_begin(const Params& p, u32 number) {
  return number * p.span + p.clusters.quotient(number * p.more);
}

// Iterates over the work of a CTA: whole tiles, or parts of their k.
struct Work {
  u32 tile;
  int first, stop;
  u32 at, span_stop, next_whole;

  // Computed in vector registers, because uniform ones take twice as long. The added `thread >> 10` is always 0,
  // which the compiler does not know.
  __device__ __forceinline__ Work(const Params& p) {
    u32 thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    const u32 number = cluster_number() + (thread >> 10);
    at = span_begin(p, number);
    span_stop = span_begin(p, number + 1);
    next_whole = p.cut_tiles + number;
  }

  __device__ __forceinline__ bool next(const Params& p) {
    if (!next_part(p)) {
      tile = next_whole;
      next_whole += p.clusters.by;
      first = 0;
      stop = p.steps;
    }
    return tile < p.tiles;
  }

  __device__ __forceinline__ bool next_part(const Params& p) {
    while (at < span_stop) {
      tile = p.line.quotient(at);
      const int begin = (int)(at - line_place(p, tile)) - p.crossing;
      first = max(0, begin);
      stop = min(p.steps, begin + (int)(span_stop - at));
      at += stop - begin;
      if (stop > 0) return true;
    }
    return false;
  }

  __device__ __forceinline__ bool is_part(const Params& p) const { return stop - first < p.steps; }
  // Whether this is the cluster's last part.
  __device__ __forceinline__ bool is_last(const Params& p) const { return span_stop <= at + p.crossing; }
  // Whether this is the end of a tile and the cluster goes on to the next one.
  __device__ __forceinline__ bool is_tail(const Params& p) const { return is_part(p) && !is_last(p); }
};

// Position of a CTA's tile of the output.
struct Place {
  int row_block;  // of 64 rows, the first warpgroup's
  int token;

  __device__ __forceinline__ Place(const Params& p, u32 tile) {
    const u32 column = p.row_pairs.quotient(tile);
    row_block = (SWIGLU ? 1 : GROUPS) * (2 * (int)(tile - column * p.row_pairs.by) + (int)cluster_rank());
    token = column * TOKENS;
  }

  // A warpgroup's block of 64 rows of W.
  __device__ __forceinline__ int weight_block(const Params& p, int group) const {
    return row_block + group * (SWIGLU ? p.blocks_n / 2 : 1);
  }

  __device__ __forceinline__ u32 strips(const Params& p) const {
    return min(STRIPS, (p.m - token + 15) / 16);
  }
};

// The clusters that share a tile, in order of k: `sharers` of them from `head`. All of them finish it, except
// for the last if it goes on to the next tile.
struct Join {
  u32 head = 0, sharers = 0, finishers = 0;

  Join() = default;
  __device__ __forceinline__ Join(const Params& p, u32 tile) {
    const u32 begin = line_place(p, tile) + p.crossing, end = line_place(p, tile + 1);
    const u32 tail = cluster_at(p, end - 1);
    head = cluster_at(p, begin);
    sharers = tail - head + 1;
    finishers = sharers - (span_begin(p, tail + 1) > end + p.crossing);
  }

  __device__ __forceinline__ static u32 cluster_at(const Params& p, u32 place) {
    const u32 about = (u32)((float)place * p.clusters_per_place);  // at most one off
    return place < span_begin(p, about) ? about - 1 : about + (place >= span_begin(p, about + 1));
  }
};

// The strips of a tile that one of its clusters finishes.
struct Share {
  u32 first, stop;

  __device__ __forceinline__ Share(u32 first, u32 stop) : first(first), stop(stop) {}
  __device__ __forceinline__ Share(const Join& join, u32 strips, u32 finisher) {
    const float inverse = __fdividef(1.0f, (float)join.finishers);
    // Adding half a strip keeps the quotient away from integers, where rounding would matter.
    first = (u32)(((float)(strips * finisher) + 0.5f) * inverse);
    stop = (u32)(((float)(strips * finisher + strips) + 0.5f) * inverse);
  }
  __device__ __forceinline__ bool has(u32 strip) const { return strip - first < stop - first; }
};
