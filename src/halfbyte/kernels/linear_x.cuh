// x in shared memory, for linear.cu: boxes of 64 k side by side, a row of x in 128 bytes of each. Chunks of 16
// bytes are exchanged within them as TMA's 128-byte swizzle does it, so that ldmatrix has no bank conflicts. A
// single row has boxes of its own size, and no bank conflicts to begin with.
//
// On SM90 TMA brings the boxes; each piece of k has a barrier, so that a warp waits for what it multiplies
// with alone. Before SM90 all threads copy and then wait for all of it.
//
// The macros are those of linear.cu.

#pragma once
#include "linear_loader.cuh"
#include "sm90.cuh"

#define X_ALIGNMENT 1024  // where the swizzle's pattern begins anew
#define X_PIECES 8
#define X_BARRIER_BYTES 128  // of which barriers take half
#define X_WARPS 4            // that ask for boxes, a thread each

// Where it begins in shared memory.
__device__ __forceinline__ u32 x_address(u32 shared) {
  return (shared + X_ALIGNMENT - 1) / X_ALIGNMENT * X_ALIGNMENT;
}

// Of 128 k, that is of two boxes; the same in all CTAs.
__device__ __forceinline__ u32 x_block_bytes(const Params& p) { return (p.m == 1 ? 1 : COLUMNS) * 256; }

struct SharedX {
  u32 barriers, start, block_bytes;
  int columns, blocks;
  int piece_bits;  // a piece has 2^piece_bits blocks
  bool single;

  __device__ __forceinline__ SharedX(const Params& p, const Place& place, u32 barriers, u32 start)
      : barriers(barriers),
        start(start),
        block_bytes(x_block_bytes(p)),
        columns(min(COLUMNS, p.m - place.first_column)),
        blocks(place.blocks),
        piece_bits(max(0, 29 - __clz(place.blocks - 1))),
        single(p.m == 1) {}

  // By one thread, before the CTA's threads meet and x is asked for. Boxes have as many rows in the last
  // pass as in the others.
  __device__ __forceinline__ void prepare(const Params& p) const {
    const int bytes = min(COLUMNS, p.m) * 256;  // that TMA brings of a block
#pragma unroll 1
    for (int i = 0, left = blocks; left > 0; i++, left -= 1 << piece_bits) {
      barrier_init(barriers + i * 8, 1);
      barrier_expect(barriers + i * 8, bytes * min(left, 1 << piece_bits));
    }
  }

  // Asks for x, which the kernel in front may have written.
  __device__ __forceinline__ void copy(const TensorMap* map, const Params& p, const Place& place) const {
#if __CUDA_ARCH__ >= 900
    const int warp = threadIdx.x / 32;
    if (warp < X_WARPS) {
      if (elect_one()) {
        wait_for_previous();
        const int begin = warp * blocks / X_WARPS, end = (warp + 1) * blocks / X_WARPS;
        // Every group begins elsewhere: all at a time would ask the same few slices of the second-level
        // cache.
        int block = (begin + blockIdx.x / SPLIT * 5) % blocks;
#pragma unroll 1
        for (int i = begin; i < end; i++) {
          const u32 to = start + block * block_bytes, barrier = barriers + (block >> piece_bits) * 8;
          const int k = (place.first_block + block) * 128;
          copy_box(to, map, k, place.first_column, barrier);
          copy_box(to + block_bytes / 2, map, k + 64, place.first_column, barrier);
          if (++block == blocks) block = 0;
        }
      }
      __syncwarp();
    }
#else
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
#endif
  }

  // Where copies come one after another: waits for all of x, which `after` groups of copies follow.
  template <int after>
  __device__ __forceinline__ static void wait_for_all() {
#if __CUDA_ARCH__ < 900
    asm volatile("cp.async.wait_group %0;" ::"n"(after) : "memory");
    __syncthreads();
#endif
  }

  // Waits for what a block belongs to, given by where it begins.
  __device__ __forceinline__ void wait(u32 offset) const {
#if __CUDA_ARCH__ >= 900
    barrier_wait(barriers + (offset >> (31 - __clz(block_bytes) + piece_bits)) * 8, 0);
#endif
  }

  // Where a lane finds x for ldmatrix in the first box: two steps of the only tile of columns, or the first
  // step of two tiles. For further steps the address is to be xored with 32 bytes each. Columns that are
  // not there are whatever lies there: they meet no others.
  __device__ __forceinline__ void addresses(u32* address) const {
    const int lane = threadIdx.x & 31;
#if COLUMN_TILES == 1
    const int column = single ? 0 : lane & 7;
    address[0] = start + column * 128 + (lane >> 3 ^ column) * 16;
#else
#pragma unroll
    for (int i = 0; i < COLUMN_TILES / 2; i++) {
      const int column = single ? 0 : 16 * i + (lane >> 4) * 8 + (lane & 7);
      address[i] = start + column * 128 + ((lane >> 3 & 1) ^ (column & 7)) * 16;
    }
#endif
  }
};
