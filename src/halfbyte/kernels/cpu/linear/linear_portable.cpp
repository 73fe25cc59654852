// Vectors of four floats, which compilers of the GNU family turn into what the CPU has, and tables.

#include <algorithm>
#include <cstring>

#include "convert.h"
#include "linear/linear.h"
#include "linear/linear_pack.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace halfbyte {
namespace {

#define TARGET

typedef float Vec __attribute__((vector_size(16), aligned(4), may_alias));
constexpr int kLanes = 4;
constexpr int kUnits = 16;
constexpr int kSums = 8;
#if defined(__aarch64__)  // 32 registers
constexpr int kPackedRows = 4;
constexpr int kUnpackedRows = 6;
#else
constexpr int kPackedRows = 2;
constexpr int kUnpackedRows = 3;
#endif
constexpr float kFactor = 0.5f;

inline Vec zero() { return Vec{}; }
inline Vec load(const float* x) { return *(const Vec*)x; }
inline void store(float* x, Vec v) { *(Vec*)x = v; }
inline Vec broadcast(const float* x) { return Vec{*x, *x, *x, *x}; }
#if defined(__aarch64__)
inline Vec fma(Vec a, Vec b, Vec c) {
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
#endif
inline Vec multiply(Vec w, const float* x) { return w * broadcast(x); }
inline Vec multiply_add(Vec sum, Vec w, const float* x) { return fma(w, broadcast(x), sum); }

inline void store_float16(const float* x, uint8_t* out) { store_as(kFloat16, x, kStrip, out); }

inline void store_bfloat16(const float* x, uint8_t* out) { store_as(kBFloat16, x, kStrip, out); }

typedef int8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t Ints __attribute__((vector_size(16)));

// Twice the values of codes 0 .. 15: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives.
inline Bytes twice(Bytes codes) {
  const Bytes m = codes & 7, sign = codes > 7;
  const Bytes magnitude = m + ((m > 4) & (m - 4)) + ((m > 6) & 2);
  return (magnitude ^ sign) - sign;
}

struct Words {
  Bytes even[2][4], odd[2][4];  // twice the values of a word's columns 0, 2, 4, 6, and 1, 3, 5, 7
};

inline Words load_words(const uint8_t* codes) {
  Words words;
  for (int i = 0; i < 8; i++) {
    const Bytes bytes = *(const Bytes*)(codes + i * 16);
    words.even[i / 4][i % 4] = twice(bytes & 15);
    words.odd[i / 4][i % 4] = twice((bytes >> 4) & 15);
  }
  return words;
}

template <int U>
inline Vec unit_of(const Words& words, int v) {
  const Ints bytes = (Ints)(U % 2 ? words.odd : words.even)[U / 8][v];
  return __builtin_convertvector((bytes << (24 - U % 8 / 2 * 8)) >> 24, Vec);
}

inline void unpack_scales(const uint8_t* bytes, float* scales) {
  for (int i = 0; i < kScaleBytes; i++) scales[i] = kTables.e4m3[bytes[i]];
}

constexpr auto pack = pack_floats;

#include "linear/linear_simd.inc"

}  // namespace

const LinearKernels kLinearPortable = kKernels;

}  // namespace halfbyte
