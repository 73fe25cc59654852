// Joins the parts of a tile that is cut along k: all its clusters store their sums in `partial`, and each
// finishes some of the tokens. Sums are added in order of k, independent of timing.
//
//   Tail       A cluster that goes on to the next tile only stores its sums, and does not wait.
//   Waiting    A cluster waits for clusters that started before it. It waits for the last one to start, the
//              tile's head, only if the head's flag says that it runs; otherwise it stores all of its
//              sums and exits, and the head finishes its tokens. So kernels that share the GPU cannot
//              deadlock over SMs.

#pragma once
#include "linear/w4a16/gemm_sm90/ring.cuh"
#include "linear/w4a16/gemm_sm90/work.cuh"

#define WORKERS (128 * GROUPS)
#define VALUES (TOKENS / 2)  // accumulators per thread
#define STRIP_FLOATS (8 * WORKERS)
#define MAX_SHARERS 32  // max clusters per tile: one per lane
#define ALL_WORKERS (1 + 3 * GROUPS)  // their barrier; those of groups and flag warps come before it

// Barrier of so many threads; returns whether `here` is true for any of them.
template <int COUNT>
__device__ __forceinline__ bool any(int barrier, bool here) {
  u32 any;
  asm volatile(
      "{.reg .pred p, q; setp.ne.u32 q, %1, 0; bar.red.or.pred p, %2, %3, q; selp.u32 %0, 1, 0, p;}"
      : "=r"(any)
      : "r"((u32)here), "r"(barrier), "n"(COUNT)
      : "memory");
  return __shfl_sync(~0u, any, 0);  // known to be the same for a warp
}

// A word that one thread writes before it arrives at a barrier, and others read after the barrier. Atomic only
// because compute-sanitizer does not recognize that order.
__device__ __forceinline__ void store_word(u32 address, u32 value) {
  u32 before;
  asm volatile("atom.shared.exch.b32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_word(u32 address) {
  u32 y;
  asm volatile("atom.shared.or.b32 %0, [%1], 0;" : "=r"(y) : "r"(address) : "memory");
  return y;
}

// Where a thread stores its sums of a part of a tile.
__device__ __forceinline__ float* partial_of(const Params& p, bool tail, u32 cluster, u32 rank) {
  const u32 place = 2 * ((tail ? 0 : p.clusters.by) + cluster) + rank;
  return p.partial + (u64)place * (TOKENS * ROWS) + (threadIdx.x - 128) * 4;
}

// Stores the sums of the first `strips` strips, except for `kept`.
__device__ __forceinline__ void store_sums(float* partial, u32 strips, const Share& kept,
                                           const float* sums) {
#pragma unroll
  for (u32 strip = 0; strip < STRIPS; strip++) {
    if (strip >= strips || kept.has(strip)) continue;
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      const float* d = sums + strip * 8 + j;
      __stcg((float4*)(partial + strip * STRIP_FLOATS + j * WORKERS),
             make_float4(d[0], d[1], d[2], d[3]));
    }
  }
}

// Adds the stored sums of the other clusters for a share, in order of k: CLUSTERS_AT_ONCE are loaded before the first is
// added, for ADDED strips. The third and later clusters of a tile start from zero and read their own stored sums, because
// those of earlier clusters must be added first.
template <u32 ADDED, u32 CLUSTERS_AT_ONCE>
__device__ __forceinline__ void add_sums(const Params& p, const Join& join, u32 own, u32 rank,
                                         const Share& share, float* sums) {
  const bool anew = own > 1;
  const u32 others = join.sharers - !anew;
#pragma unroll
  for (int i = 0; anew && i < VALUES; i++) sums[i] = 0.0f;
#pragma unroll
  for (u32 begin = 0; begin < STRIPS; begin += ADDED) {
    if (begin >= share.stop || begin + ADDED <= share.first) continue;
    for (u32 i = 0; i < others; i += CLUSTERS_AT_ONCE) {
      // Initialized, or the compiler reserves registers for it from the start of the kernel.
      float4 x[CLUSTERS_AT_ONCE][2 * ADDED] = {};
#pragma unroll
      for (u32 c = 0; c < CLUSTERS_AT_ONCE; c++) {
        if (c > 0 && i + c >= others) break;
        const u32 other = i + c + (!anew && i + c >= own);
        const float* const partial = partial_of(p, other >= join.finishers, join.head + other, rank);
#pragma unroll
        for (u32 j = 0; j < 2 * ADDED; j++)
          if (begin + j / 2 < STRIPS && share.has(begin + j / 2))
            x[c][j] = __ldcg((const float4*)(partial + (2 * begin + j) * 4 * WORKERS));
      }
#pragma unroll
      for (u32 c = 0; c < CLUSTERS_AT_ONCE; c++) {
        if (c > 0 && i + c >= others) break;
#pragma unroll
        for (u32 j = 0; j < 2 * ADDED; j++) {
          if (begin + j / 2 >= STRIPS || !share.has(begin + j / 2)) continue;
          float* d = sums + begin * 8 + j * 4;
          d[0] += x[c][j].x, d[1] += x[c][j].y, d[2] += x[c][j].z, d[3] += x[c][j].w;
        }
      }
    }
  }
}

