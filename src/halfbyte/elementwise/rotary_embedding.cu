// Rotary position embedding of q and k in one launch, optionally with RMSNorm of each head first: pairs (a, b) become
// (a cos - b sin, b cos + a sin), in float32 and rounded once. A thread has four pairs of a head, or eight of the
// channels that keep their direction.
//
// Macros: X_BF16; HEADS, KV_HEADS, HEAD_SIZE; ROTARY channels, a multiple of 8, are rotated; INTERLEAVED 1 if pairs are
// neighbours, 0 if pair i is channels i and i + ROTARY / 2; NORMS 1 for x / sqrt(mean(x^2) + epsilon) * weight of each
// head before; LANES that share a head: HEAD_SIZE / 8, with NORMS the next power of two up to 32.

#include "elementwise/values.cuh"

#define PAIRS (ROTARY / 2)
#define ITEMS (HEAD_SIZE / 8)  // of a head
#define ALL_HEADS (HEADS + KV_HEADS)

struct Params {
  const u16 *query, *key;  // [tokens, heads * HEAD_SIZE]
  u16 *query_out, *key_out;
  const u16 *query_weight, *key_weight;  // of the norms, [HEAD_SIZE]
  const i64* positions;
  const u16* table;  // [max_position, ROTARY]: cosines, then sines
  u64 query_stride, key_stride;  // of a token, in values
  u32 tokens, max_position;
  float epsilon;
};

__device__ __forceinline__ u32 known(const Params& p, i64 position) {
  return (u32)min(max(position, (i64)0), (i64)p.max_position - 1);
}

// Where an item's eight values are in a head: two groups of four.
struct Item {
  u32 first, second;
  bool is_split;  // otherwise the groups are neighbours

  __device__ __forceinline__ Item(u32 item, bool rotates) : is_split(rotates && !INTERLEAVED) {
    first = (is_split ? 4 : 8) * item;
    second = first + (is_split ? PAIRS : 4);
  }
  __device__ __forceinline__ void load(float* x, const u16* from) const {
    if (!is_split) return widen8(x, *(const uint4*)(from + first));
    widen4(x, *(const uint2*)(from + first)), widen4(x + 4, *(const uint2*)(from + second));
  }
  __device__ __forceinline__ void store(u16* to, const float* x) const {
    if (!is_split) {
      *(uint4*)(to + first) = narrow8(x);
      return;
    }
    *(uint2*)(to + first) = narrow4(x);
    *(uint2*)(to + second) = narrow4(x + 4);
  }
};

// A thread's angles.
struct Angles {
  uint2 cosines, sines;
  u32 position;

  __device__ __forceinline__ void load(const Params& p, u32 at, u32 lane) {
    const u16* row = p.table + (u64)at * ROTARY + 4 * lane;
    cosines = *(const uint2*)row, sines = *(const uint2*)(row + PAIRS);
    position = at;
  }
};

// One pair; its second channel is `DISTANCE` values behind the first.
template <int DISTANCE>
__device__ __forceinline__ void rotate(float* x, float cosine, float sine) {
  const float a = x[0], b = x[DISTANCE];
  x[0] = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
  x[DISTANCE] = __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine));
}

extern "C" __global__ void __launch_bounds__(128) rotary_embedding(const __grid_constant__ Params p) {
  const u32 index = blockIdx.x * 128 + threadIdx.x, lane = index % LANES, head = index / LANES % ALL_HEADS;
  const u32 token = index / (LANES * ALL_HEADS);
  const bool exists = token < p.tokens && lane < ITEMS, rotates = lane < PAIRS / 4;
  const bool is_query = head < HEADS;
  const u32 own = is_query ? head : head - HEADS;
  const Item item(lane, rotates);
  // A position may be outdated here; then the angles are loaded again.
  Angles angles;
  if (exists && rotates) angles.load(p, known(p, load_early(p.positions + token)), lane);
#if NORMS
  float weight[8];
  if (exists) item.load(weight, is_query ? p.query_weight : p.key_weight);
#endif
  allow_next();  // before waiting: see basics.cuh
  wait_for_previous();
  float x[8] = {};
  if (exists) {
    item.load(x, (is_query ? p.query + token * p.query_stride : p.key + token * p.key_stride) + own * HEAD_SIZE);
    if (rotates) {
      const u32 position = known(p, p.positions[token]);
      if (position != angles.position) angles.load(p, position, lane);
    }
  }
#if NORMS
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) squares = __fmaf_rn(x[i], x[i], squares);
#pragma unroll
  for (int o = LANES / 2; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
  const float factor = __frcp_rn(__fsqrt_rn(squares * (1.0f / HEAD_SIZE) + p.epsilon));
#endif
  if (!exists) return;
#if NORMS
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = __fmul_rn(__fmul_rn(x[i], factor), weight[i]);
#endif
  if (rotates) {
    float cosines[4], sines[4];
    widen4(cosines, angles.cosines), widen4(sines, angles.sines);
#pragma unroll
    for (int i = 0; i < 4; i++) rotate<INTERLEAVED ? 1 : 4>(x + (INTERLEAVED ? 2 * i : i), cosines[i], sines[i]);
  }
  item.store(is_query ? p.query_out + ((u64)token * HEADS + own) * HEAD_SIZE
                      : p.key_out + ((u64)token * KV_HEADS + own) * HEAD_SIZE, x);
}
