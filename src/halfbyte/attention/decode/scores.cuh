// Loads q as operands and computes S = K q^T of a tile, for decode.cu.
//
// The macros are those of decode.cu.

#pragma once
#include "attention/decode/values.cuh"

// A warp's words of q for a work item, as loaded from memory, and K's global scale.
struct QueryWords {
  u32 of[N_TILES][STEPS_K][2];
  float k_scale;

  __device__ __forceinline__ QueryWords(const Params& p, const WorkItem& item, int head) {
    const int g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      const int column = item.col_tile * COLS + 8 * n + g % COLS;
      load_query(of[n], p.query, query_row(p, item, head, column), c);
    }
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(k_scale) : "l"(p.k_scale));
  }

  // Rotates q as K was rotated before it was packed.
  __device__ __forceinline__ void rotate() {
#if ROTATE
#pragma unroll
    for (int n = 0; n < N_TILES; n++) rotate_query(of[n]);
#endif
  }
};

// A work item's q as operand B, permuted like the unpacked K, and the scale from S to logits in base 2.
// For fp16 operands q is multiplied by a power of two per column, to stay in their range.
struct Query {
#if Q_SHARED
  u32 shared;
#else
  u32 operands[N_TILES][STEPS_K][2];
#endif
  float logit_scale[N_TILES][2];  // of this lane's columns

  // `behind_ring`: shared-memory address for q, with Q_SHARED.
  __device__ __forceinline__ Query(const Params& p, const WorkItem& item, const QueryWords& words,
                                   u32 behind_ring) {
    const int lane = threadIdx.x & 31;
    const int g = lane >> 2, c = lane & 3;
    const float k_scale = K_KIND < 16 ? words.k_scale : 1.0f;
    const float common =
        k_scale * p.softmax_scale * Operands<K_KIND>::UNIT * (SOFTCAP ? 1.0f : LOG2E);
#if Q_SHARED
    shared = behind_ring + lane * 8;
#endif
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      const int column = item.col_tile * COLS + 8 * n + g % COLS;
      const bool valid = column < GROUP * item.queries;
      const bool own = !DUPLICATE || (g >> 2) == (c >> 1);  // this copy is for the lane's scale blocks
      float x[STEPS_K][4];
      query_values(x, words.of[n]);
      float unscale = 1.0f, scale = 1.0f;
      if (K_KIND < 16) {
        const int exponent = fp16_exponent(x);
        scale = __int_as_float((127 + exponent) << 23);
        unscale = __int_as_float((127 - exponent) << 23);
      }
      if (common < 0.0f) scale = -scale;
#pragma unroll
      for (int j = 0; j < STEPS_K; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) x[j][i] = valid && own ? x[j][i] * scale : 0.0f;
        keep(n, j, pack<K_KIND == 17>(x[j][0], x[j][1]), pack<K_KIND == 17>(x[j][2], x[j][3]));
      }
      // Positive, because it multiplies the mask's -inf.
#pragma unroll
      for (int i = 0; i < 2; i++)
        logit_scale[n][i] =
            fmaxf(__shfl_sync(~0u, unscale, (2 * c + i) * 4) * fabsf(common), 1e-37f);
    }
  }

  __device__ __forceinline__ void keep(int n, int step, u32 b0, u32 b1) {
#if Q_SHARED
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(shared + (n * STEPS_K + step) * 256), "r"(b0),
                 "r"(b1)
                 : "memory");
#else
    operands[n][step][0] = b0;
    operands[n][step][1] = b1;
#endif
  }

  // Scale of S in the exponent; 1 with a soft-cap, after which S is logits in base 2 already.
  __device__ __forceinline__ float scale_of(int n, int i) const {
    return SOFTCAP ? 1.0f : logit_scale[n][i];
  }
};

// Operands of chunks j and j + 1 of K for 16 tokens.
__device__ __forceinline__ void k_operands(u32 (*a)[4], u32 tile, int half, int j) {
  const int lane = threadIdx.x & 31;
  u32 r[4];
  ldmatrix4(r, tile + half * 16 * ROW_K + swizzle<CHUNKS_K>(lane & 15, j + (lane >> 4)));
  Operands<K_KIND>::of_k(a, r);
}

// Block scales of tokens g and g + 8 of 16.
struct KeyScales {
  u32 words[2][SF_K ? WORDS_SF_K : 1];

  __device__ __forceinline__ void load(u32 tile, int half) {
    const int g = (threadIdx.x & 31) >> 2;
    load_words<WORDS_SF_K>(words[0], tile + OFF_SF_K + (half * 16 + g) * SF_K);
    load_words<WORDS_SF_K>(words[1], tile + OFF_SF_K + (half * 16 + g + 8) * SF_K);
  }

  // As fp16 pairs: the scales of this lane's blocks in chunks j and j + 1.
  __device__ __forceinline__ u32 of_token(int which, int j) const {
    const u32 parity = (threadIdx.x & 3) >> 1 ? 0x31u : 0x20u;
    return scales_to_half2(__byte_perm(words[which][j / 2], 0, parity));
  }
};

#if N_TILES == 1
// S of a tile. Two chains of accumulators hide the latency of dependent mma.
template <int COUNT>
__device__ __forceinline__ void scores(float (*s)[N_TILES][4], const Query& query, u32 tile) {
#pragma unroll
  for (int half = 0; half < COUNT; half++) {
    float acc[2][4] = {};
    KeyScales scales;
    scales.load(tile, half);
#pragma unroll
    for (int j = 0; j < CHUNKS_K; j += 2) {
      const auto q = query.operands[0] + j / 2 * LOADED_K;
      u32 a[LOADED_K][4];
      k_operands(a, tile, half, j);
#if K_KIND == 4
      const u32 scale0 = scales.of_token(0, j), scale1 = scales.of_token(1, j);
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
      s[half][0][i] = acc[0][i] + (DUPLICATE ? __shfl_xor_sync(~0u, acc[0][i], 2) : acc[1][i]);
  }
}
#else
// S of a tile. All columns share the unpacked K; all groups of 16 tokens share the loaded q.
template <int COUNT>
__device__ __forceinline__ void scores(float (*s)[N_TILES][4], const Query& query, u32 tile) {
  KeyScales scales[COUNT];
#pragma unroll
  for (int half = 0; half < COUNT; half++) {
    scales[half].load(tile, half);
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[half][n][i] = 0.0f;
  }
#pragma unroll
  for (int j = 0; j < CHUNKS_K; j += 2) {
    u32 a[COUNT][LOADED_K][4];
#pragma unroll
    for (int half = 0; half < COUNT; half++) {
      k_operands(a[half], tile, half, j);
#if K_KIND == 4
      const u32 scale0 = scales[half].of_token(0, j), scale1 = scales[half].of_token(1, j);
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
        load_words<2>(q, query.shared + (n * STEPS_K + step) * 256);
#else
        const u32* q = query.operands[n][step];
#endif
#pragma unroll
        for (int half = 0; half < COUNT; half++)
          mma<K_KIND == 17>(s[half][n], a[half][k], q[0], q[1]);
      }
  }
}
#endif
