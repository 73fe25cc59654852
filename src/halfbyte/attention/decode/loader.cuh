// Prefetches a unit's tiles of K and V into the ring in shared memory.
//
// A stage of the ring is a tile of TILE tokens: rows of K, their block scales, rows of V, their block scales.
// With WHOLE_PAGES (pages.cuh) it is pages, which have this layout. The macros of geometry are those of
// decode.cu. One warp fills a ring; with RING_WARPS (decode_wgmma.cu) that many warps share one, each
// loading its part of every tile.

#pragma once
#include "attention/decode/formats.cuh"
#include "attention/decode/params.cuh"

#define ROW_K (HEAD_SIZE * BITS(K_KIND) / 8)
#define ROW_V (HEAD_SIZE_V * BITS(V_KIND) / 8)
#define SF_K (K_KIND == 4 ? HEAD_SIZE / 16 : 0)
#define SF_V (V_KIND == 4 ? HEAD_SIZE_V / 16 : 0)
#define CHUNKS_K (ROW_K / 16)
#define CHUNKS_V (ROW_V / 16)
#define WORDS_SF_K (SF_K / 4)
#define WORDS_SF_V (SF_V / 4)
// 16 x 16 matrices in a row of K or V, and per ldmatrix.
#define STEPS_K (HEAD_SIZE / 16)
#define STEPS_V (HEAD_SIZE_V / 16)
#define LOADED_K (16 / BITS(K_KIND))
#define LOADED_V (16 / BITS(V_KIND))
// Tokens whose rows of K are contiguous in the ring, and offsets of the regions after them.
#if WHOLE_PAGES
#define SPAN BLOCK_SIZE
#else
#define SPAN TILE
#endif
#define SPAN_BYTES (SPAN * (ROW_K + SF_K + ROW_V + SF_V))
#define OFF_SF_K (SPAN * ROW_K)
#define OFF_V (OFF_SF_K + SPAN * SF_K)
#define OFF_SF_V (OFF_V + SPAN * ROW_V)
#define STAGE_BYTES (TILE / SPAN * SPAN_BYTES)
#define Q_BYTES (Q_SHARED ? N_TILES * STEPS_K * 256 : 0)
// For means of K (means.cuh), per warp of decode.cu.
#define ANGLE_BYTES (KEEPS_ANGLES ? 16 * PAIRS * 8 : 0)
#define MEAN_LANES (COLS < 8 ? 4 * COLS : 32)
#define COEFFICIENT_BYTES (KEEPS_COEFFICIENTS ? N_TILES * (PAIRS / 8) * MEAN_LANES * 16 : 0)
#define BIAS_BYTES (SEGMENT ? 16 * COLS * 4 : 0)
#define HALVES (TILE / 16)
#ifndef RING_WARPS
#define RING_WARPS 1
#endif
// Whether recent tokens go through the tiles' stages, 16 per stage, before a work item's tiles: in decode.cu, if they
// fit.
#define STAGED_ROW (2 * (HEAD_SIZE + HEAD_SIZE_V))
#define STAGES_RECENT (RECENT && RING_WARPS == 1 && 16 * STAGED_ROW <= STAGE_BYTES)
// Whether prefetching ends with a work item and restarts with the next one. Else tiles of the next one are prefetched.
#define RESTARTS (STAGES_RECENT || KEEPS_ANGLES)
// Each warp has 16 tokens of every 64 of a tile. All addresses are computed once, except pages.
#define SHARED_RING (HND && RING_WARPS > 1)

// Offset of a 16-byte chunk of a row in the ring. The XOR swizzle avoids bank conflicts of ldmatrix.
template <int CHUNKS>
__device__ __forceinline__ u32 swizzle(int row, int chunk) {
  const int spread = CHUNKS % 8 == 0   ? row & 7
                     : CHUNKS % 4 == 0 ? (row >> 1) & 3
                     : CHUNKS % 2 == 0 ? (row >> 2) & 1
                                       : 0;
  return (u32)((row * CHUNKS + (chunk ^ spread)) * 16);
}

