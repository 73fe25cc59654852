// The ring of decode_wide.cu where a page holds one KV head: TMA brings whole pages.
//
// A page is then contiguous, [K | K's scales | V | V's scales] as a tile of the ring is. Two to eight copies
// make a tile of 128 tokens, each asked for by one thread; at head size 128 they replace 36 instructions of
// warps, and their addresses. To TMA a page is a box of rows of K's width. It exchanges their chunks of 16
// bytes as its swizzle of that width says, by address, the scales' among them.

#pragma once
#include "attention/decode/loader.cuh"
#include "kernels/runtime/sm90.cuh"

static_assert(KV_HEADS == 1 && ROW_K == ROW_V && K_KIND == 4 && V_KIND == 4, "pages like tiles");
static_assert(K_DATA == 0 && K_SCALE == OFF_SF_K && V_DATA == OFF_V && V_SCALE == OFF_SF_V,
              "pages like tiles");
static_assert(64 % BLOCK_SIZE == 0, "what 64 tokens share is a page or several");

#define TILE_PAGES (TILE / BLOCK_SIZE)
#define PAGE_WARPS (TILE_PAGES < RING_WARPS ? TILE_PAGES : RING_WARPS)  // that ask for pages

// TMA's swizzle: the byte at `at` in the pages lies at `exchanged(at)` in the ring; the number of its chunk
// is XORed with `pattern(at)`.
__device__ __forceinline__ constexpr u32 pattern(u32 at) { return at >> 7 & (CHUNKS_K - 1); }
__device__ __forceinline__ constexpr u32 exchanged(u32 at) { return at ^ (pattern(at) << 4); }

// One barrier per stage, at `ready`: it opens when the pages of the stage's tile are there.
__device__ __forceinline__ void make_barriers(u32 ready) {
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; i++) barrier_init(ready + 8 * i, PAGE_WARPS);
    tell_of_barriers();
  }
  __syncthreads();
}

// The tile that is worked on, and whether it is there.
struct Arrivals {
  u32 ring, ready;
  u32 slot = 0, parity = 0;

  __device__ __forceinline__ Arrivals(u32 ring, u32 ready) : ring(ring), ready(ready) {}

  __device__ __forceinline__ u32 tile() const { return ring + slot * STAGE_BYTES; }
  __device__ __forceinline__ void wait() const { barrier_wait(ready + 8 * slot, parity); }
  __device__ __forceinline__ void pass() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// Streams tiles into the ring, ahead of the arithmetic, their pages by the warps in turn.
struct Loader : Tiles {
  const TensorMap& map;
  u32 ring, ready, slot;
  u32 first;  // of a tile's keys, the first one of this warp's pages
  u32 pages[TILE_PAGES / PAGE_WARPS];

  __device__ __forceinline__ Loader(const Params& p, const TensorMap& map, const PlanHeader& header,
                                    const Unit& first_unit, int head, int unit, const Arrivals& arrivals)
      : Tiles(p, header, first_unit.index, head, unit), map(map), ring(arrivals.ring),
        ready(arrivals.ready), slot(arrivals.slot) {
    first = keep(threadIdx.x / 32 * BLOCK_SIZE);
    begin(first_unit.piece);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
      if (i == 0) look_up();
      step();
    }
  }

  __device__ __forceinline__ void look_up() {
    if (tile >= stop) return;
#pragma unroll
    for (int i = 0; i < TILE_PAGES / PAGE_WARPS; i++)
      pages[i] = page_of(tile * TILE + i * PAGE_WARPS * BLOCK_SIZE + first);
  }

  // Asks for the next tile, if there is one.
  __device__ __forceinline__ void step() {
    if (tile < stop) {
      load();
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      advance();
    }
    look_up();
  }

  __device__ __forceinline__ void load() const {
    // In this order: the compiler must not see lanes part before they elect one.
    if (elect_one() && (PAGE_WARPS == RING_WARPS || first < TILE)) {
      const u32 barrier = ready + 8 * slot;
      const u32 to = ring + slot * STAGE_BYTES + first / BLOCK_SIZE * SPAN_BYTES;
      barrier_expect(barrier, TILE_PAGES / PAGE_WARPS * SPAN_BYTES);
#pragma unroll
      for (int i = 0; i < TILE_PAGES / PAGE_WARPS; i++)
        copy_boxes(to + i * PAGE_WARPS * SPAN_BYTES, &map, 0, pages[i], barrier);
    }
    __syncwarp();
  }
};
