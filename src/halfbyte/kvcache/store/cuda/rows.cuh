// Tokens of a step: where they come from and go to, K centred and rotated, and first tokens that are constants.
//
// A thread has a block of 16 values of a head, so PARTS threads side by side have a head of K.
//
// Macros:
//   HEAD_SIZE, HEAD_SIZE_V    64, 128 or 256; a multiple of 16
//   KV_HEADS, BLOCK_SIZE      heads, tokens of a page
//   K_DATA, K_DATA_TOKEN, K_DATA_HEAD and so on, of k_data, k_scale, v_data and v_scale: offset in a page and
//                             strides in bytes
//   SM100                     1 if V's scales are in that order
//   KEY_TYPE, VALUE_TYPE      0 float32, 1 float16, 2 bfloat16
//   FIRST_TYPE                the same of constants for first tokens; -1 if there are none
//   MARK, TOLERANCE_EXPONENT  see kvcache/transform.py
//   SEGMENT                   tokens that share a mean; 0 where K is not centred
//   ROTATE                    1 if K is rotated
//   IN_WORDS                  1 if codes begin at multiples of four bytes, else 0

#pragma once
#include "kernels/runtime/copies.cuh"
#include "kvcache/store/cuda/scales.cuh"

#define PARTS (HEAD_SIZE / BLOCK)
#define PARTS_V (HEAD_SIZE_V / BLOCK)

struct Params {
  const void *key, *value;                                  // [tokens, KV_HEADS, size], strides in values
  u64 key_token, key_head, value_token, value_head;
  u8* pages;
  u64 page_stride, capacity;                                // bytes; slots
  const i64* slots;
  u64 slot_bytes;                                           // from a slot to the next, below 2^32
  const i64* positions;
  const float *k_scale, *v_scale;                           // null: see k_scale_number, v_scale_number
  const float *cos, *sin, *mean, *partner_mean;             // `MeanTables`
  const void *first_keys, *first_values;                    // [constants, KV_HEADS, size]
  const float *feedback, *k_weights, *v_weights;            // as of `KVTransform`
  void *ring_keys, *ring_values;                            // `RingSlots`
  const i64 *ring_rows, *ring_owners, *ring_slots;
  float k_scale_number, v_scale_number;
  u32 num_slots, last_slot;                                 // 1 or more; the last one's index
  u32 num_first, num_segments, num_kept, ring;
  u32 last_position;                                        // of the last segment, and 1 or more
  u32 tokens, last_token;                                   // per thread: it stores one block of each; a power of two,
                                                            // and one less
  u32 k_ctas, v_ctas;                                       // the grid: CTAs for K, for V, then for rings
};

template <int TYPE>
__device__ __forceinline__ float load_value(const void* x, u64 i) {
  if (TYPE == 0) return ((const float*)x)[i];
  const u16 y = ((const u16*)x)[i];
  float z;
  if (TYPE == 2) return float_of((u32)y << 16);
  asm("cvt.f32.f16 %0, %1;" : "=f"(z) : "h"(y));
  return z;
}

// Two values of 16 bits.
template <int TYPE>
__device__ __forceinline__ void widen(float& low, float& high, u32 word) {
  low = float_of(word << 16), high = float_of(word & 0xFFFF0000u);
  if (TYPE == 1) {
    asm("cvt.f32.f16 %0, %1;" : "=f"(low) : "h"((u16)word));
    asm("cvt.f32.f16 %0, %1;" : "=f"(high) : "h"((u16)(word >> 16)));
  }
}

// 16 bytes of values.
template <int TYPE>
__device__ __forceinline__ void widen4(float* to, uint4 x) {
  const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (TYPE == 0)
      to[i] = float_of(words[i]);
    else
      widen<TYPE>(to[2 * i], to[2 * i + 1], words[i]);
  }
}

// A block at value i, a multiple of 16 bytes.
template <int TYPE>
__device__ __forceinline__ void load_block(float* to, const void* x, u64 i) {
  constexpr int BYTES = TYPE ? 2 : 4;
#pragma unroll
  for (int j = 0; j < BLOCK * BYTES / 16; j++)
    widen4<TYPE>(to + j * (16 / BYTES), *(const uint4*)((const u8*)x + i * BYTES + 16 * j));
}

__device__ __forceinline__ void load_floats(float* to, const float* from) { load_block<0>(to, from, 0); }

// x plus i steps of so many bytes, in global memory.
template <class T>
__device__ __forceinline__ T* at_step(T* x, u32 i, u32 step) {
  u64 y = (u64)x;
  asm("" : "+l"(y));  // opaque: if the compiler knew a parameter it would add it later, in two more instructions
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(y) : "r"(i), "r"(step), "l"(y));
  return (T*)__cvta_global_to_generic(y);
}

// Where a token is stored.
struct Place {
  u8* page;
  u32 offset;  // tokens of the page before it
  bool keep;   // false for padding and past the last page

