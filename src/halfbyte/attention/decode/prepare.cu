// Runs before decode.cu or decode_wgmma.cu if a recipe changed K or keeps the recent tokens in 16 bits; their
// first page loads overlap with it. For every row (a head of a query token) it writes
//
//   rotated   q times the Hadamard matrix, by which K was rotated before it was packed
//   initial   attention to the recent tokens, and to a first token that is a constant of the model
//   bias      q . mean of every segment
//
// Rows      Each of the first CTAs has a query token and at most 16 of its heads, of one KV head. It attends to
//           the visible keys among the last RECENT tokens: a warp takes 16 of every 64. A row does not depend on
//           other rows. S = q K^T and O = P V are m16n8k16 with heads as M. A lane uses its 16 bytes of q, of
//           K and of V in memory order: the order of dims in a matmul is free.
// Segments  The other CTAs multiply TILE_ROWS rows with the means of TILE_SEGMENTS segments, by channel pairs
//           (`PairTables`), whose cosines and sines all KV heads share. Both operands are split into two bf16
//           numbers, so that three products give 16 bits.
//
// Macros:
//   HEAD_SIZE, HEAD_SIZE_V   64, 128 or 256
//   KV_HEADS, GROUP, SOFTCAP, Q_BF16 / Q_FP16, K_DATA and so on: as in decode.cu
//   ROTATE                   1 if K was rotated
//   RECENT                   recent tokens, read in 16 bits; 0 for none
//   SEGMENT                  tokens that share a mean; 0 where K is not centred
//   PAIRS                    channel pairs, a multiple of 16
//   KNOWS_FIRST              1 if pages may mark the first token
//   MARK                     block scale of K at position 0 that marks a constant, whose index is K's first byte
//   WARPS, ROWS              per CTA: warps, and heads of a query token
//   TILE_ROWS, TILE_SEGMENTS  32 each: output tile of a CTA that multiplies means

#include "attention/decode/formats.cuh"
#include "attention/decode/output.cuh"

#define THREADS (32 * WARPS)
#define HEADS (KV_HEADS * GROUP)
#define ROW_BLOCKS ((GROUP + ROWS - 1) / ROWS)  // per KV head
#define UPPER (ROWS > 8)                        // whether rows 8 to 15 of a matmul are used
#define STRIDE_V (HEAD_SIZE_V + 4)              // of a row of O in shared memory

// Where a query token is. One 16-byte load, on which all other loads depend.
struct Token {
  int sequence;  // -1 for padding, and for tokens before the start of their sequence
  int position;  // in the sequence; -1 likewise
  int start;     // the sequence's first query token
  int entry;     // index of its ring
};

struct Params {
  const u16* query;                           // [tokens, heads, HEAD_SIZE]
  u64 query_stride_token, query_stride_head;  // elements
  const int4* tokens_known;                   // `Token` of each
  const int* block_tables;
  const u8* pages;
  int max_pages;
  u32 page_stride;
  // Means: int32 [PAIRS], float32 [segments, PAIRS], float32 [KV_HEADS, PAIRS].
  const int *low, *high;
  const float *cosines, *sines, *low_mean, *high_mean;
  int mean_segments;
  // Constants of the model: [constants, KV_HEADS, HEAD_SIZE], [constants, KV_HEADS, HEAD_SIZE_V].
  const u16 *first_keys, *first_values;
  // Recent tokens: [entries, KV_HEADS, ring, HEAD_SIZE or HEAD_SIZE_V], and those of this step.
  const u16 *ring_keys, *ring_values, *new_keys, *new_values;
  u64 key_stride_token, key_stride_head, value_stride_token, value_stride_head;
  u32 ring;
  int reach;   // min(RECENT, window)
  // For attention to pages, where query positions are RECENT lower:
  int packed_window;  // 0 for none
  int has_packed;     // 0 if the window covers recent tokens only
  float softmax_scale, softcap, bias_scale;
  u16* rotated;        // [tokens, heads, HEAD_SIZE]
  float* bias;         // [tokens, heads, bias_segments]
  float* first_scores; // [tokens, heads], as logits in base 2; written without RECENT
  int* first_indices;  // [tokens, heads]
  float* initial_out;  // [tokens, heads, HEAD_SIZE_V]
  float* initial_lse;  // [tokens, heads], in base 2
  int tokens, bias_segments;
};

#if defined(Q_BF16)
#define OF_BF16 true
#else
#define OF_BF16 false
#endif

