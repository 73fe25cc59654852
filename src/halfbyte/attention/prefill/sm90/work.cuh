// The work of prefill.cu: its parameters, tiles of queries, and the keys of a tile.
//
// Macros:
//   X_BF16      1 for bfloat16, 0 for float16
//   HEAD_SIZE   64 or 128, of K and V
//   GROUP       query heads per KV head
//   RECENT      R: a query reads its last R keys, itself included, as the model computed them; 0 for none

#pragma once
#include "kernels/runtime/sm90.cuh"

#define WORKERS (HEAD_SIZE == 128 ? 2 : 3)            // warpgroups that have 64 rows each
#define THREADS (128 * (1 + WORKERS))
#define ROWS (64 * WORKERS)                          // of a tile: tokens x query heads
#define COLUMNS (HEAD_SIZE == 128 ? 128 : 96)         // keys of a step
#define HEADS (GROUP < ROWS ? GROUP : ROWS)          // of a tile
#define HEAD_BLOCKS ((GROUP + HEADS - 1) / HEADS)    // of a KV head
#define HALVES (HEAD_SIZE / 64)
#define HALF_BYTES (COLUMNS * 128)                   // 64 dims of a step's keys
#define SLOT_BYTES (HALVES * HALF_BYTES)
#define SLOTS (HEAD_SIZE == 128 ? 6 : 12)            // of the ring of K and V
#define OFF_RING (ROWS * HEAD_SIZE * 2)              // behind the queries

// Rows of K or V, `stride_token` and `stride_head` values apart.
struct Matrix {
  const u16* data;
  u64 stride_token, stride_head;
};

struct Params {
  Matrix query, packed_key, packed_value, new_key, new_value;
  const u16 *ring_keys, *ring_values;  // [entries, kv_heads, ring, HEAD_SIZE]
  const int* entries;                  // [sequences]
  const float* sinks;                  // [heads], or null
  u16* out;                            // [tokens, heads, HEAD_SIZE], strides in values
  u64 out_token, out_head;
  float* lse;                          // [tokens, heads], or null
  const int4* work;                    // [tiles, 2], see Tile
  int num_tiles, kv_heads, ring;
  float scale;                         // takes dot products to logits in base 2; positive
};

// Tokens of a sequence and query heads of one KV head.
//
// The keys of a tile are columns. First come those in the pages, unpacked, from position 0 to that which
// the last token sees, then its keys of the model's dtype, from the first that the first token sees.
struct Tile {
  int first_token, count;  // rows of the query
  int first_row;           // of the unpacked keys: position 0
  int position;            // of the first token
  int sequence, first_new; // position of the sequence's first token in this step
  int kv_head, head;       // the first query head

  __device__ __forceinline__ Tile(const Params& p, int item) {
    const int block = item % HEAD_BLOCKS, rest = item / HEAD_BLOCKS;
    kv_head = rest % p.kv_heads;
    head = kv_head * GROUP + block * HEADS;
    const int4 x = p.work[rest / p.kv_heads * 2], y = p.work[rest / p.kv_heads * 2 + 1];
    first_token = x.x, count = x.y, first_row = x.z, position = x.w;
    sequence = y.x, first_new = y.y;
  }

  // Columns of unpacked keys.
  __device__ __forceinline__ int packed() const { return max(0, position + count - RECENT); }

  // Position of the first key of the model's dtype.
  __device__ __forceinline__ int first_recent() const { return max(0, position - RECENT + 1); }

  __device__ __forceinline__ int columns() const {
    return packed() + (RECENT ? position + count - first_recent() : 0);
  }

  // Steps of COLUMNS.
  __device__ __forceinline__ int steps() const { return (columns() + COLUMNS - 1) / COLUMNS; }

  // The number of query heads: fewer in a KV head's last block.
  __device__ __forceinline__ int num_heads() const { return min(HEADS, (kv_head + 1) * GROUP - head); }
};

// The tiles of a CTA. They are sorted, the longest first, so that every second turn goes backwards.
struct Turns {
  int turn = 0;

  __device__ __forceinline__ bool has_next(const Params& p) const {
    Turns after = *this;
    int item;
    return after.next(p, &item);
  }

  __device__ __forceinline__ bool next(const Params& p, int* item) {
    const int place = turn & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    *item = turn++ * gridDim.x + place;
    return *item < p.num_tiles * p.kv_heads * HEAD_BLOCKS;
  }
};

// mbarriers behind the queries and the ring.
struct Barriers {
  u32 full, empty, queries_full, queries_empty;

  __device__ __forceinline__ Barriers(u32 shared) {
    full = shared + OFF_RING + SLOTS * SLOT_BYTES;
    empty = full + 8 * SLOTS;
    queries_full = empty + 8 * SLOTS;
    queries_empty = queries_full + 8;
  }
};

typedef RingState<SLOTS> Slot;

// Offset of 16 bytes of a row in a slot, or of a query: 64 dims are 128 bytes, with 128-byte swizzle.
static_assert(HALVES == 1 || ROWS == COLUMNS, "one stride from 64 dims to the others");
__device__ __forceinline__ u32 place_of(int row, int chunk) {
  return (chunk >> 3) * HALF_BYTES + row * 128 + ((chunk ^ row) & 7) * 16;
}
