// Products with NVFP4 weights, split into work items.

#include "linear/linear.h"

#include <algorithm>
#include <vector>

#include "api.h"
#include "convert.h"
#include "level.h"
#include "threads.h"
#include "attention/tiles.h"

namespace halfbyte {
namespace {

constexpr int64_t kBatchRows = 768;         // tokens packed together
constexpr int64_t kBlockBytes = 768 << 10;  // of packed x that items share: most of L2
constexpr int64_t kMinBlockRows = 48;       // min tokens of an item, which unpacks its weights once
constexpr int kTransposedStrips = 16;           // dequantized together: writes whole cache lines
constexpr int kTransposedChunks = 8;            // the same: reads whole 4 KiB pages of codes
constexpr int64_t kMinWork = 1 << 17;       // min multiplications for a second thread
constexpr size_t kKeptFloats = 4 << 20;     // max floats of packed x that a thread keeps

int64_t ceil_div(int64_t size, int64_t of) { return (size + of - 1) / of; }

const LinearKernels& linear_kernels(int format) {
#if HALFBYTE_X86
  switch (current_level()) {
    case kAvx512Bf16:
      return format == kBFloat16 ? kLinearAvx512Bf16 : kLinearAvx512;
    case kAvx512Vnni:
    case kAvx512:
      return kLinearAvx512;
    case kAvx2:
      return kLinearAvx2;
    default:
      break;
  }
#endif
  return kLinearPortable;
}

struct Batch {
  const LinearCall& call;
  const LinearKernels& kernels;
  int64_t first_row, rows;  // tokens
  int64_t strips, chunks;
  bool unpacked;
  int tile_rows, block_rows, item_strips;  // a block has several tiles
  float* packed;

