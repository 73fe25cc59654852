// Stores K and V of a step whose K a recipe changes, in one launch; the bytes are those of the reference
// (kvcache/store/reference.py). CTAs take K, V, or tokens that also go to rings.
//
// K is centred (segment means), rotated (Hadamard), and rounded to NVFP4; tokens at position 0 that are constants of
// the model are marked. How K is rounded decides what a warp takes:
//
//   BY_BLOCK   no error feedback: a thread takes the same block of 16 channels of one or more tokens
//   BY_ROW     error feedback, few tokens: a warp takes a head of a token (feedback_row.cuh)
//   BY_TILE    error feedback, many tokens: a warp takes a head of 32 tokens (feedback_tile.cuh)
//   BY_LANES   no error feedback, few tokens: several lanes share a block (lanes.cuh)
//
// Macros, besides those of the headers:
//   BY             1, 2, 3 or 4 for the above
//   CTAS_PER_SM    that registers must suffice for

#define BY_BLOCK 1
#define BY_ROW 2
#define BY_TILE 3
#define BY_LANES 4

#include "kvcache/store/cuda/values.cuh"

#if BY == BY_ROW
#include "kvcache/store/cuda/feedback_row.cuh"
#elif BY == BY_TILE
#include "kvcache/store/cuda/feedback_tile.cuh"
#elif BY == BY_LANES
#include "kvcache/store/cuda/lanes.cuh"
#endif

#define THREADS (32 * WARPS)

// A thread's block of K: which of a head's, and the first of its tokens.
struct KeyBlock {
  u32 part, head, token;

  __device__ __forceinline__ explicit KeyBlock(const Params& p, u32 number = blockIdx.x * THREADS + threadIdx.x) {
    part = number % PARTS, head = number / PARTS % KV_HEADS, token = number / (PARTS * KV_HEADS) * p.tokens;
  }
};

// As `position_of`; that of the last token past it, so that no branch is needed.
__device__ __forceinline__ u32 position_of_block(const Params& p, u32 token) {
  return known_position(p, p.positions[min(token, p.last_slot)]);
}

// Stores a head's mark and returns true, if the head is a constant for first tokens. Called by a whole warp.
__device__ __forceinline__ bool store_first(const Params& p, u32 token, u32 head, u32 part, bool at_start) {
#if FIRST_TYPE >= 0
  const int first = find_first_of(p, token, head, at_start, PARTS);
  if (first >= 0) store_key(Place::of(p, token), head, part, {}, first);
  return first >= 0;
#else
  return false;
#endif
}

// Blocks of K of `last_token` + 1 tokens, a power of two, without error feedback. `position` and `slot` are the first
// one's; `memory` is `StoreVariant.shared_bytes` of the CTA's shared memory.
template <bool EASY>
__device__ __forceinline__ void store_key_blocks(const Params& p, KeyBlock block, u32 last_token, u32 position,
                                                 Slot slot, float g, unsigned char* memory) {
  const u32 part = block.part, head = block.head;
  KeyState state(memory, head, part);
#if K_WEIGHTED
  Weights weights(p.k_weights + head * HEAD_SIZE + part * BLOCK, g);
  state.keep(weights);
#endif
  Blocks<KEY_TYPE> blocks(memory, p.key, block.token * p.key_token + head * p.key_head + part * BLOCK, p.key_token);
  blocks.copy(block.token < p.num_slots);
#pragma unroll 1
  for (u32 token = block.token;; token++) {
#if FIRST_TYPE >= 0
    if (__any_sync(~0u, position == 0))
      slot.keep = !store_first(p, token, head, part, slot.keep && position == 0) && slot.keep;
    __syncwarp();  // tells the compiler that the warp is together, which saves branches at shuffles and votes
#endif
    float x[BLOCK];
    blocks.take(x);
    u32 left = (token + 1) & last_token;
    asm("" : "+r"(left));  // opaque: else it is computed again at the loop's end
    const bool is_last = left == 0;
    blocks.copy(!is_last && token < p.last_slot);
#if SEGMENT
    state.subtract_from(x, p, head, part, segment_of(p, position));
#endif
#if ROTATE
    rotate<BLOCK, PARTS>(x, part);
#endif
#if K_WEIGHTED
    state.restore(weights);
    const Encoded encoded = encode_weighted<EASY>(x, weights, g);
#else
    const Encoded encoded = encode_as_format<EASY, FOUR_OVER_SIX>(x, g);
#endif
    if (slot.keep) {
      const Place place = slot.place(p);
      const uint2 offsets = state.offsets();
      store_codes(place.page + (offsets.x + place.offset * K_DATA_TOKEN), encoded.words);
      place.page[offsets.y + place.offset * K_SCALE_TOKEN] = encoded.scale;
    }
    if (is_last) return;
    position = position_of_block(p, token + 1), slot = Slot::of(p, token + 1);
  }
}

