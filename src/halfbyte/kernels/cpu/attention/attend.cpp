// One work item of attention: reads rows of q and the packed tokens, writes rows of the result.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "attention/attention.h"
#include "convert.h"

namespace halfbyte {
namespace {

constexpr int kMaxScales = 512;  // max scales of a token and head of V in the sm100 order
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// K or V: position in a page and how to decode it.
struct Side {
  int format, size;
  Region data, scale;
  int data_bytes, scale_bytes;  // of a head of a token
  const PackedKernels* packed;  // or null
};

// Aligned to cache lines: stores of 64 bytes that cross lines are slower.
template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), kLine); }
  void deallocate(T* x, size_t) { ::operator delete(x, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
  bool operator!=(const LineAllocator&) const { return false; }
};

using Floats = std::vector<float, LineAllocator<float>>;

// Buffers of one thread, kept between calls. Rows are (head, query row) pairs of an item.
struct Workspace {
  Floats q, packed_q, scores, sums, tile, rows, parts, merged, ordered;
  Floats raw_q, turned, bias, first_key, first_value;  // for a transform of K
  Floats recent_sums;
  // Which queries are in q: a thread often gets several parts of the same rows, and loads them once.
  uint64_t serial = 0;
  int seq, first_head, heads, first_row, rows_loaded;
  float recent_maximum[kMaxRows], recent_total[kMaxRows];
  std::vector<int> positions;
  std::vector<uint8_t> v_scales;
  const uint8_t *k_data[kSpan], *k_scales[kSpan], *v_data[kSpan], *v_scale_rows[kSpan];
  float maximum[kMaxRows], total[kMaxRows];
};

Workspace& workspace() {
  thread_local Workspace w;
  return w;
}

void reserve(Floats& x, size_t n) {
  if (x.size() < n) x.resize(n);
}

Side make_side(int format, int size, const Region& data, const Region& scale) {
  const int block = scale_block(format);
  return {format, size, data, scale, data_bytes(format, size), block ? size / block : 0, nullptr};
}

Side k_side(const Batch& batch) {
  const Layout& l = batch.layout;
  Side side = make_side(l.k_format, l.head_size, l.k_data, l.k_scale);
  if (!is_nvfp4(side.format)) return side;
  side.packed = batch.kernels.packed;
  if (batch.kernels.packed_bfloat16 && batch.call.query_format == kBFloat16)
    side.packed = batch.kernels.packed_bfloat16;
  return side;
}

Side v_side(const Batch& batch, int rows) {
  const Layout& l = batch.layout;
  Side side = make_side(l.v_format, l.head_size_v, l.v_data, l.v_scale);
  const PackedKernels* packed = batch.kernels.packed;
  if (packed && is_nvfp4(side.format) && rows <= packed->max_accumulate_rows) side.packed = packed;
  return side;
}

// Addresses of data and scales of `n` tokens from `first` on, for head 0; those of scales are unused if the
// format has none. Masked tokens before t0, whose pages may be gone, get the address of t0.
void locate(const Batch& batch, int seq, const Side& side, int first, int t0, int n,
            const uint8_t** data, const uint8_t** scales) {
  const Call& call = batch.call;
  const int block_size = batch.layout.block_size, hidden = t0 - first;
  const int32_t* table = call.block_tables + (int64_t)seq * call.max_pages + t0 / block_size;
  int in_page = t0 % block_size;
  for (int t = hidden; t < n; in_page = 0) {
    const int count = std::min(block_size - in_page, n - t);
    const uint8_t* page = call.pages + *table++ * call.page_stride;
    batch.kernels.addresses(page + side.data.offset + in_page * side.data.token, side.data.token,
                            count, data + t);
    batch.kernels.addresses(page + side.scale.offset + in_page * side.scale.token, side.scale.token,
                            count, scales + t);
    t += count;
  }
  std::fill(data, data + hidden, data[hidden]);
  std::fill(scales, scales + hidden, scales[hidden]);
}

// Copies V scales in the sm100 order to linear rows [head][token][scale]. In a page, scale s of token t is at
// row 4 (t / 4) + s / quarter and column 4 (s % quarter) + t % 4.
void gather_sm100(const Batch& batch, const Item& item, int first, int t0, int n, Workspace& w) {
  const int quarter = batch.layout.sm100_quarter, width = 4 * quarter;
  const Region& region = batch.layout.v_scale;
  w.v_scales.resize((size_t)item.heads * kSpan * width);
  for (int t = 0; t < n; t++) {
    const int in_group = std::max(t0, first + t) % batch.layout.block_size % 4;
    for (int h = 0; h < item.heads; h++) {
      const uint8_t* group =
          w.v_scale_rows[t] + (item.first_head + h) * region.head - in_group * region.token;
      uint8_t* row = w.v_scales.data() + ((size_t)h * kSpan + t) * width;
      for (int s = 0; s < width; s++)
        row[s] = group[s / quarter * region.token + 4 * (s % quarter) + in_group];
    }
    w.v_scale_rows[t] = w.v_scales.data() + (size_t)t * width;
  }
}

Rows rows_of(const Side& side, const uint8_t* const* data, const uint8_t* const* scales, int head) {
  return {data, scales, head * side.data.head, head * side.scale.head};
}

// V of the h-th head of an item.
Rows v_rows(const Batch& batch, const Side& side, int head, int h, const Workspace& w) {
  Rows rows = rows_of(side, w.v_data, w.v_scale_rows, head);
  if (batch.layout.sm100_quarter) rows.scale_offset = (int64_t)h * kSpan * side.scale_bytes;
  return rows;
}

// Tokens unpacked at a time; for up to 8 rows a small tile, which stays in L1.
int tile_of(const Item& item) { return item.rows <= 8 ? kPad : kTile; }

// scores[t] of up to kTile tokens: K is unpacked to float and multiplied.
void score_tile(const Batch& batch, const Item& item, const Side& side, const Rows& k, int count,
                const float* q, float* scores, Workspace& w) {
  const Kernels& kernels = batch.kernels;
  const int stride = padded(side.size);
  reserve(w.rows, (size_t)kPad * stride);
  const int tile = tile_of(item);
  reserve(w.tile, (size_t)side.size * tile);
  for (int i = 0; i < count; i += kPad) {
    for (int j = i; j < std::min(count, i + kPad); j++)
      kernels.unpack(side.format, k.data_of(j), k.scales_of(j), side.size,
                     w.rows.data() + (size_t)(j - i) * stride);
    kernels.transpose(w.rows.data(), stride, side.size, w.tile.data() + i, tile);
  }
  kernels.multiply(q, stride, item.rows, w.tile.data(), tile, side.size, scores, kSpan,
                   padded(count), true);
}

void accumulate_tile(const Batch& batch, const Item& item, const Side& side, const Rows& v,
                     int count, const float* weights, float* sums, int sum_stride, Workspace& w) {
  const int stride = padded(side.size);
  reserve(w.tile, (size_t)tile_of(item) * stride);
  for (int i = 0; i < count; i++)
    batch.kernels.unpack(side.format, v.data_of(i), v.scales_of(i), side.size,
                         w.tile.data() + (size_t)i * stride);
  batch.kernels.multiply(weights, kSpan, item.rows, w.tile.data(), stride, count, sums, sum_stride,
                         stride, false);
}

void score_span(const Batch& batch, const Item& item, const Side& side, const Side& v_side, int n,
                Workspace& w) {
  const int step = side.packed ? kStep : tile_of(item);
  for (int t = 0; t < n; t += step)
    for (int h = 0; h < item.heads; h++) {
      const int head = item.first_head + h, count = std::min(step, n - t), end = t + count;
      const Rows k = rows_of(side, w.k_data, w.k_scales, head);
      float* scores = w.scores.data() + (size_t)h * item.rows * kSpan + t;
      if (!side.packed) {
        score_tile(batch, item, side, k.from(t), count,
                   w.q.data() + (size_t)h * item.rows * padded(side.size), scores, w);
        continue;
      }
      // To prefetch: the next tokens of K of this head, or else the first tokens of V.
      const Rows next = end < n ? k.from(end) : v_rows(batch, v_side, head, h, w);
      side.packed->score(w.packed_q.data() + (size_t)h * item.rows * packed_size(side.size),
                         item.rows, k.from(t), count, side.size, scores, next,
                         std::min(step, end < n ? n - end : n));
    }
}

void accumulate_span(const Batch& batch, const Item& item, const Side& side, int n, int sum_stride,
                     Workspace& w) {
  const int step = side.packed ? kStep : tile_of(item);
  for (int t = 0; t < n; t += step)
    for (int h = 0; h < item.heads; h++) {
      const int count = std::min(step, n - t), end = t + count;
      const Rows v = v_rows(batch, side, item.first_head + h, h, w);
      const float* weights = w.scores.data() + (size_t)h * item.rows * kSpan + t;
      float* sums = w.sums.data() + (size_t)h * item.rows * sum_stride;
      if (side.packed)
        side.packed->accumulate(weights, item.rows, v.from(t), count, side.size, sums, v.from(end),
                                std::min(step, n - end));
      else
        accumulate_tile(batch, item, side, v.from(t), count, weights, sums, sum_stride, w);
    }
}

// Adds q . mean to the scores of `n` tokens from `first` on, divided by score_scale, by which all are
// multiplied later.
void add_means(const Batch& batch, const Item& item, int first, int n, float score_scale,
               Workspace& w) {
  const Transform& t = *batch.call.transform;
  const int depth = 2 * t.pairs, rows = item.heads * item.rows;
  const int segment = first / t.segment, width = padded((first + n - 1) / t.segment - segment + 1);
  reserve(w.bias, (size_t)rows * width);
  batch.kernels.multiply(w.turned.data(), depth, rows, t.turn + segment, t.turn_stride, depth,
                         w.bias.data(), width, width, true);
  for (int i = 0; i < rows; i++) {
    float* row = w.scores.data() + (size_t)i * kSpan;
    const float* bias = w.bias.data() + (size_t)i * width;
    for (int s = 0, begin = 0; begin < n; s++) {
      const int end = std::min(n, (segment + s + 1) * t.segment - first);
      const float value = bias[s] / score_scale;
      for (int j = begin; j < end; j++) row[j] += value;
      begin = end;
    }
  }
}

// Softmax weights from the scores of `n` tokens from `first` on; those before t0 are masked.
void softmax_span(const Batch& batch, const Item& item, int first, int t0, int n, float score_scale,
                  Workspace& w) {
  const Call& call = batch.call;
  const Kernels& kernels = batch.kernels;
  const int queries = call.query_start_loc[item.seq + 1] - call.query_start_loc[item.seq];
  const int first_position = call.seq_lens[item.seq] - queries;
  // Position 0 may be a constant of the model: `finish_row` adds it.
  if (call.transform && call.transform->first_tokens > 0) t0 = std::max(t0, 1);
  for (int i = 0; i < item.heads * item.rows; i++) {
    const int position = first_position + (item.first_row + i % item.rows) / batch.group;
    const int oldest = call.window > 0 ? std::max(t0, position - call.window + 1) : t0;
    const int from = std::clamp(oldest - first, 0, n);
    const int to = std::clamp(position + 1 - first, from, n);
    float* row = w.scores.data() + (size_t)i * kSpan;
    kernels.logits(row, padded(n), score_scale, call.softcap);
    std::fill(row, row + from, kNegInf);
    std::fill(row + to, row + padded(n), kNegInf);
    w.maximum[i] = kernels.largest(row, padded(n));
    const float shift = w.maximum[i] == kNegInf ? 0.0f : w.maximum[i];
    w.total[i] = kernels.exponentials(row, padded(n), shift);
  }
}

// Copies a row of q for unrotated K (recent tokens, the first token), then rotates it in place.
void transform_query(const Batch& batch, const Item& item, int h, int r, float* q, Workspace& w) {
  const Transform& t = *batch.call.transform;
  const int size = batch.layout.head_size, rows = item.heads * item.rows;
  const size_t at = (size_t)h * item.rows + r;
  reserve(w.raw_q, (size_t)rows * size);
  std::memcpy(w.raw_q.data() + at * size, q, size * sizeof(float));
  if (t.mean) {
    reserve(w.turned, (size_t)rows * 2 * t.pairs);
    float* turned = w.turned.data() + at * 2 * t.pairs;
    const float* mean = t.mean + (int64_t)(item.first_head + h) * size;
    for (int i = 0; i < t.pairs; i++) {
      const int a = t.one[i], b = t.other[i];
      turned[i] = a == b ? q[a] * mean[a] : q[a] * mean[a] + q[b] * mean[b];
      turned[t.pairs + i] = q[a] * mean[b] - q[b] * mean[a];
    }
  }
  if (!t.rotate) return;
  hadamard(q, size);
  if (batch.call.query_format != kBFloat16) return;
  // The kernels for bfloat16 queries need values that are exact in bfloat16.
  for (int d = 0; d < size; d++) q[d] = float_of((uint32_t)to_bfloat16(q[d]) << 16);
}

// Loads K and V at position 0 of an item's heads: constants of the model if the page marks them, else unpacked.
void load_first_token(const Batch& batch, const Item& item, Workspace& w) {
  const Call& call = batch.call;
  const Layout& l = batch.layout;
  const Transform& t = *call.transform;
  const int stride = padded(l.head_size), stride_v = padded(l.head_size_v);
  reserve(w.first_key, (size_t)item.heads * stride);
  reserve(w.first_value, (size_t)item.heads * stride_v);
  const int32_t* table = call.block_tables + (int64_t)item.seq * call.max_pages;
  const uint8_t* page = call.pages + *table * call.page_stride;
  thread_local std::vector<float> mean;
  mean.resize(l.head_size);
  for (int h = 0; h < item.heads; h++) {
    const int head = item.first_head + h;
    float* key = w.first_key.data() + (size_t)h * stride;
    float* value = w.first_value.data() + (size_t)h * stride_v;
    const uint8_t* data = page + l.k_data.offset + head * l.k_data.head;
    const uint8_t* scales = page + l.k_scale.offset + head * l.k_scale.head;
    if (scales[0] == kFirstTokenMark && data[0] < t.first_tokens) {
      const int64_t at = (int64_t)data[0] * l.kv_heads + head;
      std::memcpy(key, t.first_keys + at * l.head_size, l.head_size * sizeof(float));
      std::memcpy(value, t.first_values + at * l.head_size_v, l.head_size_v * sizeof(float));
      continue;
    }
    batch.kernels.unpack(l.k_format, data, scales, l.head_size, key);
    for (int d = 0; d < l.head_size; d++) key[d] *= call.k_global;
    if (t.rotate) hadamard(key, l.head_size);
    if (t.mean) {
      segment_mean(t, 0, head, l.head_size, mean.data());
      for (int d = 0; d < l.head_size; d++) key[d] += mean[d];
    }
    scales = page + l.v_scale.offset + head * l.v_scale.head;
    uint8_t ordered[kMaxScales];
    if (l.sm100_quarter) {  // token 0's scale s is at row s / quarter, column 4 (s % quarter)
      for (int s = 0; s < 4 * l.sm100_quarter; s++)
        ordered[s] = scales[s / l.sm100_quarter * l.v_scale.token + 4 * (s % l.sm100_quarter)];
      scales = ordered;
    }
    batch.kernels.unpack(l.v_format, page + l.v_data.offset + head * l.v_data.head, scales,
                         l.head_size_v, value);
    for (int d = 0; d < l.head_size_v; d++) value[d] *= call.v_global;
  }
}

// The score of position 0 for the r-th row of the h-th head, times log2 e; -inf if it is masked.
float first_token_score(const Batch& batch, const Item& item, int h, int r, const Workspace& w) {
  const Call& call = batch.call;
  const int queries = call.query_start_loc[item.seq + 1] - call.query_start_loc[item.seq];
  const int position = call.seq_lens[item.seq] - queries + (item.first_row + r) / batch.group;
  if (position < 0 || (call.window > 0 && position >= call.window)) return kNegInf;
  const int size = batch.layout.head_size;
  const float* q = w.raw_q.data() + ((size_t)h * item.rows + r) * size;
  const float* key = w.first_key.data() + (size_t)h * padded(size);
  float score = 0.0f;
  for (int d = 0; d < size; d++) score += q[d] * key[d];
  score *= call.softmax_scale;
  if (call.softcap > 0) score = call.softcap * std::tanh(score / call.softcap);
  return score * 1.44269504f;
}

void load_queries(const Batch& batch, const Item& item, const Side& side, Workspace& w) {
  const Call& call = batch.call;
  const bool same = w.serial == batch.serial && w.seq == item.seq && w.heads == item.heads &&
                    w.first_head == item.first_head && w.first_row == item.first_row &&
                    w.rows_loaded == item.rows;
  if (same) return;
  w.serial = batch.serial, w.seq = item.seq, w.heads = item.heads, w.first_head = item.first_head;
  w.first_row = item.first_row, w.rows_loaded = item.rows;
  const int stride = padded(side.size), element = data_bytes(call.query_format, 1);
  reserve(w.q, (size_t)item.heads * item.rows * stride);
  reserve(w.packed_q, (size_t)item.heads * item.rows * packed_size(side.size));
  for (int h = 0; h < item.heads; h++) {
    float* q = w.q.data() + (size_t)h * item.rows * stride;
    for (int r = 0; r < item.rows; r++) {
      const int row = item.first_row + r;
      const int64_t token = call.query_start_loc[item.seq] + row / batch.group;
      const int head = (item.first_head + h) * batch.group + row % batch.group;
      const int64_t at = token * call.query_token + head * call.query_head;
      batch.kernels.unpack(call.query_format, call.query + at * element, nullptr, side.size,
                           q + (size_t)r * stride);
      if (call.transform) transform_query(batch, item, h, r, q + (size_t)r * stride, w);
    }
    if (side.packed)
      side.packed->pack(q, stride, item.rows, side.size,
                        w.packed_q.data() + (size_t)h * item.rows * packed_size(side.size));
  }
}

// Addresses of the tokens `first` .. first + n - 1 of a head, in the ring or among the step's new tokens.
// Masked tokens before t0 get the address of t0.
void locate_recent(const Batch& batch, const Item& item, int head, int first, int t0, int n,
                   Workspace& w) {
  const Call& call = batch.call;
  const Recent& recent = *call.recent;
  const int start = call.query_start_loc[item.seq];
  const int first_new = recent.lengths[item.seq] - (call.query_start_loc[item.seq + 1] - start);
  const int64_t element = data_bytes(recent.format, 1);
  const int64_t ring = ((int64_t)recent.entries[item.seq] * batch.layout.kv_heads + head) * recent.ring;
  for (int t = 0; t < n; t++) {
    const int position = std::max(first + t, t0);
    if (position >= first_new) {
      const int64_t token = start + position - first_new;
      w.k_data[t] = recent.key + (token * recent.key_token + head * recent.key_head) * element;
      w.v_data[t] = recent.value + (token * recent.value_token + head * recent.value_head) * element;
    } else {
      const int64_t slot = ring + position % recent.ring;
      w.k_data[t] = recent.keys + slot * batch.layout.head_size * element;
      w.v_data[t] = recent.values + slot * batch.layout.head_size_v * element;
    }
  }
}

// Attention of an item's rows to their last tokens, unquantized. The tokens of each SIMD lane do not depend
// on the other rows of the item, so a row's bits do not either.
void attend_recent(const Batch& batch, const Item& item, Workspace& w) {
  const Call& call = batch.call;
  const Recent& recent = *call.recent;
  const Kernels& kernels = batch.kernels;
  const Layout& l = batch.layout;
  const int queries = call.query_start_loc[item.seq + 1] - call.query_start_loc[item.seq];
  const int first_position = recent.lengths[item.seq] - queries;
  const int reach = recent.window > 0 ? std::min(recent.window, recent.tokens) : recent.tokens;
  const int earliest = first_position + item.first_row / batch.group;
  const int latest = first_position + (item.first_row + item.rows - 1) / batch.group;
  const int stride = padded(l.head_size), stride_v = padded(l.head_size_v), rows = item.heads * item.rows;
  reserve(w.recent_sums, (size_t)rows * stride_v);
  std::fill(w.recent_sums.begin(), w.recent_sums.begin() + (size_t)rows * stride_v, 0.0f);
  std::fill(w.recent_maximum, w.recent_maximum + rows, kNegInf);
  std::fill(w.recent_total, w.recent_total + rows, 0.0f);
  if (latest < 0) return;  // a sequence shorter than its queries
  const int t0 = std::max(0, earliest - reach + 1), first = t0 / kPad * kPad, n = latest + 1 - first;
  const Region none{};
  const Side k = make_side(recent.format, l.head_size, none, none);
  const Side v = make_side(recent.format, l.head_size_v, none, none);
  // Rotated queries are only for packed K.
  const float* q = call.transform ? w.raw_q.data() : w.q.data();
  const int step = tile_of(item);
  for (int h = 0; h < item.heads; h++) {
    locate_recent(batch, item, item.first_head + h, first, t0, n, w);
    const Rows keys{w.k_data, w.k_data, 0, 0}, values{w.v_data, w.v_data, 0, 0};
    float* scores = w.scores.data() + (size_t)h * item.rows * kSpan;
    for (int t = 0; t < n; t += step)
      score_tile(batch, item, k, keys.from(t), std::min(step, n - t),
                 q + (size_t)h * item.rows * stride, scores + t, w);
    for (int r = 0; r < item.rows; r++) {
      const int i = h * item.rows + r;
      const int position = first_position + (item.first_row + r) / batch.group;
      const int from = std::clamp(std::max(t0, position - reach + 1) - first, 0, n);
      const int to = std::clamp(position + 1 - first, from, n);
      float* row = scores + (size_t)r * kSpan;
      kernels.logits(row, padded(n), call.softmax_scale, call.softcap);
      std::fill(row, row + from, kNegInf);
      std::fill(row + to, row + padded(n), kNegInf);
      w.recent_maximum[i] = kernels.largest(row, padded(n));
      const float shift = w.recent_maximum[i] == kNegInf ? 0.0f : w.recent_maximum[i];
      w.recent_total[i] = kernels.exponentials(row, padded(n), shift);
    }
    for (int t = 0; t < n; t += step)
      accumulate_tile(batch, item, v, values.from(t), std::min(step, n - t), scores + t,
                      w.recent_sums.data() + (size_t)h * item.rows * stride_v, stride_v, w);
  }
}

// Merges a row's parts, `stride` floats apart, the first token, the recent tokens and the sink; writes it.
void finish_row(const Batch& batch, const Item& item, int h, int r, const float* part, int64_t stride,
                int sum_stride, float v_scale, Workspace& w) {
  const Call& call = batch.call;
  const int head = item.first_head + h, row = item.first_row + r, size = batch.layout.head_size_v;
  const int64_t token = call.query_start_loc[item.seq] + row / batch.group;
  const int query_head = head * batch.group + row % batch.group;
  const float sink = call.sinks ? call.sinks[query_head] * 1.44269504f : kNegInf;
  const bool has_first = call.transform && call.transform->first_tokens > 0;
  const float first = has_first ? first_token_score(batch, item, h, r, w) : kNegInf;
  const int i_recent = h * item.rows + r;
  const float recent = call.recent ? w.recent_maximum[i_recent] : kNegInf;
  float maximum = std::max({sink, first, recent});
  for (int i = 0; i < item.parts; i++) maximum = std::max(maximum, part[i * stride + sum_stride]);
  const float shift = maximum == kNegInf ? 0.0f : maximum;
  float total = std::exp2(sink - shift);
  w.merged.assign(sum_stride, 0.0f);
  float* merged = w.merged.data();
  for (int i = 0; i < item.parts; i++) {
    const float* sums = part + i * stride;
    // A part that attends to nothing has the weight 0; NaN stays NaN.
    const float weight = std::exp2(sums[sum_stride] - shift);
    total += sums[sum_stride] == kNegInf ? sums[sum_stride + 1] : weight * sums[sum_stride + 1];
    for (int d = 0; d < sum_stride; d++) merged[d] += weight * sums[d];
  }
  if (!w.positions.empty()) {
    w.ordered.resize(size);
    for (int d = 0; d < size; d++) w.ordered[d] = merged[w.positions[d]];
    merged = w.ordered.data();
  }
  if (first != kNegInf) {
    const float weight = std::exp2(first - shift), factor = weight / v_scale;
    const float* value = w.first_value.data() + (size_t)h * padded(size);
    total += weight;
    for (int d = 0; d < size; d++) merged[d] += factor * value[d];
  }
  if (call.recent) {
    const float weight = std::exp2(recent - shift), factor = weight / v_scale;
    const float* sums = w.recent_sums.data() + (size_t)i_recent * padded(size);
    // As for parts: one that attends to nothing has the weight 0, and NaN stays NaN.
    total += recent == kNegInf ? w.recent_total[i_recent] : weight * w.recent_total[i_recent];
    for (int d = 0; d < size; d++) merged[d] += factor * sums[d];
  }
  const float scale = total == 0.0f ? 0.0f : v_scale / total;
  for (int d = 0; d < size; d++) merged[d] *= scale;
  store_as(call.out_format, merged, size,
           call.out + (token * call.out_token + query_head * call.out_head) *
                          data_bytes(call.out_format, 1));
  if (call.lse)
    call.lse[token * call.heads + query_head] =
        total == 0.0f ? kNegInf : (shift + std::log2(total)) * 0.693147181f;
}

// Attention to tokens t0 .. end - 1 of one part: weighted sums of V, max score and sum of weights per row.
void attend_part(const Batch& batch, const Item& item, const Side& k, const Side& v, int t0,
                 int end, int sum_stride, Workspace& w) {
  const int rows = item.heads * item.rows;
  w.sums.assign((size_t)rows * sum_stride, 0.0f);
  std::fill(w.maximum, w.maximum + rows, kNegInf);
  std::fill(w.total, w.total + rows, 0.0f);
  if (t0 == end) return;
  // Aligned, so that the tokens of each SIMD lane do not depend on the start of the window.
  const int first = t0 / kPad * kPad, n = end - first;
  locate(batch, item.seq, k, first, t0, n, w.k_data, w.k_scales);
  locate(batch, item.seq, v, first, t0, n, w.v_data, w.v_scale_rows);
  if (batch.layout.sm100_quarter) gather_sm100(batch, item, first, t0, n, w);
  score_span(batch, item, k, v, n, w);
  const float factor = batch.call.k_global * (k.packed ? k.packed->factor : 1.0f);
  if (batch.call.transform && batch.call.transform->mean)
    add_means(batch, item, first, n, factor, w);
  softmax_span(batch, item, first, t0, n, batch.call.softmax_scale * factor, w);
  accumulate_span(batch, item, v, n, sum_stride, w);
  if (v.packed && v.packed->fold) v.packed->fold(w.sums.data(), rows, v.size);
}

// Copies the sums of all rows to part `part` of `parts`.
void store_part(const Batch& batch, const Item& item, int part, int sum_stride, float* parts,
                const Workspace& w) {
  for (int i = 0; i < item.heads * item.rows; i++) {
    const int64_t at = ((int64_t)i / item.rows * item.parts + part) * item.rows + i % item.rows;
    float* row = parts + at * batch.width;
    std::memcpy(row, w.sums.data() + (size_t)i * sum_stride, sum_stride * sizeof(float));
    row[sum_stride] = w.maximum[i];
    row[sum_stride + 1] = w.total[i];
  }
}

}  // namespace

