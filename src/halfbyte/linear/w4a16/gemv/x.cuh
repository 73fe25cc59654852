// x in shared memory, for gemv.cu: boxes of 64 k, in which a token has 128 bytes, with TMA's 128-byte swizzle, so
// that ldmatrix has no bank conflicts. For M = 1 a box has one token and needs no swizzle.
//
// On SM90 TMA loads the boxes in up to 8 slices of k. Each slice has a barrier, so that a warp only waits for the
// slice that it multiplies with. Before SM90 all threads copy, then wait for all of x.
//
// The macros are those of gemv.cu.

#pragma once
#include "linear/w4a16/gemv/loader.cuh"
#include "kernels/runtime/sm90.cuh"

#define X_SLICES 8                       // max
#define X_WARPS (WARPS < 4 ? WARPS : 4)  // that load them
// Consecutive slices, so that those loaded first are far apart along k, as are the first items of the warps.
#define X_SLICES_PER_WARP ((X_SLICES + X_WARPS - 1) / X_WARPS)
#define X_BARRIER_BYTES 128  // X_SLICES barriers, then that of the sums (sums.cuh); keeps the rings aligned
// Blocks of 128 k in a slice; a TMA load has twice as many boxes.
#define X_SLICE_BLOCKS ((BLOCKS + SPLIT * X_SLICES - 1) / (SPLIT * X_SLICES))

// Bytes of 128 k (two boxes); the same in all CTAs.
__device__ __forceinline__ u32 x_block_bytes(const Params& p) { return (SINGLE ? 1 : COLUMNS) * 256; }

// End of x in shared memory: the same in all CTAs of a cluster, whose parts of k may differ by a block.
__device__ __forceinline__ u32 x_end(const Params& p, u32 start) {
  const int max_blocks = (BLOCKS + SPLIT - 1) / SPLIT;
  return start + (max_blocks + X_SLICE_BLOCKS - 1) / X_SLICE_BLOCKS * X_SLICE_BLOCKS * x_block_bytes(p);
}

struct SharedX {
  u32 barriers, start, block_bytes, slice_bytes;
  int columns, blocks, slice_blocks;
  bool single;

  __device__ __forceinline__ SharedX(const Params& p, const Place& place, u32 barriers, u32 start)
      : barriers(barriers),
        start(start),
        block_bytes(x_block_bytes(p)),
        slice_bytes(x_block_bytes(p) * X_SLICE_BLOCKS),
        columns(min(COLUMNS, p.m - place.first_column)),
        blocks(place.blocks),
        slice_blocks(X_SLICE_BLOCKS),
        single(SINGLE) {}

  // Starts the TMA loads of x, after the previous kernel, which may have written it. By one thread in each of
  // X_WARPS warps: initializing a barrier takes a thread 70 cycles, and the other warps can load weights without
  // waiting for the previous kernel.
  __device__ __forceinline__ void load(const TensorMap* map, const Place& place) const {
    const int first = place.warp * X_SLICES_PER_WARP;
    if (place.warp < X_WARPS && elect_one()) {
#pragma unroll
      for (int i = first; i < first + X_SLICES_PER_WARP; i++)
        if (i * slice_blocks < blocks) barrier_init(barriers + i * 8, 1);
      fence_barrier_init();
#pragma unroll
      for (int i = first; i < first + X_SLICES_PER_WARP; i++)
        if (i * slice_blocks < blocks) barrier_expect(barriers + i * 8, slice_bytes);
      wait_for_previous();
#pragma unroll
      for (int i = first; i < first + X_SLICES_PER_WARP; i++) {
        if (i * slice_blocks >= blocks) break;
        copy_boxes(start + i * slice_bytes, map, place.first_column, (place.first_block + i * slice_blocks) * 2,
                   barriers + i * 8);
      }
    }
    __syncwarp();
  }

  // The same before SM90: all threads copy, and `wait_for_all` waits.
  __device__ __forceinline__ void copy(const Params& p, const Place& place) const {
    const u16* x = p.x + place.first_column * p.x_stride + place.first_block * 128;
    const int bytes = (p.k - place.first_block * 128) * 2;  // that exist, of a row
    for (int row = 0; row < columns; row++, x += p.x_stride) {
      const int turn = single ? 0 : row & 7;
#pragma unroll 1
      for (int i = threadIdx.x; i < blocks * 16; i += THREADS)
        copy16_or_zeros(start + i / 8 * (block_bytes / 2) + row * 128 + (i % 8 ^ turn) * 16, x + i * 8,
                        i * 16 < bytes);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Waits for all of x; `after` newer cp.async groups may still be in flight.
  template <int after>
  __device__ __forceinline__ static void wait_for_all() {
    asm volatile("cp.async.wait_group %0;" ::"n"(after) : "memory");
    __syncthreads();
  }

  // Waits for the slice of the block at this offset.
  __device__ __forceinline__ void wait(u32 offset) const {
#if __CUDA_ARCH__ >= 900
    barrier_wait(barriers + offset / slice_bytes * 8, 0);
#endif
  }

  // A lane's ldmatrix addresses in the first box: two steps of the only column tile, or one step of two tiles.
  // Columns beyond M hold undefined values, which affect no other column.
  __device__ __forceinline__ void addresses(u32 (*address)[4]) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < X_TILES; i++) {
#if COLUMN_TILES == 1
      const int column = single ? 0 : lane & 7, chunk = lane >> 3;
#else
      const int column = single ? 0 : 16 * i + (lane >> 4) * 8 + (lane & 7), chunk = lane >> 3 & 1;
#endif
#pragma unroll
      for (int step = 0; step < 4; step++)
        address[i][step] = start + column * 128 + ((chunk ^ (column & 7)) ^ 2 * step) * 16;
    }
  }
};
