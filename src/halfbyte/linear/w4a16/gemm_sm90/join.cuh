// How the clusters that have parts of a tile finish it together, each some of its tokens, from the sums
// that all leave in `partial`. The order of sums is that of k, whoever comes first.
//
//   Tail       A cluster that goes on to the next tile only leaves its sums, and does not wait.
//   Waiting    A cluster waits for those that started before it. For the last to start, the tile's head,
//              it waits only if that one has said that it runs; otherwise it leaves all of its sums and
//              goes, and the head finishes its tokens. So kernels that share the GPU never wait for
//              each other's multiprocessors.

#pragma once
#include "linear/w4a16/gemm_sm90/work.cuh"

#define WORKERS (128 * GROUPS)
#define VALUES (TOKENS / 2)  // of an accumulator, per thread
#define STRIP_FLOATS (8 * WORKERS)
#define MOST_SHARERS 32  // of a tile: a lane each
#define ADDED_STRIPS 4  // at a time, as registers allow

// A CTA's threads of a warpgroup.
__device__ __forceinline__ void group_sync(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

// The same, and whether this is so for any of them.
__device__ __forceinline__ bool group_any(int group, bool here) {
  u32 any;
  asm volatile(
      "{.reg .pred p, q; setp.ne.u32 q, %1, 0; bar.red.or.pred p, %2, 128, q; selp.u32 %0, 1, 0, p;}"
      : "=r"(any)
      : "r"((u32)here), "r"(1 + group)
      : "memory");
  return __shfl_sync(~0u, any, 0);  // known to be the same for a warp
}

// A word that one thread writes before a barrier at which it only arrives, and others read behind it. Atomic,
// because compute-sanitizer does not see such an order.
__device__ __forceinline__ void leave_word(u32 address, u32 value) {
  u32 before;
  asm volatile("atom.shared.exch.b32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ u32 find_word(u32 address) {
  u32 y;
  asm volatile("atom.shared.or.b32 %0, [%1], 0;" : "=r"(y) : "r"(address) : "memory");
  return y;
}

// A thread's sums of a part of a tile.
__device__ __forceinline__ float* partial_of(const Params& p, bool tail, u32 cluster, u32 rank) {
  const u32 place = 2 * ((tail ? 0 : p.clusters.by) + cluster) + rank;
  return p.partial + (u64)place * (TOKENS * ROWS) + (threadIdx.x - 128) * 4;
}

// Leaves the sums of these strips but those kept.
__device__ __forceinline__ void leave_sums(float* partial, u32 strips, const Share& kept,
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

// Adds what others left of a share, in order of k. The third and later ones begin anew, as sums that come
// before theirs must be added first; they left theirs, too.
__device__ __forceinline__ void add_sums(const Params& p, const Join& join, u32 own, u32 rank,
                                         const Share& share, float* sums) {
  const bool anew = own > 1;
  const u32 others = join.sharers - !anew;
#pragma unroll
  for (int i = 0; anew && i < VALUES; i++) sums[i] = 0.0f;
#pragma unroll
  for (u32 begin = 0; begin < STRIPS; begin += ADDED_STRIPS) {
    if (begin >= share.stop || begin + ADDED_STRIPS <= share.first) continue;
    for (u32 i = 0; i < others; i++) {
      const u32 other = i + (!anew && i >= own);
      const float* const partial = partial_of(p, other >= join.finishers, join.head + other, rank);
      // Without values, the compiler holds registers for it from the kernel's begin.
      float4 x[2 * ADDED_STRIPS] = {};
#pragma unroll
      for (u32 j = 0; j < 2 * ADDED_STRIPS; j++)
        if (begin + j / 2 < STRIPS && share.has(begin + j / 2))
          x[j] = __ldcg((const float4*)(partial + (begin + j / 2) * STRIP_FLOATS + j % 2 * 4 * WORKERS));
#pragma unroll
      for (u32 j = 0; j < 2 * ADDED_STRIPS; j++) {
        if (begin + j / 2 >= STRIPS || !share.has(begin + j / 2)) continue;
        float* d = sums + begin * 8 + j * 4;
        d[0] += x[j].x, d[1] += x[j].y, d[2] += x[j].z, d[3] += x[j].w;
      }
    }
  }
}

// Flags of a finisher: which of a tile's clusters have left their sums; in its own place, whether the
// head runs. Raised is `raised`, or one more by a cluster that has left all sums and will not finish its
// share. Nothing else ever has such values, and a launch leaves none: so a replay of it may raise them
// again, and flags need no clearing, whatever lay in their memory.
struct Flags {
  u64* of_cluster;

  __device__ __forceinline__ Flags(const Params& p, u32 cluster, u32 rank, int group)
      : of_cluster(p.flags + ((2 * cluster + rank) * GROUPS + group) * MOST_SHARERS) {}

  __device__ __forceinline__ void set(u32 i, u64 value) const {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(of_cluster + i), "l"(value) : "memory");
  }

  // What this thread, or one that it met at a barrier, wrote before is seen by who sees the flag.
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
    } while (found - p.raised > 1);
    return found;
  }
};

