// One of the two products of a mixture-of-experts layer, for few tokens per expert; NVFP4 or MXFP4 weights in
// the order of packed.py.
//
//   GATED      middle[pair, f] = activation(gate_f x[token of pair], up_f x[token of pair]), of the pair's expert
//   otherwise  out[pair, n] = weight of the pair * (W_n middle[pair] + bias_n)
//              FEW: and sum[token, n] = sum over a token's pairs of out[pair, n], see last.cuh
//
// Bound by memory bandwidth: the weights of the experts that are hit are read once per entry, which has up to 16 of
// an expert's tokens (`_COLUMNS` in plan.py).
//
//   Work       The grid is persistent; every CTA lists the experts that are hit (routing.cuh, few.cuh). A unit is
//              GROUPS tiles of 16 rows of one expert's matrix, for the pairs of an entry; a CTA has a range of
//              consecutive units. A tile is computed by a group of SPLIT warps, which split its k: warp i has items
//              i, i + SPLIT, ...
//   Operands   m16n8k16: A = 16 rows of W, unpacked in registers; B = 8 columns, the tokens. In a gated tile, rows
//              0 to 7 are of gate and rows 8 to 15 the same ones of up: the activation needs no other lane.
//   Loads      cp.async into a ring per warp, without barriers; an item is one piece of memory. The ring runs ahead over
//              units and entries. The second product starts copying before the first has ended (programmatic dependent
//              launch): it needs its results only as x.
//   Sums       of a group's warps are added in shared memory in order of k. How k is shared depends on shapes alone, so
//              that a token's bits do not depend on the other tokens' values and routes.
//
// Macros:
//   X_BF16, MX            see values.cuh
//   GATED, INTERLEAVED    1 for the first product; whether biases of gate and up alternate
//   N, K                  of an expert's matrix: N a multiple of 16, K of 32
//   COLUMN_TILES          8 columns each: 1 or 2
//   SPLIT, GROUPS         warps of a group, groups of a CTA
//   PARTS                 of 128 k in an item
//   FEW                   1 for at most 32 pairs
//   RESIDENT              1 if shared memory holds x of all tokens, or if not GATED of all entries that the CTA has;
//                         only with FEW
//   SINGLE                1 for MXFP4 and entries of one pair, see single.cuh
//   STAGES, CTAS          items in a ring, CTAs per SM

#include "moe/cuda/few.cuh"
#include "moe/cuda/last.cuh"
#include "moe/cuda/stream.cuh"
#include "moe/cuda/tokens.cuh"

#if FEW
using Lists = FewPairs;
#else
using Lists = Routing;
#endif

#define UNITS ((TILES + GROUPS - 1) / GROUPS)  // of GROUPS tiles

// The tile that a group of warps computes in a unit. In the last unit of an entry it may be TILES or more: none.
__device__ __forceinline__ int tile_of_unit(int unit, int group) { return unit % UNITS * GROUPS + group; }

// A group's tiles of a range of units.
struct UnitTiles {
  const Params& p;
  const Lists& lists;
  int unit, end, group;

  __device__ __forceinline__ UnitTiles(const Params& p, const Lists& lists, int begin, int end, int group)
      : p(p), lists(lists), unit(begin), end(end), group(group) {
    skip_none();
  }

  __device__ __forceinline__ void skip_none() {
    if (TILES % GROUPS && valid() && tile_of_unit(unit, group) >= TILES) unit++;
  }

  __device__ __forceinline__ bool valid() const { return unit < end; }

  __device__ __forceinline__ const u8* begin() const {
    return p.tile(lists.expert(unit / UNITS), tile_of_unit(unit, group));
  }

  __device__ __forceinline__ void advance() {
    unit++;
    skip_none();
  }
};

// Writes a tile of the result from its sums: columns 2 t and 2 t + 1 of this lane's rows.
__device__ __forceinline__ void store_tile(const Params& p, const Lists& lists, const int* pairs, int count,
                                           const Vectors& v, const float (*sums)[4]) {
  if (!v.exists) return;
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < COLUMN_TILES; i++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int column = 8 * i + lane % 4 * 2 + j;
      if (column >= count) continue;
      const u64 pair = pairs[column];
      const float upper = fmaf(sums[i][j], v.scale[0], v.bias[0]), lower = fmaf(sums[i][2 + j], v.scale[1], v.bias[1]);
#if GATED
      p.out[pair * CHANNELS + v.row] = (u16)pack_pair(p.activation(upper, lower), 0.0f);
#else
      const float weight = lists.weights[pair];
      p.out[pair * N + v.row] = (u16)pack_pair(upper * weight, 0.0f);
      p.out[pair * N + v.row + 8] = (u16)pack_pair(lower * weight, 0.0f);
#endif
    }
  }
}

