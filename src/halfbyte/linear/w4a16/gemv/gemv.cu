// W4A16 GEMV (small M): y[m, n] = sum over k of x[m, k] W[n, k], W in NVFP4.
//
// Bound by memory bandwidth: the weights are read once, through the registers.
//
//   Operands   m16n8k16: A = 16 rows of W x 16 k, unpacked in registers; B = 8 columns (tokens).
//              A warp works on a unit of 32 rows of W, 128 k at a time (an item of 2304 bytes).
//   Loads      Every lane copies its own 16 bytes with cp.async into its warp's ring in shared memory
//              and reads them back: no barriers. Each half of an item (64 k) is read to registers as a
//              whole, so that its slot in the ring is free for the next copy before the arithmetic
//              starts. Copies start before the previous kernel has ended (programmatic dependent
//              launch), because weights do not depend on it. From SM90 on, the warps that load x do
//              that first, and so wait for the previous kernel.
//   x          is in shared memory for all warps (x.cuh), which start at different k.
//   Split      A group of SPLIT CTAs shares a range of units: each CTA has a part of k of all of them.
//              A CTA takes up to ROUND_UNITS units at a time (a round), whose sums fit into shared memory.
//              The items of a round are numbered unit after unit, and that sequence is cut into one
//              segment per warp. A segment may begin in the middle of a
//              unit and extend into the next one. Then the warp does the part in the next unit first,
//              so that more warps start at k = 0 of a unit.
//   Sums       of a unit are stored in shared memory and added (sums.cuh), warp after warp, then CTA
//              after CTA: always in the same order. The order does not depend on M as long as the
//              launcher keeps SPLIT, WARPS, GROUPS and ROUND_UNITS (batch invariance).
//
// Macros:
//   X_BF16         see values.cuh
//   COLUMN_TILES   tiles of 8 columns: 1, 2 or 4
//   SPLIT          CTAs of a group
//   JOIN           how they join their sums: 0 not at all (SPLIT 1), 1 as a cluster (SPLIT 2, from SM90
//                  on), 2 through global memory and `linear_join`
//   WARPS, STAGES, CTAS   warps per CTA, items in a ring, CTAs per SM
// and, all or none, because divisions would be half of the instructions before the first copy:
//   UNITS, BLOCKS, GROUPS, ROUND_UNITS   as in Params
//   SINGLE         whether M is 1

#include "linear/w4a16/gemv/sums.cuh"
#include "linear/w4a16/gemv/x.cuh"
#include "linear/w4a16/matmul.cuh"

#if JOIN == 1 && SPLIT != 2
#error "a cluster has two CTAs"
#endif

__device__ __forceinline__ void load_matrices(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Prefetches global scales and bias of the CTA's rows to L2. Called by one warp.
__device__ __forceinline__ void fetch_vectors(const Params& p, const Place& place) {
#if JOIN != 2
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < place.units; i += 32) {
    const int row = (place.first_unit + i) * 32;
    prefetch_l2(p.row_scale + row);
    if (p.bias && row < p.n) prefetch_l2(p.bias + row);
  }
#endif
}

// A lane's words of 32 rows of W x 64 k, half an item.
struct Square {
  uint4 words[2], scales;

  // Addresses in the ring: this lane's weights, and the scales of its group of four lanes.
  __device__ __forceinline__ void load(u32 weights, u32 scales_address) {
    words[0] = load16(weights);
    words[1] = load16(weights + 512);
    scales = load16(scales_address);
  }
};

__device__ __forceinline__ void multiply(float (*acc)[COLUMN_TILES][4], const Square& w,
                                         const u32 (*x_at)[4], u32 x_offset, u32 exponent) {
  const u32 words[2][4] = {{w.words[0].x, w.words[0].y, w.words[0].z, w.words[0].w},
                           {w.words[1].x, w.words[1].y, w.words[1].z, w.words[1].w}};
  const u32 scale_words[2][2] = {{w.scales.x, w.scales.y}, {w.scales.z, w.scales.w}};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 scale[2][2];
    unpack_scales(scale[0], scale_words[0][half], exponent);
    unpack_scales(scale[1], scale_words[1][half], exponent);
#if COLUMN_TILES == 1
    u32 b[4];
    load_matrices(b, x_at[0][2 * half] + x_offset);
#endif
#pragma unroll
    for (int j = 0; j < 2; j++) {
#if COLUMN_TILES > 1
      u32 b[COLUMN_TILES * 2];
#pragma unroll
      for (int i = 0; i < COLUMN_TILES / 2; i++)
        load_matrices(b + 4 * i, x_at[i][2 * half + j] + x_offset);
#endif
#pragma unroll
      for (int tile = 0; tile < 2; tile++) {
        u32 a[4];
        unpack_operand(a, words[tile][2 * half + j], scale[tile][j]);
#if COLUMN_TILES == 1
        matmul(acc[tile][0], a, b[2 * j], b[2 * j + 1]);
#else
#pragma unroll
        for (int i = 0; i < COLUMN_TILES; i++) matmul(acc[tile][i], a, b[2 * i], b[2 * i + 1]);
#endif
      }
    }
  }
}

