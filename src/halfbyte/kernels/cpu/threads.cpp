// Threads of PyTorch's OpenMP if it has one, else of our own pool.
//
// OpenMP's workers spin for a while after each parallel region. A second pool would compete with them
// for cores and be woken by the system for every call. `GOMP_parallel` is the entry of GNU's
// OpenMP, which Intel's and LLVM's provide as well.

#include "threads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "api.h"

namespace halfbyte {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
std::atomic<GompParallel> g_gomp{nullptr};

struct Items {
  void (*work)(void*, int);
  void* context;
  int count;
  std::atomic<int> next{0};

  void drain() {
    for (int i = next++; i < count; i = next++) work(context, i);
  }
};

void drain_items(void* items) { ((Items*)items)->drain(); }

// Threads that sleep between calls. The caller works as well, and only waits for threads that have
// started.
class Pool {
 public:
  void run(Items& items, int threads) {
    std::lock_guard<std::mutex> one_call_at_a_time(call_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while ((int)workers_.size() < threads - 1) {
        const int id = (int)workers_.size();
        workers_.emplace_back([this, id] { loop(id); });
        workers_.back().detach();
      }
      items_ = &items;
      invited_ = threads - 1;
      round_++;
    }
    wake_.notify_all();
    items.drain();
    std::unique_lock<std::mutex> lock(mutex_);
    items_ = nullptr;
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void loop(int id) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      Items* items = items_;
      if (id >= invited_ || items == nullptr) continue;
      busy_++;
      lock.unlock();
      items->drain();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex call_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Items* items_ = nullptr;
  int invited_ = 0, busy_ = 0;
  uint64_t round_ = 0;
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: its threads outlive static destructors
  return *instance;
}

}  // namespace

void parallel_for(int count, int threads, void (*work)(void*, int), void* context) {
  if (count <= 0) return;
  Items items{work, context, count};
  const GompParallel gomp = g_gomp;
  if (count == 1 || threads <= 1)
    items.drain();
  else if (gomp)
    // Always the same number: OpenMP recreates its threads for a team of another size.
    gomp(drain_items, &items, (unsigned)threads, 0);
  else
    pool().run(items, std::min({threads, count, 256}));
}

}  // namespace halfbyte

HALFBYTE_API void halfbyte_use_openmp(void* gomp_parallel) {
  halfbyte::g_gomp = (halfbyte::GompParallel)gomp_parallel;
}
