// Both products of gemm.cu for tiles of 16 tokens, in one kernel, by `mma.sync` instead of `wgmma`.
//
// For `wgmma`, the warps of a warpgroup wait for one another and for all matmuls of half a step. Here a warp waits for
// memory alone, and takes a quarter less instructions.
//
//   Tile       256 rows of W x up to 16 tokens of one expert, 128 k at a time, without a cluster. A warp has two tiles
//              of 16 rows, 128 rows apart, which share what it loads of x. Of at most 8 tokens it computes 8 columns.
//   Loads      by one thread each for the halves of W, in parts of 16 rows x 128 k, and by a warp for x: of gate_up it
//              copies tokens from where they are (cp.async), of down its first lane asks for boxes (TMA). All of a
//              step goes to one slot of the only ring.
//   Products   A CTA goes on to tiles of down as soon as its tiles of gate_up are done, so that weights are read
//              without a pause. Only x of down waits for other CTAs, until all rows of the tile's `middle` are in
//              memory. CTAs draw their tiles of down one by one, the last ones as halves of 128 rows, and only if all
//              CTAs run: otherwise one might wait for another that has no room. Where they do not, perhaps beside
//              another such kernel, CTAs leave after gate_up, and those that start later compute down.
//
// Macros: as in gemm.cu, with TOKENS 16 and without GATED; STAGES is 2 WEIGHT_SLOTS

#include "kernels/runtime/copies.cuh"
#include "moe/cuda/gemm_sm90/narrow_work.cuh"
#include "moe/cuda/gemm_sm90/store.cuh"

#define OCTET_BYTES 2048      // of x: 8 tokens x 128 k, as two boxes of 64 k with 128-byte swizzle

struct Loader {
  const Products& all;
  u32 shared;
  SlotBarriers barriers;
  Draws draws;
  int zero;  // see Work
  SlotState at;

  // CTA_TILES tiles of a half of the rows, to a half of the slot; none where that half does not exist, or where
  // `half` is -1.
  __device__ __forceinline__ void load_weights(const Params& p, const Tile& tile, int row_pair, int half, int to_half) {
    const int first = first_tile(row_pair, half);
    const int tiles = half < 0 ? 0 : min(max(p.matrix_tiles - first, 0), CTA_TILES);
    const u8* from = p.weight + ((u64)tile.expert * p.matrix_tiles + first) * p.tile_bytes;
#pragma unroll 1
    for (int left = p.tile_bytes; left > 0; left -= PART_BYTES, from += PART_BYTES, at.next()) {
      const u32 barrier = barriers.full + 8 * at.stage;
      const u32 to = shared + at.stage * SLOT_BYTES + to_half * WEIGHT_BYTES;
      // Of the last part only one chunk may exist. What is in the other's place is a finite number, times x = 0.
      const int bytes = min(PART_BYTES, left);
      barrier_wait(barriers.empty + 8 * at.stage, at.parity ^ 1);
      barrier_expect(barrier, tiles * bytes);
      // Not a loop where all tiles exist: this thread's instructions take long, one after another.
      if (tiles == CTA_TILES) {
#pragma unroll
        for (int i = 0; i < CTA_TILES; i++) copy_bulk(to + i * PART_BYTES, from + i * p.tile_bytes, bytes, barrier);
      } else {
#pragma unroll 1
        for (int i = 0; i < tiles; i++) copy_bulk(to + i * PART_BYTES, from + i * p.tile_bytes, bytes, barrier);
      }
    }
  }

