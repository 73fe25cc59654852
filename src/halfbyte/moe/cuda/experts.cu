// One of the two products of a mixture-of-experts layer, for few tokens per expert; NVFP4 or MXFP4 weights in
// the order of packed.py.
//
//   GATED      middle[pair, f] = activation(gate_f x[token of pair], up_f x[token of pair]), of the pair's expert
//   otherwise  out[pair, n] = weight of the pair * (W_n middle[pair] + bias_n)
//
// Bound by memory bandwidth: the weights of the experts that are hit are read once per entry, which has up to 16 of
// an expert's tokens (`_COLUMNS` in plan.py).
//
//   Work       The grid is persistent; every CTA lists the experts that are hit (routing.cuh). A unit is
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
//   STAGES, CTAS          items in a ring, CTAs per SM

#include "moe/cuda/loader.cuh"
#include "moe/cuda/tokens.cuh"

#define SUM_BYTES (COLUMN_TILES * 512)  // of a warp's sums of a tile

// What a group's result needs besides sums, loaded before the sums are there.
struct Vectors {
  int row;      // of this lane's first sums: its channel if GATED
  bool exists;  // whether the expert has such a channel
  float scale[2], bias[2];

  __device__ __forceinline__ void load(const Params& p, int expert, int tile) {
    const int g = (threadIdx.x & 31) / 4;
    row = GATED ? channel_of(tile, g) : tile * 16 + g;
    exists = !GATED || CHANNELS % 64 == 0 || row < CHANNELS;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      scale[i] = OPERAND_SCALE * (p.global_scale ? p.global_scale[expert * p.parts + i * (p.parts - 1)] : 1.0f);
      const int loaded = !GATED ? row + 8 * i : INTERLEAVED ? 2 * row + i : row + i * CHANNELS;
      bias[i] = p.bias && exists ? number_at(p.bias, (u64)expert * N + loaded, p.bias_dtype) : 0.0f;
    }
  }
};

// Writes a tile of the result from its sums: columns 2 t and 2 t + 1 of this lane's rows.
__device__ __forceinline__ void store_tile(const Params& p, const Routing& routing, const Vectors& v, int count,
                                           const float (*sums)[4]) {
  if (!v.exists) return;
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < COLUMN_TILES; i++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int column = 8 * i + lane % 4 * 2 + j;
      if (column >= count) continue;
      const u64 pair = routing.own_pairs[column];
      const float upper = fmaf(sums[i][j], v.scale[0], v.bias[0]), lower = fmaf(sums[i][2 + j], v.scale[1], v.bias[1]);
#if GATED
      p.out[pair * CHANNELS + v.row] = (u16)pack_pair(p.activation(upper, lower), 0.0f);
#else
      const float weight = routing.own_weights[column];
      p.out[pair * N + v.row] = (u16)pack_pair(upper * weight, 0.0f);
      p.out[pair * N + v.row + 8] = (u16)pack_pair(lower * weight, 0.0f);
#endif
    }
  }
}

// A lane's values of a part, 16 rows x 128 k.
struct Part {
  uint4 words[2];  // of each chunk: two of row g, two of row g + 8
  Scales scales;

  // `from` is the part in shared memory.
  __device__ __forceinline__ void load(u32 from, u32 exponent) {
    const int lane = threadIdx.x & 31;
    const u32 word = load_shared_word(from + scale_offset(lane));
#pragma unroll
    for (int i = 0; i < 2; i++) words[i] = load16(from + SCALE_BYTES + i * CHUNK_BYTES + lane * 16);
    scales.unpack(word, exponent);
  }

  // `x_at`: where this lane's bytes of its row of x begin, for each tile of columns.
  __device__ __forceinline__ void multiply(float (*acc)[4], const u8* const* x_at, u32 offset, int count,
                                           bool has_both) const {
#pragma unroll
    for (int chunk = 0; chunk < 2; chunk++) {
      if (chunk == 1 && !has_both) break;
      const u32 upper[2] = {words[chunk].x, words[chunk].y}, lower[2] = {words[chunk].z, words[chunk].w};
#pragma unroll
      for (int j = 0; j < 2; j++) {
        u32 a[2][4];
        scales.operands(a, upper[j], lower[j], chunk);
#pragma unroll
        for (int i = 0; i < COLUMN_TILES; i++) {
          if (i > 0 && count <= 8 * i) break;
          const uint4 x = *(const uint4*)(x_at[i] + offset + chunk * 128 + j * 64);
          matmul(acc[i], a[0], x.x, x.y);
          matmul(acc[i], a[1], x.z, x.w);
        }
      }
    }
  }
};

