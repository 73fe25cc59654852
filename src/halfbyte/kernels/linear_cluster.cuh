// How the CTAs of a cluster join their sums, for linear.cu.
//
// A piece of sums is finished by one of them, in turn. The others send theirs to it, into a place of their
// own in its shared memory, by stores that arrive at a barrier there: nobody waits but the one who
// finishes, and nobody reads another's memory, so that all may leave.
//
// The macros are those of linear.cu.

#pragma once
#include "linear_loader.cuh"
#include "sm90.cuh"

#define JOIN_COLUMNS 4  // whose sums a lane adds side by side, so that their latencies overlap
#define SUMS_BYTES (32 * JOIN_COLUMNS * 4)  // of a piece

#if JOIN == 1
// Stores to these addresses in a CTA of the cluster.
__device__ __forceinline__ void send16(const float* x, u32 address, u32 barrier, int rank) {
  asm volatile(
      "{.reg .b32 to, at; mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 at, %1, %2;"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, [at];}" ::"r"(
          address),
      "r"(barrier), "r"(rank), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
      : "memory");
}
#endif

struct ClusterSums {
  u32 barrier, sums;
  u32 parity = 0;  // of the round

  __device__ __forceinline__ ClusterSums(u32 barrier, u32 sums) : barrier(barrier), sums(sums) {}

  // Between rounds: nobody leaves, or sends, sums where others are still reading.
  __device__ __forceinline__ void finish_round() {
#if JOIN == 1
    parity ^= 1;
    cluster_sync();
#else
    __syncthreads();
#endif
  }

#if JOIN == 1
  // By one warp; and by all, some time after that.
  __device__ __forceinline__ void prepare() const {
    if (elect_one()) {
      barrier_init(barrier, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
  }
  __device__ __forceinline__ void say_ready() const { cluster_arrive_relaxed(); }
  __device__ __forceinline__ void wait_until_ready() const { cluster_wait(); }

  // How many pieces of a round this CTA finishes; piece `rank` is the first, SPLIT further the next.
  __device__ __forceinline__ static int own(int pieces, int rank) {
    return (pieces - rank + SPLIT - 1) / SPLIT;
  }
  // The pieces that it does not finish, one after another.
  __device__ __forceinline__ static int others(int i, int rank) {
    const int turn = i / (SPLIT - 1), at = i % (SPLIT - 1);
    return turn * SPLIT + at + (at >= rank);
  }

  __device__ __forceinline__ void expect(int pieces, int rank) const {
    if (threadIdx.x == 0) barrier_expect(barrier, own(pieces, rank) * (SPLIT - 1) * SUMS_BYTES);
  }

  __device__ __forceinline__ u32 address(int piece, int rank) const {
    return sums + (piece / SPLIT * SPLIT + rank) * SUMS_BYTES + (threadIdx.x & 31) * 16;
  }

  __device__ __forceinline__ void send(const float* x, int piece, int rank) const {
    send16(x, address(piece, rank), barrier, piece % SPLIT);
  }

  __device__ __forceinline__ void wait() const { barrier_wait(barrier, parity); }

  // Adds the CTAs' sums in their order, one of which this CTA has itself.
  __device__ __forceinline__ void add(float* x, int piece, int own_rank) const {
    const uint4 own = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                                 __float_as_uint(x[3]));
    uint4 parts[SPLIT];
#pragma unroll
    for (int rank = 0; rank < SPLIT; rank++)
      parts[rank] = rank == own_rank ? own : load16(address(piece, rank));
#pragma unroll
    for (int j = 0; j < JOIN_COLUMNS; j++) x[j] = 0.0f;
#pragma unroll
    for (int rank = 0; rank < SPLIT; rank++) {
      x[0] += __uint_as_float(parts[rank].x);
      x[1] += __uint_as_float(parts[rank].y);
      x[2] += __uint_as_float(parts[rank].z);
      x[3] += __uint_as_float(parts[rank].w);
    }
  }
#else
  __device__ __forceinline__ void prepare() const {}
  __device__ __forceinline__ void say_ready() const {}
#endif
};
