// `wgmma` of gemm.cu, for every tile size: m64nNk16 with N = TOKENS and A in registers. A thread has TOKENS / 2
// accumulators.
//
// Inline assembly has a fixed number of operands, hence a line per size.

#pragma once
#include "kernels/runtime/basics.cuh"

#if X_BF16
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif

#define NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
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
#define WGMMA_OF(tokens, types, sums, a0, a1, a2, a3, b, add) \
  "{.reg .pred p; setp.ne.b32 p, %" #add ", 0; wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32." types \
  " {" sums "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1, 0;}"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define D16(i) D8(i), D8(i + 8)
#define D32(i) D16(i), D16(i + 16)
#define D64(i) D32(i), D32(i + 32)

#if TOKENS == 64
#define D D32(0)
#define WGMMA(types) WGMMA_OF(64, types, NAMES_32, 32, 33, 34, 35, 36, 37)
#elif TOKENS == 80
#define D D32(0), D8(32)
#define WGMMA(types) WGMMA_OF(80, types, NAMES_40, 40, 41, 42, 43, 44, 45)
#elif TOKENS == 96
#define D D32(0), D16(32)
#define WGMMA(types) WGMMA_OF(96, types, NAMES_48, 48, 49, 50, 51, 52, 53)
#elif TOKENS == 112
#define D D32(0), D16(32), D8(48)
#define WGMMA(types) WGMMA_OF(112, types, NAMES_56, 56, 57, 58, 59, 60, 61)
#elif TOKENS == 128
#define D D64(0)
#define WGMMA(types) WGMMA_OF(128, types, NAMES_64, 64, 65, 66, 67, 68, 69)
#elif TOKENS == 144
#define D D64(0), D8(64)
#define WGMMA(types) WGMMA_OF(144, types, NAMES_72, 72, 73, 74, 75, 76, 77)
#elif TOKENS == 160
#define D D64(0), D16(64)
#define WGMMA(types) WGMMA_OF(160, types, NAMES_80, 80, 81, 82, 83, 84, 85)
#elif TOKENS == 176
#define D D64(0), D16(64), D8(80)
#define WGMMA(types) WGMMA_OF(176, types, NAMES_88, 88, 89, 90, 91, 92, 93)
#elif TOKENS == 192
#define D D64(0), D32(64)
#define WGMMA(types) WGMMA_OF(192, types, NAMES_96, 96, 97, 98, 99, 100, 101)
#elif TOKENS == 208
#define D D64(0), D32(64), D8(96)
#define WGMMA(types) WGMMA_OF(208, types, NAMES_104, 104, 105, 106, 107, 108, 109)
#elif TOKENS == 224
#define D D64(0), D32(64), D16(96)
#define WGMMA(types) WGMMA_OF(224, types, NAMES_112, 112, 113, 114, 115, 116, 117)
#elif TOKENS == 240
#define D D64(0), D32(64), D16(96), D8(112)
#define WGMMA(types) WGMMA_OF(240, types, NAMES_120, 120, 121, 122, 123, 124, 125)
#elif TOKENS == 256
#define D D64(0), D64(64)
#define WGMMA(types) WGMMA_OF(256, types, NAMES_128, 128, 129, 130, 131, 132, 133)
#endif

// d = a b, or d += a b.
__device__ __forceinline__ void wgmma(float* d, const u32* a, u32 b_low, bool add) {
  u64 b;
  asm("mov.b64 %0, {%1, %2};" : "=l"(b) : "r"(b_low), "r"(1024u / 16 | 1u << 30));
  asm volatile(WGMMA(WGMMA_TYPES)
               : D
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}
