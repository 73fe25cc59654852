// The order of k in x and in the intermediate result.
//
// Position 16 (2 j + h) + 8 q + 2 c + b of 64 has k = 16 c + 8 j + 4 h + 2 q + b: in this order the words of W are
// operands of matmuls (moe/cuda/values.cuh). sort.cu permutes x. The first product writes its result in this order,
// because the channels of its tiles are in it (packed.py): warp t of eight has positions 8 t .. 8 t + 7 of 64 channels.

#pragma once
#include "kernels/runtime/basics.cuh"

// The channel at a position.
__device__ __forceinline__ int channel_at(int position) {
  return position / 64 * 64 + position / 8 % 8 * 2 + position / 2 % 4 * 16 + position % 2;
}
