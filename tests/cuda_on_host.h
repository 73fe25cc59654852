// Runs CUDA C++ on a CPU: one CTA after the other, one thread at a time. See cuda_on_host.py.
//
// A thread is a fiber that runs until its next barrier or shuffle, where it gives way to the next.
// Warps and lanes take turns in an order that changes, so that a missing barrier shows. Where not
// all threads of a warp or of a CTA come to the same line, the launch ends with a message instead
// of waiting for ever; CUDA leaves open what happens then.
//
// It has what the sources that run on it need, no more: shuffles of whole warps, grids and CTAs of
// one dimension. What inline assembly does is in cuda_on_host_ptx.h.

#pragma once
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <tuple>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
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
constexpr unsigned MOST_SHARED_BYTES = 256 * 1024;
// The address of dynamic shared memory: aligned as the sources ask for, and no more.
constexpr unsigned SHARED_BEGIN = 1024 + 128;

enum Stop { AT_WARP, AT_CTA, AT_END };

// What a lane gives to the others of its warp, of any type.
struct alignas(16) Message {
  unsigned char bytes[48];
};

// A copy into shared memory that nobody has waited for yet.
struct Copy {
  unsigned to;
  const void* from;
  unsigned bytes, there;
  int group;
};

struct Thread {
  bool made;
  ucontext_t begin;
  jmp_buf here;  // not a ucontext, whose switches ask the kernel to save a signal mask
  Stop stop;
  int line;                  // of the source, where it stopped
  Message value;             // that it brings to an operation of its warp
  Message received;          // what its lane brought to the last one
  std::vector<Copy> copies;  // oldest first
  int groups;                // of copies, committed so far
};

static Thread threads[MOST_THREADS];
static char* stacks;
static jmp_buf scheduler;
static std::function<void()> body;
static std::vector<void*> shared_variables;  // that the CTA has come across
alignas(128) static unsigned char dynamic_shared[MOST_SHARED_BYTES];
static unsigned shared_bytes;
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
  memset(dynamic_shared, 0xFF, shared_bytes);
  for (int i = 0; i < count; i++) threads[i].copies.clear(), threads[i].groups = 0;
  do {
    const unsigned random = next_random();
    for (int i = 0; i < count / WARP; i++)
      if (!run_warp(nth(i, count / WARP, random) * WARP)) return false;
    if (!stand_together(0, count)) return false;
  } while (threads[0].stop != AT_END);
  return true;
}

// A thread that touches memory that is not there ends the launch, and not the process.
inline void at_fault(int, siginfo_t* info, void*) {
  say("block %u, thread %u: nothing lies at %p", blockIdx.x, threadIdx.x, info->si_addr);
  _longjmp(scheduler, 1);
}

inline bool run_grid(int grid, int count) {
  struct sigaction before, mine = {};
  mine.sa_sigaction = at_fault;
  mine.sa_flags = SA_SIGINFO | SA_NODEFER;  // nothing returns from it
  sigaction(SIGSEGV, &mine, &before);
  gridDim.x = grid, blockDim.x = count;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
    if (!run_cta(count)) break;
  sigaction(SIGSEGV, &before, nullptr);
  if (!message[0]) return true;
  for (Thread& thread : threads) thread.made = false;  // left where they stood
  return false;
}

// Nothing, or what went wrong.
template <class... Params>
const char* launch(void (*kernel)(Params...), int grid, int count, int bytes,
                   const void* const* arguments) {
  if (count % WARP || count > MOST_THREADS) return "threads: whole warps, at most 1024 threads";
  if (bytes > (int)MOST_SHARED_BYTES) return "dynamic shared memory: at most 256 KiB";
  if (!stacks) stacks = new char[(size_t)MOST_THREADS * STACK_BYTES];
  int i = 0;
  const std::tuple<Params...> params{*(const Params*)arguments[i++]...};
  body = [=] { std::apply(kernel, params); };
  message[0] = 0;
  shared_bytes = bytes;
  return run_grid(grid, count) ? nullptr : message;
}

// Shared memory begins with garbage: all ones are NaN, or -1.
inline void begin_with_garbage(void* variable, size_t bytes) {
  for (void* other : shared_variables)
    if (other == variable) return;
  shared_variables.push_back(variable);
  memset(variable, 0xFF, bytes);
}

// An operation of a whole warp: what all lanes bring can be read once all have come.
template <class T>
void bring(const T& x, int line) {
  static_assert(sizeof x <= sizeof(Message));
  memcpy(&threads[threadIdx.x].value, &x, sizeof x);
  stop(AT_WARP, line);
}
inline const void* brought_by(int lane) {
  return &threads[threadIdx.x / WARP * WARP + lane % WARP].received;
}

template <class T>
T shuffle(unsigned mask, T x, int source, int line) {
  if (mask != ~0u) refuse("a shuffle of some of a warp's lanes");
  bring(x, line);
  memcpy(&x, brought_by(source), sizeof x);
  return x;
}

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
inline float __uint_as_float(unsigned x) { return __int_as_float(x); }

template <class T>
T __ldcs(const T* x) {
  return *x;
}

inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return ((unsigned long long)high << 32 | low) >> shift % 32;
}
