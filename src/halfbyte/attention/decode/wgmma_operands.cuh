// Operands of decode_wgmma.cu: their layout in shared memory, unpacking, and matmuls.

#pragma once
#include "attention/decode/values.cuh"
#if WHOLE_PAGES
#include "attention/decode/pages.cuh"
#endif
#include "kernels/runtime/sm90.cuh"

// B operands are 8 x 8 matrices of 128 bytes, a row of 16 bytes per column, without swizzle. The matrices
// of 8 columns are contiguous along k.
#define B_MATRIX 128
#define OFF_Q (STAGES * STAGE_BYTES)
#define OFF_P (OFF_Q + COLS * HEAD_SIZE * 2)
#define OFF_EXCHANGE (OFF_P + COLS * TILE * 2)       // floats [WARPS, COLS]
#define OFF_COLUMNS (OFF_EXCHANGE + WARPS * COLS * 4)  // Columns [COLS / 2]
#define OFF_SCALES (OFF_COLUMNS + COLS * 8)            // scales of a warp's chunks of V, fp16

// A tile is 16 rows of V^T. A chunk of 32 dims has two tiles, and a warp has every fourth chunk. At head
// size 64 a warp has one tile.
#define TILES_V (HEAD_SIZE_V / 64)
#define PARTS_V (TILES_V == 1 ? 1 : 2)
#define CHUNKS_PER_WARP (TILES_V == 1 ? 1 : TILES_V / 2)

#define SCALES_CHUNK (TILE * 4)  // bytes: scales of its two blocks for all tokens
#define SCALES_WARP (CHUNKS_PER_WARP * SCALES_CHUNK)
#define OFF_BIAS (OFF_SCALES + WARPS * SCALES_WARP)    // floats [SUBTILES, COLS], see means_wgmma.cuh
#define OFF_TABLE (OFF_BIAS + COLS * TILE / 16)        // floats [16, COLS]: biases of 16 segments
#define OFF_RAW (OFF_TABLE + BIAS_BYTES)               // q as it was loaded, for the keys of keys.cuh
#define RAW_BYTES (KEEPS_QUERY ? COLS * HEAD_SIZE * 2 : 0)
#define OFF_READY (OFF_RAW + RAW_BYTES)                // mbarriers of the ring, with WHOLE_PAGES

#define V_OPERANDS (2 * PARTS_V * CHUNKS_PER_WARP)  // per 32 tokens
#define K_STEPS 4                                   // unpacked at a time
#define SUBTILES (TILE / 64)                        // 64 tokens are M of wgmma

__device__ __forceinline__ u8* shared_memory() {
  // Aligned to 1 KiB, where the pattern of every swizzle restarts.
  extern __shared__ __align__(1024) u8 shared[];
  return shared;
}

__device__ __forceinline__ u32 ring_address() { return shared_address(shared_memory()); }

// Address of a lane's words of q: operand B of k steps j and j + 1 for eight columns.
__device__ __forceinline__ u32 raw_query(int n, int j) {
  return ring_address() + OFF_RAW + (n * (STEPS_K / 2) + j / 2) * 512 + (threadIdx.x & 31) * 16;
}

// wgmma descriptor of the matrix `offset` bytes after the ring's start, with the strides along k and
// columns. Takes `ring / 16`, the descriptor's unit, so that one addition makes the lower word.
__device__ __forceinline__ u64 b_descriptor(u32 ring16, u32 offset, u32 bytes_per_8_columns) {
  u64 y;
  asm("mov.b64 %0, {%1, %2};"
      : "=l"(y)
      : "r"(ring16 + (offset / 16 + (B_MATRIX / 16 << 16))), "r"(bytes_per_8_columns / 16));
  return y;
}

#define D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])

// d = a b, or d += a b.
__device__ __forceinline__ void wgmma(float (*d)[4], const u32* a, u64 b, bool add) {
#if N_TILES == 4
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %21, 0;"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,"
      "%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
#else
  static_assert(N_TILES == 8, "32 or 64 columns");
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,"
      "%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
      " {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
#endif
}

// Offsets of rows and scales in a tile. `behind`: byte offset of a later token; 32 or 64 tokens further the
// swizzle is the same.
template <int WIDTH>
__device__ __forceinline__ constexpr u32 behind(u32 tokens) {
  return tokens / SPAN * SPAN_BYTES + tokens % SPAN * WIDTH;
}

