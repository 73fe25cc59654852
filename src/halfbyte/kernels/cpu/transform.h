// Transform of K before packing, and of queries: `halfbyte.kvcache.transform`, with the same float32
// operations in the same order (-ffp-contract=off).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace halfbyte {

constexpr uint8_t kFirstTokenMark = 0xff;
constexpr float kMatchTolerance = 0.015625f;  // 2^-6

// The same fields as `_TRANSFORM` in kernels/cpu/transform.py.
struct Transform {
  const float *mean, *partner_mean;         // [kv_heads, head_size], or null: K is not centred
  const float *cos, *sin;                   // [segments, head_size]
  const float* turn;                        // [2 pairs, turn_stride]: cos, then sin, by pair
  const float *first_keys, *first_values;   // [first_tokens, kv_heads, size]
  const float* feedback;                    // [kv_heads, head_size, head_size], or null
  const float *k_weights, *v_weights;       // [kv_heads, size] each, or null
  const int32_t *one, *other;               // [pairs] channels rotated together; a channel that is not rotated is given twice
  int64_t turn_stride;
  int32_t segment, rotate, first_tokens, pairs;
};

// The mean of a head in the segment of a position.
inline void segment_mean(const Transform& t, int64_t position, int head, int size, float* out) {
  const int64_t segment = position / t.segment;
  const float *cos = t.cos + segment * size, *sin = t.sin + segment * size;
  const float *mean = t.mean + (int64_t)head * size, *partner = t.partner_mean + (int64_t)head * size;
  for (int d = 0; d < size; d++) out[d] = cos[d] * mean[d] + sin[d] * partner[d];
}

// Hadamard transform: butterflies of neighbours first, then the factor, in blocks of a power of two.
inline void hadamard(float* x, int size) {
  const int block = size & -size;
  int stride = 1;
  if (block >= 4) {
    stride = 4;
    for (int i = 0; i < size; i += 4) {
      const float a = x[i] + x[i + 1], b = x[i] - x[i + 1];
      const float c = x[i + 2] + x[i + 3], d = x[i + 2] - x[i + 3];
      x[i] = a + c;
      x[i + 1] = b + d;
      x[i + 2] = a - c;
      x[i + 3] = b - d;
    }
  }
  for (; stride < block; stride *= 2)
    for (int i = 0; i < size; i += 2 * stride) {
      float *__restrict low = x + i, *__restrict high = x + i + stride;
      for (int j = 0; j < stride; j++) {
        const float a = low[j], b = high[j];
        low[j] = a + b;
        high[j] = a - b;
      }
    }
  const float factor = (float)(1.0 / std::sqrt((double)block));
  for (int d = 0; d < size; d++) x[d] *= factor;
}

inline bool is_close(const float* x, const float* constant, int size) {
  float largest = 0.0f;
  for (int d = 0; d < size; d++) largest = std::fmax(largest, std::fabs(constant[d]));
  for (int d = 0; d < size; d++)
    if (!(std::fabs(x[d] - constant[d]) <= kMatchTolerance * largest)) return false;  // NaN, too
  return true;
}

// Index of the constant first token that a head's K and V match; -1 for none.
inline int match_first(const Transform& t, const float* key, const float* value, int head,
                       int kv_heads, int size, int size_v) {
  for (int i = 0; i < t.first_tokens; i++) {
    const int64_t at = (int64_t)i * kv_heads + head;
    if (is_close(key, t.first_keys + at * size, size) &&
        is_close(value, t.first_values + at * size_v, size_v))
      return i;
  }
  return -1;
}

}  // namespace halfbyte
