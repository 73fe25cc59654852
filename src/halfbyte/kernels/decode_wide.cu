// Decode attention for many query columns on SM90: as decode.cu, with `wgmma` and four warps per unit.
//
// With 16 columns and more the instructions of `mma.sync`, one per 16 x 16 operand and 8 columns, cost
// as much as the unpacking. A warpgroup's `wgmma` takes all columns at once: the operand that was
// unpacked in registers is A, the small one is B in shared memory.
//
//   S  = K q^T     m64nCOLSk16: A = 64 tokens x 16 dims, a warp has 16 tokens. B = q, put into
//                  shared memory once per piece.
//   O^T = V^T P^T  m64nCOLSk16: A = 64 dims x 16 tokens, a warp has 16 dims. B = P, which each warp
//                  writes for its tokens.
//
// A CTA is one warpgroup and works on one unit of the plan; its warps share a ring in shared memory
// (RING_WARPS), the maxima of columns and two barriers per tile. Several CTAs on a multiprocessor hide
// each other's waits. Both K and V are nvfp4.
//
// Macros: those of decode.cu but DUPLICATE and Q_SHARED; TILE is 64, WARPS 4, COLS = 8 * N_TILES.

#define RING_WARPS 4
#include "decode_values.cuh"
#include "sm90.cuh"

#define P_SHIFT 11.0f
#define NOTHING_YET 1e30f
#define MOST_P 0x7800u  // 2^(P_SHIFT + 4) as fp16

static_assert(TILE == 64 && WARPS == RING_WARPS && COLS == 8 * N_TILES, "one warpgroup per ring");
static_assert(K_KIND == 4 && V_KIND == 4, "reads nvfp4");

// B operands lie as 8 x 8 matrices of 128 bytes, a row of 16 bytes per column, without swizzle: those
// of 8 columns side by side along k.
#define B_MATRIX 128
#define OFF_Q (STAGES * STAGE_BYTES)
#define OFF_P (OFF_Q + COLS * HEAD_SIZE * 2)
#define OFF_EXCHANGE (OFF_P + COLS * TILE * 2)  // floats [WARPS, COLS]

// 16 rows of V^T are a tile; a chunk of 32 dims has two, and a warp has every fourth chunk. Of 64 dims
// a warp has one tile.
#define TILES_V (HEAD_SIZE_V / 64)
#define PARTS_V (TILES_V == 1 ? 1 : 2)
#define CHUNKS_PER_WARP (TILES_V == 1 ? 1 : TILES_V / 2)

// How many halves of V's tile are unpacked while K's matmul runs: as many as there are registers for.
#define V_AHEAD (HEAD_SIZE + HEAD_SIZE_V <= 256 ? 2 : 1)
#define V_OPERANDS (2 * PARTS_V * CHUNKS_PER_WARP)  // of 32 tokens

// The matrix at an address (the lower word counts 16 bytes) and its neighbours of k and of columns.
__device__ __forceinline__ u64 b_descriptor(u32 address, u32 bytes_per_8_columns) {
  u64 y;
  asm("mov.b64 %0, {%1, %2};"
      : "=l"(y)
      : "r"(address / 16 | (B_MATRIX / 16) << 16), "r"(bytes_per_8_columns / 16));
  return y;
}

#define D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])

// d = a b, or d += a b.
__device__ __forceinline__ void wgmma(float (*d)[4], const u32* a, u64 b, bool add) {
#if N_TILES == 2
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %13, 0;"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, "
      "{%8,%9,%10,%11}, %12, p, 1, 1, 0;}"
      : D4(0), D4(1)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
#elif N_TILES == 4
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %21, 0;"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,"
      "%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
#else
  static_assert(N_TILES == 8, "16, 32 or 64 columns");
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,"
      "%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
      " {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
#endif
}

extern __shared__ __align__(128) u8 shared[];

__device__ __forceinline__ u32 ring_address() { return shared_address(shared); }

__device__ __forceinline__ float* exchange() { return (float*)(shared + OFF_EXCHANGE); }

