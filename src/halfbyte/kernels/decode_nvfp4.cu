// Split-KV decode attention that reads packed NVFP4 pages.
//
// One warp owns one unit of work: a chunk of one sequence's tokens, one KV head, and up to eight
// query columns (heads of the group x query tokens). It streams 32 tokens at a time through a ring
// of its own in shared memory (cp.async, no CTA barriers), and keeps everything else in registers.
//
//   S  = K q^T   m16n8k16: A = 16 tokens x 16 dims of K from ldmatrix, B = q. Tokens are the M side,
//                so a GQA group of up to eight heads needs no padding.
//   O^T = V^T P^T  m16n8k16: A = 16 dims x 16 tokens of V from ldmatrix.trans, which pairs the
//                tokens t, t+1 of four dims in one register; P becomes B with movmatrix.
//
// E2M1 to fp16 without tables: `s|eem` at the top of an fp16 is the same value times 2^-14,
// subnormals included. From a word of eight nibbles, two bit selects give four bytes `s0000eem0`
// each (e5m2 bytes), and a mask with an optional shift by 8 gives a pair of halves: 11 operations
// for 8 values. Times the block's E4M3 scale the product is exact in fp16 (at most 6 significant
// bits, a multiple of 2^-24). Which nibble lands in which half is irrelevant: the order of k inside
// a matmul is free as long as the other operand follows it, so q is permuted once.
//
// The softmax is rescaled lazily: only when some column's maximum has grown by more than 2^4 since
// the last rescaling. P is kept times 2^11, which uses fp16's range both ways.
//
// Compiled at run time with these macros:
//   HEAD_SIZE, HEAD_SIZE_V   multiples of 64
//   BLOCK_SIZE               tokens per page, a multiple of 16
//   Q_BF16 / Q_FP16          dtype of query and output
//   SOFTCAP                  1 if used
//   HND                      1 if a head's tokens are contiguous in a page, else any strides
//   DUPLICATE                1 for units of up to four columns, see below
//
// A register of unpacked K or V holds values of one of two neighbouring scale blocks, which one the
// lane decides. With DUPLICATE each column stands twice in B: once for the even
// blocks, once for the odd. Scales then multiply the few sums (K) and probabilities (V) of their own
// kind of block instead of every value of A; without it, with up to eight columns, they multiply A.

typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned long long u64;

#define WARPS 8
#define TILE 32
#define STAGES 3
#define COLS (DUPLICATE ? 4 : 8)
#define PLAN_CACHE 1024
#define LOG2E 1.4426950408889634f
#define NEG_INF (-__int_as_float(0x7f800000))
// With DUPLICATE, P is multiplied by scales of up to 448 before it enters the matmul.
#define P_SHIFT (DUPLICATE ? 3.0f : 11.0f)
#define RESCALE_STEP 4.0f

struct Params {
  const void* query;      // [tokens, heads, HEAD_SIZE]
  const u8* pages;
  float* partial_out;     // [rows, heads, HEAD_SIZE_V]; a row is a (split, query token)
  float2* partial_ml;     // [rows, heads]: (max in base 2, sum)
  const int* plan;        // see plan_chunks
  const int* seq_lens;
  const int* query_start_loc;
  const int* block_tables;
  const float* k_scale;
  const float* v_scale;
  u64 page_stride;
  u64 query_stride_token, query_stride_head;  // elements
  u32 k_data, k_data_token, k_data_head;      // bytes
  u32 k_sf, k_sf_token, k_sf_head;
  u32 v_data, v_data_token, v_data_head;
  u32 v_sf, v_sf_token, v_sf_head;
  int num_seqs, max_pages, kv_heads, group;
  float softmax_scale, softcap;
  int window;
};

#define ROW_K (HEAD_SIZE / 2)
#define ROW_V (HEAD_SIZE_V / 2)
#define SF_K (HEAD_SIZE / 16)
#define SF_V (HEAD_SIZE_V / 16)
#define CHUNKS_K (ROW_K / 16)
#define CHUNKS_V (ROW_V / 16)
#define WORDS_SF_K (SF_K / 4)
#define WORDS_SF_V (SF_V / 4)
#define STAGE_BYTES (TILE * (ROW_K + SF_K + ROW_V + SF_V))
#define OFF_SF_K (TILE * ROW_K)
#define OFF_V (OFF_SF_K + TILE * SF_K)
#define OFF_SF_V (OFF_V + TILE * ROW_V)