__device__ __forceinline__ uint4 load_global16(const u16* p) { return *(const uint4*)p; }

// From q . k to a logit in base 2.
__device__ __forceinline__ float logit_of(const Params& p, float score) {
  score *= p.softmax_scale;
#if SOFTCAP
  score = p.softcap * tanhf(score / p.softcap);
#endif
  return score * LOG2E;
}

// A query's position for attention to pages; -1 if it sees none of them.
__device__ __forceinline__ int packed_position(const Params& p, int position) {
  return p.has_packed ? max(position - RECENT, -1) : -1;
}

__device__ __forceinline__ Token token_of(const Params& p, int token) {
  const int4 x = p.tokens_known[token];
  return {x.x, x.y, x.z, x.w};
}

// A CTA's rows: heads of one query token that share a KV head.
struct Rows {
  int token, head, first, count;  // head: KV head; first: first query head
  Token known;

  __device__ __forceinline__ Rows(const Params& p, int number) {
    const int block = number % ROW_BLOCKS;
    head = number / ROW_BLOCKS % KV_HEADS;
    token = number / (ROW_BLOCKS * KV_HEADS);
    first = head * GROUP + block * ROWS;
    count = min(ROWS, GROUP - block * ROWS);
    known = token_of(p, token);
  }
  __device__ __forceinline__ const u16* query(const Params& p, int row) const {
    return p.query + token * p.query_stride_token + (first + row) * p.query_stride_head;
  }
  __device__ __forceinline__ u64 index(int row) const { return (u64)token * HEADS + first + row; }
};

// Dims of a row per lane, contiguous.
#define LANE_DIMS (HEAD_SIZE / 32)
__device__ __forceinline__ void load_dims(float* x, const u16* row) {
  const u32* words = (const u32*)row + threadIdx.x % 32 * (LANE_DIMS / 2);
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i += 2) {
    const u32 word = words[i / 2];
    x[i] = query_value((u16)word);
    x[i + 1] = query_value((u16)(word >> 16));
  }
}

// Multiplies a row by the Hadamard matrix (numerics/hadamard.py); a lane has LANE_DIMS dims.
__device__ __forceinline__ void rotate(const Params& p, const Rows& rows, int row) {
  const int lane = threadIdx.x % 32;
  float x[LANE_DIMS];
  load_dims(x, rows.query(p, row));
#pragma unroll
  for (int h = 1; h < LANE_DIMS; h *= 2)
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++)
      if (!(i & h)) {
        const float a = x[i], b = x[i + h];
        x[i] = a + b, x[i + h] = a - b;
      }
#pragma unroll
  for (int h = 1; h < 32; h *= 2)
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
      const float y = __shfl_xor_sync(~0u, x[i], h);
      x[i] = lane & h ? y - x[i] : x[i] + y;
    }
  constexpr float NORM = HEAD_SIZE == 64 ? 0.125f : HEAD_SIZE == 256 ? 0.0625f : 0.08838834764831845f;
  u32* to = (u32*)(p.rotated + rows.index(row) * HEAD_SIZE + lane * LANE_DIMS);
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i += 2) to[i / 2] = pack_output(x[i] * NORM, x[i + 1] * NORM);
}

// The page of position 0; -1 if the rows do not see it.
__device__ __forceinline__ int first_page(const Params& p, const Rows& rows) {
  const int at = packed_position(p, rows.known.position);
  // Pages before the window may have been reused by another sequence.
  if (at < 0 || (p.packed_window && at >= p.packed_window)) return -1;
  return p.block_tables[(u64)rows.known.sequence * p.max_pages];
}

// Index of the constant that the page marks at position 0; -1 for none.
__device__ __forceinline__ int find_first(const Params& p, const Rows& rows, int page) {
  if (page < 0) return -1;
  const u8* start = p.pages + (u64)page * p.page_stride;
  const int mark = start[K_SCALE + rows.head * K_SCALE_HEAD], index = start[K_DATA + rows.head * K_DATA_HEAD];
  return mark == MARK ? index : -1;
}

// Logit of a row for a first token that is a constant.
__device__ __forceinline__ float first_logit(const Params& p, const Rows& rows, int row, int index) {
  float q[LANE_DIMS], k[LANE_DIMS], sum = 0.0f;
  load_dims(q, rows.query(p, row));
  load_dims(k, p.first_keys + ((u64)index * KV_HEADS + rows.head) * HEAD_SIZE);
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++) sum += q[i] * k[i];
#pragma unroll
  for (int h = 1; h < 32; h *= 2) sum += __shfl_xor_sync(~0u, sum, h);
  return logit_of(p, sum);
}

