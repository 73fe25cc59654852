// Batch-invariant products with unquantized weights: each value is accumulated over k in order. BLAS
// libraries choose the order of summation by the number of rows.

#include <algorithm>
#include <cstring>
#include <vector>

#include "api.h"
#include "attention/tiles.h"
#include "formats.h"
#include "threads.h"

namespace halfbyte {
namespace {

constexpr int kColumns = 64;           // columns of y per item
constexpr int kDepth = 256;            // k of a panel, which stays in L2
constexpr int64_t kMinWork = 1 << 17;  // min multiplications for a second thread

// The same fields as `_CALL` in linear/invariant/cpu.py. Strides are in elements; w's stride along n or
// along k is 1.
struct DenseCall {
  const float* x;    // [rows, k]
  const uint8_t* w;  // [n, k], of a format
  float* out;        // [rows, n], rows padded to a multiple of kColumns
  int64_t rows, n, k, x_stride, n_stride, k_stride, out_stride;
  int32_t format, threads;
};

// panel[k][kColumns] = w[first + column][from + k]; columns past n are 0.
void fill(const DenseCall& call, int64_t first, int64_t from, int depth, float* panel) {
  const int64_t bytes = data_bytes(call.format, 1);
  const int count = (int)std::min<int64_t>(kColumns, call.n - first);
  if (count < kColumns) std::memset(panel, 0, sizeof(float) * kColumns * depth);
  const uint8_t* w = call.w + (first * call.n_stride + from * call.k_stride) * bytes;
  if (call.k_stride != 1) {
    for (int k = 0; k < depth; k++)
      kernels().unpack(call.format, w + k * call.k_stride * bytes, nullptr, count,
                       panel + k * kColumns);
    return;
  }
  alignas(64) float rows[kPad * kDepth];
  for (int n = 0; n < count; n += kPad) {
    for (int r = 0; r < kPad; r++) {
      if (n + r < count)
        kernels().unpack(call.format, w + (n + r) * call.n_stride * bytes, nullptr, depth,
                         rows + r * kDepth);
      else
        std::memset(rows + r * kDepth, 0, sizeof(float) * kDepth);
    }
    kernels().transpose(rows, kDepth, depth, panel + n, kColumns);
  }
}

void run_item(void* context, int index) {
  const DenseCall& call = *(const DenseCall*)context;
  alignas(64) float panel[kColumns * kDepth];
  const int64_t first = (int64_t)index * kColumns;
  for (int64_t from = 0; from < call.k; from += kDepth) {
    const int depth = (int)std::min<int64_t>(kDepth, call.k - from);
    fill(call, first, from, depth, panel);
    kernels().multiply(call.x + from, call.x_stride, (int)call.rows, panel, kColumns, depth,
                       call.out + first, call.out_stride, kColumns, from == 0);
  }
}

}  // namespace
}  // namespace halfbyte

// out = x . w^T in float32. k is at least 1.
HALFBYTE_API void halfbyte_dense(const void* call) {
  using namespace halfbyte;
  const DenseCall& c = *(const DenseCall*)call;
  const int threads = c.rows * c.n * c.k < kMinWork ? 1 : std::max(1, c.threads);
  parallel_for((int)((c.n + kColumns - 1) / kColumns), threads, run_item, (void*)call);
}
