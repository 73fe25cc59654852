// x times NVFP4 weights for few rows of x: y[m, n] = sum over k of x[m, k] W[n, k].
//
// The weights pass once through the registers, as fast as memory gives them; everything else is
// arranged around that.
//
//   Operands   m16n8k16: A = 16 rows of W x 16 k, unpacked in registers; B = 8 columns (rows of x).
//              A warp works on a unit of 32 rows of W, 128 k at a time (an item of 2304 bytes).
//   Loads      Every lane copies its own 16 bytes into a ring of its warp's in shared memory
//              (cp.async) and reads them back: no barriers. Each half of an item (64 k) goes to registers
//              whole, so that its place in the ring is free for the next copy before its arithmetic
//              begins.
//              Copies begin before the kernel in front has ended, because weights do not depend on it;
//              only the warps that ask for x, from SM90 on, do that first, and wait for that kernel.
//   x          lies in shared memory for all warps (linear_x.cuh), who begin at different k.
//   Split      A group of SPLIT CTAs shares a range of units: each has all of them for its share of k.
//              In a CTA, the items of a round of units lie on a line, unit after unit, that is cut into
//              one segment per warp. Where a segment begins within a unit and goes beyond it, the rest
//              of that unit comes last, so that more warps begin where a unit does.
//   Sums       A warp leaves its sum of a unit in slot (warp + unit): both only grow along the line, so
//              no two sums meet. Then the sums of a unit are added, warp after warp, then CTA after
//              CTA: always in the same order. Nothing here depends on the number of rows of x, so that
//              a row's bits do not, as long as the launcher keeps SPLIT, WARPS, GROUPS and
//              ROUND_UNITS.
//
// Macros:
//   X_BF16         see linear_values.cuh
//   COLUMN_TILES   8 columns each: 1, 2 or 4
//   SPLIT          CTAs of a group
//   JOIN           how they join their sums: 0 not (SPLIT 1), 1 as a cluster (SM90,
//                  linear_cluster.cuh), 2 through memory and `linear_join`
//   WARPS, STAGES, CTAS   warps of a CTA, items in a ring, CTAs on a multiprocessor
// and, all or none, because half of the instructions before the first copy would be divisions:
//   UNITS, BLOCKS, GROUPS, ROUND_UNITS   as in Params
//   SINGLE         whether x has one row

#include "linear_cluster.cuh"
#include "linear_x.cuh"

__device__ __forceinline__ float load_float(u32 address) {
  float y;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(y) : "r"(address) : "memory");
  return y;
}

__device__ __forceinline__ void load_matrices(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void matmul(float* c, const u32* a, u32 b0, u32 b1) {
#if X_BF16
#define MATMUL "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
#define MATMUL "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
  asm volatile(MATMUL "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// What scales and shifts the CTA's rows, on its way from memory long before it is needed. By one warp.
__device__ __forceinline__ void fetch_vectors(const Params& p, const Place& place) {
#if JOIN != 2
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < place.units; i += 32) {
    const int row = (place.first_unit + i) * 32;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.row_scale + row));
    if (p.bias && row < p.n) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.bias + row));
  }
#endif
}

// 32 rows of weights times 64 k of x: a lane's words of an item.
struct Square {
  uint4 words[2], scales;

