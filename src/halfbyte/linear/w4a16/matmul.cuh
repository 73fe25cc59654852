// The tensor cores' product of 16 rows of W and 8 columns of x, 16 k.
//
// Macro: X_BF16, see values.cuh

#pragma once
#include "linear/w4a16/values.cuh"

// c += a b: fragments of m16n8k16, float32 sums.
__device__ __forceinline__ void matmul(float* c, const u32* a, u32 b0, u32 b1) {
#if X_BF16
#define MATMUL "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
#define MATMUL "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
  asm volatile(MATMUL "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
