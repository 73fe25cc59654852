// sum = x + residual, out = sum / sqrt(mean(sum^2) + epsilon) * weight, per row; a CTA has a row. All in float32, each
// result rounded once.
//
// Macros: X_BF16; SIZE of a row, a multiple of 8; THREADS of a CTA; ADDS 0 for no residual.

#include "elementwise/values.cuh"

#define CHUNKS (SIZE / 8)  // of eight values
#define PER_THREAD ((CHUNKS + THREADS - 1) / THREADS)

struct Params {
  const uint4 *x, *residual, *weight;
  uint4 *out, *sum;
  u64 x_stride, residual_stride;  // of a row, in chunks
  float epsilon;
};

extern "C" __global__ void __launch_bounds__(THREADS) add_rms_norm(const __grid_constant__ Params p) {
  __shared__ float sums[THREADS / 32];
  const u32 row = blockIdx.x, warp = threadIdx.x / 32;
  const uint4* residual = p.residual + row * p.residual_stride;
  // A line of 128 bytes for each of the first threads.
  for (u32 i = threadIdx.x * 8; i < CHUNKS; i += THREADS * 8) {
    prefetch_l2(p.weight + i);
    if (ADDS) prefetch_l2(residual + i);
  }
  allow_next();  // before waiting: see basics.cuh
  wait_for_previous();
  float y[PER_THREAD][8], squares = 0.0f;
  uint4 weight[PER_THREAD];
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const u32 chunk = threadIdx.x + i * THREADS;
    if (chunk >= CHUNKS) break;
    widen8(y[i], p.x[row * p.x_stride + chunk]);
    weight[i] = p.weight[chunk];
    if (ADDS) {
      float z[8];
      widen8(z, residual[chunk]);
#pragma unroll
      for (int j = 0; j < 8; j++) y[i][j] = __fadd_rn(y[i][j], z[j]);
      p.sum[(u64)row * CHUNKS + chunk] = narrow8(y[i]);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) squares = __fmaf_rn(y[i][j], y[i][j], squares);
  }
  for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
  if (threadIdx.x % 32 == 0) sums[warp] = squares;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) total += sums[i];
  const float factor = __frcp_rn(__fsqrt_rn(total * (1.0f / SIZE) + p.epsilon));
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const u32 chunk = threadIdx.x + i * THREADS;
    if (chunk >= CHUNKS) break;
    float w[8];
    widen8(w, weight[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) y[i][j] = __fmul_rn(__fmul_rn(y[i][j], factor), w[j]);
    p.out[(u64)row * CHUNKS + chunk] = narrow8(y[i]);
  }
}
