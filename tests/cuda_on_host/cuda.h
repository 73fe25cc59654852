// Runs CUDA C++ on a CPU, one thread at a time. Several clusters of CTAs may be resident, by default one;
// most clusters are a single CTA. See build.py.
//
// A thread is a fiber that runs until its next barrier or shuffle, or until it has to wait; there
// it yields to the next. CTAs, warps and lanes take turns in a changing order, so that a
// missing barrier shows. If not all threads of a warp or of a CTA reach the same line, or all
// wait for ever, the launch ends with a message; in CUDA
// that is undefined behaviour.
//
// It supports only what the sources need: shuffles of whole warps, grids, clusters
// and CTAs of one dimension. Barriers, shuffles and the like are in builtins.h, what inline
// assembly does in ptx.h, that of SM90 in wgmma.h and bulk.h.

#pragma once
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#define __global__
#define __device__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static  // one CTA at a time, where they have such variables

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

constexpr int WARP = 32, MAX_THREADS = 1024, MAX_CTAS = 16, STACK_BYTES = 64 * 1024;
constexpr int MAX_TURNS = 20000;  // of a launch; those of the tests take less than 1000
constexpr unsigned MAX_SHARED_BYTES = 256 * 1024;
enum Stop { NOWHERE, AT_WARP, AT_CTA, AT_WAIT, AT_END };

// A value that a lane passes to other lanes of its warp, of any type.
struct alignas(16) Message {
  unsigned char bytes[48];
};

// A pending copy into shared memory.
struct Copy {
  unsigned to;
  const void* from;
  unsigned bytes, there;
  int group;
};

// A pending matmul.
struct Matmul {
  float* d;
  const unsigned* a;
  unsigned words[4];  // of a, as they were
  float rows[2][16];  // of A, that this lane has sums of
  unsigned long long b;
  int columns;
  bool add, is_bfloat16;
  std::vector<float> product;  // if it was early
  int group;
  bool by_rows;
};

struct Thread {
  bool made = false;
  std::unique_ptr<char[]> stack;
  ucontext_t begin;
  jmp_buf here;  // not a ucontext, whose switches ask the kernel to save a signal mask
  Stop stop;
  int line;                  // of the source, where it stopped
  const int* watched;        // waits until this value changes
  int seen;
  Message value;             // its argument of an operation of its warp
  Message received;          // its result of the last one
  std::vector<Copy> copies;  // oldest first
  int groups;                // of copies, committed so far
  std::vector<Matmul> matmuls;                // oldest first
  int matmul_groups;                          // committed so far
  std::map<float*, std::vector<float>> sums;  // of those
  std::vector<std::function<void()>> stores;  // pending TMA stores
  const unsigned long long* flag;             // that it polled last
  unsigned long long seen_flag;
  bool vote;                                  // of the CTA
  int arrivals;              // at the cluster's barrier
  bool has_to_wait;          // there, after the last of them
  bool follows_previous;     // it has waited for the previous kernel
};

constexpr int MAX_BARRIER_BYTES = (1 << 20) - 1;  // pending, in either direction

// An mbarrier in shared memory. Its phase ends when all threads and all bytes have arrived.
struct Barrier {
  int count, pending, bytes, phase;

  bool end_phase() {
    if (pending || bytes) return false;
    pending = count;
    phase++;
    return true;
  }
};

// A named barrier; `found`: whether any thread voted yes in the last phase.
struct NamedBarrier {
  int arrived = 0, phase = 0;
  bool any = false, found = false;
};

struct Cta {
  std::vector<Thread> threads;
  std::vector<bool> in_flight;  // words of shared memory that pending copies go to
  std::map<unsigned, Barrier> barriers;  // by their addresses
  std::map<int, NamedBarrier> named;     // by their numbers
  bool ended, voted;
  alignas(128) unsigned char shared[MAX_SHARED_BYTES];
};

// Pending bytes for a CTA's shared memory, which a barrier there counts.
struct Delivery {
  Cta* to;
  unsigned char* at;
  std::vector<unsigned char> bytes;
  Barrier* barrier;
};

static Cta ctas[MAX_CTAS];  // of clusters that run at the same time
static Cta* cta;             // whose turn it is
static int cluster_size, ctas_at_once;
static int cluster_phases[MAX_CTAS];  // of clusters' barriers
static std::vector<Delivery> deliveries;
static unsigned elected;  // the lane that acts for its warp
static jmp_buf scheduler;
static std::function<void()> body;
static std::vector<void*> shared_variables;  // that the CTA has come across
static unsigned shared_bytes, shared_begin;
static char message[256];
static unsigned random_state;

