// Runs CUDA C++ on a CPU: one CTA after the other, one thread at a time. See cuda_on_host.py.
//
// A thread is a fiber that runs until its next barrier or shuffle, where it gives way to the next.
// Warps and lanes take turns in an order that changes, so that a missing barrier shows. Where not
// all threads of a warp or of a CTA come to the same line, the launch ends with a message instead
// of waiting for ever; CUDA leaves open what happens then.
//
// It has what the sources that run on it need, no more: shuffles of whole warps, grids and CTAs of
// one dimension, shared memory that has a name.

#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#define __CUDA_ARCH__ 900
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static  // one CTA at a time

#define VECTORS(T, name)                                                                   \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                       \
  struct alignas(4 * sizeof(T)) name##4 { T x, y, z, w; };                                 \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                               \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(int, int)
VECTORS(unsigned, uint)
VECTORS(float, float)
#undef VECTORS

struct uint3 {
  unsigned x, y, z;
};
static uint3 threadIdx, blockIdx, blockDim{1, 1, 1}, gridDim{1, 1, 1};

using std::max;
using std::min;

namespace cuda_on_host {

constexpr int WARP = 32, MOST_THREADS = 1024, STACK_BYTES = 64 * 1024;

enum Stop { AT_WARP, AT_CTA, AT_END };

struct Thread {
  bool made;
  ucontext_t begin;
  jmp_buf here;  // not a ucontext, whose switches ask the kernel to save a signal mask
  Stop stop;
  int line;                     // of the source, where it stopped
  unsigned long long value;     // that it brings to a shuffle
  unsigned long long received;  // what its lane brought to the warp's last shuffle
};

static Thread threads[MOST_THREADS];
static char* stacks;
static jmp_buf scheduler;
static std::function<void()> body;
static std::vector<void*> shared_variables;  // that the CTA has come across
static char message[256];
static unsigned random_state;

// Give way to the scheduler, which comes back when all the others have come as far.
inline void stop(Stop where, int line) {
  Thread& thread = threads[threadIdx.x];
  thread.stop = where;
  thread.line = line;
  if (!_setjmp(thread.here)) _longjmp(scheduler, 1);
}

// The first reason counts: what comes after may follow from it.
template <class... Arguments>
void say(const char* format, Arguments... arguments) {
  if (!message[0]) snprintf(message, sizeof message, format, arguments...);
}

inline void refuse(const char* what) {
  say("not on the host: %s", what);
  stop(AT_END, 0);
}

// What a thread reads without having written it is NaN, where the compiler keeps it in memory.
__attribute__((noinline)) inline void fill_stack() {
  char below[4096];
  memset(below, 0xFF, sizeof below);
  asm volatile("" ::"r"(below) : "memory");  // or the compiler leaves it out
}

// A fiber serves one CTA after the other.
inline void fiber() {
  for (;;) {
    fill_stack();
    body();
    stop(AT_END, 0);
  }
}

inline void run(int number) {
  Thread& thread = threads[threadIdx.x = number];
  if (_setjmp(scheduler)) return;
  if (thread.made) _longjmp(thread.here, 1);
  thread.made = true;
  getcontext(&thread.begin);
  thread.begin.uc_stack.ss_sp = stacks + (size_t)number * STACK_BYTES;
  thread.begin.uc_stack.ss_size = STACK_BYTES;
  makecontext(&thread.begin, fiber, 0);
  setcontext(&thread.begin);
}

// The numbers below n in an order that `random` decides.
inline int nth(int i, int n, unsigned random) {
  return (random % n + (random >> 16 & 1 ? i : n - i)) % n;
}

inline unsigned next_random() {
  random_state = random_state * 1664525u + 1013904223u;
  return random_state >> 8;
}

inline bool stand_together(int first, int count) {
  static const char* const names[] = {"a warp's operation", "a barrier", "its end"};
  const Thread& a = threads[first];
  for (int i = first + 1; i < first + count; i++) {
    const Thread& b = threads[i];
    if (a.stop != b.stop || a.line != b.line)
      say("block %u: thread %d is at %s (line %d), thread %d at %s (line %d)", blockIdx.x, first,
          names[a.stop], a.line, i, names[b.stop], b.line);
  }
  return !message[0];
}

// Until all its threads are at a barrier of the CTA, or at their end.
inline bool run_warp(int first) {
  for (;;) {
    const unsigned random = next_random();
    for (int i = 0; i < WARP; i++) run(first + nth(i, WARP, random));
    if (!stand_together(first, WARP)) return false;
    if (threads[first].stop != AT_WARP) return true;
    for (int i = first; i < first + WARP; i++) threads[i].received = threads[i].value;
  }
}

inline bool run_cta(int count) {
  shared_variables.clear();
  do {
    const unsigned random = next_random();
    for (int i = 0; i < count / WARP; i++)
      if (!run_warp(nth(i, count / WARP, random) * WARP)) return false;
    if (!stand_together(0, count)) return false;
  } while (threads[0].stop != AT_END);
  return true;
}

// Nothing, or what went wrong.
template <class Params>
const char* launch(void (*kernel)(Params), int grid, int count, const void* bytes) {
  if (count % WARP || count > MOST_THREADS) return "threads: whole warps, at most 1024 threads";
  if (!stacks) stacks = new char[(size_t)MOST_THREADS * STACK_BYTES];
  Params params;
  memcpy((void*)&params, bytes, sizeof params);
  body = [=] { kernel(params); };
  message[0] = 0;
  gridDim.x = grid, blockDim.x = count;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
    if (!run_cta(count)) {
      for (Thread& thread : threads) thread.made = false;  // left where they stood
      return message;
    }
  return nullptr;
}

// Shared memory begins with garbage: all ones are NaN, or -1.
inline void begin_with_garbage(void* variable, size_t bytes) {
  for (void* other : shared_variables)
    if (other == variable) return;
  shared_variables.push_back(variable);
  memset(variable, 0xFF, bytes);
}

template <class T>
T shuffle(unsigned mask, T x, int source, int line) {
  static_assert(sizeof x <= sizeof threads[0].value);
  if (mask != ~0u) refuse("a shuffle of some of a warp's lanes");
  memcpy(&threads[threadIdx.x].value, &x, sizeof x);
  stop(AT_WARP, line);
  memcpy(&x, &threads[threadIdx.x / WARP * WARP + source % WARP].received, sizeof x);
  return x;
}

inline float flush(float x) { return std::fabs(x) < 1.17549435e-38f ? 0.0f : x; }

// Rounds to nearest even. `smallest` is the exponent of the smallest normal value.
inline unsigned narrow(float x, int mantissa_bits, int smallest) {
  if (std::isnan(x)) return 0x7FFF;
  const unsigned infinity = (3 - 2 * smallest) << mantissa_bits;
  const int exponent = max(std::ilogb(x), smallest);  // ilogb(0) is far below
  const float in_steps = std::ldexp(std::fabs(x), mantissa_bits - exponent);
  // Added, so that a carry out of the mantissa raises the exponent, and so does a leading one.
  unsigned rounded = ((exponent - smallest) << mantissa_bits) + (unsigned)std::nearbyint(in_steps);
  if (std::isinf(x) || exponent > 1 - smallest) rounded = infinity;
  return (std::signbit(x) ? 0x8000u : 0u) | rounded;
}
inline unsigned to_float16(float x) { return narrow(x, 10, -14); }
inline unsigned to_bfloat16(float x) { return narrow(x, 7, -126); }

}  // namespace cuda_on_host

// The default argument is the line of the call.
inline void __syncthreads(int line = __builtin_LINE()) {
  cuda_on_host::stop(cuda_on_host::AT_CTA, line);
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

inline float __int_as_float(int x) {
  float y;
  memcpy(&y, &x, sizeof y);
  return y;
}

inline size_t __cvta_generic_to_shared(const void*) {
  cuda_on_host::refuse("addresses in shared memory");
  return 0;
}
