// Split-KV decode attention on packed pages of every format of formats.cuh.
//
// One warp processes one unit of the plan (work.cuh): tiles of one or more work items, for one KV head. A work item is
// a sequence and COLS query columns (heads of the group x query tokens). The warp streams TILE tokens at a time
// through its own stages in shared memory (a ring; cp.async, no CTA barriers), and keeps everything else in registers.
//
//   S  = K q^T   m16n8k16: A = 16 tokens x 16 dims of K from ldmatrix, B = q. Tokens are the M side,
//                so a GQA group of up to eight heads needs no padding.
//   O^T = V^T P^T  m16n8k16: A = 16 dims x 16 tokens of V from ldmatrix.trans, which pairs the
//                tokens t, t+1 of four dims in one register; P becomes B with movmatrix.
//
// scores.cuh computes S; softmax.cuh has the softmax and O.
//
// The softmax is rescaled lazily: a column only when its max has grown by more than a factor of 2^4
// since its last rescaling. P is stored times 2^11 (2^3 with DUPLICATE), which leaves 2^4 of fp16's
// range for that growth and the rest for small P.
//
// Compiled at run time with these macros:
//   HEAD_SIZE, HEAD_SIZE_V   multiples of 64
//   K_KIND, V_KIND           formats
//   BLOCK_SIZE               tokens per page, a multiple of 16
//   KV_HEADS, GROUP          query heads = KV_HEADS * GROUP
//   K_DATA, K_DATA_TOKEN, K_DATA_HEAD and so on: offsets and strides in a page, in bytes
//   Q_BF16 / Q_FP16          dtype of query and output
//   SOFTCAP                  1 if used
//   HND                      1 if a head's tokens are contiguous in a page, else any strides
//   TILE                     tokens per tile, a multiple of 16
//   WARPS, STAGES, CTAS      warps per CTA, tiles per ring, CTAs per SM
//   N_TILES                  matmul columns / 8
//   DUPLICATE                1 for work items of four columns of nvfp4 (N_TILES 1), see below
//   COLS                     columns of a work item: 4 with DUPLICATE, else 8 * N_TILES
//   ROTATE                   1 if K was rotated before it was packed
//   SEGMENT, PAIRS, PAIRS_ARE_HALVES, KEEPS_COEFFICIENTS, KEEPS_ANGLES  for means that were subtracted from K
//                            (means.cuh), else 0
//   RECENT, KNOWS_FIRST, MARK  for keys that are not in the pages (recent.cuh), else 0
//   Q_SHARED                 1 to keep q in shared memory, after the ring: for many columns
//
// A register of unpacked nvfp4 holds values of one of two neighbouring scale blocks, depending on the
// lane. With DUPLICATE each column is in B twice: once for the even blocks, once for the odd ones.
// Scales then multiply the sums (K) and probabilities (V) of their blocks instead of every value of A,
// which is fewer products. Without DUPLICATE they multiply A.

// 1 to unpack codes by multiplications instead of left shifts (formats.cuh).
#define MULTIPLIES_SHIFTS (ROTATE || SEGMENT || RECENT)

#include "attention/decode/recent.cuh"
#include "attention/decode/tables.cuh"

// Computes only half of a sequence's last tile if the rest is empty. In other variants the branch costs
// the other tiles more than it saves: head size 64 with eight columns took 5 % longer.
#define HALF_TILES (DUPLICATE && HEAD_SIZE >= 128 && HALVES > 1)

// The first 16 * COUNT tokens of a tile.
template <int COUNT>
__device__ __forceinline__ void attend_tile(const Params& p, const WorkItem& item, const Query& query,
                                            const Visible& visible, const Bias& bias,
                                            int position, u32 tile, Sums& sums) {
  float s[COUNT][N_TILES][4];
  const bool partial = COUNT < HALVES || visible.is_partial(position);
  scores<COUNT>(s, query, tile);
  if (SOFTCAP) cap<COUNT>(s, p, query, bias);
  if (partial) {
    asm volatile("");  // a branch, not predicated instructions: most tiles need no mask
    visible.mask<COUNT>(s, p, item, position);
  }
  sums.rescale<COUNT>(s, query, bias);
  sums.add<COUNT>(s, query, bias, tile);
}

// A unit's share of a work item: its tiles come through the loader's ring.
__device__ __forceinline__ void attend(const Params& p, const WorkItem& item, int head, u32 row,
                                       Share share, QueryWords& words, const MeanInputs& means,
                                       const KeyInputs& keys, Loader& loader, u32& tile) {
  const u32 behind_ring = loader.ring + STAGES * STAGE_BYTES;
  Sums sums;
  auto next_stage = [&]() {
    tile = tile + STAGE_BYTES == loader.ring + STAGES * STAGE_BYTES ? loader.ring : tile + STAGE_BYTES;
  };
#if HAS_INITIAL
  RecentRows rows(p, item, keys, head);
  const OwnRounds own(rows, Rounds(p, item, share, loader.header.span));
#endif
  // Loads stage i of the share: rounds of recent tokens come first, then tiles.
  auto load_stage = [&](int i) {
#if STAGES_RECENT
    if (i < own.count) {
      StagedRound{loader.target}.load(rows, own.start(i));
      loader.commit();
      return;
    }
#endif
    loader.step();
  };
  auto wait_for_stage = [&]() {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
    __syncwarp();
  };
  const FirstMark first(p, item, keys, head, share.first);
  if (RESTARTS)
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) load_stage(i);
  Bias bias(p, item, head, share, means, behind_ring + Q_BYTES);
