// Writes K and V of tokens to their slots, in any format and layout.

#include <algorithm>
#include <cstring>
#include <vector>

#include "api.h"
#include "store/encode.h"
#include "level.h"
#include "threads.h"
#include "transform.h"

namespace halfbyte {
namespace {

constexpr int64_t kItemValues = 16384;  // min values per item, about

// The same fields as `_Input` in kvcache/store/cpu.py. Strides are in elements.
struct Input {
  const uint8_t* x;  // [tokens, kv_heads, size]
  int64_t token, head, element;
  int32_t format;
  float global_scale;
};

// The same fields as `_Call` in kvcache/store/cpu.py.
struct Call {
  uint8_t* pages;
  const int64_t* slots;
  int64_t slot_stride, num_slots, page_stride, capacity;
  int32_t threads, unused;
  const Transform* transform;  // or null
  const int64_t* positions;    // of the tokens in their sequences, for a transform
  int64_t position_stride;
  Input key, value;
};

struct Side {
  const Input& input;
  Region data, scale;
  int format, size, sm100_quarter;
};

struct Batch {
  const Layout& layout;
  const Call& call;
  const Kernels& kernels;
  Encode encode;
  EncodeWeighted encode_weighted;
  int tokens_per_item;
};

Encode best_encode() {
#if HALFBYTE_X86
  if (current_level() >= kAvx512) return encode_avx512;
  if (current_level() >= kAvx2) return encode_avx2;
#endif
  return encode_portable;
}

EncodeWeighted best_encode_weighted() {
#if HALFBYTE_X86
  if (current_level() >= kAvx512) return encode_weighted_avx512;
  if (current_level() >= kAvx2) return encode_weighted_avx2;
#endif
  return encode_weighted_portable;
}

// Stores a head's K or V rounded by weighted error, if the recipe does so; else returns false.
bool encode_by_weights(const Batch& batch, const Side& side, bool is_key, int head, float* x,
                       uint8_t* data, uint8_t* scales) {
  const Transform* t = batch.call.transform;
  if (!t || !is_nvfp4(side.format)) return false;
  const float* weights = is_key ? t->k_weights : t->v_weights;
  const float* feedback = is_key ? t->feedback : nullptr;
  if (!weights && !feedback) return false;
  const int64_t size = side.size;
  if (weights) weights += head * size;
  if (feedback) feedback += head * size * size;
  batch.encode_weighted(side.format == kNvfp4FourOverSix, x, side.size, side.input.global_scale,
                        weights, feedback, data, scales);
  return true;
}

// A contiguous row of values; copied to `row` if it is not contiguous.
const uint8_t* contiguous(const uint8_t* first, int64_t stride, int bytes, int size, uint8_t* row) {
  if (stride == 1) return first;
  for (int d = 0; d < size; d++) std::memcpy(row + d * bytes, first + d * stride * bytes, bytes);
  return row;
}

// A row of a token's K or V, at `bytes` if its values do not lie side by side.
const uint8_t* row_of(const Side& side, int64_t token, int head, std::vector<uint8_t>& bytes) {
  const Input& input = side.input;
  const int element = data_bytes(input.format, 1);
  bytes.resize((size_t)side.size * 4 + 64);
  return contiguous(input.x + (token * input.token + head * input.head) * element, input.element,
                    element, side.size, bytes.data());
}

// Transforms K (centred, rotated). At position 0, returns the index of a known first token that K and V
// match, or -1.
int transform_key(const Batch& batch, const Side& value, int64_t token, int head, float* key,
                  std::vector<uint8_t>& bytes) {
  const Transform& t = *batch.call.transform;
  const Layout& l = batch.layout;
  const int64_t position = batch.call.positions[token * batch.call.position_stride];
  thread_local std::vector<float> other;
  other.resize(std::max(padded(l.head_size), padded(l.head_size_v)));
  if (position == 0 && t.first_tokens > 0) {
    batch.kernels.unpack(value.input.format, row_of(value, token, head, bytes), nullptr,
                         l.head_size_v, other.data());
    const int first = match_first(t, key, other.data(), head, l.kv_heads, l.head_size, l.head_size_v);
    if (first >= 0) return first;
  }
  if (t.mean) {
    segment_mean(t, position, head, l.head_size, other.data());
    for (int d = 0; d < l.head_size; d++) key[d] -= other[d];
  }
  if (t.rotate) hadamard(key, l.head_size);
  return -1;
}

void store_row(const Batch& batch, const Side& side, const Side* value, int64_t token, int head,
               uint8_t* page, int in_page, std::vector<uint8_t>& bytes,
               std::vector<float>& floats) {
  const Input& input = side.input;
  floats.resize(padded(side.size));
  const uint8_t* x = row_of(side, token, head, bytes);
  uint8_t* data = page + side.data.offset + in_page * side.data.token + head * side.data.head;
  if (input.format == side.format) {
    std::memcpy(data, x, (size_t)data_bytes(input.format, side.size));
    return;
  }
  batch.kernels.unpack(input.format, x, nullptr, side.size, floats.data());
  uint8_t* first = page + side.scale.offset + head * side.scale.head;
  if (value) {  // K with a transform
    const int number = transform_key(batch, *value, token, head, floats.data(), bytes);
    if (number >= 0) {
      uint8_t* scales = first + in_page * side.scale.token;
      std::memset(data, 0, (size_t)data_bytes(side.format, side.size));
      std::memset(scales, 0, (size_t)side.size / scale_block(side.format));
      data[0] = (uint8_t)number;
      scales[0] = kFirstTokenMark;
      return;
    }
  }
  const bool linear = side.sm100_quarter == 0;
  uint8_t* scales = linear ? first + in_page * side.scale.token : bytes.data();
  if (!encode_by_weights(batch, side, value != nullptr, head, floats.data(), data, scales))
    batch.encode(side.format, floats.data(), side.size, input.global_scale, data, scales);
  if (linear) return;
  // Scale s lies at row 4 (t / 4) + s / quarter and column 4 (s % quarter) + t % 4.
  for (int s = 0; s < 4 * side.sm100_quarter; s++)
    first[(in_page / 4 * 4 + s / side.sm100_quarter) * side.scale.token +
          4 * (s % side.sm100_quarter) + in_page % 4] = scales[s];
}

void run_item(void* context, int index) {
  const Batch& batch = *(const Batch*)context;
  const Layout& l = batch.layout;
  const Call& call = batch.call;
  thread_local std::vector<uint8_t> bytes;
  thread_local std::vector<float> floats;
  const Side sides[] = {
      {call.key, l.k_data, l.k_scale, l.k_format, l.head_size, 0},
      {call.value, l.v_data, l.v_scale, l.v_format, l.head_size_v, l.sm100_quarter}};
  const int64_t first = (int64_t)index * batch.tokens_per_item;
  const int64_t last = std::min(call.num_slots, first + batch.tokens_per_item);
  for (int64_t token = first; token < last; token++) {
    const int64_t slot = call.slots[token * call.slot_stride];
    if (slot < 0) continue;
    uint8_t* page = call.pages + slot / l.block_size * call.page_stride;
    for (const Side& side : sides) {
      const Side* value = call.transform && &side == sides ? sides + 1 : nullptr;
      for (int head = 0; head < l.kv_heads; head++)
        store_row(batch, side, value, token, head, page, (int)(slot % l.block_size), bytes, floats);
    }
  }
}

}  // namespace
}  // namespace halfbyte

// The first slot past the last page, before anything is written; -1 if all was stored.
HALFBYTE_API int64_t halfbyte_store(const void* layout, const void* call) {
  using namespace halfbyte;
  const Layout& l = *(const Layout*)layout;
  const Call& c = *(const Call*)call;
  for (int64_t i = 0; i < c.num_slots; i++)
    if (c.slots[i * c.slot_stride] >= c.capacity) return c.slots[i * c.slot_stride];
  const int64_t values = (int64_t)l.kv_heads * (l.head_size + l.head_size_v);
  const int tokens = (int)std::max<int64_t>(1, kItemValues / values);
  Batch batch{l, c, kernels(), best_encode(), best_encode_weighted(), tokens};
  parallel_for((int)((c.num_slots + tokens - 1) / tokens), c.threads, run_item, &batch);
  return -1;
}