// The row of x in shared memory that a column of an entry has.
__device__ __forceinline__ int row_of(const Params& p, const int* pairs, int own, int column) {
#if !RESIDENT
  return column;
#elif GATED
  return pairs[column] / p.pairs.top_k;
#else
  return (own << p.pairs.columns_log2) + column;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) moe_product(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int group = warp / SPLIT, split = warp % SPLIT;
  // A CTA's share of the units belongs to at most so many entries.
  const int max_own = p.max_entries / gridDim.x + 2;
  u8* const rings = shared + ((RESIDENT && !GATED ? max_own : 1) * X_ROW_BYTES << p.pairs.columns_log2);
  u8* const sums = rings + SPLIT * GROUPS * STAGES * ITEM_BYTES;
  Lists lists(p.pairs, p.max_entries, max_own, sums + (SPLIT > 1 ? SPLIT * GROUPS * 2 * SUM_BYTES : 0));
  lists.clear(p.pairs);
#if GATED
  // Waits before it lets the second product start: that reads the expert ids, a result of earlier kernels, before it
  // waits itself.
  wait_for_previous();
  allow_next();
#endif
  Octets octets;
#if RESIDENT && GATED
  // Before weights, behind which they would wait, and before it is known which experts are hit.
  const int tokens = p.pairs.count / p.pairs.top_k;
  const auto token_at = [&](int row) { return p.x + (u64)row * K; };
  octets.load(tokens, threadIdx.x, token_at);
#endif
  const int total = lists.find_entries(p.pairs) * UNITS;
  const int begin = p.share(total, blockIdx.x), end = p.share(total, blockIdx.x + 1);
  Stream<UnitTiles> stream(p, {p, lists, begin, end, group}, rings + warp * STAGES * ITEM_BYTES, split);
  const int first_entry = begin / UNITS, own_entries = begin < end ? (end - 1) / UNITS + 1 - first_entry : 0;
#if RESIDENT && GATED
  load_rows(shared, tokens, token_at, octets, true);
#endif
  lists.find_own(p.pairs, first_entry, own_entries, !GATED);
#if !GATED
  wait_for_previous();
  allow_next();
#elif FEW
  clear_tickets(p);
#endif
#if RESIDENT && !GATED
  const int rows = own_entries << p.pairs.columns_log2;
  load_rows(shared, rows, [&](int row) { return p.x + (u64)lists.pair_of_row(p.pairs, row) * K; }, octets);
  __syncthreads();
#endif

  int at_entry = -1, turn = 0;
  const u8* x_at[COLUMN_TILES];
  for (int unit = begin; unit < end; unit++) {
    const int own = unit / UNITS - first_entry, count = lists.own_counts[own];
    const int* const pairs = lists.own_pairs + (own << p.pairs.columns_log2);
    if (own != at_entry) {
#if !RESIDENT
      if (own > 0) __syncthreads();  // the last entry's tokens are no longer read
      const int pairs_per_row = GATED ? p.pairs.top_k : 1;
      load_rows(shared, count, [&](int row) { return p.x + (u64)(pairs[row] / pairs_per_row) * K; }, octets);
      __syncthreads();
#endif
      at_entry = own;
      // Columns beyond the entry's tokens read the last token again; their results are not written.
#pragma unroll
      for (int i = 0; i < COLUMN_TILES; i++) {
        const int column = min(8 * i + lane / 4, count - 1);
        x_at[i] = shared + row_of(p, pairs, own, column) * X_ROW_BYTES + lane % 4 * 16;
      }
    }
    const int tile = tile_of_unit(unit, group);
    if (TILES % GROUPS && tile >= TILES) continue;
    // The warps of a group take turns in writing results.
    const bool finishes = (unit - begin) % SPLIT == split;
    Vectors vectors;
    if (finishes) vectors.load(p, lists.expert(unit / UNITS), tile);
    float acc[COLUMN_TILES][4] = {};
#if SINGLE
    multiply_single(stream, acc[0], SingleToken(shared + row_of(p, pairs, own, 0) * X_ROW_BYTES, X_OCTETS * 16));
#else
    stream.multiply_tile(acc, x_at, count);
#endif
    if (SPLIT > 1) add_group(acc, sums, turn, group, split, finishes);
    if (finishes) store_tile(p, lists, pairs, count, vectors, acc);
    turn++;
  }
#if FEW && !GATED
  const u32 exist = lists.exist();
  for (int first = begin; first < end; first += 32) {
    const int unit = first + lane;
    const bool is_own = unit < end && (unit - begin) % SPLIT == split;
    sum_last_tiles(p, exist, total / UNITS, is_own ? tile_of_unit(unit, group) : TILES);
  }
  if (total == 0) write_zeros(p);
#endif
}
