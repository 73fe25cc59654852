// The order of k in x and in the intermediate result, and of the rows of an expert's matrix in shared memory.
//
// Lane c of four reads 16 bytes of a row of W at a time, k = 32 c .. 32 c + 31 of 128 k. A word j of those has the
// operands of two matmuls (values.cuh), each with four of its values; so position 16 (2 j + h) + 8 q + 2 c + b of
// 128 k of x has k = 32 c + 8 j + 2 h + q + 4 b. The sort kernel permutes x so. For the intermediate result, a CTA
// computes the 64 channels of such positions, four runs of 16, each row where its position asks for it.
//
// A CTA has 128 rows of W, in four runs of 32 (16 of gate, 16 of up).

#pragma once
#include "kernels/runtime/basics.cuh"

#define RUNS 4
#define RUN_ROWS 32

// Run and place in the run of 16 channels, of a position of 64.
struct Channel {
  int run, place;

  __device__ __forceinline__ Channel(int position)
      : run(position >> 1 & 3),
        place((position >> 5 & 1) * 8 + (position & 1) * 4 + (position >> 4 & 1) * 2 + (position >> 3 & 1)) {}
};
