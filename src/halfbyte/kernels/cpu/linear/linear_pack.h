// Packs tokens to tiles of floats.
#pragma once

#include <algorithm>
#include <vector>

#include "linear/linear.h"
#include "attention/tiles.h"

namespace halfbyte {

// See LinearKernels::pack; a unit is a column.
inline void pack_floats(int format, const uint8_t* x, int64_t stride, int rows, int64_t k,
                        float* tile) {
  thread_local std::vector<float> row;
  const int64_t columns = (k + kChunk - 1) / kChunk * kChunk;
  row.resize((size_t)columns);
  for (int r = 0; r < rows; r++, x += stride) {
    kernels().unpack(format, x, nullptr, (int)k, row.data());
    std::fill(row.begin() + k, row.end(), 0.0f);
    for (int64_t i = 0; i < columns; i++) tile[i * rows + r] = row[i];
  }
}

}  // namespace halfbyte
