// out = silu(gate) * up, in float32 and rounded once; gate and up are the halves of a row of x. A thread has eight values.
//
// Macros: X_BF16; SIZE of a row of out, a multiple of 8.

#include "elementwise/silu.cuh"
#include "elementwise/values.cuh"

#define CHUNKS (SIZE / 8)

struct Params {
  const uint4* x;
  uint4* out;
  u64 x_stride;  // of a row, in chunks
  u64 chunks;    // of out
};

extern "C" __global__ void __launch_bounds__(128) silu_and_mul(const __grid_constant__ Params p) {
  allow_next();  // before waiting: see basics.cuh
  wait_for_previous();
  const u64 i = (u64)blockIdx.x * 128 + threadIdx.x;
  if (i >= p.chunks) return;
  const uint4* row = p.x + i / CHUNKS * p.x_stride + i % CHUNKS;
  float gate[8], up[8];
  widen8(gate, row[0]), widen8(up, row[CHUNKS]);
#pragma unroll
  for (int j = 0; j < 8; j++) gate[j] = silu_and_multiply(gate[j], up[j]);
  p.out[i] = narrow8(gate);
}
