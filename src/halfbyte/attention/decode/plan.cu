// Makes the plan of a decode step on the GPU: no host sync, and a captured graph follows new lengths.
// One CTA. work.cuh describes the plan.

#include "attention/decode/work.cuh"

#define CACHED_SEQS 1024
#define MIN_SPAN_TOKENS 128

struct PlanParams {
  int* plan;
  const int* seq_lens;
  const int* query_start_loc;
  int num_seqs;
  int num_tokens;  // query tokens; those after the last sequence's pad a captured graph
  int group;      // query heads per KV head
  int columns;    // per work item
  int tile;       // tokens
  int window;     // 0 for none
  int max_units;  // resident at once
  int units_offset, items_offset;
  int fixed_span;  // tiles per unit if batch-invariant, else 0
  int overhead;    // cost of starting a work item, in tiles
  int recent;      // further cost, in tiles, of the unit with a work item's first tile: its recent tokens
  int min_tiles;  // of a sequence with queries: 1 if it may have keys that are not in the pages
};

struct Work {
  int first_tile, tiles, items;
};

__device__ __forceinline__ Work look_up(const PlanParams& p, int seq) {
  const int length = p.seq_lens[seq];
  const int queries = p.query_start_loc[seq + 1] - p.query_start_loc[seq];
  const int first = p.window > 0 ? max(0, length - queries - p.window + 1) / p.tile : 0;
  const int tiles =
      queries > 0 ? max(p.min_tiles, (length + p.tile - 1) / p.tile - first) : 0;
  return {first, tiles, (queries * p.group + p.columns - 1) / p.columns};
}

// Positions before a work item's tiles in the aligned layout. The first unit has at least one tile.
__device__ __forceinline__ int lead_of(const PlanParams& p, int span) {
  return span > SHORT_SPAN ? min(p.recent, span - 1) : 0;
}

