// Formats of a cache, and how their bits become matmul operands.
//
// K_KIND and V_KIND say how K and V are stored:
//   4   E2M1 with an E4M3 scale per 16 values (nvfp4)
//   8   E4M3, 9 E5M2 (fp8, one scale per tensor)
//   16  fp16, 17 bf16
//
// E2M1 to fp16 without tables: `s|eem` at the top of an fp16 is the same value times 2^-14,
// subnormals included. From a word of eight nibbles, two bit selects give four bytes `s0000eem0`
// each (e5m2 bytes), and a mask with an optional shift by 8 gives a pair of halves: 11 operations
// for 8 values. Times the block's E4M3 scale the product is exact in fp16 (at most 6 significant
// bits, a multiple of 2^-24). Which nibble lands in which half is irrelevant: the order of k inside
// a matmul is free as long as the other operand follows it, so q is permuted once.

#pragma once
#include "attention/decode/work.cuh"

#define BITS(kind) ((kind) == 4 ? 4 : (kind) < 16 ? 8 : 16)

// K and V are read once (unless several work items need them), so they are marked evict-first to keep the
// next kernels' data in L2. Not where warps share a ring: for some of those kernels ptxas 13.0 reads the
// policy from a register that it never sets, which is an illegal instruction.
#if defined(RING_WARPS) || GROUP > COLS
__device__ __forceinline__ void cp_async16(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src));
}

__device__ __forceinline__ void cp_async4(u32 dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src));
}
#else
__device__ __forceinline__ u64 evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void cp_async16(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "l"(evict_first()));
}

__device__ __forceinline__ void cp_async4(u32 dst, const void* src) {
  asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 4, %2;" ::"r"(dst), "l"(src),
               "l"(evict_first()));
}
#endif

// Through L1, for data that several warps of an SM read.
__device__ __forceinline__ void cp_async16_cached(u32 dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src));
}

__device__ __forceinline__ void cp_async16_if(bool wanted, u32 dst, const void* src) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(dst),
      "l"(src), "r"((int)wanted));
}

template <bool BF16>
__device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
  if (BF16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 movmatrix(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ u32 pack_half2(float lo, float hi) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

__device__ __forceinline__ u32 pack_bf162(float lo, float hi) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

__device__ __forceinline__ float half_to_float(u32 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)x));
  return y;
}

template <bool BF16>
__device__ __forceinline__ u32 pack(float lo, float hi) {
  return BF16 ? pack_bf162(lo, hi) : pack_half2(lo, hi);
}

// A value of the query's dtype as float.
__device__ __forceinline__ float query_value(u16 x) {
#if defined(Q_BF16)
  return __int_as_float((u32)x << 16);
#else
  return half_to_float(x);
#endif
}

__device__ __forceinline__ u32 hmul2(u32 a, u32 b) {
  u32 y;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// The larger value; if one is NaN, the other.
__device__ __forceinline__ u32 max_half2(u32 a, u32 b) {
  u32 y;
  asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// Powers of two in constant memory: with literals the compiler would make shifts of the products in shift_left.
#if MULTIPLIES_SHIFTS
__constant__ u32 FACTORS[3] = {1 << 1, 1 << 4, 1 << 8};
#endif

// x << N, by a multiplication if MULTIPLIES_SHIFTS. In the loop over tiles the pipe of LOP3 is the busiest one, and
// multiplications use another. In kernels for recipes the compiler would place too many of these shifts on that of LOP3.
template <int N>
__device__ __forceinline__ u32 shift_left(u32 x) {
#if MULTIPLIES_SHIFTS
  static_assert(N == 1 || N == 4 || N == 8);
  return x * FACTORS[N == 1 ? 0 : N == 4 ? 1 : 2];
#else
  return x << N;
#endif
}

// Eight nibbles to four pairs of halves, each value times 2^-14. Byte b holds elements 2b (low
// nibble) and 2b + 1: h0 = (3, 7), h1 = (1, 5), h2 = (2, 6), h3 = (0, 4).
__device__ __forceinline__ void unpack_e2m1(u32* h, u32 w) {
  const u32 keep = 0x8E008E00u;
  u32 z = select_bits(w >> 3, w, 0x0E0E0E0Eu);
  u32 y = select_bits(shift_left<1>(w), shift_left<4>(w), 0x0E0E0E0Eu);
  h[0] = z & keep;
  h[1] = shift_left<8>(z) & keep;
  h[2] = y & keep;
  h[3] = shift_left<8>(y) & keep;
}

// The two E4M3 scales in the low 16 bits to a pair of halves; NaN stays NaN.
__device__ __forceinline__ u32 scales_to_half2(u32 bytes) {
  u32 y;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((u16)bytes));
#else
  // Spread to the upper byte of each half: the value times 2^-8, NaN (0x7F) as 480.
  bytes = __byte_perm(bytes, 0, 0x1404) & 0x7F007F00u;
  y = hmul2((bytes >> 1) & 0x3F803F80u, 0x5C005C00u);
  const u32 nan = (bytes + 0x01000100u) & 0x80008000u;
  y |= (nan >> 15) * 0x7E00u;
#endif
  return y;
}

// Two FP8 values in the low 16 bits to a pair of halves, E4M3 times FP8_UNIT's inverse; NaN stays NaN.
#if __CUDA_ARCH__ >= 890
#define FP8_UNIT 1.0f
#else
#define FP8_UNIT 256.0f
#endif
__device__ __forceinline__ u32 e4m3_to_half2(u32 bytes) {
  u32 y;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((u16)bytes));
#else
  bytes = __byte_perm(bytes, 0, 0x1404);
  y = (bytes & 0x80008000u) | ((bytes & 0x7F007F00u) >> 1);
  const u32 nan = ((bytes & 0x7F007F00u) + 0x01000100u) & 0x80008000u;
  y |= (nan >> 15) * 0x7E00u;
#endif
  return y;
}

