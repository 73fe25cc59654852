// Attention of prompts on SM90, with the last tokens in the model's dtype.
//
// Reads keys and values that were unpacked from pages (unpack.py), and for the last R keys of every query those that the
// model computed, of this step's tokens or from rings. Both are columns of one softmax (work.cuh): a second kernel for
// the last tokens would have to read queries and results again.
//
//   Tile       128 or 192 rows, tokens x query heads of a KV head, 64 for each of two or, with heads of 64, three
//              warpgroups. The longest tiles first.
//   Loads      by another warpgroup, to a ring of slots: K or V of a step. It is ahead also at the end of a tile.
//   Order      from the last columns, which need a mask, to the first.
//   Overlap    The scores of a step are computed while the values of the step before are added: a softmax hides behind
//              this second product. The warpgroups take turns in issuing both, so that one's softmax hides
//              behind another's matmuls, too (Shah et al. 2024, "FlashAttention-3").
//
// Macros: see work.cuh

#include "attention/prefill/sm90/loader.cuh"
#include "attention/prefill/sm90/output.cuh"
#include "kernels/runtime/wgmma.cuh"

#define LOADER_REGISTERS (WORKERS == 2 ? 40 : 56)
#define WORKER_REGISTERS (WORKERS == 2 ? 232 : 152)
#define STEPS_QK (HEAD_SIZE / 16)
#define STEPS_PV (COLUMNS / 16)

// What a worker thread has of a tile.
struct Sums {
  u32 q[STEPS_QK][4], weights[STEPS_PV][4];
  float scores[COLUMNS / 2], sums[HEAD_SIZE / 2], rescale[2];
  Softmax softmax;
  Visible visible[2];

  __device__ __forceinline__ void begin(const Tile& tile, int row) {
    visible[0] = Visible(tile, row);
    visible[1] = Visible(tile, row + 8);
    softmax = Softmax();
  }
};

struct Worker {
  const Params& p;
  u32 shared;
  Barriers barriers;
  int group, lane, row;  // row: the first of this thread's two in a tile
  u32 ring;              // lower word of the ring's wgmma descriptor
  Slot slot, keys;       // the next to be used, and that of the next keys
  u32 keys_at;           // lower word of the keys' descriptor
  u32 queries_parity = 0;

