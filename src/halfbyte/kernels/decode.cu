// Split-KV decode attention that reads packed pages of every format of decode_formats.cuh.
//
// One warp works on one unit of the plan (decode_work.cuh): a chunk of a sequence's tokens, one KV
// head, and COLS query columns (heads of the group x query tokens). It streams TILE tokens at a time
// through a ring of its own in shared memory (cp.async, no CTA barriers), and keeps everything else
// in registers.
//
//   S  = K q^T   m16n8k16: A = 16 tokens x 16 dims of K from ldmatrix, B = q. Tokens are the M side,
//                so a GQA group of up to eight heads needs no padding.
//   O^T = V^T P^T  m16n8k16: A = 16 dims x 16 tokens of V from ldmatrix.trans, which pairs the
//                tokens t, t+1 of four dims in one register; P becomes B with movmatrix.
//
// The softmax is rescaled lazily: a column only when its maximum has grown by more than 2^4 since
// its last rescaling. P is kept times 2^11, which uses fp16's range both ways.
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
//   Q_SHARED                 1 to keep q in shared memory, behind the ring: for many columns
//
// A register of unpacked nvfp4 holds values of one of two neighbouring scale blocks, which one the
// lane decides. With DUPLICATE each column stands twice in B: once for the even blocks, once for the
// odd. Scales then multiply the few sums (K) and probabilities (V) of their own kind of block instead
// of every value of A; without it they multiply A.

#include "decode_values.cuh"

// With DUPLICATE, P is multiplied by scales of up to 448 before it enters the matmul.
#define P_SHIFT (DUPLICATE ? 3.0f : 11.0f)
#define RESCALE_STEP 4.0f
#define NOTHING_YET 1e30f

// What a warp needs of q for a piece, as it lies in memory, and K's global scale.
struct QueryWords {
  u32 of[N_TILES][STEPS_K][2];
  float k_scale;

  __device__ __forceinline__ QueryWords(const Params& p, const Piece& piece, int head) {
    const int g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      const int column = piece.col_tile * COLS + 8 * n + g % COLS;
      const u64 base = column < GROUP * piece.queries
                           ? (u64)(piece.q_begin + column / GROUP) * p.query_stride_token +
                                 (u64)(head * GROUP + column % GROUP) * p.query_stride_head
                           : 0;
      load_query(of[n], p.query, base, c);
    }
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(k_scale) : "l"(p.k_scale));
  }
};

// A unit's share of a piece: its tiles come through the loader's ring.
__device__ __forceinline__ void attend(const Params& p, const Piece& piece, int head, u32 row,
                                       Share share, const QueryWords& words, Loader& loader,
                                       u32& tile) {
  const int lane = threadIdx.x & 31;
  const int g = lane >> 2, c = lane & 3;
  const int length = piece.length, queries = piece.queries;
  const int columns = GROUP * queries;

  // q, permuted as the unpacked K is. For fp16 operands it is multiplied by a power of two per column
  // that suits their range.
  const float k_scale = K_KIND < 16 ? words.k_scale : 1.0f;
  const float common = k_scale * p.softmax_scale * Operands<K_KIND>::UNIT * (SOFTCAP ? 1.0f : LOG2E);
#if Q_SHARED
  const u32 q_shared = loader.ring + STAGES * STAGE_BYTES + lane * 8;
#else
  u32 q_frag[N_TILES][STEPS_K][2];
#endif
  float multiplier[N_TILES][2];  // logits in base 2 are S * multiplier, for this lane's columns
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
    const int column = piece.col_tile * COLS + 8 * n + g % COLS;
    const bool valid = column < columns;
    const bool own = !DUPLICATE || (g >> 2) == (c >> 1);  // this copy's kind of block
    float x[STEPS_K][4];
    query_values(x, words.of[n]);
    float unscale = 1.0f, scale = 1.0f;
    if (K_KIND < 16) {
      float largest = 0.0f;
#pragma unroll
      for (int j = 0; j < STEPS_K; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(x[j][i]));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const int exponent = fp16_exponent(largest);
      scale = __int_as_float((127 + exponent) << 23);
      unscale = __int_as_float((127 - exponent) << 23);
    }
    if (common < 0.0f) scale = -scale;
#pragma unroll
    for (int j = 0; j < STEPS_K; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) x[j][i] = valid && own ? x[j][i] * scale : 0.0f;
      const u32 h0 = pack<K_KIND == 17>(x[j][0], x[j][1]), h1 = pack<K_KIND == 17>(x[j][2], x[j][3]);
#if Q_SHARED
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(q_shared + (n * STEPS_K + j) * 256),
                   "r"(h0), "r"(h1)
                   : "memory");
