// `wgmma` of every tile size: m64nNk16 with A in registers. A thread has N / 2 accumulators.
//
// Inline assembly has a fixed number of operands, hence two lines per size.
//
// Macro: X_BF16, 1 for bfloat16, 0 for float16

#pragma once
#include "kernels/runtime/basics.cuh"

#if X_BF16
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif

#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 \
  NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_40 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_48 NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_56 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_64 NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_72 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_80 NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_88 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_96 NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_104 NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_112 NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_120 NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define NAMES_128 NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

// Operands: the accumulators, four words of A, B's descriptor, and whether to add to the sums.
#define WGMMA_OF(tokens, sums, a0, a1, a2, a3, b, add) WGMMA_FORM(tokens, sums, a0, a1, a2, a3, b, add, 0)
#define WGMMA_FORM(tokens, sums, a0, a1, a2, a3, b, add, transposed) \
  "{.reg .pred p; setp.ne.b32 p, %" #add ", 0; wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32." WGMMA_TYPES \
  " {" sums "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1, " #transposed ";}"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define D16(i) D8(i), D8(i + 8)
#define D32(i) D16(i), D16(i + 16)
#define D64(i) D32(i), D32(i + 32)

#define SUMS_16 D8(0)
#define WGMMA_16 WGMMA_OF(16, NAMES_8, 8, 9, 10, 11, 12, 13)
#define SUMS_32 D16(0)
#define WGMMA_32 WGMMA_OF(32, NAMES_16, 16, 17, 18, 19, 20, 21)
#define SUMS_64 D32(0)
#define WGMMA_64 WGMMA_OF(64, NAMES_32, 32, 33, 34, 35, 36, 37)
#define SUMS_80 D32(0), D8(32)
#define WGMMA_80 WGMMA_OF(80, NAMES_40, 40, 41, 42, 43, 44, 45)
#define SUMS_96 D32(0), D16(32)
#define WGMMA_96 WGMMA_OF(96, NAMES_48, 48, 49, 50, 51, 52, 53)
#define SUMS_112 D32(0), D16(32), D8(48)
#define WGMMA_112 WGMMA_OF(112, NAMES_56, 56, 57, 58, 59, 60, 61)
#define SUMS_128 D64(0)
#define WGMMA_128 WGMMA_OF(128, NAMES_64, 64, 65, 66, 67, 68, 69)
#define SUMS_144 D64(0), D8(64)
#define WGMMA_144 WGMMA_OF(144, NAMES_72, 72, 73, 74, 75, 76, 77)
#define SUMS_160 D64(0), D16(64)
#define WGMMA_160 WGMMA_OF(160, NAMES_80, 80, 81, 82, 83, 84, 85)
#define SUMS_176 D64(0), D16(64), D8(80)
#define WGMMA_176 WGMMA_OF(176, NAMES_88, 88, 89, 90, 91, 92, 93)
#define SUMS_192 D64(0), D32(64)
#define WGMMA_192 WGMMA_OF(192, NAMES_96, 96, 97, 98, 99, 100, 101)
#define SUMS_208 D64(0), D32(64), D8(96)
#define WGMMA_208 WGMMA_OF(208, NAMES_104, 104, 105, 106, 107, 108, 109)
#define SUMS_224 D64(0), D32(64), D16(96)
#define WGMMA_224 WGMMA_OF(224, NAMES_112, 112, 113, 114, 115, 116, 117)
#define SUMS_240 D64(0), D32(64), D16(96), D8(112)
#define WGMMA_240 WGMMA_OF(240, NAMES_120, 120, 121, 122, 123, 124, 125)
#define SUMS_256 D64(0), D64(64)
#define WGMMA_256 WGMMA_OF(256, NAMES_128, 128, 129, 130, 131, 132, 133)

__device__ __forceinline__ u64 wgmma_descriptor(u32 low) {
  u64 b;
  asm("mov.b64 %0, {%1, %2};" : "=l"(b) : "r"(low), "r"(1024u / 16 | 1u << 30));
  return b;
}

#define SUMS(n) SUMS_##n
#define WGMMA(n) WGMMA_##n

// d = a b, or d += a b.
template <int N>
__device__ __forceinline__ void wgmma(float* d, const u32* a, u32 b_low, bool add);

// The asm statement stays on one line.
#define WGMMA_FUNCTION(n)                                                                                      \
  template <>                                                                                                  \
  __device__ __forceinline__ void wgmma<n>(float* d, const u32* a, u32 b_low, bool add) {                      \
    u64 b = wgmma_descriptor(b_low);                                                                           \
    asm volatile(WGMMA(n) : SUMS(n) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add)); \
  }

WGMMA_FUNCTION(16)
WGMMA_FUNCTION(32)
WGMMA_FUNCTION(64)
WGMMA_FUNCTION(80)
WGMMA_FUNCTION(96)
WGMMA_FUNCTION(112)
WGMMA_FUNCTION(128)
WGMMA_FUNCTION(144)
WGMMA_FUNCTION(160)
WGMMA_FUNCTION(176)
WGMMA_FUNCTION(192)
WGMMA_FUNCTION(208)
WGMMA_FUNCTION(224)
WGMMA_FUNCTION(240)
WGMMA_FUNCTION(256)

#define WGMMA_ROWS_64 WGMMA_FORM(64, NAMES_32, 32, 33, 34, 35, 36, 37, 1)
#define WGMMA_ROWS_128 WGMMA_FORM(128, NAMES_64, 64, 65, 66, 67, 68, 69, 1)
#define WGMMA_ROWS(n) WGMMA_ROWS_##n

// The same, with B's 16 rows, k, in memory instead of its columns: 128 bytes each with 128-byte swizzle, 64 columns,
// one after another. The other 64 columns are at a stride that `b_low` has.
template <int N>
__device__ __forceinline__ void wgmma_rows(float* d, const u32* a, u32 b_low, bool add);

#define WGMMA_ROWS_FUNCTION(n)                                                                                 \
  template <>                                                                                                  \
  __device__ __forceinline__ void wgmma_rows<n>(float* d, const u32* a, u32 b_low, bool add) {                 \
    u64 b = wgmma_descriptor(b_low);                                                                           \
    asm volatile(WGMMA_ROWS(n) : SUMS(n) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add)); \
  }

WGMMA_ROWS_FUNCTION(64)
WGMMA_ROWS_FUNCTION(128)