// Waits for all warps of a group.
__device__ __forceinline__ void wait_for_group(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(32 * SPLIT) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) moe_product(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int group = warp / SPLIT, split = warp % SPLIT;
  u8* const rings = shared + (X_ROW_BYTES << p.pairs.columns_log2);
  u8* const sums = rings + SPLIT * GROUPS * STAGES * ITEM_BYTES;
  const Routing routing(p.pairs, p.max_entries, sums + (SPLIT > 1 ? SPLIT * GROUPS * 2 * SUM_BYTES : 0));
#if GATED
  // Waits before it lets the second product start: that reads the expert ids, a result of earlier kernels, before it
  // waits itself.
  wait_for_previous();
  allow_next();
#endif
  routing.find_entries(p.pairs);
  const int total = *routing.num_entries * UNITS;
  const int begin = (int)((long long)total * blockIdx.x / gridDim.x);
  const int end = (int)((long long)total * (blockIdx.x + 1) / gridDim.x);

  u8* const ring = rings + warp * STAGES * ITEM_BYTES;
  Loader loader(p, routing, begin, end, group, split);
#pragma unroll
  for (int i = 0; i < STAGES; i++) loader.step(shared_address(ring) + i * ITEM_BYTES);
#if !GATED
  wait_for_previous();
  allow_next();
#endif

  const u32 exponent = p.max_entries > 0 ? SCALE_EXPONENT : 0;
  int at_entry = -1, count = 0, slot = 0, turn = 0;
  const u8* x_at[COLUMN_TILES];
  for (int unit = begin; unit < end; unit++) {
    const Entry entry = routing.entry(unit / UNITS);
    if (unit / UNITS != at_entry) {
      at_entry = unit / UNITS;
      __syncthreads();  // the last entry's tokens are no longer read
      if (warp == 0) routing.find_pairs(p.pairs, entry);
      __syncthreads();
      load_tokens(shared, p.x, routing, GATED ? p.pairs.top_k : 1);
      __syncthreads();
      count = *routing.num_own;
      // Columns beyond the entry's tokens read the last token again; their results are not written.
#pragma unroll
      for (int i = 0; i < COLUMN_TILES; i++)
        x_at[i] = shared + min(8 * i + lane / 4, count - 1) * X_ROW_BYTES + lane % 4 * 16;
    }
    const int tile = tile_of_unit(unit, group);
    if (TILES % GROUPS && tile >= TILES) continue;
    // The warps of a group take turns in writing results.
    const bool finishes = turn % SPLIT == split;
    Vectors vectors;
    if (finishes) vectors.load(p, entry.expert, tile);
    float acc[COLUMN_TILES][4] = {};
#pragma unroll 1
    for (int i = split; i < ITEMS; i += SPLIT) {
      const u32 from = shared_address(ring) + slot * ITEM_BYTES;
      wait_for_copies<STAGES - 1>();
      __syncwarp();
#pragma unroll
      for (int j = 0; j < PARTS; j++) {
        const int at = i * PARTS + j;
        const bool is_last = j == PARTS - 1 || (IS_RAGGED && at == PARTS_OF_K - 1);
        Part part;
        part.load(from + j * PART_BYTES, exponent);
        if (is_last) {
          __syncwarp();  // all lanes have read the item
          loader.step(from);
        }
        part.multiply(acc, x_at, at * (PART_K * 2), count, CHUNKS_OF_K % 2 == 0 || at < PARTS_OF_K - 1);
        if (is_last) break;
      }
      slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
    if (SPLIT > 1) {
      // Two sets of sums, so that a warp may begin the next unit while these are read.
      u8* const set = sums + ((turn & 1) * GROUPS + group) * SPLIT * SUM_BYTES + lane * 16;
#pragma unroll
      for (int i = 0; i < COLUMN_TILES; i++)
        *(float4*)(set + split * SUM_BYTES + i * 512) = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
      wait_for_group(group);
      if (finishes) {
#pragma unroll
        for (int i = 0; i < COLUMN_TILES; i++) {
          acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
#pragma unroll
          for (int j = 0; j < SPLIT; j++) {
            const float4 sum = *(const float4*)(set + j * SUM_BYTES + i * 512);
            acc[i][0] += sum.x, acc[i][1] += sum.y, acc[i][2] += sum.z, acc[i][3] += sum.w;
          }
        }
      }
    }
    if (finishes) store_tile(p, routing, vectors, count, acc);
    turn++;
  }
}