#else
      q_frag[n][j][0] = h0;
      q_frag[n][j][1] = h1;
#endif
    }
    // Positive, so that it can multiply the mask's -inf.
#pragma unroll
    for (int i = 0; i < 2; i++)
      multiplier[n][i] =
          fmaxf(__shfl_sync(~0u, unscale, (2 * c + i) * 4) * fabsf(common), 1e-37f);
  }
  const int all_from = p.window > 0 ? length - p.window : 0;  // every column attends to these:
  const int all_to = length - queries;                        // all_from <= position <= all_to
  const int first_visible = p.window > 0 ? all_to - p.window + 1 : 0;  // by any column

  float out[N_TILES][STEPS_V][4];
  // P = 2^(logit + shift), shift being P_SHIFT minus the maximum; as long as nothing was seen it is so
  // large that every logit but -inf makes it change.
  float shift[N_TILES][2], sum[N_TILES][2];
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
#pragma unroll
    for (int j = 0; j < STEPS_V; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) out[n][j][i] = 0.0f;
    shift[n][0] = shift[n][1] = NOTHING_YET;
    sum[n][0] = sum[n][1] = 0.0f;
  }
  auto scale_of = [&](int n, int i) { return SOFTCAP ? 1.0f : multiplier[n][i]; };
  const u32 k_parity = (c >> 1) ? 0x31u : 0x20u;        // bytes of this lane's kind of block
  const u32 v_parity = (g >> 2) ? 0x7351u : 0x6240u;  // the same of two tokens

  for (int t = share.first; t < share.stop; t++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
    __syncwarp();
    loader.step();

    const int position = t * TILE;
    const bool partial = position < all_from || position + TILE - 1 > all_to;
    if (position + TILE > length || position < first_visible) {
      clear_rows(tile, length - position, TILE);
      clear_rows(tile, 0, first_visible - position);
      __syncwarp();
    }

    float s[HALVES][N_TILES][4];
    // Chunks of K and operands for 16 tokens.
    auto k_operands = [&](u32(*a)[4], int half, int j) {
      u32 r[4];
      ldmatrix4(r, tile + half * 16 * ROW_K + swizzle<CHUNKS_K>(lane & 15, j + (lane >> 4)));
      Operands<K_KIND>::of_k(a, r);
    };
    // Block scales of tokens g and g + 8 of 16: bytes of this lane's kind of block become halves.
    auto load_k_scales = [&](u32(*sf)[SF_K ? WORDS_SF_K : 1], int half) {
      load_words<WORDS_SF_K>(sf[0], tile + OFF_SF_K + (half * 16 + g) * SF_K);
      load_words<WORDS_SF_K>(sf[1], tile + OFF_SF_K + (half * 16 + g + 8) * SF_K);
    };
#if N_TILES == 1
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      // Two chains, because a matmul waits for the one before it in its own.
      float acc[2][4] = {};
      u32 sf[2][SF_K ? WORDS_SF_K : 1];
      load_k_scales(sf, half);
#pragma unroll
      for (int j = 0; j < CHUNKS_K; j += 2) {
        const auto q = q_frag[0] + j / 2 * LOADED_K;
        u32 a[LOADED_K][4];
        k_operands(a, half, j);
#if K_KIND == 4
        const u32 scale0 = scales_to_half2(__byte_perm(sf[0][j / 2], 0, k_parity));
        const u32 scale1 = scales_to_half2(__byte_perm(sf[1][j / 2], 0, k_parity));
#pragma unroll
        for (int k = 0; k < 2; k++) {
#if DUPLICATE
          float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          mma<false>(x, a[2 * k], q[2 * k][0], q[2 * k][1]);
          mma<false>(x, a[2 * k + 1], q[2 * k + 1][0], q[2 * k + 1][1]);
          const float f0 = half_to_float(k ? scale0 >> 16 : scale0);
          const float f1 = half_to_float(k ? scale1 >> 16 : scale1);
          acc[0][0] += f0 * x[0];
          acc[0][1] += f0 * x[1];
          acc[0][2] += f1 * x[2];
          acc[0][3] += f1 * x[3];
#else
          scale_k(a + 2 * k, k ? both_high(scale0) : both_low(scale0),
                  k ? both_high(scale1) : both_low(scale1));
          mma<false>(acc[0], a[2 * k], q[2 * k][0], q[2 * k][1]);
          mma<false>(acc[1], a[2 * k + 1], q[2 * k + 1][0], q[2 * k + 1][1]);
#endif
        }
#else
#pragma unroll
        for (int k = 0; k < LOADED_K; k++)
          mma<K_KIND == 17>(acc[(j / 2 * LOADED_K + k) & 1], a[k], q[k][0], q[k][1]);
#endif
      }
#pragma unroll
      for (int i = 0; i < 4; i++)
        s[half][0][i] =
            acc[0][i] + (DUPLICATE ? __shfl_xor_sync(~0u, acc[0][i], 2) : acc[1][i]);
    }
