// Causal attention of a ragged batch on packed pages.
//
// Work is split into items of one sequence, one or more KV heads and up to 64 query rows (queries x
// heads of a group, for each of those KV heads). Keys are split every 512 tokens; each split has its
// own softmax, and splits are merged at the end. In decoding, every split is an item, and the last
// to finish merges. A row's result depends only on the row and its tokens: it is bitwise the same
// for any batch, number of queries and number of threads.
//
// A split has three steps: scores, softmax, values. Heads are the innermost loop, so that pages are
// read nearly in order. nvfp4 is decoded in registers where the instruction set has kernels for that
// (`PackedKernels`); all other formats are unpacked to float, a tile at a time, and multiplied.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "api.h"
#include "attention/attention.h"
#include "threads.h"

namespace halfbyte {
namespace {

constexpr int kMaxDecodeQueries = 4;            // max, for any number of heads
constexpr size_t kKeptFloats = 1u << 22;  // max floats of partial results kept between calls
constexpr int64_t kMinWork = 1 << 19;     // min multiplications for a second thread

int queries_of(const Call& call, int seq) {
  return call.query_start_loc[seq + 1] - call.query_start_loc[seq];
}

int first_key(const Call& call, int first_position) {
  return call.window > 0 ? std::max(0, first_position - call.window + 1) : 0;
}

// Number of spans of kSpan tokens; int64, because `tokens` may be near the max int.
int spans_of(int tokens) { return (int)(((int64_t)tokens + kSpan - 1) / kSpan); }

// Max rows of an item: a multiple of the group, so that queries are not split, if one fits.
int block_of_rows(const Batch& batch) {
  return std::min(kMaxRows, std::max(1, kMaxRows / batch.group) * batch.group);
}

// Prefill: blocks of rows, each with all its tokens; the longest first.
void cut_rows(Batch& batch, int seq) {
  const int queries = queries_of(batch.call, seq), rows = queries * batch.group;
  const int first = batch.call.seq_lens[seq] - queries, block = block_of_rows(batch);
  for (int row = (rows - 1) / block * block; row >= 0; row -= block) {
    const int count = std::min(block, rows - row);
    const int end = std::max(0, first + (row + count - 1) / batch.group + 1);
    const int begin = std::min(first_key(batch.call, first + row / batch.group), end);
    const int parts = std::max(1, spans_of(end) - begin / kSpan);
    for (int head = 0; head < batch.layout.kv_heads; head++)
      batch.items.push_back({seq, head, 1, row, count, begin, end, 0, parts, 0, -1});
  }
}

// Decode: the tokens are split as well.
void cut_tokens(Batch& batch, int seq, int max_heads, int64_t& floats) {
  const int kv_heads = batch.layout.kv_heads, block = block_of_rows(batch);
  const int queries = queries_of(batch.call, seq), rows = queries * batch.group;
  const int length = batch.call.seq_lens[seq], first = first_key(batch.call, length - queries);
  const int from = first / kSpan, parts = std::max(1, spans_of(length) - from);
  for (int row = 0; row < rows; row += block) {
    const int count = std::min(block, rows - row);
    const int heads = std::min({max_heads, kv_heads, std::max(1, kMaxRows / count)});
    const int64_t head_floats = (int64_t)parts * count * batch.width;
    const int counter = (int)batch.counters.size();
    for (int part = 0; part < parts; part++) {
      const int begin = std::min(length, std::max(first, (from + part) * kSpan));
      const int end = (int)std::min<int64_t>(length, ((int64_t)from + part + 1) * kSpan);
      for (int head = 0; head < kv_heads; head += heads)
        batch.items.push_back({seq, head, std::min(heads, kv_heads - head), row, count, begin, end,
                               part, parts, floats + head * head_floats,
                               parts == 1 ? -1 : counter + head / heads});
    }
    if (parts == 1) continue;
    floats += kv_heads * head_floats;
    batch.counters.insert(batch.counters.end(), (kv_heads + heads - 1) / heads, parts);
  }
}

// KV heads per item: as many as leave 16 items per thread. Results do not depend on it.
int heads_per_item(const Batch& batch) {
  const Call& call = batch.call;
  int64_t parts = 0;
  for (int seq = 0; seq < call.num_seqs; seq++) parts += spans_of(call.seq_lens[seq]);
  int heads = batch.layout.kv_heads;
  while (heads > 1 && parts * (batch.layout.kv_heads / heads) < 16 * call.threads)
    heads = (heads + 1) / 2;
  return heads;
}

void cut(Batch& batch) {
  const Call& call = batch.call;
  const int heads = heads_per_item(batch);
  int64_t floats = 0;
  const auto is_decode = [&](int seq) {
    const int queries = queries_of(call, seq);
    return queries * batch.group <= kMaxRows || queries <= kMaxDecodeQueries;
  };
  for (int seq = 0; seq < call.num_seqs; seq++)
    if (!is_decode(seq)) cut_rows(batch, seq);
  for (int seq = 0; seq < call.num_seqs; seq++)
    if (is_decode(seq)) cut_tokens(batch, seq, heads, floats);
  if (batch.parts.size() < (size_t)floats) batch.parts.resize((size_t)floats);
}

int threads_for(const Batch& batch) {
  const Layout& layout = batch.layout;
  int64_t pairs = 0;
  for (const Item& item : batch.items)
    pairs += (int64_t)item.heads * item.rows * (item.end - item.begin);
  return pairs * (layout.head_size + layout.head_size_v) < kMinWork ? 1 : batch.call.threads;
}

}  // namespace
}  // namespace halfbyte

HALFBYTE_API void halfbyte_attention(const void* layout, const void* call) {
  using namespace halfbyte;
  thread_local std::vector<Item> items;
  thread_local std::vector<float> parts;
  thread_local std::vector<int> counters;
  items.clear();
  counters.clear();
  const Layout& l = *(const Layout*)layout;
  const Call& c = *(const Call*)call;
  const int width = std::max(sum_size(l.head_size_v), padded(l.head_size_v)) + 2;
  static std::atomic<uint64_t> calls{0};
  Batch batch{l, c, kernels(), c.heads / l.kv_heads, width, items, parts, counters, ++calls};
  cut(batch);
  parallel_for((int)items.size(), threads_for(batch), run_item, &batch);
  if (parts.size() > kKeptFloats) std::vector<float>().swap(parts);
}
