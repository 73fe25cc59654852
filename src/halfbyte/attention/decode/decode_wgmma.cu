// Decode attention for many query columns on SM90: as decode.cu, with `wgmma` and four warps per unit.
//
// With more than 16 columns, `mma.sync` (one per 16 x 16 operand and 8 columns) costs as much as the
// unpacking. `wgmma` takes all columns at once: A is the operand unpacked in registers, B the small one
// in shared memory.
//
//   S  = K q^T     m64nCOLSk16: A = 64 tokens x 16 dims, a warp has 16 tokens. B = q, put into
//                  shared memory once per work item.
//   O^T = V^T P^T  m64nCOLSk16: A = 64 dims x 16 tokens, a warp has 16 dims. B = P, which each warp
//                  writes for its tokens.
//
// A CTA is one warpgroup and processes one unit of the plan. Its warps share a ring in shared memory
// (RING_WARPS) and the max of each column, with two barriers per tile. Several CTAs per SM hide each
// other's latency. Both K and V are nvfp4.
//
// Macros: those of decode.cu but DUPLICATE and Q_SHARED; TILE is 64 or 128, WARPS 4, COLS = 8 * N_TILES.
//   KEEPS_QUERY  1 to keep q in shared memory as it was loaded, for the keys of keys.cuh
//   WHOLE_PAGES  1 if a page has one KV head, equal row sizes of K and V, and divides 64 tokens: see
//                pages.cuh

#define RING_WARPS 4
#define P_SHIFT 11.0f
#include "attention/decode/means_wgmma.cuh"
#include "attention/decode/recent_wgmma.cuh"
#include "attention/decode/tables.cuh"

#define INITIAL_SHIFT 1e30f
#define MAX_P 0x7800u  // 2^(P_SHIFT + 4) as fp16
#define MAX_E 32784.0f  // largest float that rounds to MAX_P: halfway to the next fp16, ties to even
#define BIAS_IN_SHIFT (SEGMENT && !SOFTCAP)

static_assert(TILE % 64 == 0 && WARPS == RING_WARPS && COLS == 8 * N_TILES, "one warpgroup per ring");
static_assert(K_KIND == 4 && V_KIND == 4, "reads nvfp4");

__device__ __forceinline__ float* exchange() { return (float*)(shared_memory() + OFF_EXCHANGE); }

// Parameters of P = 2^(S * logit_scale + shift) for two columns. In shared memory, because those of all
// of a lane's columns would fill its registers.
struct Columns {
  float logit_scale[2];
  float shift[2];  // P_SHIFT minus the max; INITIAL_SHIFT before the first visible key
};

__device__ __forceinline__ u32 columns_address(int n, int c) {
  return ring_address() + OFF_COLUMNS + (4 * n + c) * 16;
}

__device__ __forceinline__ Columns load_columns(u32 address) {
  Columns y;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(y.logit_scale[0]), "=f"(y.logit_scale[1]), "=f"(y.shift[0]), "=f"(y.shift[1])
               : "r"(address)
               : "memory");
  return y;
}

// Writes q of a work item to shared memory, in the order of Operands::of_k and times a power of two per
// column to stay in fp16's range, and initializes Columns.
__device__ __forceinline__ void stage_query(const Params& p, const WorkItem& item, int head, u32 ring) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, c = lane & 3;
  const float common = *p.k_scale * p.softmax_scale * Operands<K_KIND>::UNIT * (SOFTCAP ? 1.0f : LOG2E);
  __syncthreads();  // the previous work item has finished reading
  for (int n = warp; n < N_TILES; n += WARPS) {
    const int column = item.col_tile * COLS + 8 * n + g;
    const bool valid = column < GROUP * item.queries;
    u32 words[STEPS_K][2];
    load_query(words, p.query, query_row(p, item, head, column), c);
#if KEEPS_QUERY
#pragma unroll
    for (int j = 0; j < STEPS_K; j += 2) store_words4(raw_query(n, j), words[j]);
#endif
#if ROTATE
    rotate_query(words);
#endif
    float x[STEPS_K][4];
    query_values(x, words);
    const int exponent = fp16_exponent(x);
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
    // Positive, because it multiplies the mask's -inf.
    if (c == 0) {
      const u32 at = columns_address(n, g >> 1) + (g & 1) * 4;
      store_float(at, fmaxf(__int_as_float((127 - exponent) << 23) * fabsf(common), 1e-37f));
      store_float(at + 8, INITIAL_SHIFT);
    }
  }
  fence_async_proxy();
  __syncthreads();
}

