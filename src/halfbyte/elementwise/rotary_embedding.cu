// Rotary position embedding of q and k in one launch: pairs (a, b) become (a cos - b sin, b cos + a sin), in float32 and
// rounded once. A thread has four pairs of a head, or eight of the channels that are only copied.
//
// Macros: X_BF16; HEADS, KV_HEADS, HEAD_SIZE; ROTARY channels, a multiple of 8, are rotated; INTERLEAVED 1 if pairs are
// neighbours, 0 if pair i is channels i and i + ROTARY / 2.

#include "elementwise/values.cuh"

#define PAIRS (ROTARY / 2)
#define ITEMS (PAIRS / 4 + (HEAD_SIZE - ROTARY) / 8)  // of a head
#define ALL_HEADS (HEADS + KV_HEADS)

typedef long long i64;

struct Params {
  const u16 *query, *key;  // [tokens, heads * HEAD_SIZE]
  u16 *query_out, *key_out;
  const i64* positions;
  const u16* table;  // [max_position, ROTARY]: cosines, then sines
  u64 query_stride, key_stride;  // of a token, in values
  u32 tokens, max_position;
};

__device__ __forceinline__ u32 known(const Params& p, i64 position) {
  return (u32)min(max(position, (i64)0), (i64)p.max_position - 1);
}

extern "C" __global__ void __launch_bounds__(128) rotary_embedding(const __grid_constant__ Params p) {
  const u32 index = blockIdx.x * 128 + threadIdx.x, item = index % ITEMS, head = index / ITEMS % ALL_HEADS;
  const u32 token = index / (ITEMS * ALL_HEADS);
  const bool exists = token < p.tokens, rotates = item < PAIRS / 4;
  // A position may be outdated here, which only makes the prefetch useless. (Volatile, so that L1 does not keep it.)
  if (exists && rotates && head == 0) {
    const u16* row = p.table + (u64)known(p, *(const volatile i64*)(p.positions + token)) * ROTARY + 4 * item;
    prefetch_l2(row);
    prefetch_l2(row + PAIRS);
  }
  allow_next();  // before waiting: see basics.cuh
  wait_for_previous();
  if (!exists) return;
  const bool is_query = head < HEADS;
  const u32 own = is_query ? head : head - HEADS;
  const u16* from = (is_query ? p.query + token * p.query_stride : p.key + token * p.key_stride) + own * HEAD_SIZE;
  u16* to = is_query ? p.query_out + ((u64)token * HEADS + own) * HEAD_SIZE
                     : p.key_out + ((u64)token * KV_HEADS + own) * HEAD_SIZE;
  if (!rotates) {
    const u32 at = ROTARY + 8 * (item - PAIRS / 4);
    *(uint4*)(to + at) = *(const uint4*)(from + at);
    return;
  }
  float a[4], b[4], cosines[4], sines[4];
#if INTERLEAVED
  float x[8];
  widen8(x, *(const uint4*)(from + 8 * item));
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = x[2 * i], b[i] = x[2 * i + 1];
#else
  widen4(a, *(const uint2*)(from + 4 * item)), widen4(b, *(const uint2*)(from + PAIRS + 4 * item));
#endif
  const u16* row = p.table + (u64)known(p, p.positions[token]) * ROTARY + 4 * item;
  widen4(cosines, *(const uint2*)row), widen4(sines, *(const uint2*)(row + PAIRS));
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float first = a[i], second = b[i];
    a[i] = __fsub_rn(__fmul_rn(first, cosines[i]), __fmul_rn(second, sines[i]));
    b[i] = __fadd_rn(__fmul_rn(second, cosines[i]), __fmul_rn(first, sines[i]));
  }
#if INTERLEAVED
#pragma unroll
  for (int i = 0; i < 4; i++) x[2 * i] = a[i], x[2 * i + 1] = b[i];
  *(uint4*)(to + 8 * item) = narrow8(x);
#else
  *(uint2*)(to + 4 * item) = narrow4(a);
  *(uint2*)(to + PAIRS + 4 * item) = narrow4(b);
#endif
}