template <int CHUNKS>
__device__ __forceinline__ u32 data_place(u32 start, u32 token, u32 chunk) {
#if WHOLE_PAGES
  return exchanged(start + behind<16 * CHUNKS>(token) + 16 * chunk);
#else
  return start + swizzle<CHUNKS>(token, chunk);
#endif
}

template <int WIDTH>
__device__ __forceinline__ u32 scale_place(u32 start, u32 token, u32 byte) {
  const u32 y = start + behind<WIDTH>(token) + byte;
#if WHOLE_PAGES
  return exchanged(y);
#else
  return y;
#endif
}

#if WHOLE_PAGES
static_assert(pattern(behind<ROW_K>(32)) == 0 && pattern(behind<ROW_K>(64)) == 0 &&
                  pattern(behind<SF_K>(64)) == 0 && SPAN_BYTES % 128 == 0,
              "alike");
#endif

// A lane's offsets in a tile: rows and scales of K and V; `parity_k` selects the scales of its blocks from
// K's words; `tokens` is the order of two tokens of V. `scales_to` and `scales`: addresses where it writes
// V's scales as fp16, and from where it reads those of its operands.
struct Places {
  u32 k, sf_k, parity_k, v, sf_v, tokens, scales_to, scales;

  __device__ __forceinline__ Places(int warp, int lane) {
    const int g = lane >> 2, c = lane & 3, chunk = TILES_V == 1 ? warp >> 1 : warp;
    k = keep(data_place<CHUNKS_K>(behind<ROW_K>(warp * 16), lane & 15, lane >> 4));
    sf_k = keep(scale_place<SF_K>(OFF_SF_K, warp * 16 + g, 0));
    parity_k = keep(c >> 1 ? 0x31u : 0x20u);
    v = keep(data_place<CHUNKS_V>(OFF_V, lane, chunk));
    sf_v = keep(scale_place<SF_V>(OFF_SF_V, 2 * lane + (lane >> 4), chunk * 2));
    tokens = keep(lane < 16 ? 0x40u : 0x04u);
    const u32 own = ring_address() + OFF_SCALES + warp * SCALES_WARP;
    scales_to = keep(own + (lane >> 4) * 128 + (lane & 3) * 16 + (lane >> 3 & 1) * 8 + (lane >> 2 & 1) * 4);
    scales = keep(own + (g >> 2) * 64 + c * 16);
  }
};

__device__ __forceinline__ u32 load_u16(u32 address) {
  u32 y;
  asm volatile("{.reg .u16 x; ld.shared.u16 x, [%1]; cvt.u32.u16 %0, x;}"
               : "=r"(y)
               : "r"(address)
               : "memory");
  return y;
}

// Bytes and scales loaded from shared memory while the previous operands are unpacked.
struct RawK {
  u32 bytes[4];  // 16 tokens x 64 dims
  u32 scales[2];  // of tokens g and g + 8
};

struct RawV {
  u32 bytes[4];  // 32 tokens x 32 dims
  u32 scales[4];  // fp16 pairs: tokens 2c, 2c + 1, then 2c + 8, 2c + 9, then the same 16 tokens later
};

// Loads a warp's 16 tokens of K in a subtile, K_STEPS k steps.
__device__ __forceinline__ void fetch_k(RawK& raw, u32 tile, const Places& at, int subtile, int first) {
  ldmatrix4(raw.bytes, tile + (at.k ^ first / 2 * 16) + behind<ROW_K>(64 * subtile));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    // If the scales of 8 tokens fill a row of 128 bytes, the next 8 have another swizzle.
    const u32 exchange = WHOLE_PAGES && 8 * SF_K == 128 ? 16 * i : 0;
    const u32 from = (at.sf_k ^ exchange) + behind<SF_K>(64 * subtile) + 8 * i * SF_K + first;
    load_words<1>(raw.scales + i, tile + from);
  }
}

__device__ __forceinline__ void unpack_k(u32 (*a)[4], const RawK& raw, const Places& at) {
  Operands<K_KIND>::of_k(a, raw.bytes);
  const u32 scale0 = scales_to_half2(__byte_perm(raw.scales[0], 0, at.parity_k));
  const u32 scale1 = scales_to_half2(__byte_perm(raw.scales[1], 0, at.parity_k));
  scale_k(a, both_low(scale0), both_low(scale1));
  scale_k(a + 2, both_high(scale0), both_high(scale1));
}

