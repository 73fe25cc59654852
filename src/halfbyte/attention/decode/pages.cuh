// The ring of decode_wgmma.cu where a page holds one KV head: TMA copies whole pages.
//
// Such a page is contiguous, [K | K's scales | V | V's scales], like a tile of the ring. Two to eight copies,
// each issued by one thread, load a tile of 128 tokens; at head size 128 they replace 36 warp instructions
// and their addresses. To TMA a page is a box of rows of K's width; its swizzle for that width permutes
// 16-byte chunks by address, including those of scales.

#pragma once
#include "attention/decode/loader.cuh"
#include "kernels/runtime/sm90.cuh"

static_assert(KV_HEADS == 1 && ROW_K == ROW_V && K_KIND == 4 && V_KIND == 4, "pages like tiles");
static_assert(K_DATA == 0 && K_SCALE == OFF_SF_K && V_DATA == OFF_V && V_SCALE == OFF_SF_V,
              "pages like tiles");
static_assert(64 % BLOCK_SIZE == 0, "64 tokens are a whole number of pages");

#define TILE_PAGES (TILE / BLOCK_SIZE)
#define PAGE_WARPS (TILE_PAGES < RING_WARPS ? TILE_PAGES : RING_WARPS)  // that issue copies

// TMA's swizzle: the byte at offset `at` of the pages is at `exchanged(at)` in the ring; the index of its
// 16-byte chunk is XORed with `pattern(at)`.
__device__ __forceinline__ constexpr u32 pattern(u32 at) { return at >> 7 & (CHUNKS_K - 1); }
__device__ __forceinline__ constexpr u32 exchanged(u32 at) { return at ^ (pattern(at) << 4); }

// One mbarrier per stage, from address `ready` on: it completes when the tile's pages have arrived.
__device__ __forceinline__ void make_barriers(u32 ready) {
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; i++) barrier_init(ready + 8 * i, PAGE_WARPS);
    fence_barrier_init();
  }
  __syncthreads();
}

// The consumer's place in the ring: the current tile, and the wait for its arrival.
struct RingReader {
  u32 ring, ready;
  u32 slot = 0, parity = 0;

  __device__ __forceinline__ RingReader(u32 ring, u32 ready) : ring(ring), ready(ready) {}

  __device__ __forceinline__ u32 tile() const { return ring + slot * STAGE_BYTES; }
  __device__ __forceinline__ void wait() const { barrier_wait(ready + 8 * slot, parity); }
  __device__ __forceinline__ void pass() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// The producer: prefetches tiles into the ring; warps take turns at the pages.
struct Loader : Tiles {
  const TensorMap& map;
  u32 ring, ready, slot;
  u32 first;  // first token, in a tile, of this warp's pages
  u32 pages[TILE_PAGES / PAGE_WARPS];

  __device__ __forceinline__ Loader(const Params& p, const TensorMap& map, const PlanHeader& header,
                                    const Unit& first_unit, int head, int unit, const RingReader& reader)
      : Tiles(p, header, first_unit.index, head, unit), map(map), ring(reader.ring),
        ready(reader.ready), slot(reader.slot) {
    first = keep(threadIdx.x / 32 * BLOCK_SIZE);
    begin(first_unit.item);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
      if (i == 0) load_page_ids();
      step();
    }
  }

  __device__ __forceinline__ void load_page_ids() {
    if (tile >= stop) return;
#pragma unroll
    for (int i = 0; i < TILE_PAGES / PAGE_WARPS; i++)
      pages[i] = page_of(tile * TILE + i * PAGE_WARPS * BLOCK_SIZE + first);
  }

  // Prefetches the next tile, if there is one.
  __device__ __forceinline__ void step() {
    if (tile < stop) {
      load();
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      advance();
    }
    load_page_ids();
  }

  __device__ __forceinline__ void load() const {
    // elect_one() comes first: it must not be in divergent code.
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
