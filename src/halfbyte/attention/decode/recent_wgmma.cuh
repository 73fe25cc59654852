// Attention to the keys of keys.cuh, for decode_wgmma.cu.
//
// Tokens are processed in rounds of 64. In S = K q^T a warp has 16 of the tokens; P goes through shared memory, as for
// pages; in O^T = V^T P^T a warp has the same dims as for pages. `mma` suffices for so few matmuls.

#pragma once
#include "attention/decode/keys.cuh"
#include "attention/decode/wgmma_operands.cuh"

#if HAS_INITIAL
// A lane's words of V for 16 tokens and this warp's dims: of tokens 2c, 2c + 1, 2c + 8 and 2c + 9, four dims each.
struct ValueWords {
  uint2 of[4][CHUNKS_PER_WARP];

  __device__ __forceinline__ void load(int token, const u16* row, int warp, int g) {
#pragma unroll
    for (int i = 0; i < CHUNKS_PER_WARP; i++) {
      const int chunk = PARTS_V == 1 ? warp / 2 : warp + 4 * i;
      of[token][i] = *(const uint2*)(row + chunk * 32 + 4 * g);
    }
  }

  // Operand A of tile m of V^T: rows g and g + 8 are dims 3 and 1 of four, or 2 and 0 (store_column).
  __device__ __forceinline__ void operand(u32* a, int m, int warp) const {
    const int i = m / PARTS_V;
    const u32 half = (PARTS_V == 1 ? warp : m) % 2 ? 0x5410 : 0x7632;
#pragma unroll
    for (int x = 0; x < 2; x++) {
      a[2 * x] = __byte_perm(of[2 * x][i].y, of[2 * x + 1][i].y, half);
      a[2 * x + 1] = __byte_perm(of[2 * x][i].x, of[2 * x + 1][i].x, half);
    }
  }
};

// Adds these keys to empty sums. Uses the shared memory of P and of the exchange between warps.
//
// `p_at`: as store_matrices takes it. `share_maxima`: max of each column over all warps.
template <class ShareMaxima>
__device__ __forceinline__ void add_keys(const RecentRows& rows, u32 p_at, u32 columns_at, float (*out)[N_TILES][4],
                                         float (*sum)[2], ShareMaxima share_maxima) {
  const Params& p = rows.p;
  const WorkItem& item = rows.item;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
  float top[N_TILES][2];
#pragma unroll
  for (int n = 0; n < N_TILES; n++) top[n][0] = top[n][1] = NEG_INF;
  auto scores = [&](float* s, const u32 (*upper)[2], const u32 (*lower)[2], int n) {
#pragma unroll
    for (int i = 0; i < 4; i++) s[i] = 0.0f;
#if !KEEPS_QUERY
    u32 q[STEPS_K][2];
    load_query(q, p.query, query_row(p, item, rows.head, item.col_tile * COLS + 8 * n + g), c);
#endif
#pragma unroll
    for (int j = 0; j < STEPS_K; j += 2) {
      u32 b[4];
#if KEEPS_QUERY
      load_words<4>(b, raw_query(n, j));
#else
      b[0] = q[j][0], b[1] = q[j][1], b[2] = q[j + 1][0], b[3] = q[j + 1][1];
#endif
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 a[4] = {upper[j + i][0], lower[j + i][0], upper[j + i][1], lower[j + i][1]};
        mma<OF_BF16>(s, a, b[2 * i], b[2 * i + 1]);
      }
    }
  };
  // Moves a column to a new max, and returns what to subtract from its logits.
  auto raise = [&](int n, int i, float new_top) {
    new_top = fmaxf(top[n][i], new_top);
    const float unit = new_top == NEG_INF ? 0.0f : new_top, factor = ex2(top[n][i] - unit);
    top[n][i] = new_top;
    sum[n][i] *= factor;
#pragma unroll
    for (int m = 0; m < TILES_V; m++) out[m][n][i] *= factor, out[m][n][2 + i] *= factor;
    return unit - P_SHIFT;
  };