inline Thread& this_thread() { return cta->threads[threadIdx.x]; }

// Memory that the previous kernel is still writing. A thread that has not waited for it finds what was there `before`.
struct Late {
  const unsigned char *begin, *before;
  size_t bytes;
};
static Late late;
static int waits;  // for the previous kernel, by threads of this launch

inline void wait_for_previous_kernel() {
  this_thread().follows_previous = true;
  waits++;
}

inline const void* found_at(const void* address) {
  const size_t offset = (const unsigned char*)address - late.begin;
  return this_thread().follows_previous || offset >= late.bytes ? address : late.before + offset;
}

// Yields to the scheduler, which returns after all other threads have reached this point.
inline void stop(Stop where, int line) {
  Thread& thread = this_thread();
  thread.stop = where;
  thread.line = line;
  if (!_setjmp(thread.here)) _longjmp(scheduler, 1);
}

// Yields until this value has changed.
inline void wait_while_it_is(const int& watched, int line) {
  this_thread().watched = &watched;
  this_thread().seen = watched;
  stop(AT_WAIT, line);
}

inline unsigned next_random() {
  random_state = random_state * 1664525u + 1013904223u;
  return random_state >> 8;
}

// At random, other threads run first.
inline void may_give_way(int line) {
  if (next_random() % 16 == 0) stop(NOWHERE, line);
}

// Keeps the first reason: later ones may follow from it.
template <class... Arguments>
void say(const char* format, Arguments... arguments) {
  if (!message[0]) snprintf(message, sizeof message, format, arguments...);
}

inline void refuse(const char* what) {
  say("not on the host: %s", what);
  stop(AT_END, 0);
}

// Fills the stack with NaN, so that reads of uninitialized variables in memory show.
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
  threadIdx.x = number;
  Thread& thread = this_thread();
  if (_setjmp(scheduler)) return;
  if (thread.made) _longjmp(thread.here, 1);
  thread.made = true;
  thread.stack.reset(new char[STACK_BYTES]);
  getcontext(&thread.begin);
  thread.begin.uc_stack.ss_sp = thread.stack.get();
  thread.begin.uc_stack.ss_size = STACK_BYTES;
  makecontext(&thread.begin, fiber, 0);
  setcontext(&thread.begin);
}

// The numbers below n in an order that `random` decides.
inline int nth(int i, int n, unsigned random) {
  return (random % n + (random >> 16 & 1 ? i : n - i)) % n;
}

inline bool stand_together(int first, int count) {
  static const char* const names[] = {"", "a warp's operation", "a barrier", "a wait", "its end"};
  const Thread& a = cta->threads[first];
  for (int i = first + 1; i < first + count; i++) {
    const Thread& b = cta->threads[i];
    if (a.stop != b.stop || a.line != b.line)
      say("block %u: thread %d is at %s (line %d), thread %d at %s (line %d)", blockIdx.x, first,
          names[a.stop], a.line, i, names[b.stop], b.line);
  }
  return !message[0];
}

inline bool any_on_the_way(int first, int count) {
  const auto on_the_way = [](const Thread& x) { return x.stop == NOWHERE || x.stop == AT_WAIT; };
  const auto begin = cta->threads.begin() + first;
  return std::any_of(begin, begin + count, on_the_way);
}

// Runs threads until all are at a barrier of the CTA, have ended, or wait; with `short_turns` only until
// an operation of the warp. Returns whether any thread made progress.
inline bool run_warp(int first, bool short_turns) {
  bool moved = false;
  for (;;) {
    const unsigned random = next_random();
    for (int i = 0; i < WARP; i++) {
      const int number = first + nth(i, WARP, random);
      const Thread& thread = cta->threads[number];
      if (thread.stop == NOWHERE || (thread.stop == AT_WAIT && *thread.watched != thread.seen))
        run(number), moved = true;
    }
    if (!moved || any_on_the_way(first, WARP) || !stand_together(first, WARP)) return moved;
    if (cta->threads[first].stop != AT_WARP) return true;
    for (int i = first; i < first + WARP; i++) {
      cta->threads[i].received = cta->threads[i].value;
      cta->threads[i].stop = NOWHERE;
    }
    if (short_turns && next_random() % 16 == 0) return true;
  }
}

