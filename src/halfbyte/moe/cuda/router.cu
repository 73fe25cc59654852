// The router of a mixture-of-experts layer for few tokens, in one launch from SM90: logits, softmax, and each token's
// experts with the largest probabilities.
//
//   logits[token, e] = gate_e x[token] + bias_e, rounded to the dtype of x
//
//   Clusters   A cluster has 8 tokens; its 8 CTAs share K. CTA i then adds up and ranks the logits of token i: the others
//              send it theirs (st.async), so that no CTA reads another's memory.
//   Operands   m16n8k16: A = 16 experts' rows of the gate, kept in registers, B = the 8 tokens. The order of k is free,
//              as long as both have the same: a lane has 8 successive k of every 32.
//   Overlap    Weights of the gate are loaded before the previous kernel has ended (programmatic dependent launch).
//   Sums       of a token are in order of k and do not depend on the other tokens.
//
// Macros:
//   X_BF16    see linear/w4a16/values.cuh
//   EXPERTS   up to 256
//   K         hidden size, a multiple of 8
//   SPLIT     warps that share the k of a CTA
//   TOP_K     up to 32

#include "kernels/runtime/sm90.cuh"
#include "linear/w4a16/matmul.cuh"

#define TILES ((EXPERTS + 15) / 16)
#define WARPS (TILES * SPLIT)
#define THREADS (32 * WARPS)
#define RANKS 8    // CTAs of a cluster, and its tokens
#define STEP_K 32
#define STEPS ((K + RANKS * SPLIT * STEP_K - 1) / (RANKS * SPLIT * STEP_K))  // of a warp
#define STEPS_AHEAD (STEPS < 8 ? STEPS : 8)                                  // whose weights registers hold
#define PARTS (RANKS * SPLIT)                                                // sums of a logit
#define IS_WHOLE (K == PARTS * STEPS * STEP_K)                               // whether all steps are within K
#define ROW_BYTES (TILES * 64)
#define OFF_KEYS (PARTS * ROW_BYTES)
#define OFF_BARRIER (OFF_KEYS + ROW_BYTES)
#define OF_LANE ((EXPERTS + 31) / 32)  // experts

struct Params {
  const u16* x;        // [m, K]
  const u16* gate;     // [EXPERTS, K]
  const u16* bias;     // [EXPERTS], or null
  const u8* padding;   // [m], bools: tokens that get no experts; or null
  float* weights;      // [m, TOP_K]
  int* ids;            // [m, TOP_K]
  int m;
  int renormalize;     // whether the weights of a token add up to 1
};

// 8 values at k of a row; zeros if there are none.
__device__ __forceinline__ uint4 load_values(const u16* row, int k) {
  return IS_WHOLE || k < K ? *(const uint4*)(row + k) : make_uint4(0, 0, 0, 0);
}

// A lane's part of a step: rows g and g + 8 of a tile of experts.
struct Weights {
  uint4 upper, lower;

  __device__ __forceinline__ void load(const u16* gate, int tile, int k) {
    const int first = tile * 16 + (threadIdx.x & 31) / 4;
    upper = lower = make_uint4(0, 0, 0, 0);
    if (EXPERTS % 16 == 0 || first < EXPERTS) upper = load_values(gate + (u64)first * K, k);
    if (EXPERTS % 16 == 0 || first + 8 < EXPERTS) lower = load_values(gate + (u64)(first + 8) * K, k);
  }

  __device__ __forceinline__ void multiply(float (*acc)[4], uint4 x) const {
    const u32 a[2][4] = {{upper.x, lower.x, upper.y, lower.y}, {upper.z, lower.z, upper.w, lower.w}};
    matmul(acc[0], a[0], x.x, x.y);
    matmul(acc[1], a[1], x.z, x.w);
  }
};

// Sends a warp's sums of 16 experts and 8 tokens to the CTAs of the tokens. `part`: number of the sums.
__device__ __forceinline__ void send_sums(const float* sums, int tile, int part, u32 shared) {
  const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
  // A lane has experts g and g + 8 of tokens 2 c and 2 c + 1. Lanes with the same c and successive g exchange them: then
  // this lane has four successive experts of one token.
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = __float_as_uint(sums[i]);
  transpose_words<4>(words);
  float own[4];
#pragma unroll
  for (int i = 0; i < 4; i++) own[i] = __uint_as_float(words[i]);
  const u32 rank = 2 * c + g % 2, expert = tile * 16 + g % 4 / 2 * 8 + g / 4 * 4;
  send_floats(own, map_to_rank(shared + part * ROW_BYTES + expert * 4, rank), map_to_rank(shared + OFF_BARRIER, rank));
}

// The logit of an expert from its sums.
__device__ __forceinline__ u32 logit_bits(const Params& p, u32 shared, int expert) {
  float sum = 0.0f;
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    sum += __uint_as_float(load_shared_word(shared + part * ROW_BYTES + expert * 4));
  if (p.bias) sum += lower_to_float(p.bias[expert]);
  return pack_pair(sum, 0.0f) & 0xFFFF;
}