// q of a piece to shared memory, in the order of Operands::of_k and times a power of two per column
// that suits fp16. What S must be multiplied by goes to `multiplier`, for this lane's columns.
__device__ __forceinline__ void stage_query(const Params& p, const Piece& piece, int head, u32 ring,
                                            float (*multiplier)[2]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, c = lane & 3;
  const int columns = GROUP * piece.queries;
  const float common = *p.k_scale * p.softmax_scale * Operands<K_KIND>::UNIT * (SOFTCAP ? 1.0f : LOG2E);
  __syncthreads();  // the piece before is done with what lies there
  for (int n = warp; n < N_TILES; n += WARPS) {
    const int column = piece.col_tile * COLS + 8 * n + g;
    const bool valid = column < columns;
    const u64 base =
        valid ? (u64)(piece.q_begin + column / GROUP) * p.query_stride_token +
                    (u64)(head * GROUP + column % GROUP) * p.query_stride_head
              : 0;
    float x[STEPS_K][4];
    load_query(x, p.query, base, c);
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < STEPS_K; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(x[j][i]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const int exponent = fp16_exponent(largest);
    float scale = __int_as_float((127 + exponent) << 23);
    if (common < 0.0f) scale = -scale;
    const u32 rows = ring + OFF_Q + (n * (HEAD_SIZE / 8)) * B_MATRIX + g * 16 + c * 4;
#pragma unroll
    for (int j = 0; j < STEPS_K; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 pair = valid ? pack_half2(x[j][2 * i] * scale, x[j][2 * i + 1] * scale) : 0;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(rows + (2 * j + i) * B_MATRIX), "r"(pair)
                     : "memory");
      }
    // Positive, so that it can multiply the mask's -inf.
    if (c == 0)
      exchange()[8 * n + g] =
          fmaxf(__int_as_float((127 - exponent) << 23) * fabsf(common), 1e-37f);
  }
  fence_async_proxy();
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) multiplier[n][i] = exchange()[8 * n + 2 * c + i];
  __syncthreads();
}

// A warp's 16 tokens of K, as operands for every step of k.
__device__ __forceinline__ void load_k(u32 (*a)[4], u32 tile, int warp, int lane) {
  const int g = lane >> 2, c = lane & 3;
  const u32 parity = (c >> 1) ? 0x31u : 0x20u;  // bytes of this lane's kind of block
  u32 sf[2][WORDS_SF_K];
  load_words<WORDS_SF_K>(sf[0], tile + OFF_SF_K + (warp * 16 + g) * SF_K);
  load_words<WORDS_SF_K>(sf[1], tile + OFF_SF_K + (warp * 16 + g + 8) * SF_K);
#pragma unroll
  for (int j = 0; j < CHUNKS_K; j += 2) {
    u32 r[4];
    ldmatrix4(r, tile + warp * 16 * ROW_K + swizzle<CHUNKS_K>(lane & 15, j + (lane >> 4)));
    Operands<K_KIND>::of_k(a + 2 * j, r);
    const u32 scale0 = scales_to_half2(__byte_perm(sf[0][j / 2], 0, parity));
    const u32 scale1 = scales_to_half2(__byte_perm(sf[1][j / 2], 0, parity));
    scale_k(a + 2 * j, both_low(scale0), both_low(scale1));
    scale_k(a + 2 * j + 2, both_high(scale0), both_high(scale1));
  }
}

// A warp's dims of V in one chunk for 32 tokens, as operands [16 tokens][parts of a chunk].
__device__ __forceinline__ void load_v(u32 (*a)[4], u32 tile, int first, int chunk, int warp,
                                       int lane) {
  const int g = lane >> 2, c = lane & 3;
  // Bytes of this lane's kind of block in the words of two tokens.
  const u32 parity = 0x40u + 0x11u * (2 * (chunk & 1) + (g >> 2));
  u32 r[4], all[4][4];
  ldmatrix4_trans(r, tile + OFF_V + first * ROW_V + swizzle<CHUNKS_V>(lane, chunk));
  Operands<V_KIND>::of_v(all, r);
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const u32 rows = tile + OFF_SF_V + (first + 16 * k + 2 * c) * SF_V + chunk / 2 * 4;
    u32 sf[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(sf[i])
                   : "r"(rows + (i % 2 + i / 2 * 8) * SF_V));
    const u32 m0 = scales_to_half2(__byte_perm(sf[0], sf[1], parity));
    const u32 m1 = scales_to_half2(__byte_perm(sf[2], sf[3], parity));
    if (PARTS_V == 1) {
#pragma unroll
      for (int i = 0; i < 4; i++) a[k][i] = (warp & 1) ? all[2 * k + 1][i] : all[2 * k][i];
      scale_v(a[k], m0, m1);
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int x = 0; x < 4; x++) a[2 * k + i][x] = all[2 * k + i][x];
        scale_v(a[2 * k + i], m0, m1);
      }
    }
  }
}

// A warp's dims of V for 32 tokens.
__device__ __forceinline__ void load_v(u32 (*a)[4], u32 tile, int first, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < CHUNKS_PER_WARP; i++)
    load_v(a + 2 * PARTS_V * i, tile, first, TILES_V == 1 ? warp >> 1 : warp + 4 * i, warp, lane);
}

