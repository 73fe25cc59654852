// Merges the partial results of each row (query token and head) that several units worked on, adds the
// sink, writes output and LSE. Rows of a single unit are written already; rows without keys get 0.
//
// Macros: HEAD_SIZE_V, KV_HEADS, GROUP, COLS (columns per work item), Q_BF16 or Q_FP16.

#include "attention/decode/output.cuh"

struct MergeParams {
  const float* partial_out;   // [rows, KV_HEADS, COLS, HEAD_SIZE_V], each divided by its own sum
  const float2* partial_ml;   // [rows, KV_HEADS, COLS]: (max in base 2, sum)
  PlanView plan;
  Output output;
  int num_tokens;
};

// The partial results of one (token, head): `count` rows from `slot` on.
struct Parts {
  u64 slot;
  int count;

  __device__ __forceinline__ bool is_single() const { return count == 1; }
};

constexpr u64 PART_STRIDE = KV_HEADS * COLS;

__device__ __forceinline__ Parts find_parts(const PlanView& plan, int token, int q_head) {
  const PlanHeader header = plan.header();
  const TokenItems items = plan.items_of(token);
  const int column = (token - items.q_begin) * GROUP + q_head % GROUP, col_tile = column / COLS;
  const int begin = items.begin + col_tile * items.cost + header.lead();
  const int unit = begin / header.span, index = items.first + col_tile;
  const int count = items.num_tiles > 0 ? (begin + items.num_tiles - 1) / header.span - unit + 1 : 0;
  return {(u64)(unit + index) * PART_STRIDE + q_head / GROUP * COLS + column % COLS, count};
}

__device__ __forceinline__ void add(float4& acc, float weight, float4 x) {
  acc.x += weight * x.x;
  acc.y += weight * x.y;
  acc.z += weight * x.z;
  acc.w += weight * x.w;
}

__device__ __forceinline__ void finish(const MergeParams& p, OutputRow row, int dim, float4 acc,
                                       float m, float total, float sink) {
  const float factor = row.finish(p.output, sink, m, total, dim == 0);
  *(uint2*)(row.values(p.output) + dim) = make_uint2(pack_output(acc.x * factor, acc.y * factor),
                                                     pack_output(acc.z * factor, acc.w * factor));
}

// DIMS / 4 lanes have DIMS dims of a row. All loads for BATCH parts are issued at once.
#define DIMS (HEAD_SIZE_V % 128 == 0 ? 128 : 64)
template <int BATCH>
__device__ __forceinline__ void merge_slice(const MergeParams& p) {
  constexpr int HEADS = KV_HEADS * GROUP, SLICES = HEAD_SIZE_V / DIMS, LANES = DIMS / 4;
  const int index = (blockIdx.x * 128 + threadIdx.x) / LANES;
  const int row = index / SLICES, token = row / HEADS, q_head = row % HEADS;
  if (token >= p.num_tokens) return;
  const int dim = index % SLICES * DIMS + threadIdx.x % LANES * 4;
  const Parts parts = find_parts(p.plan, token, q_head);
  // CTA 0 never returns here: it waits for the decode kernel, so that this kernel cannot end before that one.
  if (parts.is_single() && blockIdx.x > 0) return;
  const float2* ml = p.partial_ml + parts.slot;
  const float* source = p.partial_out + parts.slot * HEAD_SIZE_V + dim;
  const OutputRow to(token, q_head);
  const float sink = to.sink(p.output);
  allow_next();  // before waiting: see basics.cuh
  wait_for_previous();
  if (parts.is_single()) return;
  float m = NEG_INF, total = 0.0f;
  float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int base = 0; base < parts.count; base += BATCH) {
    float2 x[BATCH];
    float4 y[BATCH];
    float top = m;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      x[i] = make_float2(NEG_INF, 0.0f);
      if (base + i < parts.count) {
        x[i] = ml[(base + i) * PART_STRIDE];
        y[i] = *(const float4*)(source + (base + i) * PART_STRIDE * HEAD_SIZE_V);
      }
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) top = fmaxf(top, x[i].x);
    if (top == NEG_INF) continue;
    const float factor = ex2(m - top);
    m = top;
    total *= factor;
    acc.x *= factor, acc.y *= factor, acc.z *= factor, acc.w *= factor;
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (x[i].x != NEG_INF) {
        const float weight = x[i].y * ex2(x[i].x - m);
        total += weight;
        add(acc, weight, y[i]);
      }
  }
  finish(p, to, dim, acc, m, total, sink);
}

