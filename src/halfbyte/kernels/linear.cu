// x times NVFP4 weights for few rows of x: y[m, n] = sum over k of x[m, k] W[n, k].
//
// The weights pass once through the registers, as fast as memory gives them; everything else is
// arranged around that.
//
//   Operands   m16n8k16: A = 16 rows of W x 16 k, unpacked in registers; B = 8 columns (rows of x).
//              A warp works on a unit of 32 rows of W, 128 k at a time (an item of 2304 bytes).
//   Loads      Every lane copies its own 16 bytes into a ring of its warp's in shared memory
//              (cp.async) and reads them back: no barriers. Copies begin before the kernel in front
//              has ended, because weights do not depend on it.
//   x          lies in shared memory as it is, for all warps, who begin at different k and so wait for
//              all of it; rows 16 bytes apart from a multiple of 128, so that ldmatrix has no bank
//              conflicts.
//   Split      A group of SPLIT CTAs shares a range of units: each has all of them for its share of k.
//              In a CTA, the items of a round of units lie on a line, unit after unit, that is cut into
//              one segment per warp.
//   Sums       A warp leaves its sum of a unit in slot (warp + unit): both only grow along the line, so
//              no two sums meet. Then the sums of a unit are added, warp after warp, then CTA after
//              CTA: always in the same order. Nothing here depends on the number of rows of x, so that
//              a row's bits do not, as long as the launcher keeps SPLIT, WARPS, `groups` and
//              `round_units`.
//
// Macros:
//   X_BF16         see linear_values.cuh
//   COLUMN_TILES   8 columns each: 1, 2, 4 or 8
//   SPLIT          CTAs of a group
//   JOIN           how they join their sums: 0 not (SPLIT 1), 1 as a cluster (SM90), 2 through memory
//                  and `linear_join`
//   WARPS, STAGES, CTAS   warps of a CTA, items in a ring, CTAs on a multiprocessor

#include "linear_loader.cuh"

#define JOIN_COLUMNS 4  // whose sums a lane adds side by side, so that their latencies overlap

__device__ __forceinline__ uint4 load16(u32 address) {
  uint4 y;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
               : "r"(address));
  return y;
}

__device__ __forceinline__ float load_float(u32 address) {
  float y;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(y) : "r"(address) : "memory");
  return y;
}

__device__ __forceinline__ void store_float(u32 address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
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

// Starts to copy the CTA's share of x into shared memory: all of it at once, for its copies wait behind
// those of weights, and one wait is enough.
__device__ __forceinline__ void copy_x(const Params& p, const Place& place, int columns, u32 x_shared,
                                       u32 x_row) {
  const int chunks = place.blocks * 16, k_left = p.k - place.first_block * 128;
  const u16* x = p.x + place.first_column * p.x_stride + place.first_block * 128;
  for (int row = 0; row < columns; row++) {
#pragma unroll 1
    for (int chunk = threadIdx.x; chunk < chunks; chunk += THREADS)
      copy16_or_zeros(x_shared + chunk * 16, x + chunk * 8, chunk * 8 < k_left);
    x += p.x_stride;
    x_shared += x_row;
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// What scales and shifts the CTA's rows, on its way from memory long before it is needed.
__device__ __forceinline__ void fetch_vectors(const Params& p, const Place& place) {
#if JOIN != 2
  for (int i = threadIdx.x; i < place.units; i += THREADS) {
    const int row = (place.first_unit + i) * 32;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.row_scale + row));
    if (p.bias && row < p.n) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.bias + row));
  }
#endif
}

// Where a lane finds x for ldmatrix: two steps of the only tile of columns, or one step of two tiles.
// Columns that are not there are copies of the last one.
__device__ __forceinline__ void x_addresses(u32* address, u32 x_shared, u32 x_row, int columns) {
  const int lane = threadIdx.x & 31;
#if COLUMN_TILES == 1
  address[0] = x_shared + min(lane & 7, columns - 1) * x_row + (lane >> 3) * 16;
#else
#pragma unroll
  for (int i = 0; i < COLUMN_TILES / 2; i++) {
    const int column = 16 * i + (lane >> 4) * 8 + (lane & 7);
    address[i] = x_shared + min(column, columns - 1) * x_row + (lane >> 3 & 1) * 16;
  }
#endif
}

