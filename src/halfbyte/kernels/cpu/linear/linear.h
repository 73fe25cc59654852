// Products with NVFP4 weights: y = x . W^T, W = (E2M1 codes x E4M3 block scales) x a float per row.
//
// The order of the weights: strips of 16 rows, cut into chunks of 64 columns. A chunk holds eight
// groups of 16 words, one word per row, each word being the eight codes of eight columns as they
// lay before; and, apart, 4 x 16 scales, one per row of each block of 16 columns. A vector thus
// holds rows, and a block scale multiplies sums of its sixteen products:
//
//     total += (sum over the block's 16 columns of code * x) * scale
//
// Every column of y is summed in this order, block after block, whatever is computed beside it: no
// bit depends on the number of rows of x, on threads, or on the loops in use. Scales come last, so
// that |x| beyond 3e36 overflows whatever they are.
#pragma once

#include <cstdint>

#include "formats.h"

namespace halfbyte {

constexpr int kStrip = 16;                       // rows of weights in a vector
constexpr int kChunk = 64;                       // columns
constexpr int kBlocks = kChunk / 16;             // of a chunk
constexpr int kCodeBytes = kStrip * kChunk / 2;  // of a chunk
constexpr int kScaleBytes = kStrip * kBlocks;    // of a chunk
constexpr int kPanelChunks = 4;                  // unpacked at once
constexpr int kMaxTile = 16;                     // rows of x

// Field by field the `_CALL` of linear/w4a16/cpu.py. Strides are in elements.
struct LinearCall {
  const uint8_t* x;         // [rows, k]
  const uint8_t* codes;     // [strips, chunks, kCodeBytes]
  const uint8_t* scales;    // [strips, chunks, kScaleBytes]
  const float* row_scales;  // [n]
  const uint8_t* bias;      // [n] or null
  uint8_t* out;             // [rows, n], of the format of x
  int64_t x_stride, out_stride, rows, n, k;
  int32_t format, bias_format, threads, unused;
};

// What is asked of an instruction set. Rows of x are packed in tiles: for each unit, the smallest
// number of columns that is multiplied at once (a float, or two bfloat16), 32 bits of every row.
struct LinearKernels {
  float factor;       // totals are this many times too small
  int units;          // of a block
  int packed_rows;    // of a tile, at most
  int unpacked_rows;  // the same for unpacked codes
  // Packs `rows` rows of x of a format, `stride` bytes apart, as a tile; columns past k are 0.
  void (*pack)(int format, const uint8_t* x, int64_t stride, int rows, int64_t k, float* tile);
  // totals[row of x][kStrip] = a strip . a tile.
  void (*multiply_packed)(const uint8_t* codes, const uint8_t* scales, int64_t chunks,
                          const float* tile, int rows, float* totals);
  // Some chunks of a strip as floats, [block][unit][kStrip] and [block][kStrip].
  void (*unpack)(const uint8_t* codes, const uint8_t* scales, int64_t chunks, float* panel,
                 float* panel_scales);
  // totals += these . a tile; = where `fresh`. The bits are those of multiply_packed.
  void (*multiply_unpacked)(const float* panel, const float* panel_scales, int64_t chunks,
                            const float* tile, int rows, float* totals, bool fresh);
  // out[i] = totals[i] * scales[i] + bias[i] for i < count; kStrip of each are read.
  void (*finish)(int format, const float* totals, const float* scales, const float* bias, int count,
                 uint8_t* out);
  // Columns of a chunk as rows of `count` values of a format, `stride` bytes apart. As the oracle:
  // code * scale is exact, then there is one rounding, and that to the format. Null where a unit is
  // not a column.
  void (*dequantize)(const uint8_t* codes, const uint8_t* scales, int columns,
                     const float* row_scales, int count, int format, uint8_t* out, int64_t stride);
};

extern const LinearKernels kLinearPortable;
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
extern const LinearKernels kLinearAvx2, kLinearAvx512, kLinearAvx512Bf16;
#endif

}  // namespace halfbyte