// As many loads in flight as registers allow. With more than two clusters a share is small, and the loads' latency
// dominates: then three clusters' sums are loaded at once.
__device__ __forceinline__ void add_sums(const Params& p, const Join& join, u32 own, u32 rank,
                                         const Share& share, float* sums) {
  if (VALUES <= (GROUPS == 2 ? 64 : 48) && join.sharers > 2)
    add_sums<2, 3>(p, join, own, rank, share, sums);
  else
    add_sums<4, 1>(p, join, own, rank, share, sums);
}

// Flags of a finisher: flag i says that the tile's cluster i has stored its sums; the finisher's own flag, that
// the head runs. A raised flag is `flag_epoch`, or `flag_epoch + 1` by a cluster that has stored all sums and will not
// finish its share. The host gives each launch new epochs, so flags need no clearing before.
// A replayed CUDA graph repeats its epochs, so the launch resets its flags.
struct Flags {
  u64* of_cluster;

  __device__ __forceinline__ Flags(const Params& p, u32 cluster, u32 rank, int group)
      : of_cluster(p.flags + ((2 * cluster + rank) * GROUPS + group) * MAX_SHARERS) {}

  __device__ __forceinline__ void set(u32 i, u64 value) const {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(of_cluster + i), "l"(value) : "memory");
  }

  // Release: whoever acquires the flag sees earlier writes of this thread and of threads it synchronized with.
  __device__ __forceinline__ void raise(u32 i, u64 value) const {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(of_cluster + i), "l"(value) : "memory");
  }

  __device__ __forceinline__ u64 get(u32 i) const {
    u64 found;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(of_cluster + i) : "memory");
    return found;
  }

  __device__ __forceinline__ u64 wait(const Params& p, u32 i) const {
    u64 found;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];"
                   : "=l"(found)
                   : "l"(of_cluster + i)
                   : "memory");
    } while (found - p.flag_epoch > 1);
    return found;
  }
};

// Workers arrive, without waiting, when they have stored the sums of a tail or seen the flags of a part; the flag
// warp waits for them.
__device__ __forceinline__ void notify_flag_warp(int group, bool tail) {
  asm volatile("bar.arrive %0, 160;" ::"r"(1 + GROUPS + 2 * group + tail) : "memory");
}

__device__ __forceinline__ void wait_for_workers(int group, bool tail) {
  asm volatile("bar.sync %0, 160;" ::"r"(1 + GROUPS + 2 * group + tail) : "memory");
}

// What the epilogue of a tile, or of a part of one, has to do.
struct Epilogue {
  Place place;
  u32 strips;
  bool is_part, is_tail;
  // For a part that is finished together with other clusters:
  Join join;
  u32 own;  // this cluster's index among the tile's
  Share share;
  u64 head_runs;  // this cluster's own flag, `flag_epoch` if the head runs

  __device__ __forceinline__ Epilogue(const Params& p, const Work& work, int group)
      : place(p, work.tile),
        strips(place.strips(p)),
        is_part(work.is_part(p)),
        is_tail(work.is_tail(p)),
        own(0),
        share(0, 0),
        head_runs(p.flag_epoch) {
    if (is_part && !is_tail) {
      join = Join(p, work.tile);
      own = cluster_number() - join.head;
      share = Share(join, strips, own);
      if (own > 0) head_runs = Flags(p, join.head + own, cluster_rank(), group).get(own);
    }
    // Forces the values to be computed here, while a matmul runs, not where they are used.
    asm volatile("" : "+r"(place.row_block), "+r"(place.token), "+r"(strips));
    asm volatile("" : "+r"(join.head), "+r"(join.sharers), "+r"(join.finishers), "+r"(own));
    asm volatile("" : "+r"(share.first), "+r"(share.stop));
  }
};