// Exchange between warps: O (each row times 2^-top), max logits (`top`) and sums of weights.
struct Shared {
  float out[WARPS][ROWS][STRIDE_V];
  float top[WARPS][ROWS], sum[WARPS][ROWS], first[ROWS];
};

#if RECENT
// A warp's 16 keys of a step, at positions from `begin` on.
struct Keys {
  const Params& p;
  const Rows& rows;
  int begin, stop, first_new;
  u64 ring_row;

  // Pointer to a row of K or V; null for a token that no row sees.
  __device__ __forceinline__ const u16* at(int i, const u16* ring, const u16* news, u64 stride_token,
                                           u64 stride_head, int size) const {
    const int position = begin + i;
    if (position < max(0, rows.known.position - p.reach + 1) || position >= stop) return nullptr;
    if (position < first_new) return ring + (ring_row + position % p.ring) * size;
    return news + (u64)(rows.token - (rows.known.position - position)) * stride_token + rows.head * stride_head;
  }
  __device__ __forceinline__ const u16* key(int i) const {
    return at(i, p.ring_keys, p.new_keys, p.key_stride_token, p.key_stride_head, HEAD_SIZE);
  }
  __device__ __forceinline__ const u16* value(int i) const {
    return at(i, p.ring_values, p.new_values, p.value_stride_token, p.value_stride_head, HEAD_SIZE_V);
  }
};

// A warp's part of attention to the recent tokens, written to shared memory.
__device__ __forceinline__ void attend(const Params& p, const Rows& rows, Shared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  constexpr int CHUNKS = HEAD_SIZE / 32, CHUNKS_V = HEAD_SIZE_V / 64;
  const uint4 none = make_uint4(0, 0, 0, 0);
  const int position = rows.known.position;
  Keys keys{p, rows, 0, position + 1, position - (rows.token - rows.known.start),
            ((u64)rows.known.entry * KV_HEADS + rows.head) * p.ring};
  float top[2] = {NEG_INF, NEG_INF}, sum[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (int step = 0; step < (RECENT + 63) / 64; step++) {
    keys.begin = position - RECENT + 1 + 64 * step + 16 * warp;
    if (keys.begin >= keys.stop) break;
    // All loads are issued together: dims from 32 i + 8 t of rows g and g + 8 of K and q, from 64 i + 8 g of V.
    uint4 k[2][CHUNKS], v[4][CHUNKS_V], q[2][CHUNKS];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u16* from = keys.key(8 * j + g);
#pragma unroll
      for (int i = 0; i < CHUNKS; i++) k[j][i] = from ? load_global16(from + 32 * i + 8 * t) : none;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u16* from = keys.value(2 * t + j % 2 + j / 2 * 8);
#pragma unroll
      for (int i = 0; i < CHUNKS_V; i++) v[j][i] = from ? load_global16(from + 64 * i + 8 * g) : none;
    }
#pragma unroll
    for (int j = 0; j < 1 + UPPER; j++)
#pragma unroll
      for (int i = 0; i < CHUNKS; i++)
        q[j][i] = 8 * j + g < rows.count ? load_global16(rows.query(p, 8 * j + g) + 32 * i + 8 * t) : none;

    float s[2][4] = {};
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const u32 a[2][4] = {{q[0][i].x, UPPER ? q[UPPER][i].x : 0, q[0][i].y, UPPER ? q[UPPER][i].y : 0},
                           {q[0][i].z, UPPER ? q[UPPER][i].z : 0, q[0][i].w, UPPER ? q[UPPER][i].w : 0}};
#pragma unroll
      for (int j = 0; j < 2; j++) {
        mma<OF_BF16>(s[j], a[0], k[j][i].x, k[j][i].y);
        mma<OF_BF16>(s[j], a[1], k[j][i].z, k[j][i].w);
      }
    }
    // Rows g and g + 8; keys 8 j + 2 t and the next.
    float factor[2];
    u32 weights[2][2];
#pragma unroll
    for (int r = 0; r < 1 + UPPER; r++) {
      float largest = top[r];
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int at = keys.begin + 8 * j + 2 * t + i;
          const bool sees = at >= max(0, position - p.reach + 1) && at < keys.stop;
          s[j][2 * r + i] = sees ? logit_of(p, s[j][2 * r + i]) : NEG_INF;
          largest = fmaxf(largest, s[j][2 * r + i]);
        }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const float unit = largest == NEG_INF ? 0.0f : largest;
      factor[r] = ex2(top[r] - unit);
      float added = 0.0f;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float x = ex2(s[j][2 * r] - unit), y = ex2(s[j][2 * r + 1] - unit);
        added += x + y;
        weights[r][j] = OF_BF16 ? pack_bf162(x, y) : pack_half2(x, y);
      }
      added += __shfl_xor_sync(~0u, added, 1);
      added += __shfl_xor_sync(~0u, added, 2);
      sum[r] = sum[r] * factor[r] + added;
      top[r] = largest;
    }
    const u32 a[4] = {weights[0][0], UPPER ? weights[UPPER][0] : 0, weights[0][1], UPPER ? weights[UPPER][1] : 0};
