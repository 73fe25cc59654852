// The end of a tile in prefill.cu: sinks, division, output and log-denominators.

#pragma once
#include "attention/prefill/sm90/softmax.cuh"

// `row`: the first of the thread's two in the tile.
__device__ __forceinline__ void store(const Params& p, const Tile& tile, int row, const Softmax& softmax,
                                      const float* sums) {
  const int c = threadIdx.x % 4, num_heads = tile.num_heads();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int at = row + 8 * i, token = at / HEADS, head = at % HEADS;
    const bool exists = token < tile.count && head < num_heads;
    const int out_head = tile.head + head;
    float top = softmax.top[i], total = sum_of_row(softmax.total[i]), factor = 1.0f;
    if (p.sinks && exists) {
      const float sink = p.sinks[out_head] * LOG2E, own = top;
      top = fmaxf(top, sink);
      factor = ex2(own - top);
      total = fmaf(total, factor, ex2(sink - top));
    }
    factor /= total;
    u16* const out = p.out + (u64)(tile.first_token + token) * p.out_token + out_head * p.out_head;
#pragma unroll
    for (int j = 0; j < HEAD_SIZE / 32; j++) {
      u32 words[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float* x = sums + 16 * j + 4 * k + 2 * i;
        words[k] = pack_pair(x[0] * factor, x[1] * factor);
      }
      transpose_words<1>(words);
      if (exists) *(uint4*)(out + 32 * j + 8 * c) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (p.lse && exists && c == 0)
      p.lse[(u64)(tile.first_token + token) * (p.kv_heads * GROUP) + out_head] =
          (top + log2f(total)) * (1.0f / LOG2E);
  }
}