  // x of gate_up: a lane copies 8 values of four tokens, which are `tokens`. Rows behind the tile's pairs keep what was
  // there; their results are not used.
  __device__ __forceinline__ void gather_x(const Tile& tile, int steps, const int* tokens) {
    const int lane = threadIdx.x % 32, row = lane / 8, column = lane % 8;
    u32 from[4];  // in 8 values
#pragma unroll
    for (int i = 0; i < 4; i++) from[i] = tokens[i] * (all.h / 8) + column;
#pragma unroll 1
    for (int step = 0; step < steps; step++, at.next()) {
      const u32 to = shared + at.stage * SLOT_BYTES + 2 * WEIGHT_BYTES;
      barrier_wait(barriers.empty + 8 * at.stage, at.parity ^ 1);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = row + 4 * i;
        if (r >= tile.count) continue;
#pragma unroll
        for (int chunk = 0; chunk < 2; chunk++) {
          const int octet = 8 * (2 * step + chunk);  // of the token
          const bool exists = octet + column < all.h / 8;
          copy16_or_zeros(to + r / 8 * OCTET_BYTES + chunk * 1024 + r % 8 * 128 + (column ^ r % 8) * 16,
                          (const uint4*)all.x + (exists ? from[i] + octet : 0), exists);
        }
      }
      barrier_arrive_after_copies(barriers.full + 8 * at.stage);
    }
  }

  // x of down, by one lane; the others of its warp arrive, too.
  __device__ __forceinline__ void load_x(const Tile& tile, int steps, const TensorMap* map) {
    const int octets = tile.count > 8 ? 2 : 1;
#pragma unroll 1
    for (int step = 0; step < steps; step++, at.next()) {
      const u32 barrier = barriers.full + 8 * at.stage;
      const u32 to = shared + at.stage * SLOT_BYTES + 2 * WEIGHT_BYTES;
      barrier_wait(barriers.empty + 8 * at.stage, at.parity ^ 1);
      if (elect_one()) {
        fence_async_proxy();  // gate_up's x came by the other proxy
        barrier_expect(barrier, octets * OCTET_BYTES);
        copy_boxes(to, map, tile.first, 2 * step, barrier);
        // Rows without a pair may follow; their results are not used.
        if (octets == 2) copy_boxes(to + OCTET_BYTES, map, tile.first + 8, 2 * step, barrier);
      } else {
        barrier_arrive(barrier);
      }
    }
  }

  // Of a tile for gather_x.
  __device__ __forceinline__ void load_tokens(int* tokens, int tile) {
    const int first = min(tile, all.gate_up.max_tiles - 1) * 16 + threadIdx.x % 32 / 8;
#pragma unroll
    for (int i = 0; i < 4; i++) tokens[i] = __ldcg(all.tokens + first + 4 * i);
  }

  __device__ __forceinline__ void load_all_weights(int half) {
    Work work(all.gate_up, zero);
    while (work.next(all.gate_up)) load_weights(all.gate_up, work.tile, work.row_pair, half, half);
    Draw draw;
    while (draws.pop(draw)) {
      draws.release();
      const int of_rows = draw.half == BOTH ? half : half == 0 ? draw.half : -1;
      load_weights(all.down, draw.tile, draw.row_pair, of_rows, half);
    }
  }

  __device__ __forceinline__ void load_all_x(const TensorMap* middle_map) {
    Work work(all.gate_up, zero);
    int tokens[4], ahead[4];
    load_tokens(ahead, work.next_tile);
    while (work.next(all.gate_up)) {
#pragma unroll
      for (int i = 0; i < 4; i++) tokens[i] = ahead[i];
      load_tokens(ahead, work.next_tile);
      gather_x(work.tile, all.gate_up.steps, tokens);
    }
    Draw draw;
    int last = -1;
    while (draws.pop(draw)) {
      draws.release();
      const Tile tile(draw.tile);
      if (tile.first != last && elect_one()) Written{all.written}.wait(tile.first / 16, 2 * all.gate_up.row_pairs);
      last = tile.first;
      load_x(tile, all.down.steps, middle_map);
    }
    // Not before the last matmul: otherwise all CTAs of the next kernel would start on the few SMs whose CTAs
    // have ended.
#pragma unroll 1
    for (int i = 0; i < WEIGHT_SLOTS; i++, at.next()) barrier_wait(barriers.empty + 8 * at.stage, at.parity ^ 1);
    allow_next();
  }
};