// 32 rows of weights times 64 k of x. `weights` is this lane's place in the ring, `scales` its group's.
__device__ __forceinline__ void multiply(float (*acc)[COLUMN_TILES][4], u32 weights, u32 scales,
                                         const u32* x_address, u32 x_offset, u32 exponent) {
  const uint4 w0 = load16(weights), w1 = load16(weights + 512), s = load16(scales);
  const u32 words[2][4] = {{w0.x, w0.y, w0.z, w0.w}, {w1.x, w1.y, w1.z, w1.w}};
  const u32 scale_words[2][2] = {{s.x, s.y}, {s.z, s.w}};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 scale[2][2];
    unpack_scales(scale[0], scale_words[0][half], exponent);
    unpack_scales(scale[1], scale_words[1][half], exponent);
#if COLUMN_TILES == 1
    u32 b[4];
    load_matrices(b, x_address[0] + x_offset + half * 64);
#endif
#pragma unroll
    for (int j = 0; j < 2; j++) {
#if COLUMN_TILES > 1
      u32 b[COLUMN_TILES * 2];
#pragma unroll
      for (int i = 0; i < COLUMN_TILES / 2; i++)
        load_matrices(b + 4 * i, x_address[i] + x_offset + (2 * half + j) * 32);
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

__device__ __forceinline__ void cluster_barrier() {
#if JOIN == 1
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ float load_of_rank(u32 address, int rank) {
  float y = 0.0f;
#if JOIN == 1
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(y) : "r"(remote) : "memory");
#endif
  return y;
}

// Where this lane's row of a unit's sums lies, after a CTA of so many blocks has added them up.
__device__ __forceinline__ u32 sum_address(u32 slots, int units, int blocks, int unit, int column) {
  const Segments segments(units * blocks);
  const int first = segments.warp_of(unit * blocks, Divisor(segments.total));
  return slots + (first + unit) * SLOT_BYTES + (column * SLOT_ROW + (threadIdx.x & 31)) * 4;
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
  int of_unit, count, units;
  Divisor by_columns;

  __device__ __forceinline__ Pieces(int units, int columns)
      : of_unit((columns + JOIN_COLUMNS - 1) / JOIN_COLUMNS),
        count(units * of_unit),
        units(units),
        by_columns(of_unit) {}

  // The unit of a piece; of one beyond the last, the last.
  __device__ __forceinline__ int unit(int piece) const {
    return min(by_columns.quotient(piece), units - 1);
  }
  __device__ __forceinline__ int column(int piece) const {
    return (piece - by_columns.quotient(piece) * of_unit) * JOIN_COLUMNS;
  }
};

// Adds what `count` warps left of a piece, in their order.
__device__ __forceinline__ void add_warps(float* sums, u32 address, int count) {
#pragma unroll
  for (int j = 0; j < JOIN_COLUMNS; j++) sums[j] = load_float(address + j * SLOT_ROW * 4);
#pragma unroll 2
  for (int part = 1; part < count; part++) {
    address += SLOT_BYTES;
#pragma unroll
    for (int j = 0; j < JOIN_COLUMNS; j++) sums[j] += load_float(address + j * SLOT_ROW * 4);
  }
}

// The sums of all warps, then of all CTAs of the group, to the output, piece by piece. What finishes the
// rows of a warp's next piece is on its way while the warp works on one: the latency of memory would
// be most of a join's time.
__device__ __forceinline__ void join(const Params& p, const Place& place, const Round& round,
                                     int columns, u32 slots) {
  const int warp = threadIdx.x >> 5;
  const Pieces pieces(round.units, columns);
  const Divisor by_total(round.segments.total);
  const int first_row = (place.first_unit + round.first) * 32 + (threadIdx.x & 31);
#if JOIN == 0
  Finish next(p, first_row + pieces.unit(warp) * 32);
#endif
  __syncthreads();
  for (int i = warp; i < pieces.count; i += WARPS) {
    const int unit = pieces.unit(i), column = pieces.column(i);
    const int first = round.segments.warp_of(unit * place.blocks, by_total);
    const int last = round.segments.warp_of((unit + 1) * place.blocks - 1, by_total);
    const u32 address = sum_address(slots, round.units, place.blocks, unit, column);
#if JOIN == 0
    const Finish finish = next;
    next = Finish(p, first_row + pieces.unit(i + WARPS) * 32);
#endif
    float sums[JOIN_COLUMNS];
    add_warps(sums, address, last - first + 1);
#pragma unroll
    for (int j = 0; j < JOIN_COLUMNS; j++) {
#if JOIN == 1
      store_float(address + j * SLOT_ROW * 4, sums[j]);
#else
      const int row = first_row + unit * 32, to = place.first_column + column + j;
      if (column + j < columns)
#if JOIN == 0
        finish.store(p, row, to, sums[j]);
#else
        p.partial[((u64)place.rank * p.m + to) * p.units * 32 + row] = sums[j];
#endif
#endif
    }
  }
#if JOIN == 1
  const int begin = warp * SPLIT + place.rank;
  Finish next(p, first_row + pieces.unit(begin) * 32);
  cluster_barrier();
  for (int i = begin; i < pieces.count; i += WARPS * SPLIT) {
    const int unit = pieces.unit(i), column = pieces.column(i);
    const Finish finish = next;
    next = Finish(p, first_row + pieces.unit(i + WARPS * SPLIT) * 32);
    float parts[SPLIT][JOIN_COLUMNS];
#pragma unroll
    for (int rank = 0; rank < SPLIT; rank++) {
      const int blocks = Place::block_begin(p, rank + 1) - Place::block_begin(p, rank);
      const u32 address = sum_address(slots, round.units, blocks, unit, column);
#pragma unroll
      for (int j = 0; j < JOIN_COLUMNS; j++)
        parts[rank][j] = load_of_rank(address + j * SLOT_ROW * 4, rank);
    }
#pragma unroll
    for (int j = 0; j < JOIN_COLUMNS; j++) {
      float sum = 0.0f;
#pragma unroll
      for (int rank = 0; rank < SPLIT; rank++) sum += parts[rank][j];
      if (column + j < columns)
        finish.store(p, first_row + unit * 32, place.first_column + column + j, sum);
    }
  }
  cluster_barrier();  // nobody writes to its slots, or leaves, while others read them
#else
  __syncthreads();
#endif
}

#if JOIN == 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, CTAS) linear_few(Params p) {
  extern __shared__ __align__(128) u8 shared[];
  const Place place(p);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int columns = min(COLUMNS, p.m - place.first_column);
  const u32 x_row = place.blocks * 256 + 16;
  const u32 rings = shared_address(shared);
  const u32 slots = rings + WARPS * STAGES * ITEM_BYTES;
  const u32 x_shared = slots + (WARPS + min(p.round_units, place.units)) * SLOT_BYTES;
  const u32 ring = rings + warp * STAGES * ITEM_BYTES + lane * 16;

  Loader loader(p, place, ring);
  fetch_vectors(p, place);
  wait_for_previous();
  copy_x(p, place, columns, x_shared, x_row);
  loader.fill(ring);
  allow_next();
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1 - AHEAD_OF_X) : "memory");
  __syncthreads();

  u32 x_address[COLUMN_TILES == 1 ? 1 : COLUMN_TILES / 2];
  x_addresses(x_address, x_shared, x_row, columns);
  // From a lane's place among weights to its group's among scales.
  const u32 to_scales = ITEM_WEIGHTS + (lane >> 2) * 16 - lane * 16;
  const u32 exponent = p.m > 0 ? SCALE_EXPONENT : 0;
  u32 slot = ring, previous = ring + (STAGES - 1) * ITEM_BYTES;
  for (int first = 0; first < place.units; first += p.round_units) {
    const Round round(p, place, first);
    int item = round.begin;
    for (int unit = Divisor(place.blocks).quotient(item); item < round.end; unit++) {
      float acc[2][COLUMN_TILES][4] = {};
      const int stop = min(round.end, (unit + 1) * place.blocks);
      u32 x_offset = (item - unit * place.blocks) * 256;
#pragma unroll 1
      for (; item < stop; item++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncwarp();
        loader.step(previous);
        multiply(acc, slot, slot + to_scales, x_address, x_offset, exponent);
        multiply(acc, slot + 1024, slot + to_scales + 128, x_address, x_offset + 128, exponent);
        x_offset += 256;
        previous = slot;
        slot = slot == ring + (STAGES - 1) * ITEM_BYTES ? ring : slot + ITEM_BYTES;
      }
      leave_sums(acc, slots + (warp + unit) * SLOT_BYTES);
    }
    join(p, place, round, columns, slots);
  }
}

// Adds the partial sums of the CTAs of a group, in their order: a thread per output.
extern "C" __global__ void __launch_bounds__(256) linear_join(Params p) {
  const int index = blockIdx.x * 256 + threadIdx.x, row = index % (p.units * 32);
  const int column = index / (p.units * 32);
  if (column >= p.m || row >= p.n) return;
  const float scale = p.row_scale[row];
  const float bias = p.bias ? lower_to_float(p.bias[row]) : 0.0f;
  wait_for_previous();
  float sum = 0.0f;
#pragma unroll
  for (int rank = 0; rank < SPLIT; rank++)
    sum += p.partial[((u64)rank * p.m + column) * p.units * 32 + row];
  p.out[(u64)column * p.n + row] = (u16)pack_pair(fmaf(sum, scale, bias), 0.0f);
}
