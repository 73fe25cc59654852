// Encodes floats to the bytes of a cache, for each instruction set.
#pragma once

#include <cstdint>

#include "attention/tiles.h"
#include "convert.h"

namespace halfbyte {

// One row of `size` floats; `scales` is written where the format has block scales.
using Encode = void (*)(int format, const float* x, int size, float global_scale, uint8_t* data,
                        uint8_t* scales);

// One row in NVFP4 by weighted error, see weighted.inc; `x` is changed.
using EncodeWeighted = void (*)(bool four_over_six, float* x, int size, float g,
                                const float* weights, const float* feedback, uint8_t* data,
                                uint8_t* scales);

void encode_portable(int format, const float* x, int size, float global_scale, uint8_t* data,
                     uint8_t* scales);
void encode_weighted_portable(bool four_over_six, float* x, int size, float g,
                              const float* weights, const float* feedback, uint8_t* data,
                              uint8_t* scales);
#if HALFBYTE_X86
void encode_avx2(int format, const float* x, int size, float global_scale, uint8_t* data,
                 uint8_t* scales);
void encode_avx512(int format, const float* x, int size, float global_scale, uint8_t* data,
                   uint8_t* scales);
void encode_weighted_avx2(bool four_over_six, float* x, int size, float g, const float* weights,
                          const float* feedback, uint8_t* data, uint8_t* scales);
void encode_weighted_avx512(bool four_over_six, float* x, int size, float g, const float* weights,
                            const float* feedback, uint8_t* data, uint8_t* scales);
#endif

// |x * r|, or 0 if not a number.
inline float ratio_of(float x, float r) {
  const float t = float_of(bits_of(x * r) & 0x7fffffff);
  return t == t ? t : 0.0f;
}

// Rounds a magnitude to the nearest E2M1 value, ties to even. The ulp of 2^22 * max(1, power of two
// below t) is the step between values.
inline float e2m1_nearest(float t) {
  const float clamped = t < 6.0f ? t : 6.0f;
  const uint32_t bits = bits_of(clamped) & 0x7f800000;
  const float power = float_of((bits > 0x3f800000 ? bits : 0x3f800000) + (22u << 23));
  return (clamped + power) - power;
}

// The code of a value of `e2m1_nearest`.
inline int e2m1_code(float v) {
  return (int)(v <= 2.0f ? 2.0f * v : v <= 4.0f ? v + 2.0f : 7.0f);
}

}  // namespace halfbyte