// Returns x, opaque to the compiler, which would otherwise recompute addresses for every tile when short
// of registers.
__device__ __forceinline__ u32 keep(u32 x) {
  u32 y;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;"
               : "=r"(y)
               : "r"(x), "r"(threadIdx.x & 31));
  return y;
}

// This thread's lane, for code that seldom runs; a whole warp calls it. The compiler would otherwise compute what depends
// on the lane before the loop over work items, and keep it in registers that the loop over tiles lacks.
__device__ __forceinline__ int lane_of_now() { return (int)keep(threadIdx.x & 31); }

__device__ __forceinline__ u64 page_address(u64 base, u32 page, u32 stride) {
  u64 y;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(y) : "r"(page), "r"(stride), "l"(base));
  return y;
}

// Keeps the compiler from hoisting the sum, which would take one more register.
__device__ __forceinline__ u64 add_offset(u64 base, u32 offset) {
  asm volatile("" : "+r"(offset));
  return base + offset;
}

// The tiles first <= t < stop of a work item that a unit processes.
struct Share {
  int first, stop;
};

__device__ __forceinline__ Share share_of(const PlanHeader& header, const WorkItem& item, int unit) {
  const int begin = unit * header.span, start = item.begin + header.lead();
  return {item.first_tile + max(0, begin - start),
          item.first_tile + min(item.num_tiles, begin + header.span - start)};
}

// Returns whether work item `index` begins in this unit, after earlier items, and loads it into `item`. False without a
// load in the aligned layout, where a unit has one item, and past the last item.
__device__ __forceinline__ bool next_item_in_unit(const Params& p, const PlanHeader& header, int index,
                                        int unit, WorkItem& item) {
  if (header.is_aligned() || index >= header.items) return false;
  item = p.plan.item(index);
  return item.begin < (unit + 1) * header.span;
}

// Iterates over the tiles of a unit, across work items.
struct Tiles {
  const Params& p;
  const PlanHeader& header;
  int head, unit;
  int index;       // of the work item
  int tile, stop;  // in the work item; tile == stop: no tiles are left
  const int* table;
  u32 last_page;

  __device__ __forceinline__ Tiles(const Params& p, const PlanHeader& header, int index, int head,
                                   int unit)
      : p(p), header(header), head(head), unit(unit), index(index) {}

  __device__ __forceinline__ void begin(const WorkItem& first) {
    enter(first);
    while (tile >= stop && next_item()) {}
  }

  __device__ __forceinline__ void advance() {
    tile++;
    while (tile >= stop && next_item()) {}
  }

  __device__ __forceinline__ void enter(const WorkItem& item) {
    const Share share = share_of(header, item, unit);
    tile = share.first;
    stop = share.stop;
    table = p.block_tables + (u64)item.seq * p.max_pages;
    // A work item with recent tokens has a tile even if its length is 0.
    last_page = (u32)max(item.length - 1, 0) / BLOCK_SIZE;
  }

  __device__ __forceinline__ bool next_item() {
    WorkItem item;
    if (RESTARTS || !next_item_in_unit(p, header, ++index, unit, item)) return false;
    enter(item);
    return true;
  }

  // Page of a position; past the sequence's end, its last page.
  __device__ __forceinline__ u32 page_of(u32 position) const {
    return table[min(position / BLOCK_SIZE, last_page)];
  }
};

#if !WHOLE_PAGES
// Prefetches the tiles into the ring with cp.async.
struct Loader : Tiles {
  // If a tile may span several pages, SHARE lanes copy 16 tokens, and each of them holds these tokens' page.
  static constexpr int WARP_TOKENS = TILE / RING_WARPS, WARP_HALVES = HALVES / RING_WARPS;
  static constexpr bool ONE_PAGE = BLOCK_SIZE % WARP_TOKENS == 0;
  static constexpr int SHARE = 32 / WARP_HALVES;  // lanes per 16 tokens