  int64_t row_floats() const { return chunks * kBlocks * kernels.units; }
};

void pack_tile(void* context, int tile) {
  const Batch& batch = *(const Batch*)context;
  const LinearCall& call = batch.call;
  const int64_t row = (int64_t)tile * batch.tile_rows;
  const int64_t stride = call.x_stride * data_bytes(call.format, 1);
  batch.kernels.pack(call.format, call.x + (batch.first_row + row) * stride, stride,
                     (int)std::min<int64_t>(batch.tile_rows, batch.rows - row), call.k,
                     batch.packed + row * batch.row_floats());
}

// Tokens of an item.
struct Block {
  int64_t begin, end;
};

// Applies scales and bias of a strip's rows to totals, and writes y.
void finish(const Batch& batch, int64_t strip, int64_t row, int rows, const float* totals) {
  const LinearCall& call = batch.call;
  const int64_t n = strip * kStrip;
  const int count = (int)std::min<int64_t>(kStrip, call.n - n);
  float scales[kStrip] = {}, bias[kStrip + kPad] = {};
  for (int i = 0; i < count; i++) scales[i] = call.row_scales[n + i] * batch.kernels.factor;
  if (call.bias)
    kernels().unpack(call.bias_format, call.bias + n * data_bytes(call.bias_format, 1), nullptr,
                     count, bias);
  for (int r = 0; r < rows; r++) {
    const int64_t at = (batch.first_row + row + r) * call.out_stride + n;
    batch.kernels.finish(call.format, totals + r * kStrip, scales, bias, count,
                         call.out + at * data_bytes(call.format, 1));
  }
}

void run_packed(const Batch& batch, int64_t strip, const Block& block) {
  alignas(64) float totals[kMaxTile * kStrip];
  const int64_t chunk = strip * batch.chunks;
  for (int64_t row = block.begin; row < block.end; row += batch.tile_rows) {
    const int rows = (int)std::min<int64_t>(batch.tile_rows, block.end - row);
    batch.kernels.multiply_packed(batch.call.codes + chunk * kCodeBytes,
                                  batch.call.scales + chunk * kScaleBytes, batch.chunks,
                                  batch.packed + row * batch.row_floats(), rows, totals);
    finish(batch, strip, row, rows, totals);
  }
}

void run_unpacked(const Batch& batch, int64_t strip, const Block& block) {
  const LinearKernels& k = batch.kernels;
  thread_local std::vector<float> totals;
  totals.resize((size_t)(block.end - block.begin) * kStrip);
  alignas(64) float panel[kPanelChunks * kBlocks * 16 * kStrip], scales[kPanelChunks * kScaleBytes];
  for (int64_t c = 0; c < batch.chunks; c += kPanelChunks) {
    const int64_t chunk = strip * batch.chunks + c;
    const int64_t chunks = std::min<int64_t>(kPanelChunks, batch.chunks - c);
    k.unpack(batch.call.codes + chunk * kCodeBytes, batch.call.scales + chunk * kScaleBytes, chunks,
             panel, scales);
    for (int64_t row = block.begin; row < block.end; row += batch.tile_rows) {
      const int rows = (int)std::min<int64_t>(batch.tile_rows, block.end - row);
      k.multiply_unpacked(panel, scales, chunks,
                          batch.packed + row * batch.row_floats() + c * kBlocks * k.units * rows,
                          rows, totals.data() + (row - block.begin) * kStrip, c == 0);
    }
  }
  finish(batch, strip, block.begin, (int)(block.end - block.begin), totals.data());
}

void run_item(void* context, int index) {
  const Batch& batch = *(const Batch*)context;
  const int64_t groups = ceil_div(batch.strips, batch.item_strips);
  const int64_t first = index % groups * batch.item_strips;
  const int64_t last = std::min(batch.strips, first + batch.item_strips);
  const int64_t begin = index / groups * batch.block_rows;
  const Block block = {begin, std::min(batch.rows, begin + batch.block_rows)};
  for (int64_t strip = first; strip < last; strip++)
    (batch.unpacked ? run_unpacked : run_packed)(batch, strip, block);
}

// Chooses tiles, blocks of tokens and groups of strips so that each thread gets several items. Does
// not affect the bits of the result.
void cut(Batch& batch, int threads) {
  const LinearKernels& k = batch.kernels;
  batch.unpacked = k.unpacked_rows > 0 && batch.rows > k.packed_rows;
  const int64_t most = batch.unpacked ? k.unpacked_rows : k.packed_rows;
  const int64_t tiles = ceil_div(batch.rows, most);
  batch.tile_rows = (int)ceil_div(batch.rows, tiles);
  const int64_t fitting = kBlockBytes / (batch.row_floats() * (int64_t)sizeof(float));
  const int64_t block_tiles = std::max(kMinBlockRows, fitting) / batch.tile_rows;
  batch.block_rows = (int)(std::max<int64_t>(1, block_tiles) * batch.tile_rows);
  batch.item_strips = (int)std::clamp<int64_t>(batch.strips / (8 * threads), 1, 4);
}

void multiply(const LinearCall& call, int64_t first_row, int64_t rows, std::vector<float>& packed) {
  const int64_t strips = ceil_div(call.n, kStrip), chunks = ceil_div(call.k, kChunk);
  Batch batch{call,   linear_kernels(call.format), first_row, rows, strips, chunks, false, 0, 0, 0,
              nullptr};
  const int threads = rows * call.n * call.k < kMinWork ? 1 : std::max(1, call.threads);
  cut(batch, threads);
  packed.resize((size_t)(rows * batch.row_floats()));
  batch.packed = packed.data();
  const int tiles = (int)ceil_div(rows, batch.tile_rows);
  parallel_for(tiles, tiles < 4 ? 1 : threads, pack_tile, &batch);
  const int64_t groups = ceil_div(strips, batch.item_strips);
  const int64_t blocks = ceil_div(rows, batch.block_rows);
  parallel_for((int)(groups * blocks), threads, run_item, &batch);
}

// Dequantizes kTransposedChunks chunks of kTransposedStrips strips to `out`, transposed. Rows of `out` may
// be a page apart, so a chunk is written for all strips before the next chunk.
void dequantize_strips(void* context, int index) {
  const LinearCall& call = *(const LinearCall*)context;
  const LinearKernels& k = linear_kernels(kFloat32);
  const int64_t chunks = ceil_div(call.k, kChunk), groups = ceil_div(chunks, kTransposedChunks);
  const int64_t from = index / groups * kTransposedStrips * kStrip;
  const int64_t first = index % groups * kTransposedChunks;
  const int64_t last = std::min(chunks, first + kTransposedChunks);
  const int64_t element = data_bytes(call.format, 1), stride = call.out_stride * element;
  float row_scales[kTransposedStrips][kStrip] = {};
  for (int64_t i = 0; i < kTransposedStrips * kStrip && from + i < call.n; i++)
    row_scales[i / kStrip][i % kStrip] = call.row_scales[from + i] * k.factor;
  for (int64_t c = first; c < last; c++)
    for (int s = 0; s < kTransposedStrips && from + s * kStrip < call.n; s++) {
      const int64_t n = from + s * kStrip, chunk = n / kStrip * chunks + c;
      k.dequantize(call.codes + chunk * kCodeBytes, call.scales + chunk * kScaleBytes,
                   (int)std::min<int64_t>(kChunk, call.k - c * kChunk), row_scales[s],
                   (int)std::min<int64_t>(kStrip, call.n - n), call.format,
                   call.out + c * kChunk * stride + n * element, stride);
    }
}

}  // namespace
}  // namespace halfbyte

HALFBYTE_API void halfbyte_linear(const void* call) {
  using namespace halfbyte;
  thread_local std::vector<float> packed;
  const LinearCall& c = *(const LinearCall*)call;
  for (int64_t row = 0; row < c.rows; row += kBatchRows)
    multiply(c, row, std::min(kBatchRows, c.rows - row), packed);
  if (packed.size() > kKeptFloats) std::vector<float>().swap(packed);
}

// Dequantizes the weights of a call, transposed: `out` [k, n], in its format. x is not read.
HALFBYTE_API void halfbyte_linear_dequantize(const void* call) {
  using namespace halfbyte;
  const LinearCall& c = *(const LinearCall*)call;
  const int64_t groups = ceil_div(ceil_div(c.k, kChunk), kTransposedChunks);
  parallel_for((int)(groups * ceil_div(c.n, kTransposedStrips * kStrip)), c.threads, dequantize_strips,
               (void*)call);
}

// Whether the products above use vectors of more than four floats.
HALFBYTE_API int halfbyte_linear_has_wide_vectors() {
  return halfbyte::current_level() > halfbyte::kPortable;
}