#else
    // Many columns share what is unpacked; all halves share what is loaded of q.
    u32 sf[HALVES][2][SF_K ? WORDS_SF_K : 1];
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      load_k_scales(sf[half], half);
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[half][n][i] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < CHUNKS_K; j += 2) {
      u32 a[HALVES][LOADED_K][4];
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        k_operands(a[half], half, j);
#if K_KIND == 4
        const u32 scale0 = scales_to_half2(__byte_perm(sf[half][0][j / 2], 0, k_parity));
        const u32 scale1 = scales_to_half2(__byte_perm(sf[half][1][j / 2], 0, k_parity));
        scale_k(a[half], both_low(scale0), both_low(scale1));
        scale_k(a[half] + 2, both_high(scale0), both_high(scale1));
#endif
      }
#pragma unroll
      for (int k = 0; k < LOADED_K; k++)
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
          const int step = j / 2 * LOADED_K + k;
#if Q_SHARED
          u32 q[2];
          load_words<2>(q, q_shared + (n * STEPS_K + step) * 256);
#else
          const u32* q = q_frag[n][step];
#endif
#pragma unroll
          for (int half = 0; half < HALVES; half++)
            mma<K_KIND == 17>(s[half][n], a[half][k], q[0], q[1]);
        }
    }
#endif
#if SOFTCAP
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          s[half][n][i] =
              p.softcap * LOG2E * tanhf(s[half][n][i] * multiplier[n][i & 1] / p.softcap);
#endif
    if (partial) {
      asm volatile("");  // keeps this a branch: most tiles need no mask
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          // Keys of a column: lower <= position <= limit.
          const int column =
              min(piece.col_tile * COLS + 8 * n + (2 * c + i) % COLS, columns - 1);
          const int limit = length - queries + column / GROUP;
          const int lower = p.window > 0 ? limit - p.window + 1 : 0;
#pragma unroll
          for (int half = 0; half < HALVES; half++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
              const int at = position + half * 16 + g + 8 * k;
              if (at > limit || at < lower) s[half][n][2 * k + i] = NEG_INF;
            }
        }
    }

    float top[N_TILES][2];
    bool grown = false;
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        top[n][i] = fmaxf(s[0][n][i], s[0][n][2 + i]);
#pragma unroll
        for (int half = 1; half < HALVES; half++)
          top[n][i] = fmaxf(top[n][i], fmaxf(s[half][n][i], s[half][n][2 + i]));
        grown |= fmaf(top[n][i], scale_of(n, i), shift[n][i]) > P_SHIFT + RESCALE_STEP;
      }
    if (__any_sync(~0u, grown)) {
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
          for (int o = 4; o <= 16; o <<= 1)
            top[n][i] = fmaxf(top[n][i], __shfl_xor_sync(~0u, top[n][i], o));
          // Each column by itself, so that no column changes the rounding of another.
          if (fmaf(top[n][i], scale_of(n, i), shift[n][i]) > P_SHIFT + RESCALE_STEP) {
            const float new_shift = P_SHIFT - top[n][i] * scale_of(n, i);
            const float factor = ex2(new_shift - shift[n][i]);
            shift[n][i] = new_shift;
            sum[n][i] *= factor;
#pragma unroll
            for (int j = 0; j < STEPS_V; j++) {
              out[n][j][i] *= factor;
              out[n][j][2 + i] *= factor;
            }
          }
        }
    }

#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      u32 p0[N_TILES], p1[N_TILES];
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          e[i] = ex2(fmaf(s[half][n][i], scale_of(n, i & 1), shift[n][i & 1]));
          sum[n][i & 1] += e[i];
        }
        p0[n] = movmatrix(pack<V_KIND == 17>(e[0], e[1]));
        p1[n] = movmatrix(pack<V_KIND == 17>(e[2], e[3]));
      }