  u32 ring, target;
#if SHARED_RING
  u32 pages[TILE / 64];  // of this warp's tokens, loaded one tile ahead
  // Offsets of this lane's chunks: `from` in a page, `to` in a stage. ALIKE: V's are K's plus a constant.
  // Lanes that copy no scales have NOWHERE.
  static constexpr bool ALIKE = ROW_K == ROW_V && K_DATA_HEAD == V_DATA_HEAD;
  static constexpr u32 NOWHERE = ~0u;
  u32 first, k_from, k_to, v_from, v_to, sf_subtile, sf_from, sf_to;
  // 16-byte chunks of scales per 16 tokens, and subtiles whose scales one warp-wide copy covers.
  static constexpr int SF_CHUNKS = SF_K + SF_V, SF_SUBTILES = 32 / SF_CHUNKS;
#else
  u32 page;  // of the next tile, loaded one tile before its data
#endif

  __device__ __forceinline__ Loader(const Params& p, const PlanHeader& header, const Unit& first_unit,
                                    int head, int unit, u32 ring)
      : Tiles(p, header, first_unit.index, head, unit), ring(ring), target(ring) {
#if SHARED_RING
    const int lane = threadIdx.x & 31;
    first = keep(threadIdx.x / 32 * 16);
    k_from = keep(K_DATA + head * K_DATA_HEAD + lane * 16);
    k_to = keep(first * ROW_K + swizzle<CHUNKS_K>(lane / CHUNKS_K, lane % CHUNKS_K));
    if (!ALIKE) {
      v_from = keep(V_DATA + head * V_DATA_HEAD + lane * 16);
      v_to = keep(OFF_V + first * ROW_V + swizzle<CHUNKS_V>(lane / CHUNKS_V, lane % CHUNKS_V));
    }
    const int chunk = lane % SF_CHUNKS, subtile = lane / SF_CHUNKS;
    const bool k_side = chunk < SF_K;
    sf_subtile = keep(subtile);
    sf_from = keep(chunk * 16 + (k_side ? K_SCALE + head * K_SCALE_HEAD
                                        : V_SCALE + head * V_SCALE_HEAD - SF_K * 16));
    const u32 row = 64 * subtile + first;
    sf_to = keep(subtile >= min(SF_SUBTILES, TILE / 64) ? NOWHERE
                                      : chunk * 16 + (k_side ? OFF_SF_K + row * SF_K
                                                             : OFF_SF_V + row * SF_V - SF_K * 16));
#endif
    begin(first_unit.item);
    load_page_ids();
    if (RESTARTS) return;  // attend() loads the first stages
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) step();
  }

  // Goes to the unit's next work item, whose first stage will be `stage`.
  __device__ __forceinline__ void restart(const WorkItem& item, u32 stage) {
    __syncwarp();  // all lanes have read the last one
    enter(item);
    load_page_ids();
    target = stage;
  }

  // This warp's first token in a tile.
  __device__ __forceinline__ static u32 first_token() {
    return RING_WARPS == 1 ? 0 : threadIdx.x / 32 * WARP_TOKENS;
  }

  __device__ __forceinline__ void load_page_ids() {
    if (tile >= stop) return;
#if SHARED_RING
#pragma unroll
    for (int i = 0; i < TILE / 64; i++)
      pages[i] = page_of(tile * TILE + 64 * i + first);
#else
    const u32 position = tile * TILE + first_token() + (ONE_PAGE ? 0 : threadIdx.x % 32 / SHARE * 16);
    page = page_of(position);
#endif
  }

  // Prefetches the next tile, if there is one.
  __device__ __forceinline__ void step() {
    if (tile < stop) {
      load();
      advance();
    }
    commit();
    load_page_ids();
  }

  // Ends a stage.
  __device__ __forceinline__ void commit() {
    asm volatile("cp.async.commit_group;");
    target = target + STAGE_BYTES == ring + STAGES * STAGE_BYTES ? ring : target + STAGE_BYTES;
  }