// Stores the sums of a part for the other finishers of the tile, and waits for theirs. Returns false if this
// cluster does not stay to finish its share. `gone` gives the head the bits of finishers that did not stay, whose
// shares it finishes.
__device__ __forceinline__ bool exchange_sums(const Params& p, const Epilogue& epilogue, u32 rank, int group,
                                              u32 stays_of_groups, const float* sums, u32& gone) {
  const Join& join = epilogue.join;
  const u32 lane = threadIdx.x % 32, own = epilogue.own;
  const bool first_thread = threadIdx.x % 128 == 0;
  const Flags flags(p, join.head + own, rank, group);
  float* const partial = partial_of(p, false, join.head + own, rank);
  Share kept = epilogue.share;
  if (own > 1) kept.stop = kept.first;
  store_sums(partial, epilogue.strips, kept, sums);
  // With SwiGLU both warpgroups stay or none, because each needs the other's values.
  const bool leaves = first_thread && epilogue.head_runs != p.flag_epoch;
  const bool stays = !(SWIGLU ? any<WORKERS>(ALL_WORKERS, leaves) : any<128>(1 + group, leaves));
  if (!stays) {
    store_sums(partial, epilogue.strips, Share(0, 0), sums);
    group_sync(group);
  }
  if (threadIdx.x % 128 < 32 && lane < join.finishers && lane != own)
    Flags(p, join.head + lane, rank, group).raise(own, p.flag_epoch + !stays);
  if (stays) {
    u64 found = p.flag_epoch;
    if (lane < join.sharers && lane != own) found = flags.wait(p, lane);
    gone = __ballot_sync(~0u, found != p.flag_epoch);
    if (own > 0) gone = 0;
    __syncwarp();  // what one lane acquired is visible to all
  }
  if (first_thread) store_word(stays_of_groups + 4 * group, stays);
  notify_flag_warp(group, false);
  return stays;
}

// The work of the two flag warps, each for every second warpgroup: as the head, announce that it runs; raise the
// flags of a tail when its sums are stored; reset flags that were seen.
__device__ __forceinline__ void run_flag_warp(const Params& p, u32 stays_of_groups, int first_group) {
  Work work(p);
  bool is_tail = false, is_part = false;
  Join tail, join;
  if (p.cut_tiles > 0) {
    while (work.next_part(p)) {
      if (!work.is_part(p)) continue;
      // A tail is a cluster's first part, and does not wait.
      if (work.is_tail(p)) {
        is_tail = true;
        tail = Join(p, work.tile);
      } else {
        is_part = true;
        join = Join(p, work.tile);
      }
    }
  }
  const u32 lane = threadIdx.x % 32, number = cluster_number(), rank = cluster_rank();
  const u32 own = number - join.head;
  cluster_wait();
  wait_for_previous();
  const bool announces = is_part && own == 0 && lane > 0 && lane < join.finishers;
  for (int group = first_group; announces && group < GROUPS; group += 2)
    Flags(p, join.head + lane, rank, group).set(lane, p.flag_epoch);
  __syncwarp();
  for (int group = first_group; is_tail && group < GROUPS; group += 2) {
    wait_for_workers(group, true);
    if (lane < tail.finishers) Flags(p, tail.head + lane, rank, group).raise(number - tail.head, p.flag_epoch);
    __syncwarp();
  }
  for (int group = first_group; is_part && group < GROUPS; group += 2) {
    __syncwarp();
    wait_for_workers(group, false);
    if (!load_word(stays_of_groups + 4 * group)) continue;  // the head resets them
    const Flags flags(p, join.head + own, rank, group);
    const bool seen = lane < join.sharers && lane != own;
    const u32 gone = __ballot_sync(~0u, seen && flags.get(lane) != p.flag_epoch);
    if (seen) flags.set(lane, 0);
    if (own > 0) continue;
    if (announces) Flags(p, join.head + lane, rank, group).set(lane, 0);
    for (u32 i = 1; i < join.finishers; i++) {
      if (!(gone >> i & 1) || lane >= join.sharers || lane == i) continue;
      const Flags theirs(p, join.head + i, rank, group);
      theirs.wait(p, lane);
      theirs.set(lane, 0);
    }
  }
}