// Max of each column over all warps.
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

// Stores this warp's dims of column i of the accumulators to a row.
template <class Value>
__device__ __forceinline__ void store_column(Value* row, const float (*out)[N_TILES][4], int n, int i,
                                             int warp, int g, float factor) {
  // Dims 4g .. 4g + 3 of a chunk: 0 and 2 are in part 1, 1 and 3 in part 0; 0 and 1 in row g + 8, 2 and 3 in row g.
  // With one part per warp, odd warps have part 1.
#pragma unroll
  for (int m = 0; m < TILES_V; m += PARTS_V) {
    const float low = out[m][n][i] * factor, high = out[m][n][2 + i] * factor;
    if (PARTS_V == 1) {
      Value* const at = row + (warp >> 1) * 32 + 4 * g + !(warp & 1);
      store_values(at, high);
      store_values(at + 2, low);
    } else {
      store_values(row + (warp + 4 * (m / 2)) * 32 + 4 * g, out[m + 1][n][2 + i] * factor, high,
                   out[m + 1][n][i] * factor, low);
    }
  }
}

// Sums a work item over all warps. Writes the output if the unit has all of its tiles, else a row of the
// partial results.
__device__ __forceinline__ void write_results(const Params& p, const WorkItem& item, int head, u32 row,
                                              bool whole, u32 columns_at,
                                              const float (*out)[N_TILES][4], float (*sum)[2]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, c = lane & 3;
  const int columns = GROUP * item.queries;
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
  for (int n = 0; n < N_TILES; n++) {
    const Columns x = load_columns(columns_at + 64 * n);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = 8 * n + 2 * c + i;
      float all = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) all += exchange()[w * COLS + column];
      const int in_item = item.col_tile * COLS + column;
      if (in_item >= columns) continue;
      const float top = all == 0.0f ? NEG_INF : P_SHIFT - x.shift[i], weight = all * ex2(-P_SHIFT);
      const bool first = warp == 0 && g == 0;
      if (whole) {
        const OutputRow to(item, head, in_item);
        const float share = to.finish(p.output, to.sink(p.output), top, weight, first);
        const float factor = unscale * ex2(-P_SHIFT) * share;
        store_column(to.values(p.output), out, n, i, warp, g, factor);
      } else {
        const float inverse = all > 0.0f ? unscale / all : 0.0f;
        store_column(p.partial_out + (slots + column) * HEAD_SIZE_V, out, n, i, warp, g, inverse);
        if (first) p.partial_ml[slots + column] = make_float2(top, weight);
      }
    }
  }
}

#if !WHOLE_PAGES
// The consumer's place in the ring, for cp.async; pages.cuh has the one for TMA.
struct RingReader {
  u32 at;

  __device__ __forceinline__ explicit RingReader(u32 ring) : at(ring) {}

  __device__ __forceinline__ u32 tile() const { return at; }
  __device__ __forceinline__ void wait() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
  }
  __device__ __forceinline__ void pass() {
    const u32 ring = ring_address();
    at = at + STAGE_BYTES == ring + STAGES * STAGE_BYTES ? ring : at + STAGE_BYTES;
  }
};
#endif