// O^T += V^T P^T for 32 tokens.
__device__ __forceinline__ void add_values(float (*out)[N_TILES][4], const u32 (*a)[4], u32 p,
                                           int first) {
#pragma unroll
  for (int i = 0; i < CHUNKS_PER_WARP; i++)
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
      for (int part = 0; part < PARTS_V; part++)
        wgmma(out[PARTS_V * i + part], a[PARTS_V * (2 * i + k) + part],
              b_descriptor(p + (first / 8 + 2 * k) * B_MATRIX, TILE / 8 * B_MATRIX), true);
}

// The largest of a column among all warps.
__device__ __forceinline__ void share_maxima(float (*top)[2], int warp, int g, int c) {
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int o = 4; o <= 16; o <<= 1)
        top[n][i] = fmaxf(top[n][i], __shfl_xor_sync(~0u, top[n][i], o));
      if (g == 0) exchange()[warp * COLS + 8 * n + 2 * c + i] = top[n][i];
    }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int w = 0; w < WARPS; w++)
        top[n][i] = fmaxf(top[n][i], exchange()[w * COLS + 8 * n + 2 * c + i]);
}

// A unit's share of a piece: its tiles come through the loader's ring.
__device__ __forceinline__ void attend(const Params& p, const Piece& piece, int head, u32 row,
                                       Share share, Loader& loader, u32& tile) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, c = lane & 3;
  const int length = piece.length, queries = piece.queries;
  const int columns = GROUP * queries;
  const u32 ring = ring_address();
  float multiplier[N_TILES][2];  // logits in base 2 are S * multiplier
  stage_query(p, piece, head, ring, multiplier);

  const int all_from = p.window > 0 ? length - p.window : 0;  // every column attends to these:
  const int all_to = length - queries;                        // all_from <= position <= all_to
  const int first_visible = p.window > 0 ? all_to - p.window + 1 : 0;  // by any column

  float out[TILES_V][N_TILES][4];
  // P = 2^(logit + shift), shift being P_SHIFT minus the maximum; as long as nothing was seen it is so
  // large that every logit but -inf makes it change.
  float shift[N_TILES][2], sum[N_TILES][2];
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
#pragma unroll
    for (int m = 0; m < TILES_V; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) out[m][n][i] = 0.0f;
    shift[n][0] = shift[n][1] = NOTHING_YET;
    sum[n][0] = sum[n][1] = 0.0f;
  }
  auto scale_of = [&](int n, int i) { return SOFTCAP ? 1.0f : multiplier[n][i]; };

  for (int t = share.first; t < share.stop; t++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
    __syncthreads();
    loader.step();

    const int position = t * TILE;
    const bool partial = position < all_from || position + TILE - 1 > all_to;
    if (position + TILE > length || position < first_visible) {
      clear_rows(tile, length - position, TILE);
      clear_rows(tile, 0, first_visible - position);
      __syncthreads();
    }

    // K's matmul runs while V is unpacked.
    float s[N_TILES][4];
    u32 k[STEPS_K][4], v[V_AHEAD][V_OPERANDS][4];
    load_k(k, tile, warp, lane);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < STEPS_K; j++)
      wgmma(s, k[j], b_descriptor(ring + OFF_Q + 2 * j * B_MATRIX, HEAD_SIZE / 8 * B_MATRIX), j > 0);
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < V_AHEAD; i++) load_v(v[i], tile, 32 * i, warp, lane);
    wgmma_wait();