extern "C" __global__ void __launch_bounds__(1024) plan_work(PlanParams p) {
  __shared__ int2 warp_sums[32];
  __shared__ int2 total;
  __shared__ int2 cached[CACHED_SEQS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;

  for (int s = threadIdx.x; s < min(p.num_seqs, CACHED_SEQS); s += blockDim.x) {
    const Work w = look_up(p, s);
    cached[s] = make_int2(w.tiles, w.items);
  }
  __syncthreads();
  auto tiles_and_items = [&](int s) {
    if (s < CACHED_SEQS) return cached[s];
    const Work w = look_up(p, s);
    return make_int2(w.tiles, w.items);
  };

  // Total numbers of positions and work items.
  int2 sum = make_int2(0, 0);
  for (int s = threadIdx.x; s < p.num_seqs; s += blockDim.x) {
    const int2 x = tiles_and_items(s);
    sum.x += x.x * x.y;
    sum.y += x.x > 0 ? x.y : 0;
  }
  for (int o = 16; o; o >>= 1) {
    sum.x += __shfl_xor_sync(~0u, sum.x, o);
    sum.y += __shfl_xor_sync(~0u, sum.y, o);
  }
  if (lane == 0) warp_sums[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    sum = lane < warps ? warp_sums[lane] : make_int2(0, 0);
    for (int o = 16; o; o >>= 1) {
      sum.x += __shfl_xor_sync(~0u, sum.x, o);
      sum.y += __shfl_xor_sync(~0u, sum.y, o);
    }
    if (lane == 0) total = sum;
  }
  __syncthreads();

  int span = p.fixed_span, lead = 0;
  bool is_aligned = true;
  if (span == 0) {
    const int smallest = max(1, MIN_SPAN_TOKENS / p.tile);
    const int even = max(smallest, (total.x + p.max_units - 1) / p.max_units);
    const int continuous =
        max(smallest, (total.x + (p.overhead + p.recent) * total.y + p.max_units - 1) / p.max_units);
    // Each warp tries one span of aligned chunks. The smallest that fits wins, unless the continuous
    // layout is faster even though its units may start one more work item.
    const int candidate = even + warp;
    int units = 0;
    for (int s = lane; s < p.num_seqs; s += 32) {
      const int2 x = tiles_and_items(s);
      if (x.x > 0) units += (lead_of(p, candidate) + x.x + candidate - 1) / candidate * x.y;
    }
    for (int o = 16; o; o >>= 1) units += __shfl_xor_sync(~0u, units, o);
    if (lane == 0) warp_sums[warp].x = units <= p.max_units;
    __syncthreads();
    int winner = warps;
    for (int w = warps - 1; w >= 0; w--)
      if (warp_sums[w].x) winner = w;
    // Short units have no lead: their recent tokens take time beyond the span.
    const int aligned = even + winner, late = p.recent - lead_of(p, aligned);
    is_aligned = winner < warps && aligned + late <= continuous + p.overhead + p.recent;
    span = is_aligned ? aligned : continuous;
    lead = is_aligned ? lead_of(p, aligned) : p.overhead + p.recent;
    __syncthreads();
  }

  // Position of every work item on the line: exclusive prefix sums, blockDim sequences at a time.
  int2 base = make_int2(0, 0);  // positions, work items
  for (int start = 0; start < p.num_seqs; start += blockDim.x) {
    const int s = start + threadIdx.x;
    Work work = {0, 0, 0};
    if (s < p.num_seqs) work = look_up(p, s);
    int cost = 0;
    if (work.tiles > 0)
      cost = is_aligned ? (lead + work.tiles + span - 1) / span * span : lead + work.tiles;
    const int2 own = make_int2(cost * work.items, work.items);
    int2 inclusive = own;
    for (int o = 1; o < 32; o <<= 1) {
      const int x = __shfl_up_sync(~0u, inclusive.x, o), y = __shfl_up_sync(~0u, inclusive.y, o);
      if (lane >= o) inclusive.x += x, inclusive.y += y;
    }
    __syncthreads();
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    int2 before = base;
    for (int w = 0; w < warps; w++) {
      if (w < warp) before.x += warp_sums[w].x, before.y += warp_sums[w].y;
      base.x += warp_sums[w].x, base.y += warp_sums[w].y;
    }
    if (s < p.num_seqs) {
      int position = before.x + inclusive.x - own.x;
      const int first = before.y + inclusive.y - own.y;
      const int length = p.seq_lens[s];
      const int q_begin = p.query_start_loc[s];
      const int queries = p.query_start_loc[s + 1] - q_begin;
      for (int q = 0; q < queries; q++) {
        int4* token = (int4*)(p.plan + 4) + 2 * (q_begin + q);
        token[0] = make_int4(first, position, cost, work.tiles);
        token[1] = make_int4(q_begin, 0, 0, 0);
      }
      for (int i = 0; i < work.items; i++) {
        int4* item = (int4*)(p.plan + p.items_offset) + 2 * (first + i);
        const int4 a = make_int4(position, s, i, work.first_tile);
        const int4 b = make_int4(work.tiles, length, q_begin, queries);
        item[0] = a;
        item[1] = b;
        for (int u = (position + span - 1) / span; u * span < position + cost; u++) {
          int4* unit = (int4*)(p.plan + p.units_offset) + 3 * u;
          unit[0] = a;
          unit[1] = b;
          unit[2] = make_int4(first + i, 0, 0, 0);
        }
        position += cost;
      }
    }
  }
  // Padding tokens need a record, too: the merge would follow stale memory otherwise.
  for (int t = p.query_start_loc[p.num_seqs] + threadIdx.x; t < p.num_tokens; t += blockDim.x) {
    int4* token = (int4*)(p.plan + 4) + 2 * t;
    token[0] = make_int4(0, 0, 0, 0);
    token[1] = make_int4(t, 0, 0, 0);
  }
  if (threadIdx.x == 0)
    *(int4*)p.plan = make_int4(span, (base.x + span - 1) / span, is_aligned ? -lead : lead, base.y);
}
