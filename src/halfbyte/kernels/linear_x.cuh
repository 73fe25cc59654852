// x in shared memory, for linear.cu: rows as they are, 16 bytes apart from a multiple of 128, so that
// ldmatrix has no bank conflicts.
//
// On SM90 x arrives in pieces of k, by bulk copies that cost the warps nothing; each has a barrier, so that
// a warp waits for what it multiplies with alone. Before SM90 all threads copy and then wait for all of
// it.
//
// The macros are those of linear.cu.

#pragma once
#include "linear_loader.cuh"
#include "sm90.cuh"

#define X_PIECES 8
#define X_BARRIER_BYTES 128  // of which barriers take half

__device__ __forceinline__ void store_zeros16(u32 address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

struct SharedX {
  u32 barriers, first_row, row_bytes;
  int columns;
  int bytes, padded;  // of a row: that exist, and that are multiplied
  int piece_bits;     // a piece of a row has 2^piece_bits bytes

  __device__ __forceinline__ SharedX(const Params& p, const Place& place, u32 barriers, u32 first_row)
      : barriers(barriers),
        first_row(first_row),
        row_bytes(place.blocks * 256 + 16),
        columns(min(COLUMNS, p.m - place.first_column)),
        bytes(min(place.blocks * 256, (p.k - place.first_block * 128) * 2)),
        padded(place.blocks * 256),
        piece_bits(8 + max(0, 29 - __clz(place.blocks - 1))) {}

  // Before the CTA's threads meet and x is asked for.
  __device__ __forceinline__ void prepare() const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int i = 0, left = bytes; left > 0; i++, left -= 1 << piece_bits) {
        barrier_init(barriers + i * 8, 1);
        barrier_expect(barriers + i * 8, columns * min(left, 1 << piece_bits));
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (bytes < padded) {
#pragma unroll 1
      for (int i = threadIdx.x; i < columns * 16; i += THREADS)
        if (bytes + i % 16 * 16 < padded)
          store_zeros16(first_row + i / 16 * row_bytes + bytes + i % 16 * 16);
    }
#endif
  }

  __device__ __forceinline__ void copy(const Params& p, const Place& place) const {
    const u16* x = p.x + place.first_column * p.x_stride + place.first_block * 128;
#if __CUDA_ARCH__ >= 900
    // A lane per piece, a warp per row. Lanes take turns, in every group from another piece on: all groups
    // at a time would ask the same few slices of the second-level cache.
    const int piece = (threadIdx.x + blockIdx.x / SPLIT) % X_PIECES;
    const int begin = piece << piece_bits, size = min(bytes - begin, 1 << piece_bits);
    const u32 barrier = barriers + piece * 8;
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < columns; row += WARPS)
      if (threadIdx.x % 32 < X_PIECES && size > 0)
        copy_bulk(first_row + row * row_bytes + begin, x + row * p.x_stride + begin / 2, size, barrier);
    __syncwarp();
#else
    u32 to = first_row;
    for (int row = 0; row < columns; row++) {
#pragma unroll 1
      for (int at = threadIdx.x * 16; at < padded; at += THREADS * 16)
        copy16_or_zeros(to + at, x + at / 2, at < bytes);
      x += p.x_stride;
      to += row_bytes;
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

  // Waits for what a byte of a row belongs to.
  __device__ __forceinline__ void wait(u32 offset) const {
#if __CUDA_ARCH__ >= 900
    barrier_wait(barriers + (offset >> piece_bits) * 8, 0);
#endif
  }

  // Where a lane finds x for ldmatrix: two steps of the only tile of columns, or one step of two tiles.
  // Columns that are not there are copies of the last one.
  __device__ __forceinline__ void addresses(u32* address) const {
    const int lane = threadIdx.x & 31;
#if COLUMN_TILES == 1
    address[0] = first_row + min(lane & 7, columns - 1) * row_bytes + (lane >> 3) * 16;
#else
#pragma unroll
    for (int i = 0; i < COLUMN_TILES / 2; i++) {
      const int column = 16 * i + (lane >> 4) * 8 + (lane & 7);
      address[i] = first_row + min(column, columns - 1) * row_bytes + (lane >> 3 & 1) * 16;
    }
#endif
  }
};
