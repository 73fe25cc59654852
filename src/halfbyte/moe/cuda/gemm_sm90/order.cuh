// The order of k in x and in the intermediate result, and of the rows of an expert's matrix in shared memory.
//
// Lane c of four loads k = 32 c .. 32 c + 31 of 128 k of a row of W in one 16-byte load. Word j feeds two MMAs
// (h = 0, 1), four values each (values.cuh). x is permuted to match: position 16 (2 j + h) + 8 q + 2 c + b holds
// k = 32 c + 8 j + 2 h + q + 4 b. sort.cu permutes x. The first product writes its result in this order, because each
// lane reads the rows of W of its positions (Channel): 64 channels per CTA, in four runs of 16.
//
// A CTA has 128 rows of W, in four runs of 32 (16 of gate, 16 of up).

#pragma once
#include "kernels/runtime/basics.cuh"

#define RUNS 4
#define RUN_ROWS 32

// The channel at a position 0 .. 63: its run, and its place among the run's 16 channels.
struct Channel {
  int run, place;

  __device__ __forceinline__ Channel(int position)
      : run(position >> 1 & 3),
        place((position >> 5 & 1) * 8 + (position & 1) * 4 + (position >> 4 & 1) * 2 + (position >> 3 & 1)) {}
};