  __device__ __forceinline__ static Place of(const Params& p, u32 token) {
    const u64 slot = token < p.num_slots ? (u64)*at_step(p.slots, token, p.slot_bytes) : ~0ull;
    const u32 page = (u32)(slot / BLOCK_SIZE);  // of those that are kept; no memory has 2^32 pages
    return {p.pages + page * p.page_stride, (u32)(slot % BLOCK_SIZE), slot < p.capacity};
  }
};

// Clamps a position to 32 bits; its segment and whether it is 0 stay right. Negative ones, which only padding has,
// become 1.
__device__ __forceinline__ u32 known_position(const Params& p, i64 position) {
  const u32 high = (u64)position >> 32, clamped = high ? p.last_position : min((u32)position, p.last_position);
  return position < 0 ? 1 : clamped;
}

// The segment of a `known_position`, which has a mean.
__device__ __forceinline__ u32 segment_of(const Params& p, u32 position) {
#if SEGMENT
  return min(position / SEGMENT, p.num_segments - 1);
#else
  return 0;
#endif
}

// Prefetches what the block of a thread depends on, before wait_for_previous: a position may be outdated, which only
// makes the prefetch useless. (Volatile, so that L1 does not keep it.)
__device__ __forceinline__ void prefetch_key_block(const Params& p, u32 part, u32 head, u32 token) {
  const u32 of_head = head * HEAD_SIZE + part * BLOCK;
#if K_WEIGHTED
  prefetch_l2(p.k_weights + of_head);
#endif
#if SEGMENT
  prefetch_l2(p.mean + of_head);
  prefetch_l2(p.partner_mean + of_head);
  if (token >= p.num_slots) return;
  prefetch_l2(at_step(p.slots, token, p.slot_bytes));
  const u32 position = known_position(p, *(const volatile i64*)(p.positions + token));
  const u64 of_segment = (u64)segment_of(p, position) * HEAD_SIZE + part * BLOCK;
  prefetch_l2(p.cos + of_segment);
  prefetch_l2(p.sin + of_segment);
#endif
}

// Returns `part`, opaque to the compiler, which would otherwise hoist addresses that depend on it out of the loop over
// tokens, and spill.
__device__ __forceinline__ u32 part_of_now(u32 part) {
  asm volatile("" : "+r"(part));
  return part;
}

// The mean of a block's channels in a segment.
__device__ __forceinline__ void load_mean(const Params& p, float* x, u32 head, u32 part, u32 segment) {
  part = part_of_now(part);
  const u32 of_head = head * HEAD_SIZE + part * BLOCK;
  const u64 of_segment = (u64)segment * HEAD_SIZE + part * BLOCK;
#pragma unroll
  for (int i = 0; i < BLOCK; i += 4) {
    float cos[4], sin[4], mean[4], partner[4];
    load4(cos, p.cos + of_segment + i), load4(sin, p.sin + of_segment + i);
    load4(mean, p.mean + of_head + i), load4(partner, p.partner_mean + of_head + i);
#pragma unroll
    for (int j = 0; j < 4; j++) x[i + j] = add(mul(cos[j], mean[j]), mul(sin[j], partner[j]));
  }
}

// The mean of a block's channels in the segment of the last token that it was subtracted from.
struct Mean {
  float x[BLOCK];
  u32 segment = ~0u;

  __device__ __forceinline__ void subtract_from(float* key, const Params& p, u32 head, u32 part, u32 to) {
    if (segment != to) load_mean(p, x, head, part, segment = to);
#pragma unroll
    for (int i = 0; i < BLOCK; i++) key[i] = sub(key[i], x[i]);
  }
};

// Multiplies heads by the Hadamard matrix (numerics/hadamard.py). LANES lanes side by side have a head, COUNT values
// each; this is lane `part` of them.
template <int COUNT, int LANES>
__device__ __forceinline__ void rotate(float* x, u32 part) {
  static_assert(COUNT * LANES == HEAD_SIZE, "lanes have a head");
#pragma unroll
  for (int h = 1; h < COUNT; h *= 2)
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (!(i & h)) {
        const float a = x[i], b = x[i + h];
        x[i] = add(a, b), x[i + h] = sub(a, b);
      }
#pragma unroll
  for (int h = 1; h < LANES; h *= 2) {
    const float sign = part & h ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(~0u, x[i], h));
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++) x[i] = mul(x[i], hadamard_norm(HEAD_SIZE));
}

// Changes a block of K to K', zeros for a token that is not there. Called by a whole warp. `mean` is of the same head and
// part.
template <class Means>
__device__ __forceinline__ void change_key(const Params& p, float* x, Means& mean, u32 token, u32 head, u32 part,
                                           u32 position) {
#if SEGMENT
  if (token < p.num_slots) mean.subtract_from(x, p, head, part, segment_of(p, position));
#endif
#if ROTATE
  rotate<BLOCK, PARTS>(x, part);
#endif
}

