// A worker's rows in prefill.cu: which columns they see, and the softmax. A thread has rows g and g + 8 of its warp's
// 16, and of every 8 columns 2c and 2c + 1, where g is lane / 4 and c lane % 4.

#pragma once
#include "attention/prefill/sm90/work.cuh"
#include "kernels/runtime/pairs.cuh"

#define PAIRS (COLUMNS / 8)  // blocks of 8 columns

// Over the four lanes of a row.
__device__ __forceinline__ float max_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// This thread's columns of a step that are not behind `column`: bit 2 j + k is column 8 j + 2 c + k.
__device__ __forceinline__ u32 columns_up_to(int column) {
  column -= threadIdx.x % 4 * 2;
  const int count = (column >> 3) * 2 + min(column & 7, 1) + 1;
  return count >= 32 ? ~0u : (1u << max(count, 0)) - 1;
}

// Columns that a row sees: up to `packed`, and from `first` to `last`.
struct Visible {
  int packed, first, last;

  Visible() = default;
  __device__ __forceinline__ Visible(const Tile& tile, int row) {
    const int position = tile.position + row / HEADS, num_packed = tile.packed();
    packed = position - RECENT;
    first = max(num_packed, num_packed + position - RECENT + 1 - tile.first_recent());
    last = num_packed + position - tile.first_recent();
  }

  // As of `columns_up_to`, in the step from `begin`.
  __device__ __forceinline__ u32 columns(int begin) const {
    u32 y = columns_up_to(packed - begin);
    if (RECENT) y |= columns_up_to(last - begin) & ~columns_up_to(first - 1 - begin);
    return y;
  }
};

struct Softmax {
  float top[2] = {NEG_INF, NEG_INF};  // in base 2
  float total[2] = {0.0f, 0.0f};          // of this lane's columns

  // Turns scores into weights; `rescale` is what earlier sums are multiplied by.
  __device__ __forceinline__ void add(float* scores, float scale, float* rescale) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float max_score = scores[2 * i];
#pragma unroll
      for (int j = 0; j < PAIRS; j++)
        max_score = fmaxf(max_score, fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]));
      const float new_top = fmaxf(top[i], max_of_row(max_score) * scale);
      const float unit = new_top == NEG_INF ? 0.0f : new_top;  // a row that sees no column yet
      rescale[i] = ex2(top[i] - unit);
      top[i] = new_top;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < PAIRS; j++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          float& x = scores[4 * j + 2 * i + k];
          x = ex2(fmaf(x, scale, -unit));
          sum += x;
        }
      total[i] = fmaf(total[i], rescale[i], sum);
    }
  }
};

// Hides the scores of columns that rows do not see.
__device__ __forceinline__ void hide(float* scores, const Visible* visible, int begin) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 columns = visible[i].columns(begin);
#pragma unroll
    for (int bit = 0; bit < COLUMNS / 4; bit++)
      if (!(columns >> bit & 1)) scores[bit / 2 * 4 + 2 * i + bit % 2] = NEG_INF;
  }
}

// Weights as A of matmuls, 16 columns each.
__device__ __forceinline__ void pack_weights(u32 (*a)[4], const float* weights) {
#pragma unroll
  for (int k = 0; k < COLUMNS / 16; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) a[k][i] = pack_pair(weights[8 * k + 2 * i], weights[8 * k + 2 * i + 1]);
}