__device__ __forceinline__ u32 smem_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void cp_async16(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src));
}

__device__ __forceinline__ void cp_async4(u32 dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src));
}

__device__ __forceinline__ void ldmatrix4(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void ldmatrix4_trans(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 movmatrix(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 pack_half2(float lo, float hi) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

__device__ __forceinline__ float half_to_float(u32 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)x));
  return y;
}

__device__ __forceinline__ u32 hmul2(u32 a, u32 b) {
  u32 y;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// (a & mask) | (b & ~mask)
__device__ __forceinline__ u32 select_bits(u32 a, u32 b, u32 mask) {
  u32 y;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(y) : "r"(a), "r"(b), "r"(mask));
  return y;
}

// Eight nibbles to four pairs of halves, each value times 2^-14. Byte b holds elements 2b (low
// nibble) and 2b + 1: h0 = (3, 7), h1 = (1, 5), h2 = (2, 6), h3 = (0, 4).
__device__ __forceinline__ void unpack(u32* h, u32 w) {
  const u32 keep = 0x8E008E00u;
  u32 z = select_bits(w >> 3, w, 0x0E0E0E0Eu);
  u32 y = select_bits(w << 1, w << 4, 0x0E0E0E0Eu);
  h[0] = z & keep;
  h[1] = (z << 8) & keep;
  h[2] = y & keep;
  h[3] = (y << 8) & keep;
}

// Two E4M3 scales, bytes `selector & 15` and `(selector >> 4) & 15` of the eight in (a, b), to a
// pair of halves; NaN stays NaN.
__device__ __forceinline__ u32 scale_pair(u32 a, u32 b, u32 selector) {
  u32 y;
#if __CUDA_ARCH__ >= 890
  u32 bytes = __byte_perm(a, b, selector);
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((u16)bytes));
#else
  // Spread to the upper byte of each half: the value times 2^-8, NaN (0x7F) as 480.
  u32 bytes = __byte_perm(a, b, ((selector & 15) << 4) | ((selector & 0xF0) << 8));
  bytes &= 0x7F007F00u;
  y = hmul2((bytes >> 1) & 0x3F803F80u, 0x5C005C00u);
  u32 nan = (bytes + 0x01000100u) & 0x80008000u;
  y |= (nan >> 15) * 0x7E00u;
#endif
  return y;
}

__device__ __forceinline__ u32 both_low(u32 x) { return __byte_perm(x, x, 0x1010); }
__device__ __forceinline__ u32 both_high(u32 x) { return __byte_perm(x, x, 0x3232); }

__device__ __forceinline__ float load_query(const void* q, u64 i) {
#if defined(Q_BF16)
  return __int_as_float((u32)((const u16*)q)[i] << 16);
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(((const u16*)q)[i]));
  return y;
#endif
}

__device__ __forceinline__ u32 swizzle_k(int row, int chunk) {
  if (CHUNKS_K >= 8) return (u32)(row * ROW_K + ((chunk ^ (row & 7)) << 4));
  if (CHUNKS_K >= 4) return (u32)(row * ROW_K + ((chunk ^ ((row >> 1) & 3)) << 4));
  return (u32)(row * ROW_K + ((chunk ^ ((row >> 2) & 1)) << 4));
}

__device__ __forceinline__ u32 swizzle_v(int row, int chunk) {
  if (CHUNKS_V >= 8) return (u32)(row * ROW_V + ((chunk ^ (row & 7)) << 4));
  if (CHUNKS_V >= 4) return (u32)(row * ROW_V + ((chunk ^ ((row >> 1) & 3)) << 4));
  return (u32)(row * ROW_V + ((chunk ^ ((row >> 2) & 1)) << 4));
}

// First tile and number of tiles that a sequence's queries need; 0 tiles for an empty one.
__device__ __forceinline__ int2 tile_range(const Params& p, int seq) {
  int length = p.seq_lens[seq];
  int queries = p.query_start_loc[seq + 1] - p.query_start_loc[seq];
  int first = 0;
  if (p.window > 0) first = max(0, length - queries - p.window + 1) / TILE;
  int tiles = queries > 0 ? (length + TILE - 1) / TILE - first : 0;
  return make_int2(first, max(tiles, 0));
}

__device__ __forceinline__ int num_queries(const Params& p, int seq) {
  return p.query_start_loc[seq + 1] - p.query_start_loc[seq];
}