#if SHARED_RING
  // 16 tokens of one head are contiguous: their 16-byte chunks go to the lanes in turn.
  __device__ __forceinline__ void load() const {
    static_assert(TILE <= 128, "pages of one or two subtiles");
#pragma unroll
    for (int i = 0; i < TILE / 64; i++) {
      const u32 token = BLOCK_SIZE == 16 ? 0 : (tile * TILE + 64 * i + first) % BLOCK_SIZE;
      const u64 from = page_address((u64)p.pages, pages[i], p.page_stride);
      const u64 k = add_offset(from, k_from) + token * ROW_K;
      copy<CHUNKS_K>(target + k_to + 64 * i * ROW_K, k);
      if (ALIKE)
        copy<CHUNKS_V>(target + k_to + OFF_V + 64 * i * ROW_V, k + (V_DATA - K_DATA));
      else
        copy<CHUNKS_V>(target + v_to + 64 * i * ROW_V, add_offset(from, v_from) + token * ROW_V);
    }
#pragma unroll
    for (int i = 0; i < TILE / 64; i += SF_SUBTILES) {
      const u32 subtile = i + sf_subtile;
      const u32 page = TILE == 64 || subtile == 0 ? pages[0] : pages[TILE / 64 - 1];
      const u32 token = BLOCK_SIZE == 16 ? 0 : (tile * TILE + 64 * subtile + first) % BLOCK_SIZE;
      const u32 row = SF_K == SF_V || threadIdx.x % 32 % SF_CHUNKS < SF_K ? SF_K : SF_V;
      cp_async16_if(sf_to != NOWHERE, target + sf_to + 64 * i * row,
                    (const u8*)(add_offset(page_address((u64)p.pages, page, p.page_stride), sf_from) +
                                token * row));
    }
  }

  // 32 chunks at a time. The swizzle of later rows differs by an XOR that depends only on the row count.
  template <int CHUNKS>
  __device__ __forceinline__ static void copy(u32 to, u64 from) {
#pragma unroll
    for (int i = 0; i < 16 * CHUNKS; i += 32)
      cp_async16((to ^ (CHUNKS % 8 == 0 ? (i / CHUNKS & 7) * 16 : 0)) + i * 16,
                 (const u8*)(from + i * 16));
  }