// Converts the scales of a warp's chunks of V to fp16, for a whole tile, and stores them in the order of RawV:
// [32 tokens][block][c][4]. Four lanes need each scale, so each converts a fourth. The upper 16 lanes load
// the second token of a pair first, to avoid bank conflicts.
__device__ __forceinline__ void stage_scales(u32 tile, const Places& at) {
#pragma unroll
  for (int i = 0; i < CHUNKS_PER_WARP; i++)
#pragma unroll
    for (int subtile = 0; subtile < SUBTILES; subtile++) {
      const u32 from = tile + at.sf_v;
      const u32 offset = i * 8 + behind<SF_V>(64 * subtile);
      const u32 x = load_u16(from + offset), y = load_u16((from ^ SF_V) + offset);
#pragma unroll
      for (int block = 0; block < 2; block++) {
        const u32 both = scales_to_half2(__byte_perm(x, y, at.tokens + 0x11 * block));
        const u32 to = at.scales_to + i * SCALES_CHUNK + subtile * 256 + block * 64;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(both) : "memory");
      }
    }
  __syncwarp();
}

// As clear_rows. The TMA copy that later overwrites the cleared bytes is issued after write_probabilities,
// whose proxy fence makes every thread's stores visible to it.
__device__ __forceinline__ void clear_scales(u32 tile, int from, int to) {
  if (!WHOLE_PAGES) return clear_rows(tile, from, to);
  from = max(from, 0), to = max(min(to, TILE), 0);
  for (int i = from * SF_V + 4 * (threadIdx.x & 31); i < to * SF_V; i += 128) {
    const u32 place = scale_place<SF_V>(OFF_SF_V, i / SF_V, i % SF_V);
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + place), "r"(0) : "memory");
  }
}

// Loads a warp's dims of V for 32 tokens.
__device__ __forceinline__ void fetch_v(RawV* raw, u32 tile, const Places& at, int first) {
#pragma unroll
  for (int i = 0; i < CHUNKS_PER_WARP; i++) {
    ldmatrix4_trans(raw[i].bytes, tile + (at.v ^ i * 64) + behind<ROW_V>(first));
    load_words<4>(raw[i].scales, at.scales + i * SCALES_CHUNK + first * 4);
  }
}

// Unpacks to operands [16 tokens][parts of a chunk].
__device__ __forceinline__ void unpack_v(u32 (*a)[4], const RawV& raw, int warp) {
  u32 all[4][4];
  Operands<V_KIND>::of_v(all, raw.bytes);
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const u32 m0 = raw.scales[2 * k], m1 = raw.scales[2 * k + 1];
    if (PARTS_V == 1) {
#pragma unroll
      for (int x = 0; x < 4; x++) a[k][x] = (warp & 1) ? all[2 * k + 1][x] : all[2 * k][x];
      scale_v(a[k], m0, m1);
    } else {
#pragma unroll
      for (int part = 0; part < 2; part++) {
#pragma unroll
        for (int x = 0; x < 4; x++) a[2 * k + part][x] = all[2 * k + part][x];
        scale_v(a[2 * k + part], m0, m1);
      }
    }
  }
}

__device__ __forceinline__ void unpack_v(u32 (*a)[4], const RawV* raw, int warp) {
#pragma unroll
  for (int i = 0; i < CHUNKS_PER_WARP; i++) unpack_v(a + 2 * PARTS_V * i, raw[i], warp);
}

// O^T += V^T P^T for 32 tokens.
__device__ __forceinline__ void add_values(float (*out)[N_TILES][4], const u32 (*a)[4], u32 ring16,
                                           int first) {
#pragma unroll
  for (int i = 0; i < CHUNKS_PER_WARP; i++)
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
      for (int part = 0; part < PARTS_V; part++)
        wgmma(out[PARTS_V * i + part], a[PARTS_V * (2 * i + k) + part],
              b_descriptor(ring16, OFF_P + (first / 8 + 2 * k) * B_MATRIX, TILE / 8 * B_MATRIX),
              true);
}

// Stores four 8 x 8 fp16 matrices, transposed: a lane has rows 2c and 2c + 1 of column g of each, and
// gives the address of row lane % 8 of matrix lane / 8.
__device__ __forceinline__ void store_matrices(u32 address, const u32* x, const u32* y) {
  const u32 matrices[4] = {x[0], x[1], y[0], y[1]};
  stmatrix4_trans(address, matrices);
}
