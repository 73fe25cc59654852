// Parameters of the decode kernels; plan.py, recipe.py and cuda.py fill them.

#pragma once
#include "attention/decode/output.cuh"

// What the kernels read beside the pages if a recipe changed K or keeps recent tokens in 16 bits.
struct Recipe {
  // Means of K (kvcache/transform.py): int32 [PAIRS], split angles [segments, PAIRS, 2], float32 [KV_HEADS, PAIRS].
  const int *low, *high;
  const u32* angles;
  const float *low_mean, *high_mean;
  // First tokens that are constants: [constants, KV_HEADS, HEAD_SIZE], [constants, KV_HEADS, HEAD_SIZE_V].
  const u16 *first_keys, *first_values;
  // Recent tokens: rings [entries, KV_HEADS, ring, HEAD_SIZE or HEAD_SIZE_V], and K and V of this step.
  const u16 *ring_keys, *ring_values, *new_keys, *new_values;
  const int* entries;   // of the sequences in ring_keys
  const int* seq_lens;  // with the recent tokens, which the plan leaves out
  u64 key_stride_token, key_stride_head, value_stride_token, value_stride_head;  // elements
  u32 ring;
  int reach;  // min(RECENT, window)
  int align;  // recent tokens are read in rounds that start at a multiple of this power of two
  int mean_segments;
};

struct Params {
  const void* query;      // [tokens, heads, HEAD_SIZE]
  const u8* pages;
  float* partial_out;     // [rows, KV_HEADS, COLS, HEAD_SIZE_V], of work items split across units
  float2* partial_ml;     // [rows, KV_HEADS, COLS]: (max in base 2, sum)
  PlanView plan;
  const int* block_tables;
  const float* k_scale;
  const float* v_scale;
  u64 query_stride_token, query_stride_head;  // elements
  u32 page_stride;                            // bytes
  int max_pages, num_seqs;
  float softmax_scale, softcap;
  int window;
  int follows_store;  // 1 if only the previous kernel may still run, and it stores the step's tokens
  Output output;  // for work items covered by a single unit
  Recipe recipe;
};
