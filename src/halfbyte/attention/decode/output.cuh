// Epilogue of an attention row: adds the sink to the denominator, writes output and LSE.
//
// Macros: HEAD_SIZE_V, KV_HEADS, GROUP, Q_BF16 or Q_FP16.

#pragma once
#include "attention/decode/work.cuh"

struct Output {
  void* out;                      // [tokens, heads, HEAD_SIZE_V]
  float* lse;                     // [tokens, heads] or null
  const float* sinks;             // [heads] or null
  u64 stride_token, stride_head;  // of `out`, in elements
};

__device__ __forceinline__ u32 pack_output(float lo, float hi) {
  u32 y;
#if defined(Q_BF16)
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
#endif
  return y;
}

// A row of the output: a query token and head (a column of a work item).
struct OutputRow {
  int token, head;

  __device__ __forceinline__ OutputRow(int token, int head) : token(token), head(head) {}
  __device__ __forceinline__ OutputRow(const WorkItem& item, int kv_head, int column)
      : token(item.q_begin + column / GROUP), head(kv_head * GROUP + column % GROUP) {}

  __device__ __forceinline__ u16* values(const Output& output) const {
    return (u16*)output.out + token * output.stride_token + head * output.stride_head;
  }

  __device__ __forceinline__ float sink(const Output& output) const {
    return output.sinks ? output.sinks[head] * LOG2E : NEG_INF;
  }

  // Returns the factor that normalizes the row's weighted values. Values and the sum of weights are
  // both times 2^-top. Writes LSE if `writes_lse`. A row without keys has `top` = -inf.
  __device__ __forceinline__ float finish(const Output& output, float sink, float top, float sum,
                                          bool writes_lse) const {
    const float new_top = fmaxf(top, sink);
    const float rescale = top == NEG_INF ? 0.0f : ex2(top - new_top);
    const float all = sum * rescale + (sink == NEG_INF ? 0.0f : ex2(sink - new_top));
    if (writes_lse && output.lse)
      output.lse[(u64)token * (KV_HEADS * GROUP) + head] =
          all == 0.0f ? NEG_INF : (new_top + log2f(all)) / LOG2E;
    return all > 0.0f ? rescale / all : 0.0f;
  }
};
