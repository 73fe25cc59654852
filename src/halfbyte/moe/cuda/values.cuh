// Unpacks weights and block scales in the order of packed.py to operands of the matmul.
//
// The order of k in a matmul is free, as long as x has the same: of 64 k, lane c of four has k = 16 c .. 16 c + 15. Its
// word j of eight values feeds two matmuls, h = 0, 1, by two pairs each, q = 0, 1: value 4 h + 2 q + b of the word is
// where a matmul in natural order has k = 8 q + 2 c + b.
//
// Macros: X_BF16, see linear/w4a16/values.cuh; MX, 1 for MXFP4 (E8M0 scales per block of 32), 0 for NVFP4 (E4M3, 16).

#pragma once
#include "linear/w4a16/matmul.cuh"

#define CHUNK_K 64
#define PART_K 128
#define CHUNK_BYTES 512
#define SCALE_BYTES (MX ? 64 : 128)  // of a part
#define PART_BYTES (SCALE_BYTES + 2 * CHUNK_BYTES)
#define OPERAND_SCALE 2048.0f  // operands are values times block scales times 2^-11

// The channel of rows g and g + 8 of a tile of gate and up, which is in the order of k above.
__device__ __forceinline__ int channel_of(int tile, int g) {
  return tile / 8 * 64 + tile % 8 * 2 + g / 2 * 16 + g % 2;
}

// The offset of a lane's word of scales in a part.
__device__ __forceinline__ u32 scale_offset(int lane) { return (MX ? lane / 2 : lane) * 4; }

// Two rows' block scales for a lane's k of both chunks of a part, times 2^115 (bfloat16) or 2^3 (float16): row g in the
// lower half of a register, row g + 8 in the upper one.
struct Scales {
  u32 of_chunk[2];
#if MX
  u32 excess[2];  // the scale is of_chunk * excess; set only if `large`
  bool large;     // whether any lane has an excess other than 1

  __device__ __forceinline__ void unpack(u32 word, u32) {
    const u32 bytes[2] = {__byte_perm(word, 0, 0x4140), __byte_perm(word, 0, 0x4342)};
    of_chunk[0] = bytes[0] + 0x00730073u << 7;
    of_chunk[1] = bytes[1] + 0x00730073u << 7;
    // Bits that a byte above MAX_EXPONENT sets.
    large = __any_sync(~0u, (bytes[0] + 0x00740074u | bytes[1] + 0x00740074u) & 0x01000100u);
    if (large) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 upper = bytes[i] & 255, lower = bytes[i] >> 16;
        of_chunk[i] = field(upper) | field(lower) << 16;
        excess[i] = rest(upper) | rest(lower) << 16;
      }
    }
  }

  // Makes `excess` 1 where it is not set.
  __device__ __forceinline__ void complete_excess() {
    if (!large) excess[0] = excess[1] = 0x3F803F80u;
  }

  // bfloat16's exponent would overflow above 2^12.
  static constexpr u32 MAX_EXPONENT = 139;
  __device__ __forceinline__ static u32 field(u32 e) { return min(e, MAX_EXPONENT) + 115 << 7; }
  __device__ __forceinline__ static u32 rest(u32 e) {
    return e == 255 ? 0x7FFF : 127 + e - min(e, MAX_EXPONENT) << 7;  // 255 is NaN
  }
#else
  // `exponent` is SCALE_EXPONENT, see unpack_scales.
  __device__ __forceinline__ void unpack(u32 word, u32 exponent) { unpack_scales(of_chunk, word, exponent); }
#endif

  // Operand A of two matmuls, from a word of rows g and g + 8 of a chunk.
  __device__ __forceinline__ void operands(u32 (*a)[4], u32 upper, u32 lower, int chunk) const {
    operands_if<false>(a, upper, lower, chunk);
#if MX
    if (large) multiply_excess(a, chunk);
#endif
  }

  // The same where it is known whether there is an excess.
  template <bool LARGE>
  __device__ __forceinline__ void operands_if(u32 (*a)[4], u32 upper, u32 lower, int chunk) const {
    u32 pairs[2][4];
    unpack_values(pairs[0], upper);
    unpack_values(pairs[1], lower);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      a[i / 2][i % 2 * 2] = multiply2(pairs[0][i], both_low(of_chunk[chunk]));
      a[i / 2][i % 2 * 2 + 1] = multiply2(pairs[1][i], both_high(of_chunk[chunk]));
    }
#if MX
    if (LARGE) multiply_excess(a, chunk);
#endif
  }

#if MX
  __device__ __forceinline__ void multiply_excess(u32 (*a)[4], int chunk) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      a[i / 2][i % 2 * 2] = multiply2(a[i / 2][i % 2 * 2], both_low(excess[chunk]));
      a[i / 2][i % 2 * 2 + 1] = multiply2(a[i / 2][i % 2 * 2 + 1], both_high(excess[chunk]));
    }
  }
#endif
};