#if JOIN == 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, CTAS)
    linear_gemv(const __grid_constant__ TensorMap x_map, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];  // the period of the swizzle of x
  const Place place(p);
  const int lane = threadIdx.x & 31;
  const u32 x_start = shared_address(shared), barriers = x_end(p, x_start);
  const u32 rings = barriers + X_BARRIER_BYTES;
  // The shuffle changes nothing. It works around ptxas 13.0, which may otherwise take a copy's cache policy from
  // an unset register where it knows part of an address to be uniform in a warp, see formats.cuh.
  const u32 ring =
      __shfl_sync(~0u, rings + (threadIdx.x >> 5) * STAGES * ITEM_BYTES + lane * 16, lane);
  const SharedX x(p, place, barriers, x_start);
  Slots slots(p, place, rings + WARPS * STAGES * ITEM_BYTES, barriers + 8 * X_SLICES);
#if __CUDA_ARCH__ >= 900
  x.load(&x_map, place);
#endif
  // The first copy's address is computed in vector registers, as uniform ones take twice as long; the loop below
  // counts in uniform registers.
  Place of_lanes = place;
  of_lanes.warp = threadIdx.x >> 5;
  Loader loader(p, of_lanes, ring);
#if __CUDA_ARCH__ < 900
  x.copy(p, place);
#endif
  loader.fill(ring);
  if (place.warp == WARPS - 1) {
    slots.make_barrier();
    fetch_vectors(p, place);
  }
#if __CUDA_ARCH__ < 900
  x.wait_for_all<2 * (STAGES - COPIES_BEFORE_X)>();
#else
  // The barriers are initialized, in the other CTA as well.
#if JOIN == 1
  cluster_arrive_relaxed();
  cluster_wait();
#else
  __syncthreads();
#endif
  allow_next();
#endif

  u32 x_at[X_TILES][4];
  x.addresses(x_at);
  // Offset from a lane's weights to its group's scales.
  const u32 to_scales = ITEM_WEIGHTS + (lane >> 2) * 16 - lane * 16;
  const u32 exponent = p.m > 0 ? SCALE_EXPONENT : 0;
  u32 slot = ring;
  for (int first = 0; first < place.units; first += ROUND_UNITS) {
    const Round round(p, place, first);
    const OutFragment fragment(p, place, round, slots, place.warp);
    int summed = 0;  // units
#pragma unroll 1
    for (int part = 0; part < (EVEN_ITEMS ? 1 : 2); part++) {
      int item = part == 0 ? round.turn : round.begin;
      const int end = part == 0 ? round.end : round.turn;
      for (int unit = round.unit + (item > round.begin); item < end; unit++) {
        float acc[2][COLUMN_TILES][4] = {};
        // Items of the unit.
        const int count = EVEN_ITEMS ? EVEN_ITEMS : min(end, (unit + 1) * place.blocks) - item;
        u32 x_offset = (item - unit * place.blocks) * x.block_bytes;
        item += count;
#pragma unroll(EVEN_ITEMS ? EVEN_ITEMS : 1)
        for (int i = 0; i < count; i++) {
          // Halves of an item are copied and used separately: less work is left after the last copy.
          Square square;
          asm volatile("cp.async.wait_group %0;" ::"n"(2 * STAGES - 1) : "memory");
          __syncwarp();
          square.load(slot, slot + to_scales);
          __syncwarp();  // all lanes have read their scales
          loader.step_first(slot);
          x.wait(x_offset);
          multiply(acc, square, x_at, x_offset, exponent);
          asm volatile("cp.async.wait_group %0;" ::"n"(2 * STAGES - 1) : "memory");
          __syncwarp();
          square.load(slot + 1024, slot + to_scales + 128);
          __syncwarp();
          loader.step_second(slot);
          multiply(acc, square, x_at, x_offset + x.block_bytes / 2, exponent);
          x_offset += x.block_bytes;
          if (STAGES > 1) slot = slot == ring + (STAGES - 1) * ITEM_BYTES ? ring : slot + ITEM_BYTES;
        }
        slots.store(acc, place.warp + unit);
        summed++;
      }
    }
    // A warp without work has not waited for the previous kernel yet, which may have written the bias.
    if (round.begin == round.end) x.wait(0);
    finish(p, place, round, slots, fragment, x.columns, summed);
    if (first + ROUND_UNITS < place.units) slots.finish_round();
  }
}

// Adds the partial sums of a group's CTAs in order of rank: one thread per output.
extern "C" __global__ void __launch_bounds__(256) linear_join(Params p) {
  const int index = blockIdx.x * 256 + threadIdx.x, row = index % (UNITS * 32);
  const int column = index / (UNITS * 32);
  if (column >= p.m || row >= p.n) return;
  const float scale = p.row_scale[row];
  const float bias = p.bias ? lower_to_float(p.bias[row]) : 0.0f;
  wait_for_previous();
  float sum = 0.0f;
#pragma unroll
  for (int rank = 0; rank < SPLIT; rank++)
    sum += p.partial[((u64)rank * p.m + column) * UNITS * 32 + row];
  p.out[(u64)column * p.n + row] = (u16)pack_pair(fmaf(sum, scale, bias), 0.0f);
}