// A worker's part of all tiles.
struct Worker {
  const Products& all;
  u32 shared;
  SlotBarriers barriers;
  Place place;
  int zero;  // see Work
  u32 weights, lane_scale, x, gathered, exponent;
  SlotState slot;
  Draws draws;

  __device__ __forceinline__ Worker(const Products& all, u32 shared, const SlotBarriers& barriers, int zero)
      : all(all), shared(shared), barriers(barriers), zero(zero), draws(shared) {
    const u32 tile = shared + place.tile() * PART_BYTES;
    weights = tile + SCALE_BYTES + place.lane * 16;
    lane_scale = tile + scale_offset(place.lane);
    // Lanes give the addresses of rows of four matrices, 8 tokens x 8 k each, next to each other along k.
    x = shared + 2 * WEIGHT_BYTES + place.lane % 8 * 128 + (place.lane / 8 ^ place.lane % 8) * 16;
    // A lane reads 8 values of a row, as matmuls want them: see values.cuh.
    gathered = shared + 2 * WEIGHT_BYTES + place.lane / 4 * 128 + (place.lane % 4 * 2 ^ place.lane / 4) * 16;
    // Or the compiler computes them at every step.
    asm volatile("" : "+r"(gathered), "+r"(weights), "+r"(lane_scale));
    exponent = SCALE_EXPONENT | zero;  // hides it from the compiler, see unpack_scales
  }

  // When this lane has read its part of the slot.
  __device__ __forceinline__ void release() {
    barrier_arrive(barriers.empty + 8 * slot.stage);
    slot.next();
  }

  // Adds to `sums` the products of 32 k: of all tiles with OCTETS of 8 tokens. Sums are independent, so that
  // one matmul need not wait for the one before.
  template <int TILES, int OCTETS>
  __device__ __forceinline__ static void multiply(float (*sums)[8], u32 (*a)[2][4], u32 (*x)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++)
          matmul(sums[tile] + 4 * octet, a[tile][i], x[octet][2 * i], x[octet][2 * i + 1]);
  }

  // Adds those of a step. LARGE: whether scales of MXFP4 have an excess, see values.cuh.
  template <bool IS_GATED, int TILES, int OCTETS, bool LARGE>
  __device__ __forceinline__ void multiply_step(float (*sums)[8], const Scales* scales) {
    const u32 offset = slot.stage * SLOT_BYTES;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 words[TILES];
      u32 x_words[2][OCTETS][4];
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
        words[tile] = load16(weights + offset + tile * WEIGHT_BYTES + half * CHUNK_BYTES);
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++) {
          const u32 at = offset + octet * OCTET_BYTES + half * 1024;
          if (IS_GATED) {
            const uint4 y = load16((gathered ^ j * 16) + at);
            u32* const to = x_words[j][octet];
            to[0] = y.x, to[1] = y.y, to[2] = y.z, to[3] = y.w;
          } else {
            ldmatrix4(x_words[j][octet], (x ^ j * 64) + at);
          }
        }
      if (half == 1) release();
#pragma unroll
      for (int j = 0; j < 2; j++) {
        u32 a[TILES][2][4];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          const uint4& w = words[tile];
          scales[tile].operands_if<LARGE>(a[tile], j == 0 ? w.x : w.y, j == 0 ? w.z : w.w, half);
        }
        multiply<TILES, OCTETS>(sums, a, x_words[j]);
      }
    }
  }

  template <bool IS_GATED, int TILES, int OCTETS>
  __device__ __forceinline__ void multiply_tile(float (*sums)[8], int steps) {
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      barrier_wait(barriers.full + 8 * slot.stage, slot.parity);
      Scales scales[TILES];
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
        scales[tile].unpack(load_shared_word(lane_scale + slot.stage * SLOT_BYTES + tile * WEIGHT_BYTES), exponent);
#if MX
      // Not where operands are made: branches there would keep the compiler from mixing unpacking and matmuls.
      if (scales[0].large || scales[TILES - 1].large) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) scales[tile].complete_excess();
        multiply_step<IS_GATED, TILES, OCTETS, true>(sums, scales);
        continue;
      }
