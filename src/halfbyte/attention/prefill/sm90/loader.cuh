// The loading warpgroup of prefill.cu: queries, and the ring of K and V, from pages that were unpacked, from the
// step's tokens and from rings.

#pragma once
#include "attention/prefill/sm90/work.cuh"
#include "kernels/runtime/copies.cuh"

#define CHUNKS (HEAD_SIZE / 8)          // of a row, 16 bytes each
#define ROWS_AT_ONCE (128 / CHUNKS)     // by the warpgroup
#define COPIES (COLUMNS / ROWS_AT_ONCE)  // of a thread, for a slot

// A thread's next row in a slot.
struct Place {
  u32 to;
  int column;
  __device__ __forceinline__ void advance() {
    to += ROWS_AT_ONCE * 128;
    column += ROWS_AT_ONCE;
  }
};

struct Loader {
  const Params& p;
  u32 ring, queries, copied;  // copied: barrier of the copies before the last ones
  Barriers barriers;
  int row, chunk;
  Slot slot;
  u32 queries_parity = 1;

  __device__ __forceinline__ Loader(const Params& p, u32 shared, const Barriers& barriers)
      : p(p), ring(shared + OFF_RING), queries(shared), copied(0), barriers(barriers) {
    row = threadIdx.x / CHUNKS;
    chunk = threadIdx.x % CHUNKS;
  }

  // Commits copies that complete `barrier`, and arrives at that of the ones before: two slots are under way.
  __device__ __forceinline__ void commit(u32 barrier) {
    commit_copies();
    wait_for_copies<1>();
    arrive();
    copied = barrier;
  }

  __device__ __forceinline__ void arrive() const {
    fence_async_proxy();
    if (copied) barrier_arrive(copied);
  }

  __device__ __forceinline__ void load_queries(const Tile& tile) {
    barrier_wait(barriers.queries_empty, queries_parity);
    queries_parity ^= 1;
    const u16* const from = p.query.data + tile.first_token * p.query.stride_token + chunk * 8;
    const int num_heads = tile.num_heads();
#pragma unroll 4
    for (int i = 0; i < ROWS / ROWS_AT_ONCE; i++) {
      const int at = row + i * ROWS_AT_ONCE, token = at / HEADS, head = at % HEADS;
      const bool exists = token < tile.count && head < num_heads;
      const u16* x = from + (exists ? token * p.query.stride_token + (tile.head + head) * p.query.stride_head : 0);
      copy16_or_zeros(queries + place_of(at, chunk), x, exists);
    }
    commit(barriers.queries_full);
  }

  // Copies until the thread's next row is at least `end`.
  __device__ __forceinline__ static void copy_until(int end, Place& at, const u16* from, u64 stride_token) {
#pragma unroll 2
    for (; at.column < end; from += ROWS_AT_ONCE * stride_token, at.advance()) copy16(at.to, from);
  }

  // Loads a step's keys, or values, to the next slot.
  __device__ __forceinline__ void load(const Tile& tile, int step, const Matrix& packed, const Matrix& own,
                                       const u16* ring_data) {
    barrier_wait(barriers.empty + 8 * slot.stage, slot.parity ^ 1);
    const int num_packed = tile.packed(), end = (step + 1) * COLUMNS;
    Place at{ring + slot.stage * SLOT_BYTES + place_of(row, chunk), step * COLUMNS + row};
    const u16* const from = row_of(packed, tile.first_row + at.column, tile.kv_head);
    if (end <= num_packed) {
#pragma unroll
      for (int i = 0; i < COPIES; i++)
        copy16(at.to + i * (ROWS_AT_ONCE * 128), from + i * ROWS_AT_ONCE * packed.stride_token);
    } else {
      copy_until(num_packed, at, from, packed.stride_token);
      if (RECENT) {
        // Column of position 0, of the step's first token, and behind the last.
        const int first = num_packed - tile.first_recent(), first_new = first + tile.first_new;
        const int last = min(end, first + tile.position + tile.count);
        for (; at.column < min(first_new, last); at.advance()) copy16(at.to, in_ring(tile, ring_data, at.column - first));
        const int token = tile.first_token - tile.position + at.column - first;
        copy_until(last, at, row_of(own, token, tile.kv_head), own.stride_token);
      }
      for (; at.column < end; at.advance()) copy16_or_zeros(at.to, p.query.data, false);
    }
    commit(barriers.full + 8 * slot.stage);
    slot.next();
  }

  __device__ __forceinline__ const u16* row_of(const Matrix& x, int row, int head) const {
    return x.data + (long long)row * (long long)x.stride_token + head * x.stride_head + chunk * 8;
  }

  __device__ __forceinline__ const u16* in_ring(const Tile& tile, const u16* ring_data, int position) const {
    const u64 entry = (u64)p.entries[tile.sequence] * p.kv_heads + tile.kv_head;
    return ring_data + (entry * p.ring + position % p.ring) * HEAD_SIZE + chunk * 8;
  }

  __device__ __forceinline__ void load_key(const Tile& tile, int step) {
    load(tile, step, p.packed_key, p.new_key, p.ring_keys);
  }

  __device__ __forceinline__ void load_value(const Tile& tile, int step) {
    load(tile, step, p.packed_value, p.new_value, p.ring_values);
  }

  // In the order in which workers use them: a tile's first keys before the last values of the tile before.
  __device__ __forceinline__ void load_tiles() {
    Turns turns;
    int item;
    bool more = turns.next(p, &item);
    if (!more) return;
    Tile tile(p, item);
    load_queries(tile);
    load_key(tile, tile.steps() - 1);
    while (more) {
      const Tile own = tile;
      int step = own.steps() - 1;
#pragma unroll 1
      for (; step > 0; step--) {
        load_key(own, step - 1);
        load_value(own, step);
      }
      more = turns.next(p, &item);
      if (more) {
        tile = Tile(p, item);
        load_queries(tile);
        load_key(tile, tile.steps() - 1);
      }
      load_value(own, 0);
    }
    wait_for_copies<0>();
    arrive();
  }
};
