// Unpacks weights and block scales as loaded to operands of the matmul.
//
// The order of k in a matmul is free, as long as x has the same: a lane's word of eight values, k = 0 .. 7, becomes
// the pairs (0, 4), (1, 5), (2, 6), (3, 7), and x is permuted alike (tokens.cuh).
//
// Macros: X_BF16, see linear/w4a16/values.cuh; MX, 1 for MXFP4 (E8M0 scales per block of 32), 0 for NVFP4 (E4M3, 16).

#pragma once
#include "linear/w4a16/matmul.cuh"

#define OPERAND_SCALE 2048.0f  // operands are values times block scales times 2^-11

// Pairs of values times 2^-126 (bfloat16) or 2^-14 (float16).
__device__ __forceinline__ void unpack_word(u32* pairs, u32 w) {
#if X_BF16
  // Each 16-bit half gets two nibbles: their signs stay in bits 15 and 11, their magnitudes move down by six bits, to
  // bits 8 .. 6 and 4 .. 2. In bfloat16, bits 8 .. 6 are the last two of the exponent and the first of the mantissa.
  const u32 keep = 0x81C081C0u, sign = 0x88008800u;
  const u32 odd = select_bits(w, w >> 6, sign);
  const u32 even = select_bits(w << 8, w << 2, sign);
  pairs[0] = even << 4 & keep;
  pairs[1] = even & keep;
  pairs[2] = odd << 4 & keep;
  pairs[3] = odd & keep;
#else
  // As bytes of E5M2: sign in bit 7, magnitude in bits 3 to 1.
  const u32 keep = 0x8E008E00u, magnitude = 0x0E0E0E0Eu;
  const u32 odd = select_bits(w >> 3, w, magnitude), even = select_bits(w << 1, w << 4, magnitude);
  pairs[0] = even << 8 & keep;
  pairs[1] = odd << 8 & keep;
  pairs[2] = even & keep;
  pairs[3] = odd & keep;
#endif
}

// Two rows' block scales for a lane's 32 k, times 2^115 (bfloat16) or 2^3 (float16): row g in the lower half of a
// register, row g + 8 in the upper one.
struct Scales {
#if MX
  u32 both, excess;  // the scale is both * excess; `excess` is set only if `large`
  bool large;        // whether any lane has an excess other than 1

  // `upper` and `lower` rows' bytes.
  __device__ __forceinline__ void unpack(u32 upper, u32 lower) {
    both = field(upper) | field(lower) << 16;
    large = __any_sync(~0u, max(upper, lower) > MAX_EXPONENT);
    if (large) excess = rest(upper) | rest(lower) << 16;
  }

  // bfloat16's exponent would overflow above 2^12.
  static constexpr u32 MAX_EXPONENT = 139;
  __device__ __forceinline__ static u32 field(u32 e) { return min(e, MAX_EXPONENT) + 115 << 7; }
  __device__ __forceinline__ static u32 rest(u32 e) {
    return e == 255 ? 0x7FFF : 127 + e - min(e, MAX_EXPONENT) << 7;  // 255 is NaN
  }
#else
  u32 of_block[2];

  // `upper` and `lower` rows' bytes, of two blocks each. NaN is not kept: layers refuse it at load.
  __device__ __forceinline__ void unpack(u32 upper, u32 lower) {
    const u32 bytes = upper | lower << 16;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 x = bytes >> 8 * i & 0x007F007Fu;
#if X_BF16
      of_block[i] = multiply2(multiply2(x << 4, 0x7F007F00u), 0x75807580u);  // times 2^-120, 2^127, 2^108
#else
      of_block[i] = multiply2(x << 7, 0x68006800u);  // times 2^-8, 2^11
#endif
    }
  }
#endif

  // Operand A of two matmuls. `upper` and `lower` are words `j` (0 .. 3) of rows g and g + 8.
  __device__ __forceinline__ void operands(u32 (*a)[4], u32 upper, u32 lower, int j) const {
    u32 pairs[2][4];
    unpack_word(pairs[0], upper);
    unpack_word(pairs[1], lower);
#if MX
    const u32 scale = both;
#else
    const u32 scale = of_block[j / 2];
#endif
#pragma unroll
    for (int i = 0; i < 4; i++) {
      a[i / 2][i % 2 * 2] = multiply2(pairs[0][i], both_low(scale));
      a[i / 2][i % 2 * 2 + 1] = multiply2(pairs[1][i], both_high(scale));
    }
#if MX
    if (large) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        a[i / 2][i % 2 * 2] = multiply2(a[i / 2][i % 2 * 2], both_low(excess));
        a[i / 2][i % 2 * 2 + 1] = multiply2(a[i / 2][i % 2 * 2 + 1], both_high(excess));
      }
    }
#endif
  }
};