__device__ __forceinline__ void store_keys(const Params& p, unsigned char* memory) {
#if BY == BY_ROW
  store_key_row(p, blockIdx.x, *(SharedRows*)memory);
#elif BY == BY_LANES
  store_key_lanes(p, blockIdx.x * THREADS + threadIdx.x);
#else
  const float g = p.k_scale ? *p.k_scale : p.k_scale_number;
#if BY == BY_BLOCK
  const KeyBlock block(p);
  // Loaded together with g.
  const u32 position = position_of_block(p, block.token);
  const Slot slot = Slot::of(p, block.token);
  if (is_easy(g)) {
    store_key_blocks<true>(p, block, p.last_token, position, slot, g, memory);
    return;
  }
#pragma unroll 1
  for (u32 i = 0; i < p.tokens; i++) {
    u32 number = blockIdx.x * THREADS + threadIdx.x;
    asm volatile("" : "+r"(number));  // opaque: indices are recomputed per token, as registers to keep them lack here
    KeyBlock own(p, number);
    own.token += i;
    const u32 position = position_of_block(p, own.token);
    store_key_blocks<false>(p, own, 0, position, Slot::of(p, own.token), g, memory);
  }
#else
  const u32 warp = threadIdx.x / 32, number = blockIdx.x * WARPS + warp;
  float* tile = (float*)memory + warp * TILE_FLOATS;
  if (is_easy(g))
    store_key_tile<true>(p, number, g, tile);
  else
    store_key_tile<false>(p, number, g, tile);
#endif
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) store(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char memory[];
#if SMALL_GRID && BY == BY_BLOCK
  if (blockIdx.x < p.k_ctas) {
    const KeyBlock block(p);
    prefetch_key_block(p, block.part, block.head, block.token);
  }
#elif BY == BY_LANES
  const u32 number = blockIdx.x * THREADS + threadIdx.x, lane = number % HEAD_LANES;
  if (blockIdx.x < p.k_ctas && lane % (BLOCK / LANE_VALUES) == 0)
    prefetch_key_block(p, lane * LANE_VALUES / BLOCK, number / HEAD_LANES % KV_HEADS, number / (HEAD_LANES * KV_HEADS));
#endif
#if SMALL_GRID && (BY == BY_BLOCK || BY == BY_LANES)
#if V_WEIGHTED
  prefetch_table(p.v_weights, KV_HEADS * HEAD_SIZE_V * 4);
#endif
#if RING
  prefetch_table(p.ring_rows, p.num_kept * 8);
  prefetch_table(p.ring_owners, p.num_kept * 8);
  prefetch_table(p.ring_slots, p.num_kept * 8);
#endif
#endif
  wait_for_previous();
  allow_next();
  if (blockIdx.x < p.k_ctas)
    store_keys(p, memory);
  else if (blockIdx.x < p.k_ctas + p.v_ctas)
#if BY == BY_LANES
    store_value_lanes(p, (blockIdx.x - p.k_ctas) * THREADS + threadIdx.x, memory);
#else
    store_values(p, (blockIdx.x - p.k_ctas) * THREADS + threadIdx.x, memory);
#endif
#if RING
  else
    keep(p, (blockIdx.x - p.k_ctas - p.v_ctas) * THREADS + threadIdx.x);
#endif
}