__device__ __forceinline__ int num_col_tiles(const Params& p, int seq) {
  return (num_queries(p, seq) * p.group + COLS - 1) / COLS;
}

// Chooses the chunk so that the units just fill the warps, and numbers units and rows. One CTA.
//   plan[0]                chunk in tiles
//   plan[1 + s]            first unit (per KV head) of sequence s; [1 + num_seqs] all of them
//   plan[2 + num_seqs + s] first row of sequence s
extern "C" __global__ void __launch_bounds__(1024) plan_chunks(Params p, int* plan, int max_units,
                                                               int max_rows, int fixed_chunk) {
  __shared__ int2 warp_sums[32];
  __shared__ int2 total;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;

  // What the search asks for again and again: tiles, column tiles and queries of each sequence.
  __shared__ int4 facts[PLAN_CACHE];
  auto look_up = [&](int s) {
    return make_int4(tile_range(p, s).y, num_col_tiles(p, s), num_queries(p, s), 0);
  };
  for (int s = threadIdx.x; s < min(p.num_seqs, PLAN_CACHE); s += blockDim.x) facts[s] = look_up(s);
  __syncthreads();
  auto units_and_rows = [&](int s, int chunk) {
    if (s >= p.num_seqs) return make_int2(0, 0);
    const int4 f = s < PLAN_CACHE ? facts[s] : look_up(s);
    const int splits = (f.x + chunk - 1) / chunk;
    return make_int2(splits * f.y, splits * f.z);
  };
  auto block_sum = [&](int2 x) {
    for (int o = 16; o; o >>= 1) {
      x.x += __shfl_xor_sync(~0u, x.x, o);
      x.y += __shfl_xor_sync(~0u, x.y, o);
    }
    __syncthreads();
    if (lane == 0) warp_sums[warp] = x;
    __syncthreads();
    if (warp == 0) {
      int2 y = lane < warps ? warp_sums[lane] : make_int2(0, 0);
      for (int o = 16; o; o >>= 1) {
        y.x += __shfl_xor_sync(~0u, y.x, o);
        y.y += __shfl_xor_sync(~0u, y.y, o);
      }
      if (lane == 0) total = y;
    }
    __syncthreads();
    return total;
  };

  int chunk = fixed_chunk;
  if (chunk == 0) {
    int2 work = make_int2(0, 0);
    for (int s = threadIdx.x; s < p.num_seqs; s += blockDim.x) work.x += units_and_rows(s, 1).x;
    chunk = max(4, (block_sum(work).x + max_units - 1) / max_units);
    // Each warp tries a candidate, about 1 / 32 apart; the smallest that fits wins.
    for (int step = 0; step < 64; step++) {
      const int stride = max(1, chunk >> 5);
      const int candidate = chunk + warp * stride;
      int2 sum = make_int2(0, 0);
      for (int s = lane; s < p.num_seqs; s += 32) {
        int2 x = units_and_rows(s, candidate);
        sum.x += x.x;
        sum.y += x.y;
      }
      for (int o = 16; o; o >>= 1) {
        sum.x += __shfl_xor_sync(~0u, sum.x, o);
        sum.y += __shfl_xor_sync(~0u, sum.y, o);
      }
      __syncthreads();
      if (lane == 0) warp_sums[warp].x = sum.x <= max_units && sum.y <= max_rows;
      __syncthreads();
      int winner = warps;
      for (int w = warps - 1; w >= 0; w--)
        if (warp_sums[w].x) winner = w;
      chunk += winner * stride;
      // With more sequences than warps nothing fits; by now every sequence is one chunk.
      if (winner < warps || chunk >= 1 << 20) break;
    }
  }
  // Exclusive prefix sums, a block of sequences at a time.
  int2 base = make_int2(0, 0);
  for (int start = 0; start < p.num_seqs; start += blockDim.x) {
    const int s = start + threadIdx.x;
    const int2 own = units_and_rows(s, chunk);
    int2 inclusive = own;
    for (int o = 1; o < 32; o <<= 1) {
      int x = __shfl_up_sync(~0u, inclusive.x, o), y = __shfl_up_sync(~0u, inclusive.y, o);
      if (lane >= o) inclusive.x += x, inclusive.y += y;
    }
    __syncthreads();
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    int2 before = base;
    for (int w = 0; w < warps; w++) {
      if (w < warp) before.x += warp_sums[w].x, before.y += warp_sums[w].y;
      base.x += warp_sums[w].x, base.y += warp_sums[w].y;
    }
    if (s < p.num_seqs) {
      plan[1 + s] = before.x + inclusive.x - own.x;
      plan[2 + p.num_seqs + s] = before.y + inclusive.y - own.y;
    }
  }
  if (threadIdx.x == 0) {
    plan[0] = chunk;
    plan[1 + p.num_seqs] = base.x;
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) decode(Params p) {
  extern __shared__ __align__(128) u8 shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, c = lane & 3;
  u8* ring = shared + warp * (STAGES * STAGE_BYTES);
  const u32 ring_address = smem_address(ring);
  const int chunk = p.plan[0];
  const int num_units = p.plan[1 + p.num_seqs] * p.kv_heads;
  const u32 sel_k = (c >> 1) ? 0x31u : 0x20u;  // bytes 1, 3 or 0, 2: this lane's parity of blocks

  // Heads of one chunk are neighbours: their bytes lie in the same pages.
  for (int unit = blockIdx.x * WARPS + warp; unit < num_units; unit += gridDim.x * WARPS) {
    const int head = unit % p.kv_heads;
    const int index = unit / p.kv_heads;
    int seq = 0, high = p.num_seqs;  // plan[1 + seq] <= index < plan[2 + seq]
    while (high - seq > 1) {
      int middle = (seq + high) >> 1;
      if (p.plan[1 + middle] <= index) seq = middle;
      else high = middle;
    }
    const int2 range = tile_range(p, seq);
    const int length = p.seq_lens[seq];
    const int q_begin = p.query_start_loc[seq];
    const int queries = num_queries(p, seq);
    const int col_tiles = num_col_tiles(p, seq);
    const int split = (index - p.plan[1 + seq]) / col_tiles;
    const int col_tile = (index - p.plan[1 + seq]) % col_tiles;
    const int first_tile = range.x + split * chunk;
    const int num_tiles = min(chunk, range.y - split * chunk);
    const int columns = p.group * queries;
    const int* table = p.block_tables + (u64)seq * p.max_pages;
    const int last_page = (length - 1) / BLOCK_SIZE;

    // q, permuted as the unpacked K is, times a power of two per column that suits fp16.
    u32 q_frag[CHUNKS_K][4];
    float q_unscale = 1.0f;  // of column g
    {
      const int column = col_tile * COLS + g % COLS;
      const bool valid = column < columns;
      const bool own = !DUPLICATE || (g >> 2) == (c >> 1);  // this copy's kind of block
      const u64 base = valid ? (u64)(q_begin + column / p.group) * p.query_stride_token +
                                   (u64)(head * p.group + column % p.group) * p.query_stride_head
                             : 0;
      float largest = 0.0f;
      for (int d = c; d < HEAD_SIZE; d += 4)
        if (valid) largest = fmaxf(largest, fabsf(load_query(p.query, base + d)));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      // A power of two that brings the largest value to [2^9, 2^10).
      int exponent = largest > 0.0f ? 136 - (int)((__float_as_int(largest) >> 23) & 255) : 0;
      exponent = max(-126, min(126, exponent));
      const float scale = __int_as_float((127 + exponent) << 23);
      q_unscale = __int_as_float((127 - exponent) << 23);
#pragma unroll
      for (int j = 0; j < CHUNKS_K; j++) {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
          x[i] = valid && own ? load_query(p.query, base + 32 * j + 8 * c + i) * scale : 0.0f;
        q_frag[j][0] = pack_half2(x[3], x[7]);
        q_frag[j][1] = pack_half2(x[1], x[5]);
        q_frag[j][2] = pack_half2(x[2], x[6]);
        q_frag[j][3] = pack_half2(x[0], x[4]);
      }
    }
    // Logits in base 2 are S * multiplier, for this lane's two columns.
    const float common = *p.k_scale * p.softmax_scale * 16384.0f;
    float multiplier[2];
    int limit[2], lower[2];  // keys of a column: lower <= position <= limit
#pragma unroll
    for (int i = 0; i < 2; i++) {
      multiplier[i] = __shfl_sync(~0u, q_unscale, (2 * c + i) * 4) * common;
#if !SOFTCAP
      multiplier[i] *= LOG2E;
#endif
      int column = min(col_tile * COLS + (2 * c + i) % COLS, columns - 1);
      limit[i] = length - queries + column / p.group;
      lower[i] = p.window > 0 ? limit[i] - p.window + 1 : 0;
    }
    const int all_from = p.window > 0 ? length - p.window : 0;  // every column attends to these:
    const int all_to = length - queries;                        // all_from <= position <= all_to

#if HND
    const u32 k_offset = p.k_data + head * p.k_data_head + lane * 16;
    const u32 v_offset = p.v_data + head * p.v_data_head + lane * 16;
    const u32 sf_offset = lane < SF_K ? p.k_sf + head * p.k_sf_head + lane * 16
                                      : p.v_sf + head * p.v_sf_head + (lane - SF_K) * 16;
    const u32 sf_target = lane < SF_K ? OFF_SF_K + lane * 16 : OFF_SF_V + (lane - SF_K) * 16;
#endif
    // Pages of a tile's two halves, looked up a tile before their bytes are asked for.
    auto look_up = [&](int t, int* page) {
#pragma unroll
      for (int half = 0; half < 2; half++)
        page[half] = table[min(((first_tile + t) * TILE + half * 16) / BLOCK_SIZE, last_page)];
    };
    auto load_tile = [&](int t, int stage, const int* page_numbers) {
      const u32 base = ring_address + stage * STAGE_BYTES;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int in_page = ((first_tile + t) * TILE + half * 16) % BLOCK_SIZE;
        const u8* page = p.pages + (u64)(u32)page_numbers[half] * p.page_stride;
#if HND
        // 16 tokens of one head are contiguous: lane l copies chunk l, l + 32, ... of them.
        const u8* k = page + (k_offset + in_page * ROW_K);
        const u8* v = page + (v_offset + in_page * ROW_V);
        const u8* ks = page + (sf_offset + in_page * (lane < SF_K ? SF_K : SF_V));
#pragma unroll
        for (int i = 0; i < 16 * CHUNKS_K; i += 32)
          cp_async16(base + half * 16 * ROW_K + swizzle_k((i + lane) / CHUNKS_K, lane % CHUNKS_K),
                     k + i * 16);
#pragma unroll
        for (int i = 0; i < 16 * CHUNKS_V; i += 32)
          cp_async16(base + OFF_V + half * 16 * ROW_V +
                         swizzle_v((i + lane) / CHUNKS_V, lane % CHUNKS_V),
                     v + i * 16);
        // 16 tokens' scales are HEAD_SIZE bytes: the first lanes copy K's, the next V's.
        if (lane < SF_K + SF_V) cp_async16(base + sf_target + half * (lane < SF_K ? 16 * SF_K : 16 * SF_V), ks);
#else
        const u8* k = page + p.k_data + head * p.k_data_head + in_page * p.k_data_token;
        const u8* v = page + p.v_data + head * p.v_data_head + in_page * p.v_data_token;
        const u8* ks = page + p.k_sf + head * p.k_sf_head + in_page * p.k_sf_token;
        const u8* vs = page + p.v_sf + head * p.v_sf_head + in_page * p.v_sf_token;
#pragma unroll
        for (int i = 0; i < 16 * CHUNKS_K; i += 32) {
          int row = (i + lane) / CHUNKS_K, ch = (i + lane) % CHUNKS_K;
          cp_async16(base + swizzle_k(half * 16 + row, ch), k + row * p.k_data_token + ch * 16);
        }
#pragma unroll
        for (int i = 0; i < 16 * CHUNKS_V; i += 32) {
          int row = (i + lane) / CHUNKS_V, ch = (i + lane) % CHUNKS_V;
          cp_async16(base + OFF_V + swizzle_v(half * 16 + row, ch),
                     v + row * p.v_data_token + ch * 16);
        }
#pragma unroll
        for (int i = 0; i < 16 * WORDS_SF_K; i += 32) {
          int row = (i + lane) / WORDS_SF_K, w = (i + lane) % WORDS_SF_K;
          if (row < 16)
            cp_async4(base + OFF_SF_K + (half * 16 + row) * SF_K + w * 4,
                      ks + row * p.k_sf_token + w * 4);
        }
#pragma unroll
        for (int i = 0; i < 16 * WORDS_SF_V; i += 32) {
          int row = (i + lane) / WORDS_SF_V, w = (i + lane) % WORDS_SF_V;
          if (row < 16)
            cp_async4(base + OFF_SF_V + (half * 16 + row) * SF_V + w * 4,
                      vs + row * p.v_sf_token + w * 4);
        }
#endif
      }
    };
    float out[CHUNKS_V][2][4];
#pragma unroll
    for (int j = 0; j < CHUNKS_V; j++)
#pragma unroll
      for (int i = 0; i < 8; i++) out[j][i >> 2][i & 3] = 0.0f;
    float maximum[2] = {NEG_INF, NEG_INF}, sum[2] = {0.0f, 0.0f};

#pragma unroll
    for (int t = 0; t < STAGES - 1; t++) {
      int page[2];
      look_up(t, page);
      if (t < num_tiles) load_tile(t, t, page);
      asm volatile("cp.async.commit_group;");
    }
    int next_pages[2];
    look_up(STAGES - 1, next_pages);
    int stage = 0;
    for (int t = 0; t < num_tiles; t++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
      __syncwarp();
      const int next = t + STAGES - 1;
      if (next < num_tiles) load_tile(next, stage == 0 ? STAGES - 1 : stage - 1, next_pages);
      asm volatile("cp.async.commit_group;");
      look_up(next + 1, next_pages);
      u8* tile = ring + stage * STAGE_BYTES;
      const u32 tile_address = ring_address + stage * STAGE_BYTES;
      stage = stage == STAGES - 1 ? 0 : stage + 1;

      const int position = (first_tile + t) * TILE;
      const bool partial = position < all_from || position + TILE - 1 > all_to;
      if (position + TILE > length) {
        // Slots that were never written may hold NaN scales, and 0 * NaN is NaN.
        if (position + lane >= length) {
#pragma unroll
          for (int w = 0; w < WORDS_SF_V; w++)
            ((u32*)(tile + OFF_SF_V))[lane * WORDS_SF_V + w] = 0;
        }
        __syncwarp();
      }

      float s[2][4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        // Two chains, because a matmul waits for the one before it in its own.
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#if !DUPLICATE
        float other[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#endif
        u32 sf0[WORDS_SF_K], sf1[WORDS_SF_K];
        const u32* sf = (const u32*)(tile + OFF_SF_K) + (half * 16 + g) * WORDS_SF_K;
#pragma unroll
        for (int w = 0; w < WORDS_SF_K; w++) {
          sf0[w] = sf[w];
          sf1[w] = sf[8 * WORDS_SF_K + w];
        }
        const int row = half * 16 + (lane & 15);
#pragma unroll
        for (int j = 0; j < CHUNKS_K; j += 2) {
          u32 r[4];
          ldmatrix4(r, tile_address + swizzle_k(row, j + (lane >> 4)));
          const u32 scale0 = scale_pair(sf0[j / 2], 0, sel_k);  // blocks of chunks j and j + 1
          const u32 scale1 = scale_pair(sf1[j / 2], 0, sel_k);
#pragma unroll
          for (int k = 0; k < 2; k++) {
            u32 h0[4], h1[4];
            unpack(h0, r[2 * k]);
            unpack(h1, r[2 * k + 1]);
#if DUPLICATE
            float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            mma(x, h0[0], h1[0], h0[1], h1[1], q_frag[j + k][0], q_frag[j + k][1]);
            mma(x, h0[2], h1[2], h0[3], h1[3], q_frag[j + k][2], q_frag[j + k][3]);
            const float f0 = half_to_float(k ? scale0 >> 16 : scale0);
            const float f1 = half_to_float(k ? scale1 >> 16 : scale1);
            acc[0] += f0 * x[0];
            acc[1] += f0 * x[1];
            acc[2] += f1 * x[2];
            acc[3] += f1 * x[3];
#else
            const u32 m0 = k ? both_high(scale0) : both_low(scale0);
            const u32 m1 = k ? both_high(scale1) : both_low(scale1);
#pragma unroll
            for (int i = 0; i < 4; i++) {
              h0[i] = hmul2(h0[i], m0);
              h1[i] = hmul2(h1[i], m1);
            }
            mma(acc, h0[0], h1[0], h0[1], h1[1], q_frag[j + k][0], q_frag[j + k][1]);
            mma(other, h0[2], h1[2], h0[3], h1[3], q_frag[j + k][2], q_frag[j + k][3]);
#endif
          }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
#if DUPLICATE
          const float other_blocks = __shfl_xor_sync(~0u, acc[i], 2);
#else
          const float other_blocks = other[i];
#endif
          float x = (acc[i] + other_blocks) * multiplier[i & 1];
#if SOFTCAP
          x = p.softcap * LOG2E * tanhf(x / p.softcap);
#endif
          s[half][i] = x;
        }
      }
      if (partial) {
        asm volatile("");  // keeps this a branch: most tiles need no mask
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const int at = position + (i >> 2) * 16 + g + 8 * ((i >> 1) & 1);
          if (at > limit[i & 1] || at < lower[i & 1]) s[i >> 2][i & 3] = NEG_INF;
        }
      }

      float top[2];
      bool grown = false;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        top[i] = fmaxf(fmaxf(s[0][i], s[0][2 + i]), fmaxf(s[1][i], s[1][2 + i]));
        grown |= top[i] > maximum[i] + RESCALE_STEP;
      }
      if (__any_sync(~0u, grown)) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
          for (int o = 4; o <= 16; o <<= 1)
            top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], o));
          const float m = fmaxf(maximum[i], top[i]);
          const float factor = m == NEG_INF ? 1.0f : ex2(maximum[i] - m);
          maximum[i] = m;
          sum[i] *= factor;