// The CTA has ended: no bytes may arrive in its shared memory any more, and no barrier may wait for it.
inline void end_cta() {
  cta->ended = true;
  for (const Delivery& delivery : deliveries)
    if (delivery.to == cta) say("block %u ends before all bytes have come to it", blockIdx.x);
  for (const auto& [address, barrier] : cta->barriers)
    if (barrier.bytes)
      say("block %u ends, but at the barrier at offset %u there are %d bytes %s than expected",
          blockIdx.x, address - shared_begin, std::abs(barrier.bytes),
          barrier.bytes < 0 ? "more" : "less");
}

// A turn for every warp; then threads at a complete barrier may continue.
inline bool run_cta(bool short_turns) {
  const int count = blockDim.x;
  const unsigned random = next_random();
  bool moved = false;
  for (int i = 0; i < count / WARP && !message[0]; i++)
    moved |= run_warp(nth(i, count / WARP, random) * WARP, short_turns);
  if (any_on_the_way(0, count) || !stand_together(0, count)) return moved;
  if (cta->threads[0].stop == AT_CTA) {
    cta->voted = false;
    for (int i = 0; i < count; i++) {
      cta->threads[i].stop = NOWHERE;
      cta->voted |= cta->threads[i].vote;
    }
  } else
    end_cta();
  return true;
}

// Index among the resident clusters, and its first CTA.
inline int own_cluster() { return (cta - ctas) / cluster_size; }
inline Cta& cta_of_rank(int rank) { return ctas[own_cluster() * cluster_size + rank]; }

// Threads that have ended need not arrive.
inline bool pass_cluster_barrier(int cluster) {
  int& phase = cluster_phases[cluster];
  for (int rank = 0; rank < cluster_size; rank++)
    for (unsigned i = 0; i < blockDim.x; i++) {
      const Thread& thread = ctas[cluster * cluster_size + rank].threads[i];
      if (thread.stop != AT_END && thread.arrivals == phase) return false;
    }
  phase++;
  return true;
}

inline bool pass_cluster_barriers() {
  bool passed = false;
  for (int i = 0; i < ctas_at_once / cluster_size; i++) passed |= pass_cluster_barrier(i);
  return passed;
}

// Lets one random pending transfer arrive. Returns whether a thread may have waited for it.
inline bool deliver() {
  std::swap(deliveries[next_random() % deliveries.size()], deliveries.back());
  const Delivery x = std::move(deliveries.back());
  deliveries.pop_back();
  memcpy(x.at, x.bytes.data(), x.bytes.size());
  x.barrier->bytes -= x.bytes.size();
  if (x.barrier->bytes < -MAX_BARRIER_BYTES) refuse("more bytes than the barriers expect");
  return x.barrier->end_phase();
}

inline void turn_to(unsigned first_block, int i) {
  cta = &ctas[i];
  blockIdx.x = first_block + i;
}

inline void begin_clusters() {
  shared_variables.clear();
  deliveries.clear();
  std::fill(std::begin(cluster_phases), std::end(cluster_phases), 0);
  elected = next_random() % WARP;
  for (Cta* x = ctas; x < ctas + ctas_at_once; x++) {
    if (x->threads.size() < blockDim.x) x->threads = std::vector<Thread>(blockDim.x);
    for (Thread& thread : x->threads) {
      thread.stop = NOWHERE;
      thread.copies.clear();
      thread.matmuls.clear();
      thread.sums.clear();
      thread.stores.clear();
      thread.flag = nullptr;
      thread.groups = thread.arrivals = thread.matmul_groups = 0;
      thread.vote = false;
      thread.has_to_wait = thread.follows_previous = false;
    }
    x->in_flight.assign((shared_bytes + 3) / 4, false);
    x->barriers.clear();
    x->named.clear();
    x->ended = false;
    memset(x->shared, 0xFF, shared_bytes);
  }
}

inline void say_who_waits(unsigned first_block) {
  for (int x = 0; x < ctas_at_once; x++)
    for (unsigned i = 0; i < blockDim.x; i++) {
      const Thread& thread = ctas[x].threads[i];
      if (thread.stop == AT_WAIT)
        say("block %u, thread %u waits for ever (line %d)", first_block + x, i, thread.line);
    }
}