// A unit's share of a work item: its tiles come through the loader's ring.
__device__ __forceinline__ void attend(const Params& p, const WorkItem& item, int head, u32 row,
                                       Share share, Loader& loader, RingReader& reader) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, c = lane & 3;
  const int length = item.length, queries = item.queries;
  const int columns = GROUP * queries;
  const u32 ring = ring_address();
  const KeyInputs keys(p, item, share, loader.header.span);  // not earlier: registers would not suffice
  const int constant_index = FirstMark(p, item, keys, head, share.first).constant();
#if HAS_INITIAL
  RecentRows rows(p, item, keys, head);
  rows.constant = constant_index;
#endif
  stage_query(p, item, head, ring);

  const bool constant = constant_index >= 0;
  // Every column attends to all_from <= position <= all_to.
  const int all_from = max(p.window > 0 ? length - p.window : 0, (int)constant);
  const int all_to = length - queries;
  const int first_visible = p.window > 0 ? all_to - p.window + 1 : 0;  // by any column
  // Inner tiles, which start at inner_from <= position <= inner_to, need no mask and have no unwritten
  // slots. One unsigned comparison of position - inner_from finds them; if there are none, inner_from is
  // past all positions.
  const int inner_to = min(all_to + 1, length) - TILE;
  const int lowest = max(all_from, first_visible);
  const int inner_from = inner_to < lowest ? 1 << 30 : lowest;
  const u32 inner = keep(max(inner_to - inner_from, 0));
  const Places places(warp, lane);
  const u32 ring16 = ring / 16;

  float out[TILES_V][N_TILES][4];
  float sum[N_TILES][2];
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
#pragma unroll
    for (int m = 0; m < TILES_V; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) out[m][n][i] = 0.0f;
    sum[n][0] = sum[n][1] = 0.0f;
  }
  // Address of this lane's row for store_matrices.
  const u32 p_at = keep(ring + OFF_P + (lane >> 4) * (TILE / 8) * B_MATRIX +
                        (2 * warp + (lane >> 3 & 1)) * B_MATRIX + (lane & 7) * 16);
  const u32 columns_at = keep(columns_address(0, c));
  auto scale_of = [](const Columns& x, int i) { return SOFTCAP ? 1.0f : x.logit_scale[i]; };
  // Shift from logits of a subtile to exponents; with a soft-cap the logits include the bias already.
  auto shifted = [&](float* shift, const Columns& x, int subtile, int n) {
    const float2 bias_of = BIAS_IN_SHIFT ? Bias::of(subtile, n, c) : make_float2(0.0f, 0.0f);
    shift[0] = BIAS_IN_SHIFT ? x.shift[0] + bias_of.x : x.shift[0];
    shift[1] = BIAS_IN_SHIFT ? x.shift[1] + bias_of.y : x.shift[1];
  };

#if HAS_INITIAL
  if (share.first == item.first_tile)
    add_keys(rows, p_at, columns_at, out, sum, [&](float (*top)[2]) { share_maxima(top, warp, g, c); });
#endif
  Bias bias(p);
  int from_inner = share.first * TILE - inner_from;
  for (int left = share.stop - share.first; left > 0; left--, from_inner += TILE) {
    reader.wait();
    bias.publish(p, item, head, from_inner + inner_from);
    __syncthreads();
    const u32 tile = reader.tile();
    RawK raw_k[2];
    fetch_k(raw_k[0], tile, places, 0, 0);
    loader.step();

    const bool edge = (u32)from_inner > inner;
    if (__builtin_expect(edge, 0)) {
      const int position = keep(from_inner + inner_from);
      const int beyond = length - position, before = first_visible - position;
      clear_scales(tile, beyond, TILE);
      clear_scales(tile, 0, before);
      __syncthreads();
    }

    // The next operands are unpacked while a matmul runs.
    float s[SUBTILES][N_TILES][4];
    u32 k[2][K_STEPS][4];
    constexpr int PARTS_K = STEPS_K / K_STEPS;
#pragma unroll
    for (int i = 0; i < SUBTILES * PARTS_K; i++) {
      const int subtile = i / PARTS_K, first = i % PARTS_K * K_STEPS;
      if (i + 1 < SUBTILES * PARTS_K)
        fetch_k(raw_k[(i + 1) % 2], tile, places, (i + 1) / PARTS_K, (i + 1) % PARTS_K * K_STEPS);
      if (i >= 2) wgmma_wait<1>();
      unpack_k(k[i % 2], raw_k[i % 2], places);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < K_STEPS; j++)
        wgmma(s[subtile], k[i % 2][j],
              b_descriptor(ring16, OFF_Q + 2 * (first + j) * B_MATRIX, HEAD_SIZE / 8 * B_MATRIX),
              first + j > 0);
      wgmma_commit();
      if (i == 0) stage_scales(tile, places);
    }
    Columns x[N_TILES];
