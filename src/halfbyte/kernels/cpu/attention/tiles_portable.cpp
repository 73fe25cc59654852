// Vectors of four floats, which compilers of the GNU family turn into what the CPU has (SSE2,
// NEON), and tables for the conversions.

#include <cmath>
#include <cstring>
#include <limits>

#include "attention/tiles.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace halfbyte {

const Tables kTables;

namespace {

#define TARGET

typedef float Vec __attribute__((vector_size(16), aligned(4), may_alias));
constexpr int kLanes = 4;
constexpr int kColumns = 2;
constexpr int kHeldRows = 4;

inline Vec load(const float* x) { return *(const Vec*)x; }
inline void store(float* x, Vec v) { *(Vec*)x = v; }
inline Vec set(float x) { return Vec{x, x, x, x}; }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
#if defined(__aarch64__)
inline Vec fma(Vec a, Vec b, Vec c) {
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
#endif
// b where either is NaN, as x86's.
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline Vec choose_less(Vec a, Vec b, Vec x, Vec y) { return a < b ? x : y; }
inline Vec absolute(Vec x) { return x < set(0.0f) ? -x : x; }
inline Vec with_sign_of(Vec x, Vec sign) { return sign < set(0.0f) ? -x : x; }
inline Vec nearest(Vec x) {  // |x| < 2^22
  const Vec magic = set(12582912.0f);
  return (x + magic) - magic;
}
inline Vec times_power(Vec x, Vec power) {  // -126 <= power <= 127, or NaN where x is
  for (int i = 0; i < kLanes; i++) {
    const uint32_t bits = (uint32_t)(power[i] >= -126.0f ? (int)power[i] + 127 : 0) << 23;
    float factor;
    std::memcpy(&factor, &bits, 4);
    x[i] *= factor;
  }
  return x;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
  // The exponent field moves by 112; subnormals are multiplied into place, exactly.
  uint32_t bits = magnitude << 13;
  float x;
  if (magnitude >= 0x7c00) {
    bits += 0x70000000;
    bits |= sign;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  std::memcpy(&x, &bits, 4);
  x *= 5.192296858534828e33f;  // 2^112
  return sign ? -x : x;
}

inline Vec from_float32(const uint8_t* data) { return load((const float*)data); }
inline Vec from_float16(const uint8_t* data) {
  uint16_t h[kLanes];
  std::memcpy(h, data, sizeof h);
  return Vec{half_to_float(h[0]), half_to_float(h[1]), half_to_float(h[2]), half_to_float(h[3])};
}
inline Vec from_bfloat16(const uint8_t* data) {
  uint16_t h[kLanes];
  std::memcpy(h, data, sizeof h);
  const uint32_t bits[kLanes] = {(uint32_t)h[0] << 16, (uint32_t)h[1] << 16, (uint32_t)h[2] << 16,
                                 (uint32_t)h[3] << 16};
  Vec x;
  std::memcpy(&x, bits, sizeof x);
  return x;
}
inline Vec look_up(const float* table, const uint8_t* i) {
  return Vec{table[i[0]], table[i[1]], table[i[2]], table[i[3]]};
}
inline Vec from_e4m3(const uint8_t* data) { return look_up(kTables.e4m3, data); }
inline Vec from_e5m2(const uint8_t* data) { return look_up(kTables.e5m2, data); }
inline Vec from_e2m1(const uint8_t* data) {
  return Vec{kE2M1[data[0] & 15], kE2M1[data[0] >> 4], kE2M1[data[1] & 15], kE2M1[data[1] >> 4]};
}

void transpose(const float* in, int64_t in_stride, int columns, float* out, int64_t out_stride) {
  for (int c = 0; c < columns; c++)
    for (int r = 0; r < kPad; r++) out[c * out_stride + r] = in[r * in_stride + c];
}

#include "attention/tiles_simd.inc"

}  // namespace

const Kernels kPortableKernels = {unpack,       transpose, multiply, logits, largest,
                                  exponentials, addresses, nullptr,  nullptr};

}  // namespace halfbyte
