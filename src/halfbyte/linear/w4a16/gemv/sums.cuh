// How the warps of gemv.cu store their sums in shared memory, and how these become the result.
//
//   Slots      A warp stores its sum of a unit in slot (warp + unit). From one sum to the next along the
//              sequence of items, warp or unit increases and neither decreases, so no two sums share a
//              slot. A slot consists of accumulator fragments of the matmul: 16 rows of W x 8 columns,
//              16 bytes per lane.
//   Pairs      If two CTAs share a unit as a cluster, each finishes one of its two tiles of 16 rows. A warp
//              sends its sums of the other tile straight to the other CTA's shared memory (st.async), whose
//              barrier counts the bytes; after a round a warp arrives there with the number of bytes it
//              sent. No CTA reads the other's memory, so either may exit first.
//   Output     is computed by fragments: a warp adds the stored sums of one, warp after warp, then CTA after
//              CTA. The address of its first fragment is computed before its first matmul.
//
// The macros are those of gemv.cu.

#pragma once
#include "linear/w4a16/gemv/loader.cuh"
#include "kernels/runtime/sm90.cuh"

#define SOURCES (JOIN == 1 ? 2 : 1)  // CTAs whose sums a CTA adds
#define TILES (2 / SOURCES)          // of 16 rows, that a CTA finishes per unit
#define FRAGMENT_BYTES 512
#define PARTS 4  // loads in flight, per source
#define SLOT_BYTES (TILES * COLUMN_TILES * FRAGMENT_BYTES)

__device__ __forceinline__ float4 load_floats(u32 address) {
  float4 y;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(y.x), "=f"(y.y), "=f"(y.z), "=f"(y.w)
               : "r"(address)
               : "memory");
  return y;
}

__device__ __forceinline__ void store_floats(const float* x, u32 address) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
}

// The slots in this CTA's shared memory: `count` for the sums of its own warps and, in a pair, as many for those of the
// other CTA's warps, rank 0 first.
struct Slots {
  u32 start, barrier;
  int count, rank;  // slots per source; this CTA's source
  u32 peer_start, peer_barrier;
  u32 parity = 0;  // of the round

  __device__ __forceinline__ Slots(const Params& p, const Place& place, u32 start, u32 barrier)
      : start(start),
        barrier(barrier),
        count(WARPS + min(ROUND_UNITS, place.units) - 1),
        rank(JOIN == 1 ? place.rank : 0),
        peer_start(JOIN == 1 ? map_to_rank(start, rank ^ 1) : 0),
        peer_barrier(JOIN == 1 ? map_to_rank(barrier, rank ^ 1) : 0) {}

  // A lane's offset from the first slot.
  __device__ __forceinline__ u32 offset(int source, int slot) const {
    return (source * count + slot) * SLOT_BYTES + (threadIdx.x & 31) * 16;
  }

  __device__ __forceinline__ void store(float (*sums)[COLUMN_TILES][4], int slot) const {
    const u32 at = offset(rank, slot);
#pragma unroll
    for (int i = 0; i < COLUMN_TILES; i++) {
#if JOIN == 1
      float own[4], other[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        own[j] = rank ? sums[1][i][j] : sums[0][i][j];
        other[j] = rank ? sums[0][i][j] : sums[1][i][j];
      }
      send_floats(other, peer_start + at + i * FRAGMENT_BYTES, peer_barrier);
      store_floats(own, start + at + i * FRAGMENT_BYTES);
#else
#pragma unroll
      for (int tile = 0; tile < 2; tile++)
        store_floats(sums[tile][i], start + at + (tile * COLUMN_TILES + i) * FRAGMENT_BYTES);
#endif
    }
  }

#if JOIN == 1
  // Called by one warp; the other CTA's warps arrive at the barrier.
  __device__ __forceinline__ void make_barrier() const {
    if (elect_one()) {
      barrier_init(barrier, WARPS);
      fence_barrier_init();
    }
    __syncwarp();
  }

  // Waits until all warps have stored their sums of a round; this warp has stored those of `units` units.
  __device__ __forceinline__ void wait_for_all(int units) const {
    if (elect_one()) barrier_expect_mapped(peer_barrier, units * SLOT_BYTES);
    __syncthreads();
    barrier_wait(barrier, parity);
  }

  // Before the next round overwrites the slots, all warps must have read them.
  __device__ __forceinline__ void finish_round() {
    parity ^= 1;
    cluster_sync();
  }
#else
  __device__ __forceinline__ void make_barrier() const {}
  __device__ __forceinline__ void wait_for_all(int) const { __syncthreads(); }
  __device__ __forceinline__ void finish_round() const { __syncthreads(); }
#endif
};

// Which warps of a source have stored sums of a unit.
struct Line {
  int blocks;
  Segments segments;
  RoundDivisor by_total;

  __device__ __forceinline__ Line(int units, int blocks)
      : blocks(blocks), segments(units * blocks), by_total(segments.total) {}

