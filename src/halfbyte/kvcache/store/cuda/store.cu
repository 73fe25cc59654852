// Stores K and V of a step whose K a recipe changes, in one launch; the bytes are those of the reference
// (kvcache/store/reference.py). CTAs take K, V, or tokens that also go to rings.
//
// K is centred (segment means), rotated (Hadamard), and rounded to NVFP4; tokens at position 0 that are constants of
// the model are marked. How K is rounded decides what a warp takes:
//
//   BY_BLOCK   values alone: a thread takes a block of 16
//   BY_ROW     error feedback, few tokens: a warp takes a head of a token (feedback_row.cuh)
//   BY_TILE    error feedback, many tokens: a warp takes a head of 32 tokens (feedback_tile.cuh)
//
// Macros, besides those of the headers:
//   BY             1, 2 or 3 for the above
//   CTAS_PER_SM    that registers must suffice for

#define BY_BLOCK 1
#define BY_ROW 2
#define BY_TILE 3

#include "kvcache/store/cuda/feedback_row.cuh"
#include "kvcache/store/cuda/feedback_tile.cuh"
#include "kvcache/store/cuda/values.cuh"

#define THREADS (32 * WARPS)

// A block of K without error feedback.
template <bool EASY>
__device__ __forceinline__ void store_key_block(const Params& p, u32 number, float g) {
  const u32 part = number % PARTS, head = number / PARTS % KV_HEADS, token = number / (PARTS * KV_HEADS);
  const i64 position = position_of(p, token);
  const Place place = Place::of(p, token);
  float x[BLOCK];
  load_key(p, x, token, head, part, position);
#if K_WEIGHTED
  float w[BLOCK];
  load_floats(w, p.k_weights + head * HEAD_SIZE + part * BLOCK);
  const Encoded encoded = encode_weighted<EASY>(x, w, g);
#else
  const Encoded encoded = encode_as_format<EASY, FOUR_OVER_SIX>(x, g);
#endif
  int first = -1;
#if FIRST_TYPE >= 0
  first = find_first_of(p, token, head, place.keep && position == 0, PARTS);
#endif
  store_key(place, head, part, encoded, first);
}

template <bool EASY>
__device__ __forceinline__ void store_keys(const Params& p, float g, unsigned char* memory) {
#if BY == BY_BLOCK
  store_key_block<EASY>(p, blockIdx.x * THREADS + threadIdx.x, g);
#elif BY == BY_ROW
  store_key_row<EASY>(p, blockIdx.x, g, *(SharedRows*)memory);
#else
  const u32 warp = threadIdx.x / 32;
  store_key_tile<EASY>(p, blockIdx.x * WARPS + warp, g, (float*)memory + warp * TILE_FLOATS);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) store(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char memory[];
  wait_for_previous();
  allow_next();
  if (blockIdx.x < p.k_ctas) {
    const float g = p.k_scale ? *p.k_scale : p.k_scale_number;
    if (is_easy(g))
      store_keys<true>(p, g, memory);
    else
      store_keys<false>(p, g, memory);
  } else if (blockIdx.x < p.k_ctas + p.v_ctas)
    store_values(p, (blockIdx.x - p.k_ctas) * THREADS + threadIdx.x);
#if RING
  else
    keep(p, (blockIdx.x - p.k_ctas - p.v_ctas) * THREADS + threadIdx.x);
#endif
}
