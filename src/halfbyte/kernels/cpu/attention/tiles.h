// Functions that attention needs for each instruction set: generic ones for vectors of any width
// (`tiles_simd.inc`), and hand-written ones for nvfp4.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "formats.h"

namespace halfbyte {

constexpr int kSpan = 512;  // tokens scored before their softmax
constexpr int kTile = 64;   // max tokens unpacked at a time
constexpr int kStep = 32;   // tokens decoded at a time in registers
constexpr int kPad = 16;    // rows of floats are padded to a multiple of this

inline int padded(int n) { return (n + kPad - 1) / kPad * kPad; }

// Addresses of a head's rows by token: those of head 0, which all heads share, and the head's offset.
struct Rows {
  const uint8_t* const* data;
  const uint8_t* const* scales;
  int64_t data_offset, scale_offset;

  const uint8_t* data_of(int t) const { return data[t] + data_offset; }
  const uint8_t* scales_of(int t) const { return scales[t] + scale_offset; }
  Rows from(int t) const { return {data + t, scales + t, data_offset, scale_offset}; }
  void prefetch(int t, int element) const {
    __builtin_prefetch(data_of(t) + element / 2);
    __builtin_prefetch(scales_of(t) + element / 16);
  }
};

// Kernels that decode nvfp4 in registers, for up to `kStep` tokens. They also prefetch the cache lines of
// `ahead` tokens of `next`, a few at a time: a burst would fill the line fill buffers and stall other loads.
struct PackedKernels {
  // Scale of the results of `score` and `accumulate`.
  float factor;
  // Max query rows for `accumulate`. Beyond, unpacking V once is faster; the result is bitwise the same.
  int max_accumulate_rows;
  // Packs query rows (float, `stride` apart) in the order that `score` reads.
  void (*pack)(const float* q, int64_t stride, int rows, int head_size, float* packed);
  // scores[r * kSpan + t] = q[r] . k[t]; columns up to kStep may be written.
  void (*score)(const float* packed, int rows, Rows k, int tokens, int head_size, float* scores,
                Rows next, int ahead);
  // sums[r] += weights[r * kSpan + t] * v[t], with the elements of a row permuted; rows `sum_size` apart.
  void (*accumulate)(const float* weights, int rows, Rows v, int tokens, int head_size, float* sums,
                     Rows next, int ahead);
  // Adds up partial sums in place after the last `accumulate`; may be null.
  void (*fold)(float* sums, int rows, int head_size);
  // Index of an element in a (folded) row of sums.
  int (*position)(int element);
};

constexpr int kSumChunk = 128;

// Floats in a row of sums.
inline int sum_size(int head_size) { return (head_size + kSumChunk - 1) / kSumChunk * kSumChunk; }

// Max floats of a row of packed queries.
inline int packed_size(int head_size) { return 2 * sum_size(head_size); }

// Calls f with the number of rows (up to four) as a constant. Always inlined: target attributes would
// otherwise prevent it.
template <class F>
__attribute__((always_inline)) inline void with_rows(int rows, const F& f) {
  if (rows == 4) f(std::integral_constant<int, 4>());
  if (rows == 3) f(std::integral_constant<int, 3>());
  if (rows == 2) f(std::integral_constant<int, 2>());
  if (rows == 1) f(std::integral_constant<int, 1>());
}

struct Kernels {
  // `size` values of a row; writes up to padded(size).
  void (*unpack)(int format, const uint8_t* data, const uint8_t* scales, int size, float* out);
  // out[c][r] = in[r][c] for `columns` columns of kPad rows.
  void (*transpose)(const float* in, int64_t in_stride, int columns, float* out,
                    int64_t out_stride);
  // c[r][n] += a[r][k] * b[k][n], or = where `fresh`; `width` is a multiple of kPad.
  void (*multiply)(const float* a, int64_t a_stride, int rows, const float* b, int64_t b_stride,
                   int depth, float* c, int64_t c_stride, int width, bool fresh);
  // The next three are for n % kPad == 0 values.
  // x *= scale, softcapped where softcap > 0, times log2 e.
  void (*logits)(float* x, int n, float scale, float softcap);
  float (*largest)(const float* x, int n);  // never NaN
  // x = 2^(x - shift); the sum.
  float (*exponentials)(float* x, int n, float shift);
  // out[i] = first + i * stride.
  void (*addresses)(const uint8_t* first, int64_t stride, int count, const uint8_t** out);
  const PackedKernels* packed;           // or null
  const PackedKernels* packed_bfloat16;  // for queries that are exact in bfloat16, or null
};

// The functions of the level in use.
const Kernels& kernels();

extern const Kernels kPortableKernels;
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HALFBYTE_X86 1
extern const Kernels kAvx2Kernels, kAvx512Kernels;
extern const PackedKernels kPackedBfloat16Avx512, kPackedVnni;
#endif

}  // namespace halfbyte
