// Products with NVFP4 weights: y = x . W^T, W = (E2M1 codes x E4M3 block scales) x a float per row.
//
// Layout of the weights: strips of 16 rows, split into chunks of 64 columns. A chunk has eight
// groups of 16 words, one word per row, with the codes of eight columns in their original order;
// and, stored separately, 4 x 16 scales, one per row and block of 16 columns. So a vector holds 16
// rows, and a block scale multiplies the sum of its sixteen products:
//
//     total += (sum over the block's 16 columns of code * x) * scale
//
// Every column of y is summed in this order, block after block: its bits do not depend on the number
// of tokens, on threads, or on the loops in use. Scales are applied last, so |x| above 3e36
// overflows even if a scale is small.
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
constexpr int kMaxTile = 16;                     // tokens

// The same fields as `_CALL` in linear/w4a16/cpu.py. Strides are in elements.
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

// Implemented by each instruction set. A unit is the columns of x that one multiply-add takes, 32 bits:
// one float, or two bfloat16. A tile of packed tokens has, unit after unit, those 32 bits of each token.
struct LinearKernels {
  float factor;       // totals must be multiplied by this
  int units;          // per block
  int packed_rows;    // max tokens of a tile
  int unpacked_rows;  // the same with unpacked codes
  // Packs `rows` tokens of a format, `stride` bytes apart, as a tile; columns past k are 0.
  void (*pack)(int format, const uint8_t* x, int64_t stride, int rows, int64_t k, float* tile);
  // totals[token][kStrip] = a strip . a tile.
  void (*multiply_packed)(const uint8_t* codes, const uint8_t* scales, int64_t chunks,
                          const float* tile, int rows, float* totals);
  // Some chunks of a strip as floats, [block][unit][kStrip] and [block][kStrip].
  void (*unpack)(const uint8_t* codes, const uint8_t* scales, int64_t chunks, float* panel,
                 float* panel_scales);
  // totals += these . a tile; = if `fresh`. Bitwise equal to multiply_packed.
  void (*multiply_unpacked)(const float* panel, const float* panel_scales, int64_t chunks,
                            const float* tile, int rows, float* totals, bool fresh);
  // out[i] = totals[i] * scales[i] + bias[i] for i < count; kStrip of each are read.
  void (*finish)(int format, const float* totals, const float* scales, const float* bias, int count,
                 uint8_t* out);
  // Dequantizes a chunk, transposed: each column as `count` values of a format, `stride` bytes apart.
  // As in the oracle, code * scale is exact and the result is rounded once. Null where a unit is not
  // a column.
  void (*dequantize)(const uint8_t* codes, const uint8_t* scales, int columns,
                     const float* row_scales, int count, int format, uint8_t* out, int64_t stride);
};

extern const LinearKernels kLinearPortable;
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
extern const LinearKernels kLinearAvx2, kLinearAvx512, kLinearAvx512Bf16;
#endif

}  // namespace halfbyte
