// Shared by the decode kernels: loads queries as operands, scales operands, stores results.
//
// The macros are those of decode.cu.

#pragma once
#include "attention/decode/loader.cuh"

// Where a column's row of q begins, in elements; 0 for columns past the work item's last one.
__device__ __forceinline__ u64 query_row(const Params& p, const WorkItem& item, int head, int column) {
  return column < GROUP * item.queries
             ? (u64)(item.q_begin + column / GROUP) * p.query_stride_token +
                   (u64)(head * GROUP + column % GROUP) * p.query_stride_head
             : 0;
}

// Loads a lane's words of a row of q, aligned to 16 bytes; c is the lane's index in its group of four.
// Volatile, so that the compiler does not move the loads.
__device__ __forceinline__ void load_query(u32 (*w)[2], const void* query, u64 base, int c) {
  const u16* q = (const u16*)query + base;
#pragma unroll
  for (int j = 0; j < STEPS_K; j += 2) {
    if (K_KIND == 4) {
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w[j][0]), "=r"(w[j][1]), "=r"(w[j + 1][0]), "=r"(w[j + 1][1])
                   : "l"(q + 16 * j + 8 * c));
      continue;
    }
#pragma unroll
    for (int k = j; k < j + 2; k++) {
      if (K_KIND < 16) {
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                     : "=r"(w[k][0]), "=r"(w[k][1])
                     : "l"(q + 16 * k + 4 * c));
      } else {
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(w[k][0]) : "l"(q + 16 * k + 2 * c));
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(w[k][1]) : "l"(q + 16 * k + 2 * c + 8));
      }
    }
  }
}

// Multiplies a row of q by the Hadamard matrix (numerics/hadamard.py); four lanes hold a row.
__device__ __forceinline__ void rotate_query(u32 (*w)[2]) {
  // A lane has runs of consecutive dims; the next dims are those of the group's other lanes.
  constexpr int RUN = K_KIND == 4 ? 8 : K_KIND < 16 ? 4 : 2, DIMS = HEAD_SIZE / 4;
  const int c = threadIdx.x & 3;
  float x[DIMS];
#pragma unroll
  for (int i = 0; i < DIMS; i++) x[i] = query_value((u16)(w[i / 4][i / 2 % 2] >> 16 * (i & 1)));
  auto butterflies = [&](int h) {
#pragma unroll
    for (int i = 0; i < DIMS; i++)
      if (!(i & h)) {
        const float a = x[i], b = x[i + h];
        x[i] = a + b, x[i + h] = a - b;
      }
  };
#pragma unroll
  for (int h = 1; h < RUN; h *= 2) butterflies(h);
#pragma unroll
  for (int h = 1; h < 4; h *= 2)
#pragma unroll
    for (int i = 0; i < DIMS; i++) {
      const float y = __shfl_xor_sync(~0u, x[i], h);
      x[i] = c & h ? y - x[i] : x[i] + y;
    }
#pragma unroll
  for (int h = RUN; h < DIMS; h *= 2) butterflies(h);
  constexpr float NORM = hadamard_norm(HEAD_SIZE);
#pragma unroll
  for (int i = 0; i < DIMS; i += 2) w[i / 4][i / 2 % 2] = pack_output(x[i] * NORM, x[i + 1] * NORM);
}

// Unpacks the words to floats for every k step, in the order of dims of Operands::of_k.
__device__ __forceinline__ void query_values(float (*x)[4], const u32 (*w)[2]) {
#pragma unroll
  for (int j = 0; j < STEPS_K; j += 2) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = query_value((u16)(w[j + i / 4][i / 2 % 2] >> 16 * (i & 1)));
    // The order of unpack_e2m1.
    constexpr int OF_E2M1[8] = {3, 7, 1, 5, 2, 6, 0, 4};
#pragma unroll
    for (int i = 0; i < 8; i++) x[j + i / 4][i % 4] = y[K_KIND == 4 ? OF_E2M1[i] : i];
  }
}

// Exponent of the power of two that scales the absmax of a row to [2^9, 2^10). Four lanes hold a row.
__device__ __forceinline__ int fp16_exponent(const float (*x)[4]) {
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < STEPS_K; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(x[j][i]));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  const int exponent = largest > 0.0f ? 136 - (int)((__float_as_int(largest) >> 23) & 255) : 0;
  return max(-126, min(126, exponent));
}

// Multiplies K's operands of two k steps by the scales of tokens g and g + 8.
__device__ __forceinline__ void scale_k(u32 (*a)[4], u32 scale0, u32 scale1) {
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int k = 0; k < 4; k++) a[i][k] = hmul2(a[i][k], k & 1 ? scale1 : scale0);
}

// Multiplies V's operands by the scales of tokens 2c, 2c + 1 and of tokens 2c + 8, 2c + 9.
__device__ __forceinline__ void scale_v(u32* a, u32 scale0, u32 scale1) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = hmul2(a[i], i < 2 ? scale0 : scale1);
}

// Zeroes tokens from .. to - 1 of V in a tile, in nvfp4 only their scales, since its codes cannot be NaN. No query sees
// these tokens: their slots were never written, or they are before every window. Their weight is 0, but they may be
// NaN, and 0 * NaN is NaN.
__device__ __forceinline__ void clear_rows(u32 tile, int from, int to) {
  constexpr int WIDTH = V_KIND == 4 ? SF_V : ROW_V;
  constexpr u32 START = V_KIND == 4 ? OFF_SF_V : OFF_V;
  from = max(from, 0), to = max(min(to, TILE), 0);  // before they are multiplied: windows can be long
  for (int i = from * WIDTH + 4 * (threadIdx.x & 31); i < to * WIDTH; i += 128)
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + START + i), "r"(0) : "memory");
}

// Stores consecutive values to a row: float for partial results, 16 bits for the output.
__device__ __forceinline__ void store_values(float* to, float a, float b, float c, float d) {
  *(float4*)to = make_float4(a, b, c, d);
}
__device__ __forceinline__ void store_values(u16* to, float a, float b, float c, float d) {
  *(uint2*)to = make_uint2(pack_output(a, b), pack_output(c, d));
}
__device__ __forceinline__ void store_values(float* to, float a, float b) {
  *(float2*)to = make_float2(a, b);
}
__device__ __forceinline__ void store_values(u16* to, float a, float b) {
  *(u32*)to = pack_output(a, b);
}
__device__ __forceinline__ void store_values(float* to, float a) { *to = a; }
__device__ __forceinline__ void store_values(u16* to, float a) { *to = (u16)pack_output(a, 0.0f); }

// Stores column i of the accumulators, which are in the order of Operands::of_v, to a row.
template <class Value>
__device__ __forceinline__ void store_row(Value* row, const float (*out)[4], int i, int g,
                                          float factor) {
#pragma unroll
  for (int j = 0; j < STEPS_V; j++) {
    const float low = out[j][i] * factor, high = out[j][2 + i] * factor;
    if (V_KIND == 4) {
      // Dims 4g .. 4g + 3 of 32: 0 and 2 are in tile j + 1, 1 and 3 in tile j; 0 and 1 in row g + 8, 2 and 3 in row g.
      if (j % 2 == 0)
        store_values(row + 16 * j + 4 * g, out[j + 1][2 + i] * factor, high,
                     out[j + 1][i] * factor, low);
    } else if (V_KIND < 16) {
      store_values(row + 16 * j + 2 * g, low, high);
    } else {
      store_values(row + 16 * j + g, low);
      store_values(row + 16 * j + g + 8, high);
    }
  }
}