#if SOFTCAP
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        s[n][i] = p.softcap * LOG2E * tanhf(s[n][i] * multiplier[n][i & 1] / p.softcap);
#endif
    if (partial) {
      asm volatile("");  // keeps this a branch: most tiles need no mask
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          // Keys of a column: lower <= position <= limit.
          const int column = min(piece.col_tile * COLS + 8 * n + 2 * c + i, columns - 1);
          const int limit = length - queries + column / GROUP;
          const int lower = p.window > 0 ? limit - p.window + 1 : 0;
#pragma unroll
          for (int k = 0; k < 2; k++) {
            const int at = position + warp * 16 + g + 8 * k;
            if (at > limit || at < lower) s[n][2 * k + i] = NEG_INF;
          }
        }
    }

    // P to shared memory; its sums are added once the shift is known to hold. The largest tells: the
    // packed halves are compared, two at a time.
    float added[N_TILES][2];
    auto write_probabilities = [&]() {
      u32 largest = 0;
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; i++) e[i] = ex2(fmaf(s[n][i], scale_of(n, i & 1), shift[n][i & 1]));
        added[n][0] = e[0] + e[2];
        added[n][1] = e[1] + e[3];
        const u32 upper = pack_half2(e[0], e[1]), lower = pack_half2(e[2], e[3]);
        largest = max_half2(largest, max_half2(upper, lower));
        const u32 rows = ring + OFF_P + (n * (TILE / 8) + 2 * warp) * B_MATRIX + g * 16 + c * 4;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(rows), "r"(movmatrix(upper)) : "memory");
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(rows + B_MATRIX), "r"(movmatrix(lower))
                     : "memory");
      }
      fence_async_proxy();
      return largest;
    };
    const u32 largest = write_probabilities();
    const bool grown = max(largest & 0xFFFFu, largest >> 16) > MOST_P;
    if (__syncthreads_or(grown)) {
      float top[N_TILES][2];
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) top[n][i] = fmaxf(s[n][i], s[n][2 + i]);
      share_maxima(top, warp, g, c);
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          // Each column by itself, by what the vote saw, so that no column changes the rounding of
          // another: larger than this rounds to a half above MOST_P.
          if (ex2(fmaf(top[n][i], scale_of(n, i), shift[n][i])) > 32776.0f) {
            const float new_shift = P_SHIFT - top[n][i] * scale_of(n, i);
            const float factor = ex2(new_shift - shift[n][i]);
            shift[n][i] = new_shift;
            sum[n][i] *= factor;
#pragma unroll
            for (int m = 0; m < TILES_V; m++) {
              out[m][n][i] *= factor;
              out[m][n][2 + i] *= factor;
            }
          }
        }
      write_probabilities();
      __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      sum[n][0] += added[n][0];
      sum[n][1] += added[n][1];
    }

    wgmma_fence();
#pragma unroll
    for (int i = 0; i < V_AHEAD; i++) add_values(out, v[i], ring + OFF_P, 32 * i);
    if (V_AHEAD == 1) {
      u32 rest[V_OPERANDS][4];
      load_v(rest, tile, 32, warp, lane);
      wgmma_fence();
      add_values(out, rest, ring + OFF_P, 32);
    }
    wgmma_commit();
    wgmma_wait();
    tile = tile + STAGE_BYTES == ring + STAGES * STAGE_BYTES ? ring : tile + STAGE_BYTES;
  }

  // Sums over all tokens, of all warps.
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int o = 4; o <= 16; o <<= 1) sum[n][i] += __shfl_xor_sync(~0u, sum[n][i], o);
    }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (g == 0) exchange()[warp * COLS + 8 * n + 2 * c + i] = sum[n][i];
  __syncthreads();

  const float unscale = *p.v_scale * Operands<V_KIND>::UNIT;
  const u64 slots = ((u64)row * KV_HEADS + head) * COLS;
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = 8 * n + 2 * c + i;
      float all = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) all += exchange()[w * COLS + column];
      if (piece.col_tile * COLS + column >= columns) continue;
      const float inverse = all > 0.0f ? unscale / all : 0.0f;
      float* const partial_out = p.partial_out + (slots + column) * HEAD_SIZE_V;
      // Of a chunk's dims 4g .. 4g + 3, part 1 has 0 and 2, part 0 has 1 and 3, the upper rows the first.
#pragma unroll
      for (int m = 0; m < TILES_V; m += PARTS_V) {
        const float low = out[m][n][i] * inverse, high = out[m][n][2 + i] * inverse;
        if (PARTS_V == 1) {
          float* const at = partial_out + (warp >> 1) * 32 + 4 * g + !(warp & 1);
          at[0] = high;
          at[2] = low;
        } else {
          *(float4*)(partial_out + (warp + 4 * (m / 2)) * 32 + 4 * g) = make_float4(
              out[m + 1][n][2 + i] * inverse, high, out[m + 1][n][i] * inverse, low);
        }
      }
      if (warp == 0 && g == 0)
        p.partial_ml[slots + column] = make_float2(
            all == 0.0f ? NEG_INF : P_SHIFT - shift[n][i], all * ex2(-P_SHIFT));
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS) decode(Params p) {
  const u32 ring = ring_address();
  asm volatile("griddepcontrol.launch_dependents;");  // the merge may take its place, and wait
  const PlanHeader header = p.plan.header();
  for (int x = blockIdx.x; x < header.units * KV_HEADS; x += gridDim.x) {
    const int number = x / KV_HEADS, head = x % KV_HEADS;
    const Unit unit = p.plan.unit(number);
    Loader loader(p, header, unit, head, number, ring);
    u32 tile = ring;
    Piece piece = unit.piece;
    int index = unit.index;
    do {
      const Share share = share_of(header, piece, number);
      if (share.first < share.stop) attend(p, piece, head, number + index, share, loader, tile);
    } while (goes_on(p, header, ++index, number, piece));
    asm volatile("cp.async.wait_all;");
    __syncthreads();
  }
}