void run_item(void* context, int index) {
  const Batch& batch = *(const Batch*)context;
  const Item& item = batch.items[index];
  Workspace& w = workspace();
  const Side k = k_side(batch), v = v_side(batch, item.rows);
  const int sum_stride = v.packed ? sum_size(v.size) : padded(v.size);
  const bool alone = item.counter < 0;
  const int64_t part_size = (int64_t)item.rows * batch.width;
  reserve(w.scores, (size_t)item.heads * item.rows * kSpan);
  if (alone) reserve(w.parts, (size_t)(item.heads * item.parts * part_size));
  float* parts = alone ? w.parts.data() : batch.parts.data() + item.first_part;
  load_queries(batch, item, k, w);
  int t0 = item.begin, part = item.part;
  do {
    const int end = (int)std::min<int64_t>(item.end, ((int64_t)t0 / kSpan + 1) * kSpan);
    attend_part(batch, item, k, v, t0, end, sum_stride, w);
    store_part(batch, item, part++, sum_stride, parts, w);
    t0 = end;
  } while (t0 < item.end);
  if (!alone && __atomic_sub_fetch(&batch.counters[item.counter], 1, __ATOMIC_ACQ_REL) != 0) return;

  w.positions.clear();
  for (int d = 0; v.packed && d < v.size; d++) w.positions.push_back(v.packed->position(d));
  const float v_scale = batch.call.v_global * (v.packed ? v.packed->factor : 1.0f);
  const Transform* transform = batch.call.transform;
  if (transform && transform->first_tokens > 0 && batch.call.seq_lens[item.seq] > 0)
    load_first_token(batch, item, w);
  if (batch.call.recent) attend_recent(batch, item, w);
  for (int h = 0; h < item.heads; h++)
    for (int r = 0; r < item.rows; r++)
      finish_row(batch, item, h, r,
                 parts + h * item.parts * part_size + (int64_t)r * batch.width, part_size,
                 sum_stride, v_scale, w);
}

}  // namespace halfbyte