#pragma unroll
          for (int j = 0; j < CHUNKS_V; j++) {
            out[j][0][i] *= factor;
            out[j][0][2 + i] *= factor;
            out[j][1][i] *= factor;
            out[j][1][2 + i] *= factor;
          }
        }
      }
      float shift[2];
#pragma unroll
      for (int i = 0; i < 2; i++)
        shift[i] = maximum[i] == NEG_INF ? 0.0f : maximum[i] - P_SHIFT;

#pragma unroll
      for (int half = 0; half < 2; half++) {
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          e[i] = ex2(s[half][i] - shift[i & 1]);
          sum[i & 1] += e[i];
        }
        const u32 p0 = movmatrix(pack_half2(e[0], e[1]));
        const u32 p1 = movmatrix(pack_half2(e[2], e[3]));
        const u32* sf = (const u32*)(tile + OFF_SF_V) + (half * 16 + 2 * c) * WORDS_SF_V;
        u32 sa[WORDS_SF_V], sb[WORDS_SF_V], sc[WORDS_SF_V], sd[WORDS_SF_V];
#pragma unroll
        for (int w = 0; w < WORDS_SF_V; w++) {
          sa[w] = sf[w];
          sb[w] = sf[WORDS_SF_V + w];
          sc[w] = sf[8 * WORDS_SF_V + w];
          sd[w] = sf[9 * WORDS_SF_V + w];
        }
        const int row = half * 16 + (lane & 15);
