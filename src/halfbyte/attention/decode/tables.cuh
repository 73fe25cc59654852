// The tables of a step that the decode kernels read before their first tile.
//
// Macros: SEGMENT and PAIRS of mean_operands.cuh, RECENT of keys.cuh.

#pragma once
#include "attention/decode/loader.cuh"

// Prefetches tables that the kernel reads before its first tile; the tiles of the previous layer have evicted them.
__device__ __forceinline__ void prefetch_tables(const Params& p) {
  prefetch_table(p.plan.data, p.plan.items_offset * 4);
  prefetch_table(p.block_tables, p.num_seqs * p.max_pages * 4);
#if SEGMENT
  prefetch_table(p.recipe.angles, p.recipe.mean_segments * PAIRS * 8);
  prefetch_table(p.recipe.low_mean, KV_HEADS * PAIRS * 4);
  prefetch_table(p.recipe.high_mean, KV_HEADS * PAIRS * 4);
#endif
#if RECENT
  prefetch_table(p.recipe.entries, p.num_seqs * 4);
  prefetch_table(p.recipe.seq_lens, p.num_seqs * 4);
#endif
}
