// One of the two products of a mixture-of-experts layer, for few tokens per expert; weights as loaded, NVFP4 or MXFP4.
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
//              i, i + SPLIT, ... of ITEM_K.
//   Operands   m16n8k16: A = 16 rows of W, unpacked in registers; B = 8 columns, the tokens. In a gated tile, rows
//              0 to 7 are of gate and rows 8 to 15 the same ones of up: the activation needs no other lane.
//   Loads      cp.async into a ring per warp, without barriers. The ring runs ahead over units and entries. The second
//              product starts copying before the first has ended (programmatic dependent launch): it needs its
//              results only as x.
//   Sums       of a group's warps are added in shared memory in order of k. How k is shared depends on shapes alone, so
//              that a token's bits do not depend on the other tokens' values and routes.
//
// Macros:
//   X_BF16, MX            see values.cuh
//   GATED, INTERLEAVED    1 for the first product; whether its rows of gate and up alternate
//   N, K                  of an expert's matrix: N a multiple of 16, K of 32
//   COLUMN_TILES          8 columns each: 1 or 2
//   SPLIT, GROUPS         warps of a group, groups of a CTA
//   PARTS                 of 256 k in an item
//   STAGES, CTAS          items in a ring, CTAs per SM

#include "moe/cuda/loader.cuh"
#include "moe/cuda/tokens.cuh"
#include "moe/cuda/values.cuh"

#define SUM_BYTES (COLUMN_TILES * 512)  // of a warp's sums of a tile

// What a group's result needs besides sums, loaded before the sums are there.
struct Vectors {
  int rows[2];  // of this lane: g and g + 8 of the tile
  float scale[2], bias[2];

  __device__ __forceinline__ void load(const Params& p, int expert, int tile) {
    const int g = (threadIdx.x & 31) / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      rows[i] = row_of_tile(tile, g + 8 * i);
      const int part = i * (p.parts - 1);
      scale[i] = OPERAND_SCALE * (p.global_scale ? p.global_scale[expert * p.parts + part] : 1.0f);
      bias[i] = p.bias ? number_at(p.bias, (u64)expert * N + rows[i], p.bias_dtype) : 0.0f;
    }
  }
};

// Writes a tile of the result from its sums: columns 2 t and 2 t + 1 of this lane's rows.
__device__ __forceinline__ void store_tile(const Params& p, const Routing& routing, const Vectors& v, int tile,
                                           int count, const float (*sums)[4]) {
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
      p.out[pair * (N / 2) + tile * 8 + lane / 4] = (u16)pack_pair(p.activation(upper, lower), 0.0f);
#else
      const float weight = routing.own_weights[column];
      p.out[pair * N + v.rows[0]] = (u16)pack_pair(upper * weight, 0.0f);
      p.out[pair * N + v.rows[1]] = (u16)pack_pair(lower * weight, 0.0f);
#endif
    }
  }
}

// A lane's values of a part of an item, 16 rows x PART_K.
struct Part {
  uint4 words[2][2];  // by row (g, g + 8) and half of k
  Scales scales[2];   // by half of k

  // `slot` is the item in shared memory, `shifts` where rows of scales begin, `left` how many k exist from here on.
  __device__ __forceinline__ void load(const u8* slot, int part, const u32* shifts, int left) {
    const int lane = threadIdx.x & 31;
    const u32 weights = shared_address(slot) + part * PART_WEIGHTS + lane * 16;
    const u8* scales_at = slot + ITEM_WEIGHTS + part * (PART_K / BLOCK);
    const u8* upper = scales_at + lane / 4 * SCALE_ROW_BYTES + shifts[0];
    const u8* lower = scales_at + (lane / 4 + 8) * SCALE_ROW_BYTES + shifts[1];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      words[0][half] = load16(weights + half * 512);
      words[1][half] = load16(weights + half * 512 + 1024);
      // Beyond K lie the next row's scales, which may be NaN.
      const bool exists = !IS_RAGGED || half * 128 + lane % 4 * 32 < left;
#if MX
      const int at = half * 4 + lane % 4;
      scales[half].unpack(exists ? upper[at] : 0, exists ? lower[at] : 0);
#else
      const int at = half * 8 + lane % 4 * 2;
      scales[half].unpack(exists ? *(const u16*)(upper + at) : 0, exists ? *(const u16*)(lower + at) : 0);
#endif
    }
  }

  // `x_at`: where this lane's bytes of its row of x begin, for each tile of columns.
  __device__ __forceinline__ void multiply(float (*acc)[4], const u8* const* x_at, u32 offset, int count) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 upper[4] = {words[0][half].x, words[0][half].y, words[0][half].z, words[0][half].w};
      const u32 lower[4] = {words[1][half].x, words[1][half].y, words[1][half].z, words[1][half].w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        u32 a[2][4];
        scales[half].operands(a, upper[j], lower[j], j);
#pragma unroll
        for (int i = 0; i < COLUMN_TILES; i++) {
          if (i > 0 && count <= 8 * i) break;
          const uint4 x = *(const uint4*)(x_at[i] + offset + half * 256 + j * 64);
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
    u32 shifts[2] = {};
    if (!SCALES_ARE_ALIGNED) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        shifts[i] = ((u32)(u64)p.scales + (entry.expert * N + row_of_tile(tile, lane / 4 + 8 * i)) * ROW_SCALES) & 3;
    }
    // The warps of a group take turns in writing results.
    const bool finishes = turn % SPLIT == split;
    Vectors vectors;
    if (finishes) vectors.load(p, entry.expert, tile);
    float acc[COLUMN_TILES][4] = {};
#pragma unroll 1
    for (int i = split; i < ITEMS; i += SPLIT) {
      const u8* from = ring + slot * ITEM_BYTES;
      wait_for_copies<STAGES - 1>();
      __syncwarp();
#pragma unroll
      for (int j = 0; j < PARTS; j++) {
        const int k = i * ITEM_K + j * PART_K;
        const bool is_last = j == PARTS - 1 || (IS_RAGGED && k + PART_K >= K);
        Part part;
        part.load(from, j, shifts, K - k);
        if (is_last) {
          __syncwarp();  // all lanes have read the item
          loader.step(shared_address(from));
        }
        part.multiply(acc, x_at, k * 2, count);
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
    if (finishes) store_tile(p, routing, vectors, tile, count, acc);
    turn++;
  }
}
