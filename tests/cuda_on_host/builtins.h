// CUDA C++'s built-in functions: barriers, shuffles and votes of whole warps, casts of
// bits, for build.py.

#pragma once
#include "cuda.h"

// The default argument is the line of the call.
inline void __syncthreads(int line = __builtin_LINE()) {
  cuda_on_host::stop(cuda_on_host::AT_CTA, line);
}
// __syncthreads_or: whether the predicate is true for any thread of the CTA.
inline bool __syncthreads_or(bool x, int line = __builtin_LINE()) {
  cuda_on_host::this_thread().vote = x;
  cuda_on_host::stop(cuda_on_host::AT_CTA, line);
  cuda_on_host::this_thread().vote = false;
  return cuda_on_host::cta->voted;
}
inline void __syncwarp(int line = __builtin_LINE()) {
  cuda_on_host::stop(cuda_on_host::AT_WARP, line);
}

template <class T>
T __shfl_sync(unsigned mask, T x, int source, int line = __builtin_LINE()) {
  return cuda_on_host::shuffle(mask, x, source, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int lane_mask, int line = __builtin_LINE()) {
  return cuda_on_host::shuffle(mask, x, threadIdx.x % 32 ^ lane_mask, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned delta, int line = __builtin_LINE()) {
  const unsigned lane = threadIdx.x % 32;
  return cuda_on_host::shuffle(mask, x, lane < delta ? lane : lane - delta, line);
}

inline bool __any_sync(unsigned mask, bool x, int line = __builtin_LINE()) {
  if (mask != ~0u) cuda_on_host::refuse("a vote of some of a warp's lanes");
  cuda_on_host::bring(x, line);
  bool any = false;
  for (int lane = 0; lane < 32; lane++) any |= *(const bool*)cuda_on_host::brought_by(lane);
  return any;
}

inline float __int_as_float(int x) {
  float y;
  memcpy(&y, &x, sizeof y);
  return y;
}
inline float __uint_as_float(unsigned x) { return __int_as_float(x); }

inline unsigned __float_as_uint(float x) {
  unsigned y;
  memcpy(&y, &x, sizeof y);
  return y;
}

inline int __float_as_int(float x) { return __float_as_uint(x); }

inline unsigned __ballot_sync(unsigned mask, bool x, int line = __builtin_LINE()) {
  if (mask != ~0u) cuda_on_host::refuse("a vote of some of a warp's lanes");
  cuda_on_host::bring(x, line);
  unsigned all = 0;
  for (int i = 0; i < 32; i++) all |= *(const bool*)cuda_on_host::brought_by(i) * 1u << i;
  return all;
}

inline unsigned __match_any_sync(unsigned mask, int x, int line = __builtin_LINE()) {
  if (mask != ~0u) cuda_on_host::refuse("a comparison of some of a warp's lanes");
  cuda_on_host::bring(x, line);
  unsigned all = 0;
  for (int i = 0; i < 32; i++) all |= (*(const int*)cuda_on_host::brought_by(i) == x) * 1u << i;
  return all;
}

inline int __reduce_add_sync(unsigned mask, int x, int line = __builtin_LINE()) {
  if (mask != ~0u) cuda_on_host::refuse("a sum of some of a warp's lanes");
  cuda_on_host::bring(x, line);
  int sum = 0;
  for (int i = 0; i < 32; i++) sum += *(const int*)cuda_on_host::brought_by(i);
  return sum;
}

inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }

template <class T>
T __ldcs(const T* x) {
  return *x;
}
template <class T>
T __ldcg(const T* x) {
  return *x;
}
template <class T>
void __stcg(T* to, T x, int line = __builtin_LINE()) {
  cuda_on_host::may_give_way(line);
  *to = x;
}

// Compiled without contraction, so that an operator rounds its own result.
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }

// The smallest or the largest of a warp.
template <class Choose>
unsigned reduce(unsigned mask, unsigned x, Choose choose, int line) {
  if (mask != ~0u) cuda_on_host::refuse("a reduction of some of a warp's lanes");
  cuda_on_host::bring(x, line);
  for (int i = 0; i < 32; i++) x = choose(x, *(const unsigned*)cuda_on_host::brought_by(i));
  return x;
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned x, int line = __builtin_LINE()) {
  return reduce(mask, x, [](unsigned a, unsigned b) { return std::min(a, b); }, line);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned x, int line = __builtin_LINE()) {
  return reduce(mask, x, [](unsigned a, unsigned b) { return std::max(a, b); }, line);
}

inline float __fdividef(float x, float y) { return x / y; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline void __threadfence(int line = __builtin_LINE()) { cuda_on_host::may_give_way(line); }

inline int atomicAdd(int* to, int x, int line = __builtin_LINE()) {
  cuda_on_host::may_give_way(line);
  const int before = *to;
  *to += x;
  return before;
}

// __byte_perm: bytes of x (0 to 3) and y (4 to 7), selected by the selector's nibbles.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned z = 0;
  for (int i = 0; i < 32; i += 8) {
    const unsigned nibble = selector >> i / 2;
    const unsigned byte = bytes >> 8 * (nibble & 7) & 0xFF;
    z |= (nibble & 8 ? (byte >> 7) * 0xFF : byte) << i;
  }
  return z;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return ((unsigned long long)high << 32 | low) >> shift % 32;
}
