// Tiles of down in narrow.cu: how CTAs draw them, and wait until they can be loaded.

#pragma once
#include "moe/cuda/gemm_sm90/memory.cuh"

#define LOADERS 34  // threads: one for each half of W, and a warp for x
#define HALVED 1    // pairs of tiles of rows per CTA, the last ones, drawn as halves: CTAs end closer together
#define DRAWS 1     // entries; with more, tiles are drawn earlier, and CTAs end less at the same time
#define POLLS 64    // some 40 us

struct Products {
  Params gate_up, down;
  const u16* x;       // [M, h]
  const int* tokens;  // [rows]: token of a row's pair; not set where a row has none
  int h;              // a multiple of 8
  u64* written;       // see Written
  int* counters;      // CTAs that have started, and tiles of down that were drawn; cleared by the list kernel
};

// Of every tile, how many pieces of `middle` are in memory: two of each pair of tiles of rows. The list kernel clears
// them. Tiles of 16 tokens begin at multiples of 16, so that their rows number them.
struct Written {
  u64* pieces;

  // Waits until this thread's last stores are in memory, and counts them.
  __device__ __forceinline__ void add(int tile) const {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(pieces + tile), "l"(1ull) : "memory");
  }

  // Before this thread loads them by TMA.
  __device__ __forceinline__ void wait(int tile, u64 all) const {
    u64 found;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(pieces + tile) : "memory");
    } while (found != all);
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }
};

// What a CTA draws of down: a pair of tiles of rows, or half of it.
enum Half { FIRST, SECOND, BOTH };  // 0 and 1 are ranks of first_tile
struct Draw {
  int2 tile;
  int row_pair;  // -1 behind the last one
  int half;
};

// A ring of draws, from the thread that draws them to loaders and workers.
struct Draws {
  u32 full, empty, entries;
  RingState<DRAWS> at;

  __device__ __forceinline__ Draws(u32 shared)
      : full(shared + OFF_BARRIERS + 16 * WEIGHT_SLOTS), empty(full + 8 * DRAWS), entries(empty + 8 * DRAWS) {
    static_assert(16 * WEIGHT_SLOTS + 32 * DRAWS <= BARRIER_BYTES, "barriers and entries fit");
  }

  __device__ __forceinline__ void make() const {
    for (int i = 0; i < DRAWS; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, LOADERS + WORKERS);
    }
  }

  __device__ __forceinline__ void wait_for_place() const { barrier_wait(empty + 8 * at.stage, at.parity ^ 1); }

  // After that.
  __device__ __forceinline__ void push(const Draw& draw) {
    store16(entries + 16 * at.stage, make_uint4(draw.tile.x, draw.tile.y, draw.row_pair, draw.half));
    barrier_arrive(full + 8 * at.stage);
    at.next();
  }

  // Whether there is one, which this thread then releases.
  __device__ __forceinline__ bool pop(Draw& draw) const {
    barrier_wait(full + 8 * at.stage, at.parity);
    const uint4 entry = load16(entries + 16 * at.stage);
    draw = {make_int2(entry.x, entry.y), (int)entry.z, (int)entry.w};
    return draw.row_pair >= 0;
  }

  __device__ __forceinline__ void release() {
    barrier_arrive(empty + 8 * at.stage);
    at.next();
  }
};

// Draws this CTA's tiles of down; called by a thread that does nothing else, so that no loader waits for its atomics. A
// tile of down needs rows of `middle` from several CTAs. A CTA that is not resident, perhaps because another such
// kernel runs, may have to wait until this one ends, so this one must not wait for it: a CTA draws only if it has seen
// that all CTAs have started. The last one to start always sees that, and computes the tiles that no other CTA draws.
__device__ __forceinline__ void draw_tiles(const Products& all, Draws draws) {
  const Params& p = all.down;
  const int all_pairs = __ldcg(p.num_tiles) * p.row_pairs;
  const int whole = max(all_pairs - HALVED * (int)gridDim.x, 0), end = 2 * all_pairs - whole;
  int started = atomicAdd(all.counters, 1) + 1;
#pragma unroll 1
  for (int i = 0; i < POLLS && started < (int)gridDim.x; i++) started = atomicAdd(all.counters, 0);
  while (started == (int)gridDim.x) {
    // Before it draws: CTAs that are late leave tiles to others.
    draws.wait_for_place();
    const int drawn = atomicAdd(all.counters + 1, 1);
    if (drawn >= end) break;
    const int halves = max(drawn - whole, 0), pair = drawn - (halves + 1) / 2, tile = pair / p.row_pairs;
    draws.push({__ldcg(p.tiles + tile), pair - tile * p.row_pairs, drawn < whole ? BOTH : halves % 2 ? SECOND : FIRST});
  }
  draws.push({make_int2(0, 0), -1, BOTH});
}