#pragma unroll
    for (int i = 0; i < CHUNKS_V; i++) {
      // Column c of matmul j is dim 64 i + 8 c + j.
      float out[8][4] = {};
#pragma unroll
      for (int j = 0; j < 8; j++) {
        auto word = [&](const uint4& x) { return j / 2 == 0 ? x.x : j / 2 == 1 ? x.y : j / 2 == 2 ? x.z : x.w; };
        const u32 half = j % 2 ? 0x7632 : 0x5410;
        mma<OF_BF16>(out[j], a, __byte_perm(word(v[0][i]), word(v[1][i]), half),
                     __byte_perm(word(v[2][i]), word(v[3][i]), half));
      }
#pragma unroll
      for (int r = 0; r < 1 + UPPER; r++) {
        if (8 * r + g >= rows.count) continue;
        float* to = shared.out[warp][8 * r + g] + 64 * i + 16 * t;
#pragma unroll
        for (int j = 0; j < 16; j++) {
          const float x = out[j % 8][2 * r + j / 8];
          to[j] = step == 0 ? x : to[j] * factor[r] + x;
        }
      }
    }
  }
  if (t == 0)
#pragma unroll
    for (int r = 0; r < 1 + UPPER; r++)
      if (8 * r + g < rows.count) shared.top[warp][8 * r + g] = top[r], shared.sum[warp][8 * r + g] = sum[r];
}

// Merges the warps' parts and the first token.
__device__ __forceinline__ void join(const Params& p, const Rows& rows, int first, const Shared& shared) {
  for (int x = threadIdx.x; x < rows.count * (HEAD_SIZE_V / 4); x += THREADS) {
    const int row = x / (HEAD_SIZE_V / 4), dim = x % (HEAD_SIZE_V / 4) * 4;
    float top = first >= 0 ? shared.first[row] : NEG_INF;
#pragma unroll
    for (int i = 0; i < WARPS; i++) top = fmaxf(top, shared.top[i][row]);
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float sum = 0.0f;
    auto add = [&](float weight, float x, float y, float z, float w) {
      out.x += weight * x, out.y += weight * y, out.z += weight * z, out.w += weight * w;
    };
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      if (shared.top[i][row] == NEG_INF) continue;  // this warp wrote nothing
      const float weight = ex2(shared.top[i][row] - top);
      const float* part = shared.out[i][row] + dim;
      sum += weight * shared.sum[i][row];
      add(weight, part[0], part[1], part[2], part[3]);
    }
    if (first >= 0) {
      const float weight = ex2(shared.first[row] - top);
      const uint2 y = *(const uint2*)(p.first_values + ((u64)first * KV_HEADS + rows.head) * HEAD_SIZE_V + dim);
      sum += weight;
      add(weight, query_value((u16)y.x), query_value((u16)(y.x >> 16)), query_value((u16)y.y),
          query_value((u16)(y.y >> 16)));
    }
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    *(float4*)(p.initial_out + rows.index(row) * HEAD_SIZE_V + dim) =
        make_float4(out.x * inverse, out.y * inverse, out.z * inverse, out.w * inverse);
    if (dim == 0) p.initial_lse[rows.index(row)] = sum > 0.0f ? top + log2f(sum) : NEG_INF;
  }
}
#endif