#pragma unroll
        for (int j = 0; j < CHUNKS_V; j += 2) {
          u32 r[4];
          ldmatrix4_trans(r, tile_address + OFF_V + swizzle_v(row, j + (lane >> 4)));
#pragma unroll
          for (int k = 0; k < 2; k++) {
            // Byte 2k + g / 4 of two tokens' scales.
            const u32 byte = 2 * k + (g >> 2);
            const u32 selector = byte | ((byte + 4) << 4);
            const u32 m0 = scale_pair(sa[j / 2], sb[j / 2], selector);
            const u32 m1 = scale_pair(sc[j / 2], sd[j / 2], selector);
            u32 h0[4], h1[4];
            unpack(h0, r[2 * k]);
            unpack(h1, r[2 * k + 1]);
#if DUPLICATE
            const u32 b0 = hmul2(p0, m0), b1 = hmul2(p1, m1);
#else
            const u32 b0 = p0, b1 = p1;
#pragma unroll
            for (int i = 0; i < 4; i++) {
              h0[i] = hmul2(h0[i], m0);
              h1[i] = hmul2(h1[i], m1);
            }
#endif
            mma(out[j + k][0], h0[0], h0[1], h1[0], h1[1], b0, b1);
            mma(out[j + k][1], h0[2], h0[3], h1[2], h1[3], b0, b1);
          }
        }
      }
    }
    asm volatile("cp.async.wait_all;");
    __syncwarp();

    const float unscale = *p.v_scale * 16384.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int o = 4; o <= 16; o <<= 1) sum[i] += __shfl_xor_sync(~0u, sum[i], o);
      const int column = col_tile * COLS + (2 * c + i) % COLS;
      const bool own = !DUPLICATE || (g >> 2) == (c >> 1);
      if (column < columns && own) {
        const u64 row = p.plan[2 + p.num_seqs + seq] + split * queries + column / p.group;
        const u64 slot = row * (p.kv_heads * p.group) + head * p.group + column % p.group;
        const float inverse = sum[i] > 0.0f ? unscale / sum[i] : 0.0f;
        float* target = p.partial_out + slot * HEAD_SIZE_V + 4 * g;
#pragma unroll
        for (int j = 0; j < CHUNKS_V; j++) {
          // Dims 4g .. 4g + 3 of chunk j.
          float4 x = make_float4(out[j][1][2 + i] * inverse, out[j][0][2 + i] * inverse,
                                 out[j][1][i] * inverse, out[j][0][i] * inverse);
          *(float4*)(target + 32 * j) = x;
        }
        if (g % 4 == 0 && (DUPLICATE || g == 0)) p.partial_ml[slot] = make_float2(maximum[i], sum[i] * ex2(-P_SHIFT));
      }
    }
  }
}