// Loads K' of a block, as `change_key` has it.
__device__ __forceinline__ void load_key(const Params& p, float* x, Mean& mean, u32 token, u32 head, u32 part,
                                         u32 position) {
  if (token < p.num_slots) {
    load_block<KEY_TYPE>(x, p.key, token * p.key_token + head * p.key_head + part * BLOCK);
  } else {
#pragma unroll
    for (int i = 0; i < BLOCK; i++) x[i] = 0.0f;
  }
  change_key(p, x, mean, token, head, part, position);
}

__device__ __forceinline__ u32 position_of(const Params& p, u32 token) {
  return token < p.num_slots ? known_position(p, p.positions[token]) : 1;
}

#if FIRST_TYPE >= 0
// Whether a head is a constant. Called by a whole warp, for one head.
template <int TYPE, int SIZE>
__device__ __forceinline__ bool is_constant(const void* x, u64 at, const void* constants, u64 constant) {
  float distance = 0.0f, size = 0.0f;
  bool is_number = true;
  for (int i = threadIdx.x % 32; i < SIZE; i += 32) {
    const float expected = load_value<FIRST_TYPE>(constants, constant + i);
    const float off = fabsf(sub(load_value<TYPE>(x, at + i), expected));
    is_number = is_number && off == off;
    distance = fmaxf(distance, off), size = fmaxf(size, fabsf(expected));
  }
#pragma unroll
  for (int h = 1; h < 32; h *= 2) {
    distance = fmaxf(distance, __shfl_xor_sync(~0u, distance, h));
    size = fmaxf(size, __shfl_xor_sync(~0u, size, h));
  }
  return !__any_sync(~0u, !is_number) && distance <= mul(size, 1.0f / (1 << TOLERANCE_EXPONENT));
}

// The first constant that K and V of a head are; -1 for none. Called by a whole warp.
__device__ __forceinline__ int find_first(const Params& p, u32 token, u32 head) {
  for (u32 i = 0; i < p.num_first; i++) {
    const u64 row = (u64)i * KV_HEADS + head;
    if (is_constant<KEY_TYPE, HEAD_SIZE>(p.key, token * p.key_token + head * p.key_head, p.first_keys,
                                         row * HEAD_SIZE) &&
        is_constant<VALUE_TYPE, HEAD_SIZE_V>(p.value, token * p.value_token + head * p.value_head, p.first_values,
                                             row * HEAD_SIZE_V))
      return i;
  }
  return -1;
}

// The constant that each thread's head is, with `lanes_of_head` lanes per head; -1 for tokens not at position 0.
__device__ __forceinline__ int find_first_of(const Params& p, u32 token, u32 head, bool at_start, u32 lanes_of_head) {
  int found = -1;
  const u32 lane = threadIdx.x % 32, own = lane / lanes_of_head * lanes_of_head;
  for (u32 waiting = __ballot_sync(~0u, at_start && lane == own); waiting; waiting &= waiting - 1) {
    const int first = __ffs(waiting) - 1;
    const int constant = find_first(p, __shfl_sync(~0u, token, first), __shfl_sync(~0u, head, first));
    if (own == first) found = constant;
  }
  return found;
}
#endif

__device__ __forceinline__ void store_codes(u8* to, uint2 words) {
#if IN_WORDS
  ((u32*)to)[0] = words.x, ((u32*)to)[1] = words.y;
#else
#pragma unroll
  for (int i = 0; i < 4; i++) to[i] = words.x >> 8 * i, to[4 + i] = words.y >> 8 * i;
#endif
}

// Where a block of K is in a page, but for the token.
__device__ __forceinline__ u32 key_codes_offset(u32 head, u32 part) {
  return K_DATA + head * K_DATA_HEAD + part * (BLOCK / 2);
}
__device__ __forceinline__ u32 key_scale_offset(u32 head, u32 part) { return K_SCALE + head * K_SCALE_HEAD + part; }

__device__ __forceinline__ u8* key_codes(const Place& place, u32 head, u32 part) {
  return place.page + (place.offset * K_DATA_TOKEN + key_codes_offset(head, part));
}
__device__ __forceinline__ u8* key_scale(const Place& place, u32 head, u32 part) {
  return place.page + (place.offset * K_SCALE_TOKEN + key_scale_offset(head, part));
}

// Stores a block of K. If first >= 0, stores the mark of calibrated first token `first` instead: its index in the first
// code byte, MARK as the first block scale, zeros elsewhere.
__device__ __forceinline__ void store_key(const Place& place, u32 head, u32 part, Encoded block, int first) {
  if (!place.keep) return;
  if (first >= 0) block = {make_uint2(part ? 0 : first, 0), part ? 0 : MARK};
  store_codes(key_codes(place, head, part), block.words);
  *key_scale(place, head, part) = block.scale;
}