// An E5M2 value is the upper byte of a half.
__device__ __forceinline__ u32 e5m2_to_half2(u32 bytes) { return __byte_perm(bytes, 0, 0x1404); }

// Stores four words to an address aligned to 16 bytes.
__device__ __forceinline__ void store_words4(u32 address, const u32* x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// Loads a row of scales: `WORDS` words from an address aligned to min(WORDS, 4) words.
template <int WORDS>
__device__ __forceinline__ void load_words(u32* x, u32 address) {
  if (WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4)
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[i]), "=r"(x[i + 1]), "=r"(x[i + 2]), "=r"(x[i + 3])
                   : "r"(address + 4 * i));
  } else if (WORDS % 2 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 2)
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(x[i]), "=r"(x[i + 1])
                   : "r"(address + 4 * i));
  } else {
#pragma unroll
    for (int i = 0; i < WORDS; i++)
      x[i] = load_shared_word(address + 4 * i);
  }
}

// Unpacks the result of one ldmatrix.x4 into A operands of 16 x 16. It loads 16 rows of two 16-byte
// chunks: rows 0-7 and 8-15 of the first chunk, then of the second.
template <int KIND>
struct Operands {
  static constexpr int TILES = 16 / BITS(KIND);

  // K: tokens are rows. From a chunk, a lane has 32 bits of token g and of token g + 8.
  __device__ __forceinline__ static void of_k(u32 (*a)[4], const u32* r) {
    if (KIND == 4) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        u32 x[4], y[4];
        unpack_e2m1(x, r[2 * k]);
        unpack_e2m1(y, r[2 * k + 1]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          a[2 * k + i][0] = x[2 * i];
          a[2 * k + i][1] = y[2 * i];
          a[2 * k + i][2] = x[2 * i + 1];
          a[2 * k + i][3] = y[2 * i + 1];
        }
      }
    } else if (KIND < 16) {
#pragma unroll
      for (int k = 0; k < 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) a[k][i] = fp8(r[2 * k + (i & 1)] >> (i >> 1) * 16);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) a[0][i] = r[i];
    }
  }

  // V, transposed: dims are rows. From a chunk, a lane has 16 bits of tokens 2c and 2c + 1, and of
  // tokens 2c + 8 and 2c + 9.
  __device__ __forceinline__ static void of_v(u32 (*a)[4], const u32* r) {
    if (KIND == 4) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        u32 x[4], y[4];
        unpack_e2m1(x, r[2 * k]);
        unpack_e2m1(y, r[2 * k + 1]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          a[2 * k + i][0] = x[2 * i];
          a[2 * k + i][1] = x[2 * i + 1];
          a[2 * k + i][2] = y[2 * i];
          a[2 * k + i][3] = y[2 * i + 1];
        }
      }
    } else if (KIND < 16) {
#pragma unroll
      for (int k = 0; k < 2; k++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const u32 pairs = __byte_perm(r[2 * k + i], 0, 0x3120);
          a[k][2 * i] = fp8(pairs);
          a[k][2 * i + 1] = fp8(pairs >> 16);
        }
    } else {
      a[0][0] = r[0];
      a[0][1] = r[2];
      a[0][2] = r[1];
      a[0][3] = r[3];
    }
  }

  __device__ __forceinline__ static u32 fp8(u32 bytes) {
    return KIND == 8 ? e4m3_to_half2(bytes & 0xFFFFu) : e5m2_to_half2(bytes);
  }

  // Scale from operands to the stored values.
  static constexpr float UNIT = KIND == 4 ? 16384.0f : KIND == 8 ? FP8_UNIT : 1.0f;
};