  // From this lane's place in the ring, and its group's.
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

// A warp's sums of a unit to their slot.
__device__ __forceinline__ void leave_sums(float (*acc)[COLUMN_TILES][4], u32 slot) {
  const int lane = threadIdx.x & 31;
  slot += ((lane & 3) * 2 * SLOT_ROW + (lane >> 2)) * 4;
#pragma unroll
  for (int tile = 0; tile < 2; tile++)
#pragma unroll
    for (int i = 0; i < COLUMN_TILES; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        store_float(slot + ((8 * i + j % 2) * SLOT_ROW + 16 * tile + j / 2 * 8) * 4, acc[tile][i][j]);
}

// What becomes of a row's sum. The bias stays as loaded until it is used, so that nothing waits for it.
struct Finish {
  float scale;
  u32 bias;

  __device__ __forceinline__ Finish(const Params& p, int row)
      : scale(p.row_scale[row]), bias(p.bias && row < p.n ? p.bias[row] : 0) {}

  __device__ __forceinline__ void store(const Params& p, int row, int column, float sum) const {
    if (row < p.n)
      p.out[(u64)column * p.n + row] = (u16)pack_pair(fmaf(sum, scale, lower_to_float(bias)), 0.0f);
  }
};

// A round's sums, cut into pieces of a unit's 32 rows and JOIN_COLUMNS columns.
struct Pieces {
  const Round& round;
  int of_unit, count, blocks;
  RoundDivisor by_total;

  __device__ __forceinline__ Pieces(const Params& p, const Round& round, int blocks)
      : round(round),
        of_unit(SINGLE ? 1 : COLUMNS / JOIN_COLUMNS),
        count(round.units * of_unit),
        blocks(blocks),
        by_total(round.segments.total) {}

  // The unit of a piece; of one beyond the last, the last.
  __device__ __forceinline__ int unit(int piece) const { return min(piece / of_unit, round.units - 1); }
  __device__ __forceinline__ int column(int piece) const { return piece % of_unit * JOIN_COLUMNS; }
};

// Where a lane's row of a piece begins, and how many warps have left sums of it.
struct Piece {
  int unit, column, warps;
  u32 address;

  __device__ __forceinline__ Piece(const Pieces& pieces, int index, u32 slots)
      : unit(pieces.unit(index)), column(pieces.column(index)) {
    const Segments& segments = pieces.round.segments;
    const int first = segments.warp_of(unit * pieces.blocks, pieces.by_total);
    warps = segments.warp_of((unit + 1) * pieces.blocks - 1, pieces.by_total) - first + 1;
    address = slots + (first + unit) * SLOT_BYTES + (column * SLOT_ROW + (threadIdx.x & 31)) * 4;
  }

  // Adds the warps' sums in their order.
  __device__ __forceinline__ void add(float* sums) const {
    u32 from = address;
#pragma unroll
    for (int j = 0; j < JOIN_COLUMNS; j++) sums[j] = load_float(from + j * SLOT_ROW * 4);
#pragma unroll 2
    for (int part = 1; part < warps; part++) {
      from += SLOT_BYTES;
#pragma unroll
      for (int j = 0; j < JOIN_COLUMNS; j++) sums[j] += load_float(from + j * SLOT_ROW * 4);
    }
  }
};

// The sums of all warps, then of all CTAs of the group, to the output, piece by piece. Where a warp's
// next piece lies, and what finishes its rows, is known before the warp comes to it: these latencies
// would be most of a join's time.
#if JOIN == 1
// The first warps begin with the pieces that other CTAs finish, the last ones with this CTA's own.
__device__ __forceinline__ void join(const Params& p, const Place& place, const Round& round,
                                     int columns, u32 slots, ClusterSums& cluster) {
  const Pieces pieces(p, round, place.blocks);
  const int first_row = (place.first_unit + round.first) * 32 + (threadIdx.x & 31);
  const int own = cluster.own(pieces.count, place.rank);
  int index = cluster.others(place.warp, place.rank);
  int own_index = (WARPS - 1 - place.warp) * SPLIT + place.rank;
  Piece next(pieces, index, slots), next_own(pieces, own_index, slots);
  Finish next_finish(p, first_row + next_own.unit * 32);
  cluster.expect(pieces.count, place.rank);
  if (round.first == 0) cluster.wait_until_ready();
  __syncthreads();
#pragma unroll 1
  for (int i = place.warp; i < pieces.count - own; i += WARPS) {
    float sums[JOIN_COLUMNS];
    next.add(sums);
    cluster.send(sums, index, place.rank);
    if (i + WARPS < pieces.count - own) {
      index = cluster.others(i + WARPS, place.rank);
      next = Piece(pieces, index, slots);
    }
  }
#pragma unroll 1
  for (; own_index < pieces.count; own_index += WARPS * SPLIT) {
    const Piece piece = next_own;
    const Finish finish = next_finish;
    float sums[JOIN_COLUMNS];
    piece.add(sums);
    if (own_index + WARPS * SPLIT < pieces.count) {
      next_own = Piece(pieces, own_index + WARPS * SPLIT, slots);
      next_finish = Finish(p, first_row + next_own.unit * 32);
    }
    cluster.wait();
    cluster.add(sums, own_index, place.rank);
#pragma unroll
    for (int j = 0; j < JOIN_COLUMNS; j++)
      if (piece.column + j < columns)
        finish.store(p, first_row + piece.unit * 32, place.first_column + piece.column + j, sums[j]);
  }
}
#else
__device__ __forceinline__ void join(const Params& p, const Place& place, const Round& round,
                                     int columns, u32 slots, ClusterSums& cluster) {
  const Pieces pieces(p, round, place.blocks);
  const int first_row = (place.first_unit + round.first) * 32 + (threadIdx.x & 31);
  Piece next(pieces, place.warp, slots);
#if JOIN == 0
  Finish next_finish(p, first_row + next.unit * 32);
#endif
  __syncthreads();
#pragma unroll 1
  for (int i = place.warp; i < pieces.count; i += WARPS) {
    const Piece piece = next;
    float sums[JOIN_COLUMNS];
    piece.add(sums);
    if (i + WARPS < pieces.count) next = Piece(pieces, i + WARPS, slots);
#if JOIN == 0
    const Finish finish = next_finish;
    next_finish = Finish(p, first_row + next.unit * 32);
#endif
#pragma unroll
    for (int j = 0; j < JOIN_COLUMNS; j++) {
      const int row = first_row + piece.unit * 32, to = place.first_column + piece.column + j;
      if (piece.column + j < columns)
#if JOIN == 0
        finish.store(p, row, to, sums[j]);
#else
        p.partial[((u64)place.rank * p.m + to) * UNITS * 32 + row] = sums[j];
#endif
    }
  }
}
#endif

#if JOIN == 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, CTAS)
    linear_few(const __grid_constant__ TensorMap x_map, const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  const Place place(p);
  const int lane = threadIdx.x & 31;
  const u32 x_start = x_address(shared_address(shared)), barriers = x_end(p, x_start);
  const u32 rings = barriers + X_BARRIER_BYTES;
  const u32 ring = rings + place.warp * STAGES * ITEM_BYTES + lane * 16;
  const u32 slots = rings + WARPS * STAGES * ITEM_BYTES;
  const u32 received = slots + (WARPS + min(ROUND_UNITS, place.units)) * SLOT_BYTES;
  const SharedX x(p, place, barriers, x_start);
  ClusterSums cluster(barriers + 8 * X_PIECES, received);
#if __CUDA_ARCH__ >= 900
  x.bring(&x_map, place);
#endif
  Loader loader(p, place, ring);
#if __CUDA_ARCH__ < 900
  x.copy(p, place);
#endif
  loader.fill(ring);
  if (place.warp == WARPS - 1) {
    cluster.prepare();
    fetch_vectors(p, place);
  }
#if __CUDA_ARCH__ < 900
  x.wait_for_all<2 * (STAGES - AHEAD_OF_X)>();
#else
  __syncthreads();  // barriers are there
  cluster.say_ready();
  allow_next();
#endif

  u32 x_at[X_TILES][4];
  x.addresses(x_at);
  // From a lane's place among weights to its group's among scales.
  const u32 to_scales = ITEM_WEIGHTS + (lane >> 2) * 16 - lane * 16;
  const u32 exponent = p.m > 0 ? SCALE_EXPONENT : 0;
  u32 slot = ring;
  for (int first = 0; first < place.units; first += ROUND_UNITS) {
    const Round round(p, place, first);
#pragma unroll 1
    for (int part = 0; part < 2; part++) {
      int item = part == 0 ? round.turn : round.begin;
      const int end = part == 0 ? round.end : round.turn;
      for (int unit = round.unit + (item > round.begin); item < end; unit++) {
        float acc[2][COLUMN_TILES][4] = {};
        const int stop = min(end, (unit + 1) * place.blocks);
        u32 x_offset = (item - unit * place.blocks) * x.block_bytes;
#pragma unroll 1
        for (; item < stop; item++) {
          // The halves of an item come and go by themselves: what is left to do when the last one has
          // come is less.
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
          slot = slot == ring + (STAGES - 1) * ITEM_BYTES ? ring : slot + ITEM_BYTES;
        }
        leave_sums(acc, slots + (place.warp + unit) * SLOT_BYTES);
      }
    }
    // A warp without work has waited for nothing that the kernel in front wrote, such as a copy of the bias.
    if (round.begin == round.end) x.wait(0);
    join(p, place, round, x.columns, slots, cluster);
    if (first + ROUND_UNITS < place.units) cluster.finish_round();
  }
}

// Adds the partial sums of the CTAs of a group, in their order: a thread per output.
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