#pragma unroll
    for (int n = 0; n < N_TILES; n++) x[n] = load_columns(columns_at + 64 * n);
    wgmma_wait();
#if SOFTCAP
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4 * SUBTILES; i++) {
        float& y = s[i / 4][n][i % 4];
        const float2 bias_of = Bias::of(i / 4, n, c);
        y = y * x[n].logit_scale[i & 1] + (SEGMENT ? (i & 1 ? bias_of.y : bias_of.x) : 0.0f);
        y = p.softcap * LOG2E * tanhf(y / p.softcap);
      }
#endif
    if (__builtin_expect(edge, 0)) {
      const int row = keep(from_inner + inner_from + warp * 16 + g);
      const int first_column = keep(item.col_tile * COLS + 2 * c);
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          // A column sees lower <= position <= limit.
          const int column = min(first_column + 8 * n + i, columns - 1);
          const int limit = length - queries + column / GROUP;
          const int lower = max(p.window > 0 ? limit - p.window + 1 : 0, (int)constant);
#pragma unroll
          for (int k = 0; k < 2 * SUBTILES; k++) {
            const int at = row + k / 2 * 64 + k % 2 * 8;
            if (at > limit || at < lower) s[k / 2][n][k % 2 * 2 + i] = NEG_INF;
          }
        }
    }

    // Writes P to shared memory and returns its max, as packed fp16 pairs. Sums are added later, when the
    // max shows that the shift need not change. Stage by stage, so that latencies overlap.
    float added[N_TILES][2];
    auto write_probabilities = [&]() {
      u32 largest = 0;
#pragma unroll
      for (int subtile = 0; subtile < SUBTILES; subtile++) {
        u32 pairs[N_TILES][2];
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
          float e[4], shift[2];
          shifted(shift, x[n], subtile, n);
#pragma unroll
          for (int i = 0; i < 4; i++)
            e[i] = ex2(fmaf(s[subtile][n][i], scale_of(x[n], i & 1), shift[i & 1]));
#pragma unroll
          for (int i = 0; i < 2; i++)
            added[n][i] = subtile == 0 ? e[i] + e[2 + i] : added[n][i] + (e[i] + e[2 + i]);
          pairs[n][0] = pack_half2(e[0], e[1]);
          pairs[n][1] = pack_half2(e[2], e[3]);
          largest = max_half2(largest, max_half2(pairs[n][0], pairs[n][1]));
        }
#pragma unroll
        for (int n = 0; n < N_TILES; n += 2)
          store_matrices(p_at + (n * (TILE / 8) + subtile * 8) * B_MATRIX, pairs[n], pairs[n + 1]);
      }
      fence_async_proxy();
      return largest;
    };
    RawV raw_v[2][CHUNKS_PER_WARP];
    fetch_v(raw_v[0], tile, places, 0);
    const u32 largest = write_probabilities();
    const bool grown = max(largest & 0xFFFFu, largest >> 16) > MAX_P;
    if (__builtin_expect(__syncthreads_or(grown), 0)) {
      // With a bias, which may differ between subtiles, the max exponent and the max logit are both needed.
      float top[N_TILES][2], exponents[N_TILES][2];
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int subtile = 0; subtile < SUBTILES; subtile++) {
          const float2 bias_of = BIAS_IN_SHIFT ? Bias::of(subtile, n, c) : make_float2(0.0f, 0.0f);
          float shift[2];
          shifted(shift, x[n], subtile, n);
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float largest = fmaxf(s[subtile][n][i], s[subtile][n][2 + i]);
            if (BIAS_IN_SHIFT) {
              const float exponent = fmaf(largest, scale_of(x[n], i), shift[i]);
              exponents[n][i] = subtile == 0 ? exponent : fmaxf(exponents[n][i], exponent);
              largest = largest * scale_of(x[n], i) + (i ? bias_of.y : bias_of.x);
            }
            top[n][i] = subtile == 0 ? largest : fmaxf(top[n][i], largest);
          }
        }
      share_maxima(top, warp, g, c);
      if (BIAS_IN_SHIFT) {
        __syncthreads();
        share_maxima(exponents, warp, g, c);
      }
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          // Per column, with the test that triggered the rescale, so that no column changes the rounding
          // of another.
          const float exponent =
              BIAS_IN_SHIFT ? exponents[n][i] : fmaf(top[n][i], scale_of(x[n], i), x[n].shift[i]);
          if (ex2(exponent) > MAX_E) {
            const float logit = BIAS_IN_SHIFT ? top[n][i] : top[n][i] * scale_of(x[n], i);
            const float new_shift = P_SHIFT - logit;
            const float factor = ex2(new_shift - x[n].shift[i]);
            x[n].shift[i] = new_shift;
            if (warp == 0 && g == 0) store_float(columns_at + 64 * n + 8 + 4 * i, new_shift);
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

    u32 v[2][V_OPERANDS][4];
#pragma unroll
    for (int i = 0; i < TILE / 32; i++) {
      if (i + 1 < TILE / 32) fetch_v(raw_v[(i + 1) % 2], tile, places, 32 * (i + 1));
      if (i >= 2) wgmma_wait<1>();
      unpack_v(v[i % 2], raw_v[i % 2], warp);
      wgmma_fence();
      add_values(out, v[i % 2], ring16, 32 * i);
      wgmma_commit();
    }
    wgmma_wait();
    reader.pass();
  }

  const bool whole = share.stop - share.first == item.num_tiles;
  write_results(p, item, head, row, whole, columns_at, out, sum);
}

