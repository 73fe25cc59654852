// Attention: calls and their work items.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/tiles.h"
#include "transform.h"

namespace halfbyte {

constexpr int kMaxRows = 64;  // of an item

// K and V of the last tokens, unquantized. The same fields as `_RECENT` in attention/cpu.py; strides are in
// elements.
struct Recent {
  const uint8_t *keys, *values;  // [entries, kv_heads, ring, size]: position p is in slot p % ring
  const uint8_t *key, *value;    // of the step's tokens, [tokens, kv_heads, size]
  const int32_t* entries;        // [num_seqs]
  const int32_t* lengths;        // [num_seqs], all tokens; `Call::seq_lens` counts those read from pages
  int64_t key_token, key_head, value_token, value_head;
  int32_t tokens;  // a query at p reads keys after p - tokens from here
  int32_t ring, format;
  int32_t window;  // of the layer; `Call::window` is for tokens read from pages
};

// The same fields as `_Call` in attention/cpu.py. Strides are in elements.
struct Call {
  const uint8_t* query;  // [tokens, heads, head_size]
  const uint8_t* pages;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  const float* sinks;  // [heads] or null
  uint8_t* out;        // [tokens, heads, head_size_v]
  float* lse;          // [tokens, heads] or null
  const Transform* transform;  // the transform of K, or null
  const Recent* recent;        // or null
  int64_t page_stride, query_token, query_head, out_token, out_head;
  int32_t query_format, out_format, num_seqs, max_pages, heads, window, threads, unused;
  float softmax_scale, k_global, v_global, softcap;
};

struct Item {
  int seq, first_head, heads;  // KV heads
  int first_row, rows;         // of each head
  int begin, end;              // tokens
  int part;                    // index of its first part (a split of the tokens)
  int parts;                   // number of parts for these rows; an item has one of them, or all
  int64_t first_part;          // where the first head's parts begin in `Batch::parts`
  int counter;                 // index of the counter of unfinished parts; negative if the item has all
};

struct Batch {
  const Layout& layout;
  const Call& call;
  const Kernels& kernels;
  int group;
  int width;  // floats in a row of `parts`: weighted sums of V, the max score (log2), the sum of weights
  std::vector<Item>& items;
  std::vector<float>& parts;  // [head][part][row][width] for each sequence that is split into parts
  std::vector<int>& counters;
  uint64_t serial;  // unique per call
};

// Runs one item; `context` is the Batch.
void run_item(void* context, int index);

}  // namespace halfbyte