extern "C" __global__ void __launch_bounds__(128) merge_8(MergeParams p) { merge_slice<8>(p); }

// Takes four times the registers: for grids whose CTAs are all resident at once.
extern "C" __global__ void __launch_bounds__(128) merge_32(MergeParams p) { merge_slice<32>(p); }

// For rows with many parts: a CTA has 32 dims of a row and merges THREADS parts per round, in eight steps. AHEAD: a
// round's loads are issued in the round before. Chosen where rows may have a few parts more than fit in one.
#define STEPS 8
template <int THREADS, bool AHEAD = false>
__device__ __forceinline__ void merge_row(const MergeParams& p) {
  constexpr int HEADS = KV_HEADS * GROUP, SLICES = HEAD_SIZE_V / 32, LANES = 8;
  constexpr int PER_STEP = THREADS / LANES;
  __shared__ float weights[THREADS];
  __shared__ float2 warp_values[THREADS / 32];
  __shared__ float4 joined[THREADS / 32][LANES];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int row = blockIdx.x / SLICES, token = row / HEADS, q_head = row % HEADS;
  const int dim = blockIdx.x % SLICES * 32 + lane % LANES * 4;
  const Parts parts = find_parts(p.plan, token, q_head);
  // CTA 0 never returns here: it waits for the decode kernel, so that this kernel cannot end before that one.
  if (parts.is_single() && blockIdx.x > 0) return;
  const float2* ml = p.partial_ml + parts.slot;
  const float* source = p.partial_out + parts.slot * HEAD_SIZE_V + dim;
  const OutputRow to(token, q_head);
  const float sink = to.sink(p.output);
  allow_next();  // before waiting: see basics.cuh
  wait_for_previous();
  if (parts.is_single()) return;
  float m = NEG_INF, total = 0.0f;
  float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float2 x, next_x;
  float4 y[STEPS], next_y[STEPS];
  auto load = [&](float2& x, float4* y, int base) {
    x = make_float2(NEG_INF, 0.0f);
    if (base + threadIdx.x < parts.count) x = ml[(base + threadIdx.x) * PART_STRIDE];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const int part = base + i * PER_STEP + threadIdx.x / LANES;
      y[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (part < parts.count) y[i] = *(const float4*)(source + part * PART_STRIDE * HEAD_SIZE_V);
    }
  };
  if (AHEAD) load(next_x, next_y, 0);
  for (int base = 0; base < parts.count; base += THREADS) {
    if (AHEAD) {
      x = next_x;
#pragma unroll
      for (int i = 0; i < STEPS; i++) y[i] = next_y[i];
      load(next_x, next_y, base + THREADS);
    } else {
      load(x, y, base);
    }
    float top = x.x;
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    __syncthreads();
    if (lane == 0) warp_values[warp].x = top;
    __syncthreads();
    top = m;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) top = fmaxf(top, warp_values[w].x);
    const float weight = x.x == NEG_INF ? 0.0f : x.y * ex2(x.x - top);
    weights[threadIdx.x] = weight;
    float sum = weight;
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    if (lane == 0) warp_values[warp].y = sum;
    __syncthreads();
    const float factor = top == NEG_INF ? 1.0f : ex2(m - top);
    m = top;
    total *= factor;
    acc.x *= factor, acc.y *= factor, acc.z *= factor, acc.w *= factor;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) total += warp_values[w].y;
#pragma unroll
    for (int i = 0; i < STEPS; i++) add(acc, weights[i * PER_STEP + threadIdx.x / LANES], y[i]);
  }
#pragma unroll
  for (int o = LANES; o < 32; o <<= 1) {
    acc.x += __shfl_xor_sync(~0u, acc.x, o);
    acc.y += __shfl_xor_sync(~0u, acc.y, o);
    acc.z += __shfl_xor_sync(~0u, acc.z, o);
    acc.w += __shfl_xor_sync(~0u, acc.w, o);
  }
  if (lane < LANES) joined[warp][lane] = acc;
  __syncthreads();
  if (threadIdx.x >= LANES) return;
  for (int w = 1; w < THREADS / 32; w++) add(acc, 1.0f, joined[w][lane]);
  finish(p, to, dim, acc, m, total, sink);
}

extern "C" __global__ void __launch_bounds__(128) merge_128(MergeParams p) { merge_row<128>(p); }

extern "C" __global__ void __launch_bounds__(128) merge_128_ahead(MergeParams p) { merge_row<128, true>(p); }

extern "C" __global__ void __launch_bounds__(512) merge_512(MergeParams p) { merge_row<512>(p); }
