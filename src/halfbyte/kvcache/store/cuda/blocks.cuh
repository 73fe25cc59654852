// What a thread of BY_BLOCK keeps from one of its tokens to the next. If the launch fills the GPU, that is in shared
// memory, because fewer registers allow more CTAs per SM.
//
// Macros:
//   WARPS         of a CTA
//   others        see rows.cuh

#pragma once
#include "kvcache/store/cuda/rows.cuh"

#define BLOCK_AHEAD_BYTES (SMALL_GRID ? 0 : 2 * (KEY_TYPE && VALUE_TYPE ? 2 : 4) * BLOCK * 32 * WARPS)

// A token's slot. A token past the last one has that one's, so that no branch is needed.
struct Slot {
  u64 number;
  bool keep;  // as of Place

  __device__ __forceinline__ static Slot of(const Params& p, u32 token) {
    const u32 known = min(token, p.last_slot);
    const u64 number = *at_step(p.slots, known, p.slot_bytes);
    return {number, token == known && number < p.capacity};
  }
  __device__ __forceinline__ Place place(const Params& p) const {
    u64 page = (u64)p.pages + (u32)(number / BLOCK_SIZE) * p.page_stride;
    u32 offset = number % BLOCK_SIZE;
    asm("" : "+l"(page), "+r"(offset));  // opaque: the compiler would combine them in more instructions
    return {(u8*)__cvta_global_to_generic(page), offset, keep};
  }
};

#if SMALL_GRID
// A thread's block of its only token.
template <int TYPE>
struct Blocks {
  const void* from;
  bool exists;

  __device__ __forceinline__ Blocks(unsigned char*, const void* x, u64 i, u64) {
    from = (const u8*)x + i * (TYPE ? 2 : 4);
  }
  __device__ __forceinline__ void copy(bool there) { exists = there; }
  __device__ __forceinline__ void take(float* to) const {
    if (exists) {
      load_block<TYPE>(to, from, 0);
      return;
    }
#pragma unroll
    for (int j = 0; j < BLOCK; j++) to[j] = 0.0f;
  }
};

// Of a block of K: its channels' mean; where it is in a page, but for the token.
struct KeyState : Mean {
  u32 codes, scale;

  __device__ __forceinline__ KeyState(unsigned char*, u32 head, u32 part)
      : codes(key_codes_offset(head, part)), scale(key_scale_offset(head, part)) {}
  __device__ __forceinline__ void keep(const Weights&) const {}
  __device__ __forceinline__ void restore(Weights&) const {}
  __device__ __forceinline__ uint2 offsets() const { return make_uint2(codes, scale); }
};
#else
// A thread's block of successive tokens, double-buffered: the next token's is copied to shared memory while this one is
// rounded.
template <int TYPE>
struct Blocks {
  static constexpr u32 BYTES = TYPE ? 2 : 4, CHUNKS = BLOCK * BYTES / 16;
  static constexpr u32 STRIDE = 16 * 32 * WARPS, STAGE = CHUNKS * STRIDE;
  static constexpr int FIRST = (int)(STAGE / 2) - BLOCK_AHEAD_BYTES;
  u32 middle;      // `KeyState::own`
  u32 last;        // plus FIRST: address of the 16 bytes copied last; others are STRIDE apart. In turns on either side of
                   // `middle`
  const u8* from;  // the next token's

  // `memory`: BLOCK_AHEAD_BYTES of the CTA's shared memory. The first token's block begins at value i.
  __device__ __forceinline__ Blocks(unsigned char* memory, const void* x, u64 i, u64 token_stride)
      : middle(shared_address(memory + BLOCK_AHEAD_BYTES) + threadIdx.x * 16), last(middle + STAGE / 2),
        from((const u8*)x + i * BYTES), step(token_stride) {}

  // Begins to copy the next token's block; zeros if it does not exist.
  __device__ __forceinline__ void copy(bool exists) {
    last = 2 * middle - last;
#pragma unroll
    for (u32 j = 0; j < CHUNKS; j++) copy16_or_zeros(last + FIRST + j * STRIDE, from + 16 * j, exists);
    commit_copies();
    from += step * BYTES;
  }

  // The block that was copied last.
  __device__ __forceinline__ void take(float* x) const {
    wait_for_copies<0>();
#pragma unroll
    for (u32 j = 0; j < CHUNKS; j++) widen4<TYPE>(x + j * (16 / BYTES), load16(last + FIRST + j * STRIDE));
  }

 private:
  u64 step;
};

// Of a block of K: its channels' mean in the segment of the last token; where it is in a page, but for the token;
// numbers of its weights.
struct KeyState {
  static constexpr u32 STRIDE = 16 * 32 * WARPS;
  u32 own;  // address of this thread's first four of 24 words; others are STRIDE apart
  u32 segment = ~0u;

  // `memory`: BLOCK_AHEAD_BYTES of shared memory, then 96 bytes for each thread of the CTA.
  __device__ __forceinline__ KeyState(unsigned char* memory, u32 head, u32 part)
      : own(shared_address(memory + BLOCK_AHEAD_BYTES) + threadIdx.x * 16) {
    const float offsets[4] = {float_of(key_codes_offset(head, part)), float_of(key_scale_offset(head, part))};
    store_float4(own + 5 * STRIDE, offsets);
  }

  __device__ __forceinline__ void subtract_from(float* key, const Params& p, u32 head, u32 part, u32 to) {
    if (segment != to) {
      float x[BLOCK];
      load_mean(p, x, head, part, segment = to);
#pragma unroll
      for (int i = 0; i < 4; i++) store_float4(own + i * STRIDE, x + 4 * i);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 x = load16(own + i * STRIDE);
      key[4 * i] = sub(key[4 * i], float_of(x.x)), key[4 * i + 1] = sub(key[4 * i + 1], float_of(x.y));
      key[4 * i + 2] = sub(key[4 * i + 2], float_of(x.z)), key[4 * i + 3] = sub(key[4 * i + 3], float_of(x.w));
    }
  }
  __device__ __forceinline__ void keep(const Weights& weights) const {
    const float numbers[4] = {weights.slack, weights.unit.high, weights.unit.low, 0.0f};
    store_float4(own + 4 * STRIDE, numbers);
  }
  __device__ __forceinline__ void restore(Weights& weights) const {
    const uint4 x = load16(own + 4 * STRIDE);
    weights.slack = float_of(x.x), weights.unit.high = float_of(x.y), weights.unit.low = float_of(x.z);
  }
  __device__ __forceinline__ uint2 offsets() const {
    const float2 x = load_float2(own + 5 * STRIDE);
    return make_uint2(bits_of(x.x), bits_of(x.y));
  }
};
#endif