// Random phases: one CTA may run ahead of the others, pending transfers may arrive before any thread
// waits for them, and warps may take short turns.
inline bool run_clusters(unsigned first_block) {
  begin_clusters();
  unsigned order = next_random();
  const auto ended = [](const Cta& x) { return x.ended; };
  for (int turn = 0; !std::all_of(ctas, ctas + ctas_at_once, ended); turn++) {
    if (turn == MAX_TURNS) {
      say("block %u and those beside it never end", first_block);
      return false;
    }
    if (next_random() % 8 == 0) order = next_random();
    const bool one_ahead = order >> 17 & 1, early = order >> 18 & 1, short_turns = order >> 19 & 1;
    bool moved = false;
    const int arriving = early ? next_random() % (deliveries.size() + 1) : 0;
    for (int i = 0; i < arriving; i++) moved |= deliver();
    for (int i = 0; i < ctas_at_once; i++) {
      turn_to(first_block, nth(i, ctas_at_once, order));
      const bool ran = !cta->ended && run_cta(short_turns);
      if (message[0]) return false;
      moved |= ran;
      if (ran && one_ahead) break;
    }
    if (pass_cluster_barriers() || moved) continue;
    while (!deliveries.empty() && !moved) moved = deliver();
    if (!moved) {
      say_who_waits(first_block);
      return false;
    }
  }
  return true;
}

// A thread that accesses unmapped memory ends the launch, not the process.
inline void at_fault(int, siginfo_t* info, void*) {
  say("block %u, thread %u: nothing lies at %p", blockIdx.x, threadIdx.x, info->si_addr);
  _longjmp(scheduler, 1);
}

inline bool run_grid() {
  struct sigaction before, mine = {};
  mine.sa_sigaction = at_fault;
  mine.sa_flags = SA_SIGINFO | SA_NODEFER;  // nothing returns from it
  sigaction(SIGSEGV, &mine, &before);
  unsigned block = 0;
  const int at_once = ctas_at_once;
  for (; block < gridDim.x; block += ctas_at_once) {
    ctas_at_once = min(at_once, int(gridDim.x - block));
    if (!run_clusters(block)) break;
  }
  sigaction(SIGSEGV, &before, nullptr);
  if (!message[0]) return true;
  for (Cta& x : ctas) x.threads.clear();  // left where they stood
  return false;
}

// Null, or the error message.
template <class... Params>
const char* launch(void (*kernel)(Params...), int cluster, int clusters_at_once, int grid, int count,
                   int bytes, const void* const* arguments) {
  if (count % WARP || count > MAX_THREADS) return "threads: whole warps, at most 1024 threads";
  if (bytes > (int)MAX_SHARED_BYTES) return "dynamic shared memory: at most 256 KiB";
  if (grid % cluster) return "grid: whole clusters";
  if (cluster * clusters_at_once > MAX_CTAS) return "clusters: at most 16 CTAs at the same time";
  int i = 0;
  const std::tuple<Params...> params{*(const Params*)arguments[i++]...};
  body = [=] { std::apply(kernel, params); };
  message[0] = 0;
  shared_bytes = bytes;
  cluster_size = cluster, ctas_at_once = cluster * clusters_at_once;
  gridDim.x = grid, blockDim.x = count;
  return run_grid() ? nullptr : message;
}

// Dynamic shared memory, at an odd multiple of the alignment that a source declares (128), so that a source that
// needs a larger alignment shows.
inline unsigned char* dynamic_shared(unsigned alignment) {
  shared_begin = 1024 + alignment;
  return cta->shared;
}

// Shared memory starts as all ones: NaN, or -1.
inline void begin_with_garbage(void* variable, size_t bytes) {
  if (ctas_at_once > 1) refuse("variables in shared memory, with CTAs side by side");
  for (void* other : shared_variables)
    if (other == variable) return;
  shared_variables.push_back(variable);
  memset(variable, 0xFF, bytes);
}

// An operation of a whole warp: arguments of all lanes can be read once all have arrived.
template <class T>
void bring(const T& x, int line) {
  static_assert(sizeof x <= sizeof(Message));
  memcpy(&this_thread().value, &x, sizeof x);
  stop(AT_WARP, line);
}
inline const void* brought_by(int lane) {
  return &cta->threads[threadIdx.x / WARP * WARP + lane % WARP].received;
}

template <class T>
T shuffle(unsigned mask, T x, int source, int line) {
  if (mask != ~0u) refuse("a shuffle of some of a warp's lanes");
  bring(x, line);
  memcpy(&x, brought_by(source), sizeof x);
  return x;
}

}  // namespace cuda_on_host