__device__ __forceinline__ void prepare_rows(const Params& p, int number, Shared& shared) {
  const int warp = threadIdx.x / 32;
  const Rows rows(p, number);
  // Loaded early, used after the loads of the recent tokens are issued.
  const int page = KNOWS_FIRST ? first_page(p, rows) : -1;
#if RECENT
  if (rows.known.position >= 0)
    attend(p, rows, shared);
  else if (threadIdx.x < WARPS * ROWS)
    shared.top[threadIdx.x / ROWS][threadIdx.x % ROWS] = NEG_INF;
#endif
  const int first = find_first(p, rows, page);
#if ROTATE
  for (int row = warp; row < rows.count; row += WARPS) rotate(p, rows, row);
#endif
#if KNOWS_FIRST
  for (int row = warp; row < rows.count; row += WARPS) {
    const float logit = first < 0 ? NEG_INF : first_logit(p, rows, row, first);
    if (threadIdx.x % 32) continue;
    p.first_indices[rows.index(row)] = first;
#if RECENT
    shared.first[row] = logit;
#else
    p.first_scores[rows.index(row)] = logit;
#endif
  }
#endif
#if RECENT
  __syncthreads();
  join(p, rows, first, shared);
#endif
}

#if SEGMENT
// Splits x and y into sums of two bf16 numbers, packed as pairs.
__device__ __forceinline__ void split(u32& high, u32& low, float x, float y) {
  high = pack_bf162(x, y);
  low = pack_bf162(x - __int_as_float(high << 16), y - __int_as_float(high & 0xFFFF0000u));
}

// A lane's table entries for PAIRS_AT_ONCE pairs, of which it has four of every 16: means for rows g and
// g + 8, cosines and sines for segments g and g + 8.
#define PAIRS_AT_ONCE (PAIRS < 32 ? PAIRS : 32)
struct Tables {
  float low_mean[2][PAIRS_AT_ONCE / 4], high_mean[2][PAIRS_AT_ONCE / 4];
  float cosine[2][PAIRS_AT_ONCE / 4], sine[2][PAIRS_AT_ONCE / 4];

  __device__ __forceinline__ static void load4(float* to, const float* from) {
    const float4 x = *(const float4*)from;
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  }
  __device__ __forceinline__ void load(const Params& p, const int* heads, const u32* segments, int first) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < PAIRS_AT_ONCE / 4; j += 4) {
        const int pair = first + 4 * j + threadIdx.x % 4 * 4;
        load4(low_mean[i] + j, p.low_mean + heads[i] * PAIRS + pair);
        load4(high_mean[i] + j, p.high_mean + heads[i] * PAIRS + pair);
        load4(cosine[i] + j, p.cosines + segments[i] * PAIRS + pair);
        load4(sine[i] + j, p.sines + segments[i] * PAIRS + pair);
      }
  }
};

// In shared memory: rows of the query, padded so that rows are in different banks, and the pairs' channels.
struct Queries {
  static constexpr int STRIDE = HEAD_SIZE + 8;
  u16 values[TILE_ROWS][STRIDE];
  u16 low[PAIRS], high[PAIRS];
};

// Multiplies TILE_ROWS rows of the query with means of TILE_SEGMENTS segments. A warp has half of both.
__device__ __forceinline__ void multiply_means(const Params& p, int number, Queries& queries) {
  constexpr int CHUNKS = TILE_ROWS * (HEAD_SIZE / 8) / THREADS;  // of 16 bytes of a row, per thread
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane >> 2, t = lane & 3;
  const int blocks = (p.bias_segments + TILE_SEGMENTS - 1) / TILE_SEGMENTS, num_rows = p.tokens * HEADS;
  const int first_row = number / blocks * TILE_ROWS, first_segment = number % blocks * TILE_SEGMENTS;
  const int last_row = min(first_row + TILE_ROWS, num_rows) - 1;
  // All loads are issued before the first use.
  uint4 chunks[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int x = threadIdx.x + i * THREADS, row = min(first_row + x / (HEAD_SIZE / 8), last_row);
    chunks[i] = load_global16(p.query + row / HEADS * p.query_stride_token +
                              row % HEADS * p.query_stride_head + x % (HEAD_SIZE / 8) * 8);
  }
  const int own_row = warp % 2 * 16 + g, own_segment = first_segment + warp / 2 * 16 + g;
  int heads[2];
  u32 segments[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    heads[i] = min(first_row + own_row + 8 * i, last_row) % HEADS / GROUP;
    // After the last mean, the last one applies, as in the store.
    segments[i] = min(own_segment + 8 * i, p.mean_segments - 1);
  }
  Tables tables;
  tables.load(p, heads, segments, 0);
  for (int i = threadIdx.x; i < PAIRS; i += THREADS) queries.low[i] = p.low[i], queries.high[i] = p.high[i];
  int latest = -1, earliest = 1 << 30;
  for (int token = first_row / HEADS; token <= last_row / HEADS; token++) {
    const int position = packed_position(p, token_of(p, token).position);
    latest = max(latest, position);
    if (position >= 0) earliest = min(earliest, position);
  }
  const int oldest = p.packed_window ? earliest - p.packed_window + 1 : 0;
  if (first_segment * SEGMENT > latest || (first_segment + TILE_SEGMENTS) * SEGMENT <= oldest) return;
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int x = threadIdx.x + i * THREADS;
    uint2* to = (uint2*)(queries.values[x / (HEAD_SIZE / 8)] + x % (HEAD_SIZE / 8) * 8);
    to[0] = make_uint2(chunks[i].x, chunks[i].y), to[1] = make_uint2(chunks[i].z, chunks[i].w);
  }
  __syncthreads();
  float scores[2][4] = {};
