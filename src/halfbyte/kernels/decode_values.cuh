// What the decode kernels share: queries into operands, scales onto operands, results out.
//
// The macros are those of decode.cu.

#pragma once
#include "decode_loader.cuh"

template <bool BF16>
__device__ __forceinline__ u32 pack(float lo, float hi) {
  return BF16 ? pack_bf162(lo, hi) : pack_half2(lo, hi);
}

__device__ __forceinline__ float query_value(const u16* q) {
#if defined(Q_BF16)
  return __int_as_float((u32)*q << 16);
#else
  return half_to_float(*q);
#endif
}

// A lane's part of q for every step of k, in the order in which Operands::of_k has K's dims. The row at
// `base` is aligned to 16 bytes; c is the lane's place in a group of four.
__device__ __forceinline__ void load_query(float (*x)[4], const void* query, u64 base, int c) {
  const u16* q = (const u16*)query + base;
  if (K_KIND == 4) {
#pragma unroll
    for (int j = 0; j < STEPS_K; j += 2) {
      const uint4 words = *(const uint4*)(q + 16 * j + 8 * c);
      const u32 w[4] = {words.x, words.y, words.z, words.w};
      float y[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const u16 half = (u16)(w[i / 2] >> 16 * (i & 1));
        y[i] = query_value(&half);
      }
      // The order of unpack_e2m1.
      x[j][0] = y[3], x[j][1] = y[7], x[j][2] = y[1], x[j][3] = y[5];
      x[j + 1][0] = y[2], x[j + 1][1] = y[6], x[j + 1][2] = y[0], x[j + 1][3] = y[4];
    }
  } else {
#pragma unroll
    for (int j = 0; j < STEPS_K; j++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        x[j][i] = query_value(q + 16 * j + (K_KIND < 16 ? 4 * c + i : 2 * c + i % 2 + i / 2 * 8));
  }
}

// Of the power of two that brings the largest value to [2^9, 2^10).
__device__ __forceinline__ int fp16_exponent(float largest) {
  const int exponent = largest > 0.0f ? 136 - (int)((__float_as_int(largest) >> 23) & 255) : 0;
  return max(-126, min(126, exponent));
}

// Two steps of K's operands times the scales of tokens g and g + 8.
__device__ __forceinline__ void scale_k(u32 (*a)[4], u32 scale0, u32 scale1) {
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int k = 0; k < 4; k++) a[i][k] = hmul2(a[i][k], k & 1 ? scale1 : scale0);
}

// V's operands times the scales of tokens 2c, 2c + 1 and of tokens 2c + 8, 2c + 9.
__device__ __forceinline__ void scale_v(u32* a, u32 scale0, u32 scale1) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = hmul2(a[i], i < 2 ? scale0 : scale1);
}

// V's rows `from .. to` of a tile, which no query sees: slots that were never written, and keys before
// every window. They may hold NaN, and 0 * NaN is NaN. Of nvfp4 only the scales can be NaN.
__device__ __forceinline__ void clear_rows(u32 tile, int from, int to) {
  constexpr int WIDTH = V_KIND == 4 ? SF_V : ROW_V;
  constexpr u32 START = V_KIND == 4 ? OFF_SF_V : OFF_V;
  for (int i = max(from, 0) * WIDTH + 4 * (threadIdx.x & 31); i < min(to, TILE) * WIDTH; i += 128)
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + START + i), "r"(0) : "memory");
}

// Column i of the accumulators to a row of partial results, in the order of Operands::of_v.
__device__ __forceinline__ void store_row(float* row, const float (*out)[4], int i, int g,
                                          float factor) {
#pragma unroll
  for (int j = 0; j < STEPS_V; j++) {
    const float low = out[j][i] * factor, high = out[j][2 + i] * factor;
    if (V_KIND == 4) {
      // Dims 4g .. 4g + 3 of 32: tile 1 has 0 and 2, tile 0 has 1 and 3, the upper rows the first.
      if (j % 2 == 0)
        *(float4*)(row + 16 * j + 4 * g) =
            make_float4(out[j + 1][2 + i] * factor, high, out[j + 1][i] * factor, low);
    } else if (V_KIND < 16) {
      *(float2*)(row + 16 * j + 2 * g) = make_float2(low, high);
    } else {
      row[16 * j + g] = low;
      row[16 * j + g + 8] = high;
    }
  }
}
