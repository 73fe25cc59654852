// Storing on any CPU.

#include <cmath>
#include <cstring>
#include <limits>

#include "convert.h"
#include "store/encode.h"

namespace halfbyte {
namespace {

#define TARGET

uint32_t top_bits(const float* x) {
  uint32_t top = 0;
  for (int i = 0; i < 16; i++) {
    const uint32_t magnitude = bits_of(x[i]) & 0x7fffffff;
    top = magnitude > top ? magnitude : top;
  }
  return top;
}

void e2m1_values(const float* x, float divisor, uint8_t* out) {
  uint32_t codes[16];
  for (int i = 0; i < 16; i++) {
    const float y = float_of(bits_of(x[i] / divisor) & 0x7fffffff);
    codes[i] = (uint32_t)(y > 0.25f) + (y >= 0.75f) + (y > 1.25f) + (y >= 1.75f) + (y > 2.5f) +
               (y >= 3.5f) + (y > 5.0f) + ((uint32_t)(x[i] < 0.0f) << 3);
  }
  for (int i = 0; i < 8; i++) out[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
}

float squared_error(const float* x, const uint8_t* data, float s, float g) {
  float sum[16];
  for (int i = 0; i < 16; i++) {
    const float error = kE2M1[data[i / 2] >> i % 2 * 4 & 15] * s * g - x[i];
    sum[i] = error * error;
  }
  for (int n = 8; n > 0; n /= 2)
    for (int i = 0; i < n; i++) sum[i] = sum[2 * i] + sum[2 * i + 1];
  return sum[0];
}

void e4m3_values(const float* x, float scale, uint8_t* out) {
  for (int i = 0; i < 16; i++) out[i] = E4M3::of(x[i] / scale);
}

void e5m2_values(const float* x, float scale, uint8_t* out) {
  for (int i = 0; i < 16; i++) out[i] = E5M2::of(x[i] / scale);
}

void float16_values(const float* x, float, uint8_t* out) {
  for (int i = 0; i < 16; i++) {
    const uint16_t half = to_float16(x[i] > 65504.0f    ? 65504.0f
                                     : x[i] < -65504.0f ? -65504.0f
                                                        : x[i]);
    std::memcpy(out + 2 * i, &half, 2);
  }
}

void bfloat16_values(const float* x, float, uint8_t* out) {
  for (int i = 0; i < 16; i++) {
    const uint16_t half = to_bfloat16(x[i]);
    std::memcpy(out + 2 * i, &half, 2);
  }
}

float weighted_error(const float* x, const float* weights, float r) {
  float sum[16];
  for (int i = 0; i < 16; i++) {
    const float t = ratio_of(x[i], r), off = e2m1_nearest(t) - t;
    sum[i] = off * off * weights[i];
  }
  for (int n = 8; n > 0; n /= 2)
    for (int i = 0; i < n; i++) sum[i] = sum[2 * i] + sum[2 * i + 1];
  return sum[0];
}

void product_codes(const float* x, float r, uint8_t* out) {
  int codes[16];
  for (int i = 0; i < 16; i++)
    codes[i] = e2m1_code(e2m1_nearest(ratio_of(x[i], r))) | (x[i] < 0.0f) << 3;
  for (int i = 0; i < 8; i++) out[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
}

void subtract_product(float* __restrict x, const float* __restrict feedback, float error, int n) {
  for (int i = 0; i < n; i++) x[i] -= error * feedback[i];
}

#include "store/encode.inc"
#include "store/weighted.inc"

}  // namespace

void encode_portable(int format, const float* x, int size, float global_scale, uint8_t* data,
                     uint8_t* scales) {
  encode(format, x, size, global_scale, data, scales);
}

void encode_weighted_portable(bool four_over_six, float* x, int size, float g,
                              const float* weights, const float* feedback, uint8_t* data,
                              uint8_t* scales) {
  encode_weighted(four_over_six, x, size, g, weights, feedback, data, scales);
}

}  // namespace halfbyte