// Joins the chunks of each (token, head): `spread` warps each, which take chunks in turn.
#define MERGE_WARPS 8
extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32)
    merge(Params p, void* out, float* lse, const float* sinks, u64 out_stride_token,
          u64 out_stride_head, int num_tokens, int spread) {
  __shared__ float joined[MERGE_WARPS][HEAD_SIZE_V];
  __shared__ float totals[MERGE_WARPS];
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) % spread;
  const int base_warp = (threadIdx.x >> 5) - warp;
  const int row = blockIdx.x * (MERGE_WARPS / spread) + base_warp / spread;
  const int heads = p.kv_heads * p.group;
  const int token = row / heads, q_head = row % heads;
  if (token >= num_tokens) return;  // with spread > 1 all warps of a CTA share a row
  int seq = 0, high = p.num_seqs;
  while (high - seq > 1) {
    int middle = (seq + high) >> 1;
    if (p.query_start_loc[middle] <= token) seq = middle;
    else high = middle;
  }
  const int queries = num_queries(p, seq);
  const int begin = 0, end = (p.plan[2 + seq] - p.plan[1 + seq]) / max(1, num_col_tiles(p, seq));
  const u64 stride = (u64)queries * heads;
  const u64 base =
      ((u64)p.plan[2 + p.num_seqs + seq] + token - p.query_start_loc[seq]) * heads + q_head;
  const float sink = sinks ? sinks[q_head] * LOG2E : NEG_INF;
  float m = sink;
  for (int i = begin + lane; i < end; i += 32) m = fmaxf(m, p.partial_ml[i * stride + base].x);
  for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
  float total = 0.0f;
  const int width = HEAD_SIZE_V / 32;  // consecutive dims of a lane
  float acc[width];
