// V of a step, and tokens that go to rings.
//
// Macros:
//   V_KIND          4 NVFP4, 6 the same by `four_over_six`, 8 E4M3, 9 E5M2
//   V_WEIGHTED      1 if V's block scales are chosen by weighted error
//   RING            1 if tokens go to rings of the inputs' dtype

#pragma once
#include "kvcache/store/cuda/blocks.cuh"

// FP8 of a value in the format's range: E4M3, or E5M2. NaN is 0x7F.
__device__ __forceinline__ u32 fp8_of(float x, bool is_negative) {
  if (x != x) return 0x7F;
  const u32 bits = bits_of(x) & 0x7FFFFFFF;
  u32 code;
  if (V_KIND == 8)
    code = byte_of_ratio(float_of(bits));
  else {
    const u32 normal = ((bits + 0xFFFFF + (bits >> 21 & 1)) >> 21) - (112 << 2);
    code = bits < 0x38800000 ? bits_of(add(float_of(bits), 128.0f)) - 0x43000000 : normal;  // steps of 2^-16
  }
  return code | (is_negative ? 0x80 : 0);
}

// x within +-limit; NaN stays.
__device__ __forceinline__ float clamp(float x, float limit) { return x != x ? x : fmaxf(fminf(x, limit), -limit); }

template <bool EASY>
__device__ __forceinline__ void encode_fp8(u32* words, const float* x, float g) {
  constexpr float LARGEST = V_KIND == 8 ? 448.0f : 57344.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = 0;
#pragma unroll
  for (int i = 0; i < BLOCK; i++) {
    float y, sign = x[i];  // with EASY, a quotient that rounds to 0 may have the wrong sign
    if (EASY)
      y = Inverse(g).of(clamp(x[i], mul(LARGEST, g)));
    else
      sign = y = clamp(__fdiv_rn(x[i], g), LARGEST);
    words[i / 4] |= fp8_of(y, bits_of(sign) >> 31) << 8 * (i % 4);
  }
}

#if V_KIND < 8
// Where a block of V is in a page, but for the token. The offsets are opaque to the compiler, which would otherwise
// compute them anew for every token.
struct ValueBlock {
  u32 codes, scale;

  __device__ __forceinline__ ValueBlock(u32 head, u32 part)
      : codes(V_DATA + head * V_DATA_HEAD + part * (BLOCK / 2)), scale(V_SCALE + head * V_SCALE_HEAD) {
#if SM100
    scale += part / (PARTS_V / 4) * V_SCALE_TOKEN + part % (PARTS_V / 4) * 4;
#else
    scale += part;
#endif
    asm volatile("" : "+r"(codes), "+r"(scale));
  }
  __device__ __forceinline__ u8* codes_of(const Place& place) const {
    return place.page + (codes + place.offset * V_DATA_TOKEN);
  }
  __device__ __forceinline__ u8* scale_of(const Place& place) const {
#if SM100
    return place.page + (scale + place.offset / 4 * 4 * V_SCALE_TOKEN + place.offset % 4);
#else
    return place.page + (scale + place.offset * V_SCALE_TOKEN);
#endif
  }
};
#endif

// Blocks of `p.tokens` tokens. Called by a whole warp.
template <bool EASY>
__device__ __forceinline__ void store_value_blocks(const Params& p, u32 number, float g, unsigned char* memory) {
  const u32 part = number % PARTS_V, head = number / PARTS_V % KV_HEADS;
  const u32 begin = number / (PARTS_V * KV_HEADS) * p.tokens;
#if V_WEIGHTED
  const Weights weights(p.v_weights + head * HEAD_SIZE_V + part * BLOCK, g);
#endif
#if V_KIND < 8
  const ValueBlock block(head, part);
#endif
  Blocks<VALUE_TYPE> blocks(memory, p.value, begin * p.value_token + head * p.value_head + part * BLOCK, p.value_token);
  blocks.copy(begin < p.num_slots);
#pragma unroll 1
  for (u32 token = begin;; token++) {
    float x[BLOCK];
    blocks.take(x);
    const bool is_last = ((token + 1) & p.last_token) == 0;
    blocks.copy(!is_last && token < p.last_slot);
    const Slot slot = Slot::of(p, token);
#if V_KIND >= 8
    u32 words[4];
    encode_fp8<EASY>(words, x, g);
#elif V_WEIGHTED
    const Encoded encoded = encode_weighted<EASY>(x, weights, g);
#else
    const Encoded encoded = encode_as_format<EASY, V_KIND == 6>(x, g);
#endif
    if (slot.keep) {
      const Place place = slot.place(p);
#if V_KIND >= 8
      u8* data = place.page + (V_DATA + place.offset * V_DATA_TOKEN + head * V_DATA_HEAD);
      store_codes(data + part * BLOCK, make_uint2(words[0], words[1]));
      store_codes(data + part * BLOCK + 8, make_uint2(words[2], words[3]));
#else
      store_codes(block.codes_of(place), encoded.words);
      *block.scale_of(place) = encoded.scale;
#endif
    }
    if (is_last) return;
  }
}

// `memory`: BLOCK_AHEAD_BYTES of the CTA's shared memory.
__device__ __forceinline__ void store_values(const Params& p, u32 number, unsigned char* memory) {
  const float g = p.v_scale ? *p.v_scale : p.v_scale_number;
  if (is_easy(g))
    store_value_blocks<true>(p, number, g, memory);
  else
    store_value_blocks<false>(p, number, g, memory);
}

#if RING
// Copies 16 bytes of a kept token's K or V; `i` counts them.
template <int TYPE, int SIZE>
__device__ __forceinline__ void keep_chunk(const Params& p, u32 i, const void* x, u64 stride_token, u64 stride_head,
                                           void* ring) {
  constexpr u32 BYTES = TYPE ? 2 : 4, CHUNKS = SIZE * BYTES / 16;
  const u32 chunk = i % CHUNKS, head = i / CHUNKS % KV_HEADS, kept = i / (CHUNKS * KV_HEADS);
  if (kept >= p.num_kept) return;
  const u64 from = p.ring_rows[kept] * stride_token + head * stride_head;
  const u64 to = ((p.ring_owners[kept] * KV_HEADS + head) * p.ring + p.ring_slots[kept]) * SIZE;
  ((uint4*)((u8*)ring + to * BYTES))[chunk] = ((const uint4*)((const u8*)x + from * BYTES))[chunk];
}

__device__ __forceinline__ void keep(const Params& p, u32 i) {
  keep_chunk<KEY_TYPE, HEAD_SIZE>(p, i, p.key, p.key_token, p.key_head, p.ring_keys);
  keep_chunk<VALUE_TYPE, HEAD_SIZE_V>(p, i, p.value, p.value_token, p.value_head, p.ring_values);
}
#endif