#else
  __device__ __forceinline__ void load() const {
    const int lane = threadIdx.x & 31;
    const int own_half = lane / SHARE, own_index = lane % SHARE;
    // This warp's tokens in the page and in the ring.
    const u32 in_page = (u32)(tile * TILE + first_token()) % BLOCK_SIZE;
    const u32 own_k = target + first_token() * ROW_K;
    const u32 own_sf_k = target + OFF_SF_K + first_token() * SF_K;
    const u32 own_v = target + OFF_V + first_token() * ROW_V;
    const u32 own_sf_v = target + OFF_SF_V + first_token() * SF_V;
#if HND
    // 16 tokens of one head are contiguous: their 16-byte chunks go to the lanes in turn.
    const u64 k_base = (u64)p.pages + head * K_DATA_HEAD + lane * 16;
    const u64 v_base =
        K_DATA_HEAD == V_DATA_HEAD ? k_base : (u64)p.pages + head * V_DATA_HEAD + lane * 16;
    auto sf_offset = [&](int index) {
      return index < SF_K ? K_SCALE + head * K_SCALE_HEAD + index * 16
                          : V_SCALE + head * V_SCALE_HEAD + (index - SF_K) * 16;
    };
    auto sf_target = [&](int index) {
      return index < SF_K ? own_sf_k + own_half * (16 * SF_K) + index * 16
                          : own_sf_v + own_half * (16 * SF_V) + (index - SF_K) * 16;
    };
    const u64 sf_base = (u64)p.pages + sf_offset(own_index);
    const u32 own_sf_target = sf_target(own_index);
#endif
#pragma unroll
    for (int half = 0; half < WARP_HALVES; half++) {
      const u32 from = ONE_PAGE ? page : __shfl_sync(~0u, page, half * SHARE);
      const u32 token = ONE_PAGE ? in_page + 16 * half : (in_page + 16 * half) % BLOCK_SIZE;
#if HND
      const u64 k = page_address(k_base, from, p.page_stride) + token * ROW_K;
      const u64 v = K_DATA_HEAD == V_DATA_HEAD && ROW_K == ROW_V
                        ? k
                        : page_address(v_base, from, p.page_stride) + token * ROW_V;
#pragma unroll
      for (int i = 0; i < 16 * CHUNKS_K; i += 32)
        if (16 * CHUNKS_K % 32 == 0 || i + lane < 16 * CHUNKS_K)
          cp_async16(own_k + half * 16 * ROW_K +
                         swizzle<CHUNKS_K>((i + lane) / CHUNKS_K, (i + lane) % CHUNKS_K),
                     (const u8*)(k + K_DATA + i * 16));
#pragma unroll
      for (int i = 0; i < 16 * CHUNKS_V; i += 32)
        if (16 * CHUNKS_V % 32 == 0 || i + lane < 16 * CHUNKS_V)
          cp_async16(own_v + half * 16 * ROW_V +
                         swizzle<CHUNKS_V>((i + lane) / CHUNKS_V, (i + lane) % CHUNKS_V),
                     (const u8*)(v + V_DATA + i * 16));
#else
      const u8* base = (const u8*)page_address((u64)p.pages, from, p.page_stride);
      const u8* k = base + K_DATA + head * K_DATA_HEAD + token * K_DATA_TOKEN;
      const u8* v = base + V_DATA + head * V_DATA_HEAD + token * V_DATA_TOKEN;
#pragma unroll
      for (int i = lane; i < 16 * CHUNKS_K; i += 32)
        cp_async16(own_k + half * 16 * ROW_K + swizzle<CHUNKS_K>(i / CHUNKS_K, i % CHUNKS_K),
                   k + i / CHUNKS_K * K_DATA_TOKEN + i % CHUNKS_K * 16);
#pragma unroll
      for (int i = lane; i < 16 * CHUNKS_V; i += 32)
        cp_async16(
            own_v + half * 16 * ROW_V + swizzle<CHUNKS_V>(i / CHUNKS_V, i % CHUNKS_V),
            v + i / CHUNKS_V * V_DATA_TOKEN + i % CHUNKS_V * 16);
#if K_KIND == 4
      const u8* ks = base + K_SCALE + head * K_SCALE_HEAD + token * K_SCALE_TOKEN;
#pragma unroll
      for (int i = lane; i < 16 * WORDS_SF_K; i += 32)
        cp_async4(own_sf_k + half * 16 * SF_K + i * 4,
                  ks + i / WORDS_SF_K * K_SCALE_TOKEN + i % WORDS_SF_K * 4);
#endif
#if V_KIND == 4
      const u8* vs = base + V_SCALE + head * V_SCALE_HEAD + token * V_SCALE_TOKEN;
#pragma unroll
      for (int i = lane; i < 16 * WORDS_SF_V; i += 32)
        cp_async4(own_sf_v + half * 16 * SF_V + i * 4,
                  vs + i / WORDS_SF_V * V_SCALE_TOKEN + i % WORDS_SF_V * 4);
#endif
#endif
    }
#if HND
    // Scales of 16 tokens are SF_K + SF_V chunks; every lane copies for its own 16 tokens.
    const u32 token = (in_page + 16 * own_half) % BLOCK_SIZE;
#pragma unroll
    for (int i = 0; i < SF_K + SF_V; i += SHARE) {
      const int index = own_index + i;
      const u64 own = page_address(i == 0 ? sf_base : (u64)p.pages + sf_offset(index), page,
                                   p.page_stride);
      const u64 source = own + token * (SF_K == SF_V || index < SF_K ? SF_K : SF_V);
      if ((SF_K + SF_V) % SHARE == 0 || index < SF_K + SF_V)
        cp_async16(i == 0 ? own_sf_target : sf_target(index), (const u8*)source);
    }
#endif
  }
#endif
};
#endif
