// The formats of a cache, by the numbers that `library.py` gives them, and their tables.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace halfbyte {

enum Format : int32_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kE4M3,
  kE5M2,
  kNvfp4,
  kNvfp4FourOverSix,  // decoded as kNvfp4
  kFp4Block16,
  kMxfp4,
  kFormats,
};

inline bool is_nvfp4(int format) { return format == kNvfp4 || format == kNvfp4FourOverSix; }

// Values that share a block scale; 0 where there are none.
inline int scale_block(int format) {
  if (is_nvfp4(format) || format == kFp4Block16) return 16;
  return format == kMxfp4 ? 32 : 0;
}

// Bytes of `size` values, without block scales.
inline int data_bytes(int format, int size) {
  if (scale_block(format)) return size / 2;
  return format == kFloat32                          ? 4 * size
         : format == kFloat16 || format == kBFloat16 ? 2 * size
                                                     : size;
}

alignas(64) constexpr float kE2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// The float value of every byte, for the small formats.
struct Tables {
  alignas(64) float e4m3[256];
  alignas(64) float e5m2[256];
  alignas(64) float e8m0[256];
  Tables() {
    for (int b = 0; b < 256; b++) {
      e4m3[b] = (b & 127) == 127 ? std::numeric_limits<float>::quiet_NaN() : small(b, 3, 7);
      e5m2[b] = (b & 124) != 124 ? small(b, 2, 15)
                : b & 3          ? std::numeric_limits<float>::quiet_NaN()
                                 : std::copysign(std::numeric_limits<float>::infinity(), 64.0f - b);
      e8m0[b] = b == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, b - 127);
    }
  }

 private:
  static float small(int byte, int mantissa_bits, int bias) {
    const int one = 1 << mantissa_bits, mantissa = byte & (one - 1);
    const int exponent = (byte & 127) >> mantissa_bits;
    const float x = exponent ? std::ldexp((float)(one + mantissa), exponent - bias - mantissa_bits)
                             : std::ldexp((float)mantissa, 1 - bias - mantissa_bits);
    return byte & 128 ? -x : x;
  }
};

extern const Tables kTables;

// The float value of every block-scale byte of a 4-bit format.
inline const float* scale_table(int format) {
  return is_nvfp4(format) ? kTables.e4m3 : kTables.e8m0;
}

// Where a page keeps one kind of bytes: offsets and strides in bytes.
struct Region {
  int64_t offset, token, head;
};

// A `PageLayout`; `pack_layout` of `library.py` writes it.
struct Layout {
  Region k_data, k_scale, v_data, v_scale;
  int32_t k_format, v_format, kv_heads, head_size, head_size_v, block_size;
  int32_t sm100_quarter;  // a fourth of the V scales of a row, or 0 for the linear order
  int32_t unused;
};

}  // namespace halfbyte
