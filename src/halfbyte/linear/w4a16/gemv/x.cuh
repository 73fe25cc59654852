// x in shared memory, for gemv.cu: boxes of 64 k side by side, a row of x in 128 bytes of each. Chunks of 16
// bytes are exchanged within them as TMA's 128-byte swizzle does it, so that ldmatrix has no bank conflicts. A
// single row has boxes of its own size, and no bank conflicts to begin with.
//
// On SM90 TMA brings the boxes, in a few pieces of k. Each has a barrier, so that a warp waits for what it
// multiplies with alone. Before SM90 all threads copy and then wait for all of it.
//
// The macros are those of gemv.cu.

#pragma once
#include "linear/w4a16/gemv/loader.cuh"
#include "kernels/runtime/sm90.cuh"

#define X_PIECES 8                       // at most
#define X_WARPS (WARPS < 4 ? WARPS : 4)  // that ask for them
// Side by side: so those that come first lie far apart along k, as the places where warps begin do.
#define X_PIECES_OF_WARP ((X_PIECES + X_WARPS - 1) / X_WARPS)
#define X_BARRIER_BYTES 128  // of which barriers take half
// Blocks of a piece: the tensor map's boxes are as many.
#define X_PIECE ((BLOCKS + SPLIT * X_PIECES - 1) / (SPLIT * X_PIECES))

// Of 128 k, that is of two boxes; the same in all CTAs.
__device__ __forceinline__ u32 x_block_bytes(const Params& p) { return (SINGLE ? 1 : COLUMNS) * 256; }

// At the same place in all CTAs of a cluster, whose shares of k may differ by a block.
__device__ __forceinline__ u32 x_end(const Params& p, u32 start) {
  const int most = (BLOCKS + SPLIT - 1) / SPLIT;
  return start + (most + X_PIECE - 1) / X_PIECE * X_PIECE * x_block_bytes(p);
}

struct SharedX {
  u32 barriers, start, block_bytes, piece_bytes;
  int columns, blocks, piece;
  bool single;

  __device__ __forceinline__ SharedX(const Params& p, const Place& place, u32 barriers, u32 start)
      : barriers(barriers),
        start(start),
        block_bytes(x_block_bytes(p)),
        piece_bytes(x_block_bytes(p) * X_PIECE),
        columns(min(COLUMNS, p.m - place.first_column)),
        blocks(place.blocks),
        piece(X_PIECE),
        single(SINGLE) {}

  // Asks for x, which the kernel in front may have written: a thread of some warps, because each takes 70
  // cycles to make a barrier, and not of all, because they wait for that kernel before they ask for weights.
  __device__ __forceinline__ void bring(const TensorMap* map, const Place& place) const {
    const int first = place.warp * X_PIECES_OF_WARP;
    if (place.warp < X_WARPS && elect_one()) {
#pragma unroll
      for (int i = first; i < first + X_PIECES_OF_WARP; i++)
        if (i * piece < blocks) barrier_init(barriers + i * 8, 1);
      tell_of_barriers();
#pragma unroll
      for (int i = first; i < first + X_PIECES_OF_WARP; i++)
        if (i * piece < blocks) barrier_expect(barriers + i * 8, piece_bytes);
      wait_for_previous();
#pragma unroll
      for (int i = first; i < first + X_PIECES_OF_WARP; i++) {
        if (i * piece >= blocks) break;
        copy_boxes(start + i * piece_bytes, map, place.first_column, (place.first_block + i * piece) * 2,
                   barriers + i * 8);
      }
    }
    __syncwarp();
  }

  // The same, by all threads, which wait for it with `wait_for_all`.
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

  // Waits for all of x, which `after` groups of copies follow.
  template <int after>
  __device__ __forceinline__ static void wait_for_all() {
    asm volatile("cp.async.wait_group %0;" ::"n"(after) : "memory");
    __syncthreads();
  }

  // Waits for what a block belongs to, given by where it begins.
  __device__ __forceinline__ void wait(u32 offset) const {
#if __CUDA_ARCH__ >= 900
    barrier_wait(barriers + offset / piece_bytes * 8, 0);
#endif
  }

  // Where a lane finds x for ldmatrix in the first box: two steps of the only tile of columns, or one step of
  // two tiles. Columns that are not there are whatever lies there: they meet no others.
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
