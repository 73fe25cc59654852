// Conversions of float to smaller formats, round to nearest even.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "formats.h"

namespace halfbyte {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  if (x != x) return 0xffff;  // as PyTorch converts vectors
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t to_float16(float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds to 65536 or more
  if (magnitude < 0x38800000) {
    // A subnormal is a multiple of 2^-24: adding 0.5, whose last bit is 2^-24, rounds to one.
    return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000));
  }
  return (uint16_t)(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13));
}

// To a small float with MANTISSA and BIAS, and LARGEST as float bits. Saturates; NaN becomes 0x7f.
template <int MANTISSA, int BIAS, uint32_t LARGEST>
struct SmallFloat {
  // A subnormal is a multiple of the smallest one: adding a power of two whose ulp is that rounds.
  static constexpr uint32_t kMagic = (uint32_t)(127 + 23 + 1 - BIAS - MANTISSA) << 23;
  static constexpr uint32_t kNormal = (uint32_t)(128 - BIAS) << 23;
  static constexpr uint32_t kLargest = LARGEST;
  static constexpr int kDropped = 23 - MANTISSA;
  // Added before truncation: rebiases the exponent and rounds half down; odd results need 1 more.
  static constexpr uint32_t kMove = (1u << (kDropped - 1)) - 1 - ((uint32_t)(127 - BIAS) << 23);

  static uint8_t of(float x) {
    const uint32_t sign = bits_of(x) >> 24 & 0x80, given = bits_of(x) & 0x7fffffff;
    if (given > 0x7f800000) return 0x7f;
    const uint32_t magnitude = given > LARGEST ? LARGEST : given;
    if (magnitude < kNormal)
      return (uint8_t)(sign | (bits_of(float_of(magnitude) + float_of(kMagic)) - kMagic));
    return (uint8_t)(sign | (magnitude + kMove + (magnitude >> kDropped & 1)) >> kDropped);
  }
};

using E4M3 = SmallFloat<3, 7, 0x43e00000>;
using E5M2 = SmallFloat<2, 15, 0x47600000>;

inline uint8_t to_e4m3(float x) { return E4M3::of(x); }

// `n` floats as an array of float32, float16 or bfloat16.
inline void store_as(int format, const float* x, int n, uint8_t* out) {
  if (format == kFloat32) {
    std::memcpy(out, x, 4 * (size_t)n);
    return;
  }
  uint16_t* halves = (uint16_t*)out;
  for (int i = 0; i < n; i++)
    halves[i] = format == kBFloat16 ? to_bfloat16(x[i]) : to_float16(x[i]);
}

}  // namespace halfbyte