  __device__ __forceinline__ int first_warp(int unit) const {
    return segments.warp_of(unit * blocks, by_total);
  }
  __device__ __forceinline__ int last_warp(int unit) const {
    return segments.warp_of((unit + 1) * blocks - 1, by_total);
  }
};

// A fragment of a round's result.
struct OutFragment {
  int row, column;  // its first ones, relative to the CTA's first row and to the first token of this pass
  u32 address[SOURCES];
  int warps[SOURCES];
  float scale[2];  // of a lane's rows, g and g + 8

  __device__ __forceinline__ static int count(const Round& round) {
    return round.units * TILES * COLUMN_TILES;
  }

  // Fragment `index` of a round; an index beyond the last gives an unused one of the last unit.
  __device__ __forceinline__ OutFragment(const Params& p, const Place& place, const Round& round,
                                   const Slots& slots, int index) {
    const int fragment = index % (TILES * COLUMN_TILES);
    const int unit = min(index / (TILES * COLUMN_TILES), round.units - 1);
    const int tile = JOIN == 1 ? slots.rank : fragment / COLUMN_TILES;
    row = (round.first + unit) * 32 + tile * 16;
    column = fragment % COLUMN_TILES * 8;
#pragma unroll
    for (int source = 0; source < SOURCES; source++) {
      const Line line(round.units, JOIN == 1 ? place.blocks_of(p, source) : place.blocks);
      const int first = line.first_warp(unit);
      warps[source] = line.last_warp(unit) - first + 1;
      address[source] = slots.start + slots.offset(source, first + unit) + fragment * FRAGMENT_BYTES;
    }
#if JOIN != 2
#pragma unroll
    for (int i = 0; i < 2; i++) scale[i] = p.row_scale[row_of_lane(place, i)];
#endif
  }

  __device__ __forceinline__ int row_of_lane(const Place& place, int i) const {
    return place.first_unit * 32 + row + (threadIdx.x & 31) / 4 + 8 * i;
  }

  // Adds the sums of all warps and CTAs, in that order.
  __device__ __forceinline__ void add(float* sums) const {
    float of[SOURCES][4] = {};
    const int max_warps = max(warps[0], warps[SOURCES - 1]);
#pragma unroll 1
    for (int begin = 0; begin < max_warps; begin += PARTS) {
      float4 x[SOURCES][PARTS];
#pragma unroll
      for (int source = 0; source < SOURCES; source++)
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
          x[source][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (begin + j < warps[source])
            x[source][j] = load_floats(address[source] + (begin + j) * SLOT_BYTES);
        }
#pragma unroll
      for (int source = 0; source < SOURCES; source++)
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
          of[source][0] += x[source][j].x, of[source][1] += x[source][j].y;
          of[source][2] += x[source][j].z, of[source][3] += x[source][j].w;
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) sums[j] = JOIN == 1 ? of[0][j] + of[SOURCES - 1][j] : of[0][j];
  }

  // Biases of a lane's rows as loaded bits: the conversion, which waits for them, comes later.
  __device__ __forceinline__ void load_bias(const Params& p, const Place& place, u32* bias) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = row_of_lane(place, i);
      bias[i] = JOIN != 2 && p.bias && row < p.n ? p.bias[row] : 0;
    }
  }

  // Stores to the output or, if `linear_join` adds the parts of k, to `partial`.
  __device__ __forceinline__ void store(const Params& p, const Place& place, int columns, const u32* bias,
                                        const float* sums) const {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int row = row_of_lane(place, j / 2), at = column + (threadIdx.x & 3) * 2 + j % 2;
      const u64 to = place.first_column + at;
      if (at >= columns) continue;
#if JOIN == 2
      p.partial[((u64)place.rank * p.m + to) * UNITS * 32 + row] = sums[j];
#else
      if (row < p.n)
        p.out[to * p.n + row] =
            (u16)pack_pair(fmaf(sums[j], scale[j / 2], lower_to_float(bias[j / 2])), 0.0f);
#endif
    }
  }
};

// Writes a round's output, starting with `fragment`, after this warp has stored sums of `units` units. Scale and
// bias of the next fragment are loaded before this one's sums are added.
__device__ __forceinline__ void finish(const Params& p, const Place& place, const Round& round,
                                       const Slots& slots, OutFragment fragment, int columns, int units) {
  u32 bias[2];
  fragment.load_bias(p, place, bias);
  slots.wait_for_all(units);
#pragma unroll 1
  for (int i = place.warp; i < OutFragment::count(round); i += WARPS) {
    const OutFragment now = fragment;
    const u32 now_bias[2] = {bias[0], bias[1]};
    if (i + WARPS < OutFragment::count(round)) {
      fragment = OutFragment(p, place, round, slots, i + WARPS);
      fragment.load_bias(p, place, bias);
    }
    float sums[4];
    now.add(sums);
    now.store(p, place, columns, now_bias, sums);
  }
}