  __device__ __forceinline__ Worker(const Params& p, u32 shared, const Barriers& barriers)
      : p(p), shared(shared), barriers(barriers) {
    group = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0);
    lane = threadIdx.x % 32;
    row = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    ring = __shfl_sync(~0u, (shared + OFF_RING) / 16 | (HALF_BYTES / 16) << 16, 0);
  }

  // A warpgroup issues matmuls in its turn.
  __device__ __forceinline__ void take_turn() const {
    asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
  }
  __device__ __forceinline__ void pass_turn() const {
    asm volatile("bar.arrive %0, 256;" ::"r"(1 + (group + 1) % WORKERS) : "memory");
  }

  // Reads the tile's queries as A of matmuls.
  __device__ __forceinline__ void load_queries(u32 (*q)[4]) {
    barrier_wait(barriers.queries_full, queries_parity);
    queries_parity ^= 1;
    const int at = row - lane / 4 + lane % 16;
#pragma unroll
    for (int k = 0; k < STEPS_QK; k++) ldmatrix4(q[k], shared + place_of(at, 2 * k + lane / 16));
    __syncwarp();
    if (lane == 0) barrier_arrive(barriers.queries_empty);
  }

  // Waits for the next slot; the descriptor of its matrix.
  __device__ __forceinline__ u32 next_slot(Slot* used) {
    *used = slot;
    slot.next();
    barrier_wait(barriers.full + 8 * used->stage, used->parity);
    return ring + used->stage * (SLOT_BYTES / 16);
  }

  __device__ __forceinline__ void release(const Slot& used) const {
    if (lane == 0) barrier_arrive(barriers.empty + 8 * used.stage);
  }

  __device__ __forceinline__ void multiply_keys(float* scores, const u32 (*q)[4], u32 keys) const {
#pragma unroll
    for (int k = 0; k < STEPS_QK; k++)
      wgmma<COLUMNS>(scores, q[k], keys + k / 4 * (HALF_BYTES / 16) + k % 4 * 2, k > 0);
    wgmma_commit();
  }

  __device__ __forceinline__ void multiply_values(float* sums, const u32 (*weights)[4], u32 values, bool add) const {
#pragma unroll
    for (int k = 0; k < STEPS_PV; k++)
      wgmma_rows<HEAD_SIZE>(sums, weights[k], values + k * (16 * 128 / 16), add || k > 0);
    wgmma_commit();
  }

  // Hides what rows do not see, and adds to the softmax.
  __device__ __forceinline__ void weigh(Sums& x, const Tile& tile, int step) const {
    if ((step + 1) * COLUMNS > tile.position - RECENT + 1) hide(x.scores, x.visible, step * COLUMNS);
    x.softmax.add(x.scores, p.scale, x.rescale);
  }

  // Multiplies the next step's keys, unless there are none, and the values of this step; meanwhile weighs the next step.
  //
  // Behind the last tile keys are multiplied once more, for nothing: a branch between matmuls and the wait for them lets
  // the compiler wait for every single one.
  //
  // `follows`: whether there are keys behind those of the next step. That these are waited for here keeps the softmax
  // before the second wait for matmuls: the compiler moves that wait up, but not over a loop.
  __device__ __forceinline__ void advance(Sums& x, const Tile& tile, int next_step, bool add, bool more, bool follows) {
    const Slot used = keys;
    Slot values;
    take_turn();
    wgmma_fence();
    multiply_keys(x.scores, x.q, keys_at);
    const u32 at = next_slot(&values);
    wgmma_fence();  // without it the compiler puts one here, and then waits for every single matmul, too
    multiply_values(x.sums, x.weights, at, add);
    pass_turn();
    wgmma_wait<1>();
    hold<COLUMNS / 2>(x.scores);
    if (more) release(used);
    weigh(x, tile, next_step);
    if (follows) keys_at = next_slot(&keys);
    wgmma_wait<0>();
    hold<HEAD_SIZE / 2>(x.sums);
    release(values);
  }

  // The first scores of a tile are computed while the last values of the tile before are added.
  __device__ __forceinline__ void run_tiles() {
    Turns turns;
    int item;
    bool more = turns.next(p, &item);
    if (!more) return;
    Tile tile(p, item);
    Sums x;
    x.begin(tile, row);
    load_queries(x.q);
    if (group == WORKERS - 1) pass_turn();
    keys_at = next_slot(&keys);
    wgmma_fence();
    multiply_keys(x.scores, x.q, keys_at);
    wgmma_wait<0>();
    hold<COLUMNS / 2>(x.scores);
    release(keys);
    weigh(x, tile, tile.steps() - 1);
    pack_weights(x.weights, x.scores);
    if (tile.steps() > 1 || turns.has_next(p)) keys_at = next_slot(&keys);
    while (more) {
      int step = tile.steps() - 1;
      bool add = false;
      more = turns.next(p, &item);
#pragma unroll 1
      for (; step > 0; step--) {
        advance(x, tile, step - 1, add, true, step > 1 || more);
        pack_weights(x.weights, x.scores);
        if (__any_sync(~0u, x.rescale[0] != 1.0f || x.rescale[1] != 1.0f)) {
#pragma unroll
          for (int i = 0; i < HEAD_SIZE / 2; i++) x.sums[i] *= x.rescale[i / 2 % 2];
        }
        add = true;
      }
      const Softmax done = x.softmax;
      const Tile old = tile;
      if (more) {
        tile = Tile(p, item);
        x.begin(tile, row);
        load_queries(x.q);
      }
      advance(x, tile, tile.steps() - 1, add, more, more && (tile.steps() > 1 || turns.has_next(p)));
      store(p, old, row, done, x.sums);
      pack_weights(x.weights, x.scores);
    }
    if (group == 0) take_turn();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) prefill(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];  // period of the swizzle
  const u32 base = shared_address(shared);
  const Barriers barriers(base);
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) {
      barrier_init(barriers.full + 8 * i, 128);
      barrier_init(barriers.empty + 8 * i, 4 * WORKERS);
    }
    barrier_init(barriers.queries_full, 128);
    barrier_init(barriers.queries_empty, 4 * WORKERS);
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
    Loader(p, base, barriers).load_tiles();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WORKER_REGISTERS));
    Worker(p, base, barriers).run_tiles();
  }
}