#if KEEPS_ANGLES
  // Computes the first biases while the first stages load. Their angles were prefetched before the stages.
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1));
  __syncwarp();
  bias.step(p, share.first * TILE);
#endif
  const int constant = first.constant();
  const Visible visible(p, item, constant >= 0);
#if HAS_INITIAL
  rows.constant = constant;
  if (constant >= 0) prefetch_constant(rows);
#if STAGES_RECENT
#pragma unroll 1
  for (int i = 0; i < own.count; i++, next_stage()) {
    wait_for_stage();
    load_stage(i + STAGES - 1);
    add_round(rows, own.start(i), StagedRound{tile}, words, sums);
  }
#else
  add_rounds(rows, own, words, sums);
#endif
  if (constant >= 0) add_constant(rows, words, sums);
  if (constant >= 0 || own.count > 0) to_stored_units(p, sums);
#endif
  words.rotate();
  const Query query(p, item, words, behind_ring);
  for (int t = share.first; t < share.stop; t++, next_stage()) {
    wait_for_stage();
    loader.step();

    const int position = t * TILE;
    bias.step(p, position);
    if (visible.has_hidden_rows(position)) {
      clear_rows(tile, visible.length - position, TILE);
      clear_rows(tile, 0, visible.first - position);
      __syncwarp();
    }
    if (HALF_TILES && visible.length - position <= TILE / 2) {
      asm volatile("");  // a branch, not predicated instructions: skips half of the arithmetic
      attend_tile<HALF_TILES ? HALVES / 2 : HALVES>(p, item, query, visible, bias, position, tile, sums);
    } else {
      attend_tile<HALVES>(p, item, query, visible, bias, position, tile, sums);
    }
  }
  sums.write_results(p, item, head, row, share.stop - share.first == item.num_tiles);
}

// With recent tokens, all inputs are complete when this kernel follows a store (Params::follows_store), except what the
// store writes: the step's tokens in pages and rings. This kernel reads these from the step's K and V, unless a sequence
// has more of them than there are recent ones. So it waits for the store at its end, before which it may not end.
//
// Without recent tokens it waits before the first tiles: other sequences may read pages that the store fills (two prompts
// of one step may share a prefix). With recent tokens this cannot happen: a sequence whose prefix is written in this step
// has a ring to fill, and then all tokens are stored before, with `follows_store` 0.
#define WAITS_LAST (RECENT && RESTARTS)

extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS) decode(Params p) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32;
  constexpr u32 WARP_BYTES = STAGES * STAGE_BYTES + Q_BYTES + COEFFICIENT_BYTES + BIAS_BYTES + ANGLE_BYTES;
  const u32 ring = shared_address(shared) + warp * WARP_BYTES, behind_query = ring + STAGES * STAGE_BYTES + Q_BYTES;
  prefetch_tables(p);
  if (!p.follows_store) wait_for_previous();  // for the plan and q, too
  allow_next();  // the merge kernel may launch now: before it waits for this one, it only reads the plan
  const PlanHeader header = p.plan.header();
  // The heads of a unit run next to each other: their bytes are in the same pages.
  // The number of units is loaded in every iteration: keeping it would cost the tile loop a register.
  for (int i = blockIdx.x * WARPS + warp; i < p.plan.header().units * KV_HEADS; i += gridDim.x * WARPS) {
    const int number = i / KV_HEADS, head = i % KV_HEADS;
    const Unit unit = p.plan.unit(number);
    if (WAITS_LAST && unit.item.queries > RECENT) wait_for_previous();
    // Loaded before the first tiles, because it would queue behind their bytes.
    QueryWords words(p, unit.item, head);
    MeanInputs means(p, unit.item, head, share_of(header, unit.item, number), behind_query);
    KeyInputs keys(p, unit.item, share_of(header, unit.item, number), header.span);
    if (!WAITS_LAST) wait_for_previous();
    Loader loader(p, header, unit, head, number, ring);
    u32 tile = ring;
    WorkItem item = unit.item;
    int index = unit.index;
    for (;;) {
      const Share share = share_of(header, item, number);
      if (share.first < share.stop)
        attend(p, item, head, number + index, share, words, means, keys, loader, tile);
      if (!next_item_in_unit(p, header, ++index, number, item)) break;
      if (WAITS_LAST && item.queries > RECENT) wait_for_previous();
      words = QueryWords(p, item, head);
      means = MeanInputs(p, item, head, share_of(header, item, number), behind_query);
      keys = KeyInputs(p, item, share_of(header, item, number), header.span);
      if (RESTARTS) loader.restart(item, tile);
    }
    asm volatile("cp.async.wait_all;");
    __syncwarp();
  }
  wait_for_previous();
}