#endif
      multiply_step<IS_GATED, TILES, OCTETS, false>(sums, scales);
    }
  }

  // TILES of this warp, the first of which is in half `first` of the rows.
  // `last`: the tile of `middle` that this thread has stored, but not counted in `written`; -1 if there is none.
  template <bool IS_GATED, int TILES>
  __device__ __forceinline__ void multiply_and_store(const Params& p, int2 packed, int row_pair, int first,
                                                     const TensorMap* out_map, int& last) {
    // Known to be the same for a warp, now that it is needed.
    const Tile tile(make_int2(__shfl_sync(~0u, packed.x, 0), __shfl_sync(~0u, packed.y, 0)));
    Vectors<IS_GATED> vectors[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++)
      vectors[i] = {p, tile.expert, first_tile(row_pair, first + i) + place.tile(), place.lane};
    float sums[TILES][8] = {};
    if (tile.count > 8)
      multiply_tile<IS_GATED, TILES, 2>(sums, p.steps);
    else
      multiply_tile<IS_GATED, TILES, 1>(sums, p.steps);
#pragma unroll
    for (int i = 0; i < TILES; i++) vectors[i].complete();
    // One tile late, so that the stores have ended.
    if (IS_GATED && last >= 0) Written{all.written}.add(last);
    wait_for_strips(place.group);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const u32 from = shared + i * GROUPS * OUT_BYTES;
      store(p, tile, row_pair, first + i, vectors[i], place, out_map, from, sums[i]);
    }
    if (IS_GATED && threadIdx.x % 128 == 0) last = tile.first / 16;
  }

  __device__ __forceinline__ void multiply_all(const TensorMap* middle_map, const TensorMap* out_map) {
    int last = -1;
    Work work(all.gate_up, zero);
    while (work.next(all.gate_up))
      multiply_and_store<true, 2>(all.gate_up, work.tile, work.row_pair, 0, middle_map, last);
    // Before this CTA's first tile of down, which may wait for it.
    if (last >= 0) Written{all.written}.add(last);
    Draw draw;
    while (draws.pop(draw)) {
      draws.release();
      const int row_pair = __shfl_sync(~0u, draw.row_pair, 0), half = __shfl_sync(~0u, draw.half, 0);
      if (half == BOTH)
        multiply_and_store<false, 2>(all.down, draw.tile, row_pair, 0, out_map, last);
      else
        multiply_and_store<false, 1>(all.down, draw.tile, row_pair, half, out_map, last);
    }
    wait_for_stores();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    moe_gemm(const __grid_constant__ TensorMap middle_out_map, const __grid_constant__ TensorMap middle_map,
             const __grid_constant__ TensorMap out_map, const __grid_constant__ Products p) {
  extern __shared__ __align__(1024) u8 shared[];  // period of the swizzle
  const u32 base = shared_address(shared);
  const SlotBarriers barriers(base);
  const Draws draws(base);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same for a warp
  if (threadIdx.x == 96) {
    for (int i = 0; i < WEIGHT_SLOTS; i++) {
      barrier_init(barriers.full + 8 * i, LOADERS);
      barrier_init(barriers.empty + 8 * i, WORKERS);
    }
    draws.make();
    fence_barrier_init();
  }
  if (threadIdx.x == 64) prefetch_map(&middle_map);
  if (threadIdx.x == 128) prefetch_map(&middle_out_map);
  if (threadIdx.x == 160) prefetch_map(&out_map);
  __syncthreads();
  wait_for_previous();  // the list kernel
  const int zero = hidden_zero(p.gate_up);
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
    Loader loader{p, base, barriers, draws, zero};
    if (warp < 2) {
      if (elect_one()) loader.load_all_weights(warp);
    } else if (warp == 2) {
      loader.load_all_x(&middle_map);
    } else if (elect_one()) {
      draw_tiles(p, draws);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WORKER_REGISTERS));
    Worker(p, base, barriers, zero).multiply_all(&middle_out_map, &out_map);
  }
}