#if V_KIND == 4
      u32 sf0[2 * WORDS_SF_V], sf1[2 * WORDS_SF_V];  // tokens 2c, 2c + 1 and 2c + 8, 2c + 9
      load_words<2 * WORDS_SF_V>(sf0, tile + OFF_SF_V + (half * 16 + 2 * c) * SF_V);
      load_words<2 * WORDS_SF_V>(sf1, tile + OFF_SF_V + (half * 16 + 2 * c + 8) * SF_V);
#endif
#pragma unroll
      for (int j = 0; j < CHUNKS_V; j += 2) {
        u32 r[4], a[LOADED_V][4];
        ldmatrix4_trans(r, tile + OFF_V + half * 16 * ROW_V +
                               swizzle<CHUNKS_V>(lane & 15, j + (lane >> 4)));
        Operands<V_KIND>::of_v(a, r);
#if V_KIND == 4
        const u32 both0 = __byte_perm(sf0[j / 2], sf0[WORDS_SF_V + j / 2], v_parity);
        const u32 both1 = __byte_perm(sf1[j / 2], sf1[WORDS_SF_V + j / 2], v_parity);
#endif
#pragma unroll
        for (int k = 0; k < LOADED_V; k++) {
#if V_KIND == 4
          const u32 m0 = scales_to_half2(k / 2 ? both0 >> 16 : both0 & 0xFFFFu);
          const u32 m1 = scales_to_half2(k / 2 ? both1 >> 16 : both1 & 0xFFFFu);
#if !DUPLICATE
          scale_v(a[k], m0, m1);
#endif
#endif
#pragma unroll
          for (int n = 0; n < N_TILES; n++) {
#if DUPLICATE
            const u32 b0 = hmul2(p0[n], m0), b1 = hmul2(p1[n], m1);
#else
            const u32 b0 = p0[n], b1 = p1[n];
#endif
            mma<V_KIND == 17>(out[n][j / 2 * LOADED_V + k], a[k], b0, b1);
          }
        }
      }
    }
    tile = tile + STAGE_BYTES == loader.ring + STAGES * STAGE_BYTES ? loader.ring
                                                                     : tile + STAGE_BYTES;
  }

  const float unscale = (V_KIND < 16 ? *p.v_scale : 1.0f) * Operands<V_KIND>::UNIT;
  const bool whole = share.stop - share.first == piece.num_tiles;
  const u64 slots = ((u64)row * KV_HEADS + head) * COLS;
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float all = sum[n][i];
#pragma unroll
      for (int o = 4; o <= 16; o <<= 1) all += __shfl_xor_sync(~0u, all, o);
      const int column = 8 * n + (2 * c + i) % COLS, in_piece = piece.col_tile * COLS + column;
      const bool own = !DUPLICATE || (g >> 2) == (c >> 1);
      if (in_piece >= columns || !own) continue;
      const float top = all == 0.0f ? NEG_INF : P_SHIFT - shift[n][i], weight = all * ex2(-P_SHIFT);
      const bool first = DUPLICATE ? g % 4 == 0 : g == 0;
      if (whole) {
        const OutputRow to(piece, head, in_piece);
        const float share = to.finish(p.output, to.sink(p.output), top, weight, first);
        const float factor = unscale * ex2(-P_SHIFT) * share;
        store_row(to.values(p.output), out[n], i, g, factor);
      } else {
        const float inverse = all > 0.0f ? unscale / all : 0.0f;
        store_row(p.partial_out + (slots + column) * HEAD_SIZE_V, out[n], i, g, inverse);
        if (first) p.partial_ml[slots + column] = make_float2(top, weight);
      }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS) decode(Params p) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32;
  const u32 ring = shared_address(shared) + warp * (STAGES * STAGE_BYTES + Q_BYTES);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");  // the merge may take its place, and wait
#endif
  const PlanHeader header = p.plan.header();
  // Heads of one unit are neighbours: their bytes lie in the same pages.
  for (int i = blockIdx.x * WARPS + warp; i < header.units * KV_HEADS; i += gridDim.x * WARPS) {
    const int number = i / KV_HEADS, head = i % KV_HEADS;
    const Unit unit = p.plan.unit(number);
    // Asked for before the first tiles, behind whose bytes it would have to wait.
    QueryWords words(p, unit.piece, head);
    Loader loader(p, header, unit, head, number, ring);
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
}