// Workers only arrive when they have left the sums of a tail, or seen the flags of a part: a warp beside them
// waits for that.
__device__ __forceinline__ void tell_keeper(int group, bool tail) {
  asm volatile("bar.arrive %0, 160;" ::"r"(1 + GROUPS + 2 * group + tail) : "memory");
}

__device__ __forceinline__ void wait_for_workers(int group, bool tail) {
  asm volatile("bar.sync %0, 160;" ::"r"(1 + GROUPS + 2 * group + tail) : "memory");
}

// What is to be done with a tile, or a part of one, when its matmuls have ended.
struct Ending {
  Place place;
  u32 strips;
  bool is_part, is_tail;
  // Of a part that is finished together:
  Join join;
  u32 own;  // which of the tile's clusters this one is
  Share share;

  __device__ __forceinline__ Ending(const Params& p, const Work& work)
      : place(p, work.tile),
        strips(place.strips(p)),
        is_part(work.is_part(p)),
        is_tail(work.is_tail(p)),
        own(0),
        share(0, 0) {
    if (is_part && !is_tail) {
      join = Join(p, work.tile);
      own = cluster_number() - join.head;
      share = Share(join, strips, own);
    }
    // Here, not where they are used.
    asm volatile("" : "+r"(place.row_block), "+r"(place.token), "+r"(strips));
    asm volatile("" : "+r"(join.head), "+r"(join.sharers), "+r"(join.finishers), "+r"(own));
    asm volatile("" : "+r"(share.first), "+r"(share.stop));
  }
};

// Leaves the sums of a part for those that finish the tile together, and waits for theirs. False if this
// cluster has gone. To the head it tells the finishers (bits) who have, and whose shares it finishes.
__device__ __forceinline__ bool exchange_sums(const Params& p, const Ending& ending, u32 rank, int group,
                                              u32 stays_of_groups, const float* sums, u32& gone) {
  const Join& join = ending.join;
  const u32 lane = threadIdx.x % 32, own = ending.own;
  const bool first_thread = threadIdx.x % 128 == 0;
  const Flags flags(p, join.head + own, rank, group);
  const u64 head_runs = own > 0 ? flags.get(own) : p.raised;
  float* const partial = partial_of(p, false, join.head + own, rank);
  Share kept = ending.share;
  if (own > 1) kept.stop = kept.first;
  leave_sums(partial, ending.strips, kept, sums);
  const bool stays = group_any(group, first_thread && head_runs == p.raised);
  if (!stays) {
    leave_sums(partial, ending.strips, Share(0, 0), sums);
    group_sync(group);
  }
  if (threadIdx.x % 128 < 32 && lane < join.finishers && lane != own)
    Flags(p, join.head + lane, rank, group).raise(own, p.raised + !stays);
  if (stays) {
    u64 found = p.raised;
    if (lane < join.sharers && lane != own) found = flags.wait(p, lane);
    gone = __ballot_sync(~0u, found != p.raised);
    if (own > 0) gone = 0;
    __syncwarp();  // what one lane has been told of is there for all
  }
  if (first_thread) leave_word(stays_of_groups + 4 * group, stays);
  tell_keeper(group, false);
  return stays;
}

// What two warps beside the workers do, each for every second warpgroup: a head tells the others that it runs,
// flags of a tail are raised when its sums are written, and flags that were seen are taken back.
__device__ __forceinline__ void keep_flags(const Params& p, u32 stays_of_groups, int first_group) {
  Work work(p);
  bool is_tail = false, is_part = false;
  Join tail, join;
  if (p.cut_tiles > 0) {
    while (work.next_part(p)) {
      if (!work.is_part(p)) continue;
      // A tail is the first that a cluster has, and waits for nobody.
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
  const bool told = is_part && own == 0 && lane > 0 && lane < join.finishers;
  for (int group = first_group; told && group < GROUPS; group += 2)
    Flags(p, join.head + lane, rank, group).set(lane, p.raised);
  __syncwarp();
  for (int group = first_group; is_tail && group < GROUPS; group += 2) {
    wait_for_workers(group, true);
    if (lane < tail.finishers) Flags(p, tail.head + lane, rank, group).raise(number - tail.head, p.raised);
    __syncwarp();
  }
  for (int group = first_group; is_part && group < GROUPS; group += 2) {
    __syncwarp();
    wait_for_workers(group, false);
    if (!find_word(stays_of_groups + 4 * group)) continue;  // the head takes them back
    const Flags flags(p, join.head + own, rank, group);
    const bool seen = lane < join.sharers && lane != own;
    const u32 gone = __ballot_sync(~0u, seen && flags.get(lane) != p.raised);
    if (seen) flags.set(lane, 0);
    if (own > 0) continue;
    if (told) Flags(p, join.head + lane, rank, group).set(lane, 0);
    for (u32 i = 1; i < join.finishers; i++) {
      if (!(gone >> i & 1) || lane >= join.sharers || lane == i) continue;
      const Flags theirs(p, join.head + i, rank, group);
      theirs.wait(p, lane);
      theirs.set(lane, 0);
    }
  }
}