#pragma unroll
  for (int d = 0; d < width; d++) acc[d] = 0.0f;
#pragma unroll 4
  for (int i = begin + warp; i < end; i += spread) {
    const float2 ml = p.partial_ml[i * stride + base];
    const float weight = ml.x == NEG_INF ? 0.0f : ml.y * ex2(ml.x - m);
    total += weight;
    const float2* source = (const float2*)(p.partial_out + (i * stride + base) * HEAD_SIZE_V);
#pragma unroll
    for (int d = 0; d < width / 2; d++) {
      const float2 x = source[lane * (width / 2) + d];
      acc[2 * d] += weight * x.x;
      acc[2 * d + 1] += weight * x.y;
    }
  }
  if (spread > 1) {
#pragma unroll
    for (int d = 0; d < width; d++) joined[warp][lane * width + d] = acc[d];
    if (lane == 0) totals[warp] = total;
    __syncthreads();
    if (warp != 0) return;
    for (int w = 1; w < spread; w++) {
      total += totals[w];
#pragma unroll
      for (int d = 0; d < width; d++) acc[d] += joined[w][lane * width + d];
    }
  }
  if (sink != NEG_INF) total += ex2(sink - m);
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
  const u64 target = token * out_stride_token + q_head * out_stride_head + lane * width;
#pragma unroll
  for (int d = 0; d < width; d++) {
    const float x = acc[d] * inverse;
    const u64 at = target + d;
#if defined(Q_BF16)
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    ((u16*)out)[at] = y;
#else
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    ((u16*)out)[at] = y;
#endif
  }
  if (lse && lane == 0)
    lse[(u64)token * heads + q_head] = total > 0.0f ? (m + log2f(total)) / LOG2E : NEG_INF;
}