#if RECENT
#pragma unroll 1
  for (int start = rows.first_round(); start < rows.stop; start += 64) {
    float s[N_TILES][4], round_top[N_TILES][2];
    u32 k[2][STEPS_K][2];
#pragma unroll
    for (int i = 0; i < 2; i++) load_query(k[i], rows.key(start + 16 * warp + 8 * i + g), 0, c);
    // With K, because every load waits for the tiles in flight.
    ValueWords v[4];
#pragma unroll
    for (int group = 0; group < 4; group++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        v[group].load(i, rows.value(start + 16 * group + 2 * c + i % 2 + i / 2 * 8), warp, g);
#pragma unroll
    for (int n = 0; n < N_TILES; n++) scores(s[n], k[0], k[1], n);
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int2 visible = rows.visible(8 * n + 2 * c + i);
#pragma unroll
        for (int half = 0; half < 2; half++)
          s[n][2 * half + i] = rows.logit(s[n][2 * half + i], start + 16 * warp + 8 * half + g, visible);
        round_top[n][i] = fmaxf(s[n][i], s[n][2 + i]);
      }
    share_maxima(round_top);
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      u32 pairs[2][2];
#pragma unroll
      for (int m = 0; m < 2; m++) {
        float e[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float unit = raise(n + m, i, round_top[n + m][i]);
          e[i] = ex2(s[n + m][i] - unit), e[2 + i] = ex2(s[n + m][2 + i] - unit);
          sum[n + m][i] += e[i] + e[2 + i];
        }
        pairs[m][0] = pack<OF_BF16>(e[0], e[1]), pairs[m][1] = pack<OF_BF16>(e[2], e[3]);
      }
      store_matrices(p_at + n * (TILE / 8) * B_MATRIX, pairs[0], pairs[1]);
    }
    __syncthreads();
#pragma unroll
    for (int group = 0; group < 4; group++) {
      u32 a[TILES_V][4];
#pragma unroll
      for (int m = 0; m < TILES_V; m++) v[group].operand(a[m], m, warp);
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        // A row of P is a column of the work item: 8 tokens.
        const u32 at = ring_address() + OFF_P + (n * (TILE / 8) + 2 * group) * B_MATRIX + g * 16 + c * 4;
        u32 b[2];
        load_words<1>(b, at);
        load_words<1>(b + 1, at + B_MATRIX);
#pragma unroll
        for (int m = 0; m < TILES_V; m++) mma<OF_BF16>(out[m][n], a[m], b[0], b[1]);
      }
    }
  }
#endif
  if (rows.constant >= 0) {
    // All rows of A are its key, so that every thread has the logits of its columns.
    u32 k[STEPS_K][2];
    load_query(k, rows.constant_key(), 0, c);
    ValueWords v;
    v.load(0, rows.constant_value(), warp, g);
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      float s[4];
      scores(s, k, k, n);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float logit = rows.constant_logit(s[i], 8 * n + 2 * c + i), unit = raise(n, i, logit);
        const float e = ex2(logit - unit);
        if (warp == 0 && g == 0) sum[n][i] += e;  // one thread only: sums are added across threads
#pragma unroll
        for (int m = 0; m < TILES_V; m++) {
          const uint2 x = v.of[0][m / PARTS_V];
          const u32 by = (PARTS_V == 1 ? warp : m) % 2 ? 0 : 16;  // as in `operand`
          out[m][n][i] += query_value((u16)(x.y >> by)) * e;
          out[m][n][2 + i] += query_value((u16)(x.x >> by)) * e;
        }
      }
    }
  }
  // The sums are in units of the stored V.
  const float unit = 1.0f / (*p.v_scale * Operands<V_KIND>::UNIT);
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (warp == 0 && g == 0 && top[n][i] != NEG_INF) store_float(columns_at + 64 * n + 8 + 4 * i, P_SHIFT - top[n][i]);
#pragma unroll
      for (int m = 0; m < TILES_V; m++) out[m][n][i] *= unit, out[m][n][2 + i] *= unit;
    }
  __syncthreads();
}
#endif
