// Soft-cap, mask, softmax, O^T += V^T P^T of a tile, and the epilogue of a work item, for decode.cu.
//
// The macros are those of decode.cu.

#pragma once
#include "attention/decode/means.cuh"

// With DUPLICATE, P is multiplied by scales of up to 448 before it enters the matmul.
#define P_SHIFT (DUPLICATE ? 3.0f : 11.0f)
#define RESCALE_STEP 4.0f
#define INITIAL_SHIFT 1e30f

template <int COUNT>
__device__ __forceinline__ void cap(float (*s)[N_TILES][4], const Params& p, const Query& query,
                                    const Bias& bias) {
#pragma unroll
  for (int half = 0; half < COUNT; half++)
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        s[half][n][i] =
            p.softcap * LOG2E *
            tanhf(bias.plus(s[half][n][i] * query.logit_scale[n][i & 1], n, i & 1) / p.softcap);
}

// The keys that the columns of a work item attend to.
struct Visible {
  int length, queries, columns;
  int all_from, all_to;  // every column attends to all_from <= position <= all_to
  int first;             // first position that any column attends to
  bool constant;         // the first token is visible and a constant of the model, not in the page

  __device__ __forceinline__ Visible(const Params& p, const WorkItem& item, bool constant)
      : length(item.length), queries(item.queries), columns(GROUP * item.queries), constant(constant) {
    all_from = p.window > 0 ? length - p.window : 0;
    if (constant) all_from = max(all_from, 1);
    all_to = length - queries;
    first = p.window > 0 ? all_to - p.window + 1 : 0;
  }

  // Whether some column does not attend to the whole tile.
  __device__ __forceinline__ bool is_partial(int position) const {
    return position < all_from || position + TILE - 1 > all_to;
  }

  __device__ __forceinline__ bool has_hidden_rows(int position) const {
    return position + TILE > length || position < first;
  }

  template <int COUNT>
  __device__ __forceinline__ void mask(float (*s)[N_TILES][4], const Params& p, const WorkItem& item,
                                       int position) const {
    const int g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        // A column sees lower <= position <= limit.
        const int column =
            min(item.col_tile * COLS + 8 * n + (2 * c + i) % COLS, columns - 1);
        const int limit = length - queries + column / GROUP;
        const int lower = max(p.window > 0 ? limit - p.window + 1 : 0, (int)constant);
#pragma unroll
        for (int half = 0; half < COUNT; half++)
#pragma unroll
          for (int k = 0; k < 2; k++) {
            const int at = position + half * 16 + g + 8 * k;
            if (at > limit || at < lower) s[half][n][2 * k + i] = NEG_INF;
          }
      }
  }
};

// Running O and softmax state of a warp, for this lane's columns.
struct Sums {
  float out[N_TILES][STEPS_V][4];
  // P = 2^(logit + shift) with shift = P_SHIFT - max. INITIAL_SHIFT is so large that the first logit
  // other than -inf triggers a rescale.
  float shift[N_TILES][2], sum[N_TILES][2];

  __device__ __forceinline__ Sums() {
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
#pragma unroll
      for (int j = 0; j < STEPS_V; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[n][j][i] = 0.0f;
      shift[n][0] = shift[n][1] = INITIAL_SHIFT;
      sum[n][0] = sum[n][1] = 0.0f;
    }
  }

  // Rescales columns whose max has grown by more than RESCALE_STEP.
  template <int COUNT, class Scales, class Shifts>
  __device__ __forceinline__ void rescale(const float (*s)[N_TILES][4], const Scales& query,
                                          const Shifts& bias) {
    float top[N_TILES][2];
    bool grown = false;
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        top[n][i] = fmaxf(s[0][n][i], s[0][n][2 + i]);
#pragma unroll
        for (int half = 1; half < COUNT; half++)
          top[n][i] = fmaxf(top[n][i], fmaxf(s[half][n][i], s[half][n][2 + i]));
        grown |= fmaf(top[n][i], query.scale_of(n, i), bias.shifted(shift[n][i], n, i)) >
                 P_SHIFT + RESCALE_STEP;
      }
    if (__any_sync(~0u, grown)) {
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
          for (int o = 4; o <= 16; o <<= 1)
            top[n][i] = fmaxf(top[n][i], __shfl_xor_sync(~0u, top[n][i], o));
          // Per column, so that no column changes the rounding of another.
          if (fmaf(top[n][i], query.scale_of(n, i), bias.shifted(shift[n][i], n, i)) >
              P_SHIFT + RESCALE_STEP) {
            const float new_shift = P_SHIFT - bias.shifted(top[n][i] * query.scale_of(n, i), n, i);
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
  }

  // Computes P of 16 tokens as operand B and adds it to the sums.
  template <bool BF16, class Scales, class Shifts>
  __device__ __forceinline__ void weigh(u32* p0, u32* p1, const float (*s)[4], const Scales& query,
                                        const Shifts& bias) {
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      float e[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        e[i] = ex2(fmaf(s[n][i], query.scale_of(n, i & 1), bias.shifted(shift[n][i & 1], n, i & 1)));
        sum[n][i & 1] += e[i];
      }
      p0[n] = movmatrix(pack<BF16>(e[0], e[1]));
      p1[n] = movmatrix(pack<BF16>(e[2], e[3]));
    }
  }

  // O^T += V^T P^T for a tile.
  template <int COUNT>
  __device__ __forceinline__ void add(const float (*s)[N_TILES][4], const Query& query,
                                      const Bias& bias, u32 tile) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int half = 0; half < COUNT; half++) {
      u32 p0[N_TILES], p1[N_TILES];
      weigh<V_KIND == 17>(p0, p1, s[half], query, bias);
#if V_KIND == 4
      const int g = lane >> 2, c = lane & 3;
      const u32 parity = (g >> 2) ? 0x7351u : 0x6240u;  // bytes of this lane's scale blocks
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
        const u32 both0 = __byte_perm(sf0[j / 2], sf0[WORDS_SF_V + j / 2], parity);
        const u32 both1 = __byte_perm(sf1[j / 2], sf1[WORDS_SF_V + j / 2], parity);
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
  }

  // Writes the output if the unit has the whole work item, else `row` of the partial results.
  __device__ __forceinline__ void write_results(const Params& p, const WorkItem& item, int head, u32 row,
                                        bool whole) const {
    const int g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
    const float unscale = (V_KIND < 16 ? *p.v_scale : 1.0f) * Operands<V_KIND>::UNIT;
    const u64 slots = ((u64)row * KV_HEADS + head) * COLS;
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float all = sum[n][i];
#pragma unroll
        for (int o = 4; o <= 16; o <<= 1) all += __shfl_xor_sync(~0u, all, o);
        const int column = 8 * n + (2 * c + i) % COLS, in_item = item.col_tile * COLS + column;
        const bool own = !DUPLICATE || (g >> 2) == (c >> 1);
        if (in_item >= GROUP * item.queries || !own) continue;
        const float top = all == 0.0f ? NEG_INF : P_SHIFT - shift[n][i], weight = all * ex2(-P_SHIFT);
        const bool first = DUPLICATE ? g % 4 == 0 : g == 0;
        if (whole) {
          const OutputRow to(item, head, in_item);
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
};