#if WHOLE_PAGES
#define MAP , const __grid_constant__ TensorMap map
#else
#define MAP
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS) decode(Params p MAP) {
  const u32 ring = ring_address();
#if WHOLE_PAGES
  prefetch_map(&map);
  make_barriers(ring + OFF_READY);
  RingReader reader(ring, ring + OFF_READY);
#endif
  prefetch_tables(p);
  wait_for_previous();  // for the store, too: this kernel does not overlap it
  allow_next();  // see decode.cu
  const PlanHeader header = p.plan.header();
  for (int x = blockIdx.x; x < header.units * KV_HEADS; x += gridDim.x) {
    const int number = x / KV_HEADS, head = x % KV_HEADS;
    const Unit unit = p.plan.unit(number);
#if WHOLE_PAGES
    Loader loader(p, map, header, unit, head, number, reader);
#else
    Loader loader(p, header, unit, head, number, ring);
    RingReader reader(ring);
#endif
    WorkItem item = unit.item;
    int index = unit.index;
    do {
      const Share share = share_of(header, item, number);
      if (share.first < share.stop) attend(p, item, head, number + index, share, loader, reader);
    } while (next_item_in_unit(p, header, ++index, number, item));
#if !WHOLE_PAGES
    asm volatile("cp.async.wait_all;");
#endif
    __syncthreads();
  }
}
