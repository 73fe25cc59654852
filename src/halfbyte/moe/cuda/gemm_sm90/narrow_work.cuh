// Tiles of down in narrow.cu: how CTAs draw them, and wait until they can be loaded.

#pragma once
#include "moe/cuda/gemm_sm90/memory.cuh"

#define LOADERS 3  // threads
#define DRAWS 1    // entries; with more, tiles are drawn earlier, and CTAs end less at the same time
#define POLLS 64   // some 40 us

struct Products {
  Params gate_up, down;
  u64* written;   // see Written
  int* counters;  // CTAs that have started, and tiles of down that were drawn; cleared by the sort kernel
};

// Of every tile, how many pieces of `middle` are in memory: two of each pair of tiles of rows. The sort kernel clears
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

// A ring of tiles of down, from the thread that draws them to loaders and workers.
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

  // After that. `row_pair` is -1 behind the last tile.
  __device__ __forceinline__ void push(int2 tile, int row_pair) {
    store16(entries + 16 * at.stage, make_uint4(tile.x, tile.y, row_pair, 0));
    barrier_arrive(full + 8 * at.stage);
    at.next();
  }

  // Whether there is a tile, which this thread then releases.
  __device__ __forceinline__ bool pop(int2& tile, int& row_pair) const {
    barrier_wait(full + 8 * at.stage, at.parity);
    const uint4 entry = load16(entries + 16 * at.stage);
    tile = make_int2(entry.x, entry.y), row_pair = entry.z;
    return row_pair >= 0;
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
  const int end = __ldcg(p.num_tiles) * p.row_pairs;
  int started = atomicAdd(all.counters, 1) + 1;
#pragma unroll 1
  for (int i = 0; i < POLLS && started < (int)gridDim.x; i++) started = atomicAdd(all.counters, 0);
  while (started == (int)gridDim.x) {
    // Before it draws: CTAs that are late leave tiles to others.
    draws.wait_for_place();
    const int drawn = atomicAdd(all.counters + 1, 1);
    if (drawn >= end) break;
    const int tile = drawn / p.row_pairs;
    draws.push(__ldcg(p.tiles + tile), drawn - tile * p.row_pairs);
  }
  draws.push(make_int2(0, 0), -1);
}
