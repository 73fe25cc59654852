// Split-KV decode attention that reads packed pages of every format of formats.cuh.
//
// One warp works on one unit of the plan (work.cuh): a chunk of a sequence's tokens, one KV
// head, and COLS query columns (heads of the group x query tokens). It streams TILE tokens at a time
// through a ring of its own in shared memory (cp.async, no CTA barriers), and keeps everything else
// in registers.
//
//   S  = K q^T   m16n8k16: A = 16 tokens x 16 dims of K from ldmatrix, B = q. Tokens are the M side,
//                so a GQA group of up to eight heads needs no padding.
//   O^T = V^T P^T  m16n8k16: A = 16 dims x 16 tokens of V from ldmatrix.trans, which pairs the
//                tokens t, t+1 of four dims in one register; P becomes B with movmatrix.
//
// S is in scores.cuh; what becomes of it, in softmax.cuh.
//
// The softmax is rescaled lazily: a column only when its maximum has grown by more than 2^4 since
// its last rescaling. P is kept times 2^11, which uses fp16's range both ways; with DUPLICATE times 2^3.
//
// Compiled at run time with these macros:
//   HEAD_SIZE, HEAD_SIZE_V   multiples of 64
//   K_KIND, V_KIND           formats
//   BLOCK_SIZE               tokens per page, a multiple of 16
//   KV_HEADS, GROUP          query heads = KV_HEADS * GROUP
//   K_DATA, K_DATA_TOKEN, K_DATA_HEAD and so on: bytes, where a page keeps what
//   Q_BF16 / Q_FP16          dtype of query and output
//   SOFTCAP                  1 if used
//   HND                      1 if a head's tokens are contiguous in a page, else any strides
//   TILE                     tokens at a time, a multiple of 16
//   WARPS, STAGES, CTAS      warps per CTA, tiles in a ring, CTAs per multiprocessor
//   N_TILES                  matmul columns / 8
//   DUPLICATE                1 for pieces of four columns of nvfp4 (N_TILES 1), see below
//   COLS                     columns of a piece: 4 with DUPLICATE, else 8 * N_TILES
//   PREPARED                 1 if prepare.cu is in front, and may still run
//   SEGMENT, KNOWS_FIRST, INITIAL  of K that a recipe changed (transformed.cuh), else 0
//   Q_SHARED                 1 to keep q in shared memory, behind the ring: for many columns
//
// A register of unpacked nvfp4 holds values of one of two neighbouring scale blocks, which one the
// lane decides. With DUPLICATE each column stands twice in B: once for the even blocks, once for the
// odd. Scales then multiply the few sums (K) and probabilities (V) of their own kind of block instead
// of every value of A; without it they multiply A.

#include "attention/decode/softmax.cuh"

// Half a tile where a sequence's last one has no more. Elsewhere than here the branch was measured to
// cost other tiles more than it saves: heads of 64 with eight columns took 5 % longer.
#define HALF_TILES (DUPLICATE && HEAD_SIZE >= 128 && HALVES > 1)

// The first 16 * COUNT tokens of a tile.
template <int COUNT>
__device__ __forceinline__ void attend_tile(const Params& p, const Piece& piece, const Query& query,
                                            const Visible& visible, const Bias& bias,
                                            int position, u32 tile, Sums& sums) {
  float s[COUNT][N_TILES][4];
  const bool partial = COUNT < HALVES || visible.is_partial(position);
  scores<COUNT>(s, query, tile);
  if (SOFTCAP) cap<COUNT>(s, p, query, bias);
  if (partial) {
    asm volatile("");  // keeps this a branch: most tiles need no mask
    visible.mask<COUNT>(s, p, piece, position);
  }
  sums.rescale<COUNT>(s, query, bias);
  sums.add<COUNT>(s, query, bias, tile);
}

// A unit's share of a piece: its tiles come through the loader's ring.
__device__ __forceinline__ void attend(const Params& p, const Piece& piece, int head, u32 row,
                                       Share share, const QueryWords& words, Loader& loader,
                                       u32& tile) {
  const Query query(p, piece, words, loader.ring + STAGES * STAGE_BYTES);
  const Visible visible(p, piece, head, share.first);
  Bias bias(p, piece, head, share.first * TILE);
  Sums sums;
  if (begins_with_something(piece, share.first, visible.constant)) sums.begin_with(p, piece, head);
  for (int t = share.first; t < share.stop; t++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
    __syncwarp();
    loader.step();

    const int position = t * TILE;
    bias.step(p, min(t + 1, share.stop - 1) * TILE);
    if (visible.has_hidden_rows(position)) {
      clear_rows(tile, visible.length - position, TILE);
      clear_rows(tile, 0, visible.first - position);
      __syncwarp();
    }
    if (HALF_TILES && visible.length - position <= TILE / 2) {
      asm volatile("");  // keeps this a branch
      attend_tile<HALF_TILES ? HALVES / 2 : HALVES>(p, piece, query, visible, bias, position, tile, sums);
    } else {
      attend_tile<HALVES>(p, piece, query, visible, bias, position, tile, sums);
    }
    tile = tile + STAGE_BYTES == loader.ring + STAGES * STAGE_BYTES ? loader.ring
                                                                     : tile + STAGE_BYTES;
  }
  sums.leave(p, piece, head, row, share.stop - share.first == piece.num_tiles);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS) decode(Params p) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32;
  const u32 ring = shared_address(shared) + warp * (STAGES * STAGE_BYTES + Q_BYTES);
#if !PREPARED
  wait_for_previous();  // for the plan, too
#endif
  allow_next();  // the merge may take its place, and wait
  const PlanHeader header = p.plan.header();
  // Heads of one unit are neighbours: their bytes lie in the same pages.
  for (int i = blockIdx.x * WARPS + warp; i < header.units * KV_HEADS; i += gridDim.x * WARPS) {
    const int number = i / KV_HEADS, head = i % KV_HEADS;
    const Unit unit = p.plan.unit(number);
#if PREPARED
    // Pages are complete; what else is read comes from the kernel in front, which may still run.
    Loader loader(p, header, unit, head, number, ring);
    wait_for_previous();
    QueryWords words(p, unit.piece, head);
#else
    // Asked for before the first tiles, behind whose bytes it would have to wait.
    QueryWords words(p, unit.piece, head);
    Loader loader(p, header, unit, head, number, ring);
#endif
    u32 tile = ring;
    Piece piece = unit.piece;
    int index = unit.index;
    for (;;) {
      const Share share = share_of(header, piece, number);
      if (share.first < share.stop)
        attend(p, piece, head, number + index, share, words, loader, tile);
      if (!goes_on(p, header, ++index, number, piece)) break;
      words = QueryWords(p, piece, head);
    }
    asm volatile("cp.async.wait_all;");
    __syncwarp();
  }
  // One CTA waits in any case, or this kernel might end before the one in front of it.
  if (PREPARED && blockIdx.x == 0) wait_for_previous();
}