// 32 bits whose order is that of logits of 16 bits, and descending that of experts: the largest is ranked first, and 0 is
// below all. Both zeros are equal; NaN comes before all numbers.
__device__ __forceinline__ u32 key_of(u32 bits, u32 expert) {
  if (bits == 0x8000) bits = 0;
  const u32 ordered = bits & 0x8000 ? ~bits & 0xFFFF : bits | 0x8000;
  return ordered << 16 | 0xFFFF - expert;
}
__device__ __forceinline__ u32 expert_of(u32 key) { return 0xFFFF - (key & 0xFFFF); }
__device__ __forceinline__ float logit_of(u32 key) {
  const u32 ordered = key >> 16;
  return lower_to_float(ordered & 0x8000 ? ordered & 0x7FFF : ~ordered & 0xFFFF);
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

// Ranks a token's experts. Called by one warp.
__device__ __forceinline__ void rank_experts(const Params& p, const u32* all_keys, int token) {
  const int lane = threadIdx.x & 31;
  u32 keys[OF_LANE];
#pragma unroll
  for (int i = 0; i < OF_LANE; i++) {
    const int expert = lane + 32 * i;
    keys[i] = expert < EXPERTS ? all_keys[expert] : 0;
  }
  u32 own = 0, largest = 0;  // of rank `lane`
  float others = 0.0f;       // sum of exponentials of experts that are not chosen
#pragma unroll 1
  for (int rank = 0; rank < TOP_K; rank++) {
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) best = max(best, keys[i]);
    best = __reduce_max_sync(~0u, best);
    if (rank == 0) largest = best;
    if (lane == rank) own = best;
#pragma unroll
    for (int i = 0; i < OF_LANE; i++)
      if (keys[i] == best) keys[i] = 0;
  }
  const float first = logit_of(largest);
  if (!p.renormalize) {
#pragma unroll
    for (int i = 0; i < OF_LANE; i++)
      if (keys[i]) others += ex2((logit_of(keys[i]) - first) * LOG2E);
  }
  const float mine = lane < TOP_K ? ex2((logit_of(own) - first) * LOG2E) : 0.0f;
  const float sum = sum_of_warp(mine + others);
  if (lane >= TOP_K) return;
  const bool is_padding = p.padding && p.padding[token];
  p.weights[token * TOP_K + lane] = is_padding ? 0.0f : mine / sum;
  p.ids[token * TOP_K + lane] = is_padding ? -1 : expert_of(own);
}

extern "C" __global__ void __cluster_dims__(RANKS, 1, 1) __launch_bounds__(THREADS)
    moe_route(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 memory[];
  const u32 shared = shared_address(memory), barrier = shared + OFF_BARRIER;
  u32* const keys = (u32*)(memory + OFF_KEYS);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int rank = cluster_rank(), tile = warp / SPLIT, part = rank * SPLIT + warp % SPLIT;
  const int begin = part * STEPS * STEP_K + lane % 4 * 8;
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    fence_barrier_init();
    barrier_expect(barrier, PARTS * ROW_BYTES);
  }
  __syncwarp();
  cluster_arrive_relaxed();
  Weights weights[STEPS_AHEAD];
#pragma unroll
  for (int i = 0; i < STEPS_AHEAD; i++) weights[i].load(p.gate, tile, begin + i * STEP_K);
  allow_next();  // it reads the results after its own wait
  cluster_wait();
  wait_for_previous();

  const int group = blockIdx.x / RANKS * RANKS;
  const u16* const x = p.x + (u64)min(group + lane / 4, p.m - 1) * K;
  uint4 values[STEPS_AHEAD];
#pragma unroll
  for (int i = 0; i < STEPS_AHEAD; i++) values[i] = load_values(x, begin + i * STEP_K);
  // Zeros that depend on all loads: otherwise ptxas asks for some values after matmuls that wait for the first.
  const u32 none = p.m >> 31;
  float acc[2][4] = {};
#pragma unroll
  for (int i = 0; i < STEPS_AHEAD; i++) acc[i / 4][i % 4] = __uint_as_float(values[STEPS_AHEAD - 1 - i].x & none);
#pragma unroll
  for (int i = 0; i < STEPS_AHEAD; i++) weights[i].multiply(acc, values[i]);
#pragma unroll 4
  for (int i = STEPS_AHEAD; i < STEPS; i++) {
    weights[0].load(p.gate, tile, begin + i * STEP_K);
    weights[0].multiply(acc, load_values(x, begin + i * STEP_K));
  }
#pragma unroll
  for (int i = 0; i < 4; i++) acc[0][i] += acc[1][i];
  send_sums(acc[0], tile, part, shared);

  // Not before all sums are there may a CTA exit.
  barrier_wait(barrier, 0);
  for (int expert = threadIdx.x; expert < EXPERTS; expert += THREADS)
    keys[expert] = key_of(logit_bits(p, shared, expert), expert);
  __syncthreads();
  if (warp == 0 && group + rank < p.m) rank_experts(p, keys, group + rank);
}