#pragma unroll
  for (int first = 0; first < PAIRS; first += PAIRS_AT_ONCE) {
    if (first) tables.load(p, heads, segments, first);
#pragma unroll
    for (int j = 0; j < PAIRS_AT_ONCE / 4; j += 2) {
      // Two pairs per lane make a k step of a matmul: k values 2t and 2t + 1 belong to one pair.
      u32 a[2][4], b[2][2][2];  // [high and low part]; b: [segments g and g + 8]
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int pair = first + (j + k) / 4 * 16 + 4 * t + (j + k) % 4;
        const int low = queries.low[pair], high = queries.high[pair];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const u16* q = queries.values[own_row + 8 * i];
          const float x = query_value(q[low]), y = query_value(q[high]);
          const float m = tables.low_mean[i][j + k], n = tables.high_mean[i][j + k];
          split(a[0][2 * k + i], a[1][2 * k + i], x * m + y * n, x * n - y * m);
          split(b[0][i][k], b[1][i][k], tables.cosine[i][j + k], tables.sine[i][j + k]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        mma<true>(scores[i], a[1], b[0][i][0], b[0][i][1]);
        mma<true>(scores[i], a[0], b[1][i][0], b[1][i][1]);
        mma<true>(scores[i], a[0], b[0][i][0], b[0][i][1]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = first_row + own_row + i / 2 * 8;
      const int segment = first_segment + warp / 2 * 16 + 8 * n + 2 * t + i % 2;
      if (row < num_rows && segment < p.bias_segments)
        p.bias[(u64)row * p.bias_segments + segment] = scores[n][i] * p.bias_scale;
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 3) prepare(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) u8 memory[];
  // In this order: `decode` assumes complete pages as soon as allow_next lets it start.
  wait_for_previous();
  allow_next();
  const int row_ctas = p.tokens * (KV_HEADS * ROW_BLOCKS);
  if (blockIdx.x < row_ctas)
    prepare_rows(p, blockIdx.x, *(Shared*)memory);
#if SEGMENT
  else
    multiply_means(p, blockIdx.x - row_ctas, *(Queries*)memory);
#endif
}

struct FindParams {
  const int *query_start_loc, *seq_lens;  // [sequences + 1], [sequences]
  const int* entries;                     // [sequences], of their rings, or null
  int4* known;                            // `Token` of each
  int sequences, tokens;
};

// Finds the `Token` of every query token; runs once for all layers.
extern "C" __global__ void __launch_bounds__(THREADS) find_tokens(const __grid_constant__ FindParams p) {
  const int token = blockIdx.x * THREADS + threadIdx.x;
  if (token >= p.tokens) return;
  // The first sequence that ends after the token.
  int first = 0, stop = p.sequences;
  while (first < stop) {
    const int middle = (first + stop) / 2;
    if (p.query_start_loc[middle + 1] > token) stop = middle;
    else first = middle + 1;
  }
  int4 known = make_int4(-1, -1, 0, 0);
  if (first < p.sequences) {
    const int position = p.seq_lens[first] - (p.query_start_loc[first + 1] - token);
    if (position >= 0)
      known = make_int4(first, position, p.query_start_loc[first], p.entries ? p.entries[first] : 0);
  }
  p.known[token] = known;
}
