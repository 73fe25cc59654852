// C++ for inline assembly, for build.py: shared memory by its 32-bit addresses,
// copies into it, barriers in it, matrices, halves.
//
// A copy overwrites its target with garbage at once, and arrives when its thread waits for it, or, if a
// barrier counts it, at any time before its phase ends: so both a missing wait and a copy
// that starts too early show. Until a thread has waited for its copy, no thread may touch the
// target. Fences do nothing: writes are visible to all threads at once.

#pragma once
#include "builtins.h"

namespace cuda_on_host {

// Ends the kernel with a message, like `refuse`.
template <class... Arguments>
void fail(const char* format, Arguments... arguments) {
  say(format, arguments...);
  stop(AT_END, 0);
}

inline unsigned to_shared(const void* pointer) {
  const size_t offset = (const unsigned char*)pointer - cta->shared;
  if (offset >= shared_bytes) refuse("addresses of what is not in dynamic shared memory");
  return shared_begin + offset;
}

// Address of `bytes` bytes of a CTA's shared memory; fails if they are out of bounds.
inline unsigned char* at(Cta& cta, unsigned address, unsigned bytes, unsigned alignment) {
  const unsigned offset = address - shared_begin;
  if (address % alignment || offset >= shared_bytes || bytes > shared_bytes - offset)
    fail("block %u, thread %u: %u bytes at offset %d of %u bytes of shared memory", blockIdx.x,
         threadIdx.x, bytes, (int)offset, shared_bytes);
  return cta.shared + offset;
}
// The same in this CTA; fails if a thread's copy to these bytes is pending.
inline unsigned char* at(unsigned address, unsigned bytes) {
  unsigned char* x = at(*cta, address, bytes, bytes);
  for (unsigned i = 0, first = (address - shared_begin) / 4; i < (bytes + 3) / 4; i++)
    if (cta->in_flight[first + i])
      fail("block %u, thread %u: a copy to offset %d of shared memory is pending", blockIdx.x,
           threadIdx.x, (int)(address - shared_begin));
  return x;
}

inline void mark_in_flight(unsigned address, unsigned bytes, bool pending) {
  for (unsigned i = 0; i < bytes / 4; i++) cta->in_flight[(address - shared_begin) / 4 + i] = pending;
}

template <class T>
T load(unsigned address) {
  T x;
  memcpy(&x, at(address, sizeof x), sizeof x);
  return x;
}

inline void unpack(uint2 all, unsigned& x, unsigned& y) { x = all.x, y = all.y; }
inline void unpack(float2 all, float& x, float& y) { x = all.x, y = all.y; }
inline void unpack(float4 all, float& x, float& y, float& z, float& w) {
  x = all.x, y = all.y, z = all.z, w = all.w;
}
inline void unpack(uint4 all, unsigned& x, unsigned& y, unsigned& z, unsigned& w) {
  x = all.x, y = all.y, z = all.z, w = all.w;
}

template <class T>
void store(unsigned address, T x) {
  memcpy(at(address, sizeof x), &x, sizeof x);
}

// A copy of `bytes` bytes, of which the first `there` come from memory and the rest are zeros.
inline void copy(unsigned to, const void* from, unsigned bytes, unsigned there) {
  if ((size_t)from % bytes || there > bytes) fail("a copy of %u bytes from %p", there, from);
  memset(at(to, bytes), 0xFF, bytes);
  mark_in_flight(to, bytes, true);
  this_thread().copies.push_back({to, found_at(from), bytes, there, this_thread().groups});
}

inline void commit_group() { this_thread().groups++; }

// Waits until at most the last `left` groups are pending.
inline void wait_group(int left) {
  Thread& thread = this_thread();
  auto copy = thread.copies.begin();
  for (; copy != thread.copies.end() && copy->group < thread.groups - left; copy++) {
    mark_in_flight(copy->to, copy->bytes, false);
    unsigned char* to = at(copy->to, copy->bytes);
    memset(to, 0, copy->bytes);
    memcpy(to, copy->from, copy->there);
  }
  thread.copies.erase(thread.copies.begin(), copy);
}

inline void wait_all() {
  commit_group();
  wait_group(0);
}

// Written to the memory of barriers, so that other writes there show.
constexpr unsigned char BARRIER_BYTE = 0xBB;

inline void barrier_fails(unsigned address, const char* why) {
  fail("block %u, thread %u: the barrier at offset %d %s", blockIdx.x, threadIdx.x,
       (int)(address - shared_begin), why);
}

inline void init_barrier(unsigned address, int count) {
  memset(at(address, 8), BARRIER_BYTE, 8);
  if (!cta->barriers.insert({address, {count, count, 0, 0}}).second)
    barrier_fails(address, "is made twice");
}

inline Barrier& barrier_at(Cta& cta, unsigned address) {
  const unsigned char* memory = at(cta, address, 8, 8);
  const auto found = cta.barriers.find(address);
  if (found == cta.barriers.end()) barrier_fails(address, "is not there yet");
  for (int i = 0; i < 8; i++)
    if (memory[i] != BARRIER_BYTE) barrier_fails(address, "was overwritten");
  return found->second;
}

inline void arrive_and_expect(Cta& cta, unsigned address, int bytes) {
  Barrier& barrier = barrier_at(cta, address);
  barrier.bytes += bytes;
  if (--barrier.pending < 0) barrier_fails(address, "has an arrival too many");
  if (barrier.bytes > MAX_BARRIER_BYTES) barrier_fails(address, "cannot count as many bytes");
  barrier.end_phase();
}

// Whether the phase of this parity has ended. If not, other threads get a turn.
inline bool try_wait(unsigned address, unsigned parity, int line = __builtin_LINE()) {
  const Barrier& barrier = barrier_at(*cta, address);
  if (barrier.phase % 2 != parity) return true;
  wait_while_it_is(barrier.phase, line);
  return false;
}

// The elected lane is random, but always the same in a launch.
inline bool elect(int line = __builtin_LINE()) {
  bring(0, line);
  return threadIdx.x % WARP == elected;
}

inline void arrive_at_cluster() {
  Thread& thread = this_thread();
  if (thread.has_to_wait) fail("block %u: arrives twice at the cluster's barrier", blockIdx.x);
  thread.has_to_wait = true;
  thread.arrivals++;
}

inline void wait_for_cluster(int line = __builtin_LINE()) {
  Thread& thread = this_thread();
  if (!thread.has_to_wait) fail("block %u: has not arrived at the cluster's barrier", blockIdx.x);
  const int& phase = cluster_phases[own_cluster()];
  while (thread.arrivals > phase) wait_while_it_is(phase, line);
  thread.has_to_wait = false;
}

// st.async: the value is read at once and arrives later.
inline void send(Cta& to, unsigned address, unsigned alignment, std::vector<unsigned char> bytes,
                 unsigned barrier) {
  if (to.ended) fail("block %u sends to a CTA that has ended", blockIdx.x);
  unsigned char* const place = at(to, address, bytes.size(), alignment);
  memset(place, 0xFF, bytes.size());
  deliveries.push_back({&to, place, std::move(bytes), &barrier_at(to, barrier)});
}

// Arrives at a barrier when this thread's copies have ended: it counts their bytes.
inline void arrive_after_copies(unsigned barrier) {
  unsigned expected = 0;
  for (const Copy& copy : this_thread().copies) {
    mark_in_flight(copy.to, copy.bytes, false);
    std::vector<unsigned char> bytes(copy.bytes);
    memcpy(bytes.data(), copy.from, copy.there);
    send(*cta, copy.to, copy.bytes, std::move(bytes), barrier);
    expected += copy.bytes;
  }
  this_thread().copies.clear();
  arrive_and_expect(*cta, barrier, expected);
}

// A tensor map here: `BoxMap` of build.py.
struct BoxMap {
  unsigned char* memory;
  unsigned long long sizes[4], strides[3];  // values; bytes
  unsigned box[4];
  unsigned value_bytes;
};

inline void check_map(const BoxMap& map) {
  if (map.box[1] > 256 || map.box[2] > 256 || (size_t)map.memory % 16 || map.strides[0] % 16)
    fail("a tensor map that the driver refuses");
}

// Consecutive boxes of rows of 32, 64 or 128 bytes; beyond the tensor
// are zeros. Boxes of more than one row are swizzled in chunks of 16 bytes.
inline void copy_boxes(unsigned to, const void* tensor_map, int value, int first_row, int first_box,
                       unsigned barrier) {
  const BoxMap& map = *(const BoxMap*)tensor_map;
  const unsigned rows = map.box[1], boxes = map.box[2], width = map.box[0] * map.value_bytes;
  if (value || map.sizes[0] != map.box[0]) refuse("boxes of parts of rows");
  if (width != 32 && width != 64 && width != 128) refuse("boxes that no swizzle is for");
  check_map(map);
  std::vector<unsigned char> bytes(boxes * rows * width);
  for (unsigned i = 0; i < bytes.size(); i += 16) {
    const unsigned row = first_row + i / width % rows, box = first_box + i / width / rows;
    const unsigned turn = rows > 1 ? (to + i) / 128 % (width / 16) * 16 : 0;
    if (row < map.sizes[1] && box < map.sizes[2])
      memcpy(&bytes[i ^ turn],
             map.memory + row * map.strides[0] + box * map.strides[1] + i % width, 16);
  }
  send(*cta, to, 128, std::move(bytes), barrier);
}

inline float flush(float x) { return std::fabs(x) < 1.17549435e-38f ? 0.0f : x; }

// Rounds to nearest even. `smallest` is the exponent of the smallest normal value.
inline unsigned narrow(float x, int mantissa_bits, int smallest) {
  if (std::isnan(x)) return 0x7FFF;
  const unsigned infinity = (3 - 2 * smallest) << mantissa_bits;
  const int exponent = max(std::ilogb(x), smallest);  // ilogb(0) is far below
  const float in_steps = std::ldexp(std::fabs(x), mantissa_bits - exponent);
  // Added, so that a carry out of the mantissa raises the exponent, and so does a leading one.
  unsigned rounded = ((exponent - smallest) << mantissa_bits) + (unsigned)std::nearbyint(in_steps);
  if (std::isinf(x) || exponent > 1 - smallest) rounded = infinity;
  return (std::signbit(x) ? 0x8000u : 0u) | rounded;
}
inline unsigned to_float16(float x) { return narrow(x, 10, -14); }
inline unsigned to_bfloat16(float x) { return narrow(x, 7, -126); }

inline float of_bfloat16(unsigned x) { return __int_as_float(x << 16); }
inline float of_float16(unsigned x) {
  const bool finite = (x & 0x7C00) != 0x7C00;
  const float magnitude = finite ? __int_as_float((x & 0x7FFF) << 13) * 0x1p112f
                                 : __int_as_float(0x7F800000 | (x & 0x3FF) << 13);
  return x & 0x8000 ? -magnitude : magnitude;
}

// a * b + c, of both halves. With c = -0 it is a * b, which is exact before it is rounded.
inline unsigned fma_bfloat16x2(unsigned a, unsigned b, unsigned c) {
  const auto fma = [](unsigned x, unsigned y, unsigned z) {
    return to_bfloat16(std::fma(of_bfloat16(x), of_bfloat16(y), of_bfloat16(z)));
  };
  return fma(a >> 16, b >> 16, c >> 16) << 16 | fma(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF);
}
inline unsigned multiply_float16x2(unsigned a, unsigned b) {
  const auto multiply = [](unsigned x, unsigned y) {
    return to_float16(of_float16(x & 0xFFFF) * of_float16(y & 0xFFFF));
  };
  return multiply(a >> 16, b >> 16) << 16 | multiply(a, b);
}

// The larger of both pairs; a number, if there is one.
inline unsigned max_float16x2(unsigned a, unsigned b) {
  const auto larger = [](unsigned x, unsigned y) {
    return to_float16(std::fmax(of_float16(x & 0xFFFF), of_float16(y & 0xFFFF)));
  };
  return larger(a >> 16, b >> 16) << 16 | larger(a, b);
}

// The two E4M3 values in the low 16 bits, which a half holds exactly.
inline unsigned of_e4m3x2(unsigned x) {
  const auto convert = [](unsigned byte) {
    // As the bits of a half they are the value times 2^-8, but for NaN.
    const float magnitude = (byte & 0x7F) == 0x7F ? NAN : of_float16((byte & 0x7F) << 7) * 256;
    return to_float16(byte & 0x80 ? -magnitude : magnitude);
  };
  return convert(x >> 8) << 16 | convert(x);
}

// The nearest E4M3 byte, ties to even; larger values saturate.
inline unsigned to_e4m3(float x) {
  if (std::isnan(x)) return 0x7F;
  const double size = std::fmin(std::fabs(x), 448.0);
  const double step = std::ldexp(1.0, size < 0x1p-6 ? -9 : std::ilogb(size) - 3);
  const float rounded = std::nearbyint(size / step) * step;
  return __float_as_uint(rounded * 0x1p-120f) >> 20 | (std::signbit(x) ? 0x80 : 0);
}

// PTX allows an error of 1 ulp: returns one of the two floats around the exact value, at random.
inline float approximate_inverse(float x) {
  const double truth = 1 / (double)flush(x);
  const float near = truth, other = std::nextafter(near, near < truth ? INFINITY : -INFINITY);
  return flush(near == truth || next_random() & 1 ? near : other);
}

// Four of 8 x 8 halves; lane i gives the address of row i % 8 of matrix i / 8.
inline void load_matrices(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned address,
                          int line = __builtin_LINE()) {
  const uint4 row = load<uint4>(address);
  bring(row, line);
  unsigned* const words[4] = {&a, &b, &c, &d};
  const int lane = threadIdx.x % WARP;
  for (int i = 0; i < 4; i++)
    memcpy(words[i], (const unsigned*)brought_by(8 * i + lane / 4) + lane % 4, 4);
}

// The same, each of them transposed: a lane has two rows' halves of one column.
inline void load_transposed_matrices(unsigned& a, unsigned& b, unsigned& c, unsigned& d,
                                     unsigned address, int line = __builtin_LINE()) {
  const uint4 row = load<uint4>(address);
  bring(row, line);
  unsigned* const words[4] = {&a, &b, &c, &d};
  const int lane = threadIdx.x % WARP;
  for (int i = 0; i < 4; i++) {
    const auto half = [=](int row) {
      return (unsigned)((const unsigned short*)brought_by(8 * i + row))[lane / 4];
    };
    *words[i] = half(lane % 4 * 2 + 1) << 16 | half(lane % 4 * 2);
  }
}

// Of 8 x 8 halves: lane i brings two of row i / 4, and gets two of column i / 4.
inline unsigned transpose(unsigned pair, int line = __builtin_LINE()) {
  bring(pair, line);
  const int lane = threadIdx.x % WARP, column = lane / 4;
  const auto half = [=](int row) {
    return (unsigned)((const unsigned short*)brought_by(row * 4 + column / 2))[column % 2];
  };
  return half(lane % 4 * 2 + 1) << 16 | half(lane % 4 * 2);
}

// A lane's part of the operands of m16n8k16: rows g and g + 8 of A and column g of B, where g is
// lane / 4; k = 2 (lane % 4) + {0, 1, 8, 9}.
struct Operands {
  float a[2][4], b[4];
};

inline void multiply_matrices(const char* type, float& c0, float& c1, float& c2, float& c3,
                              unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                              unsigned b1, int line = __builtin_LINE()) {
  const bool is_bfloat16 = strstr(type, "m16n8k16.row.col.f32.bf16.bf16.f32");
  if (!is_bfloat16 && !strstr(type, "m16n8k16.row.col.f32.f16.f16.f32")) refuse(type);
  Operands mine;
  const auto unpack = [=](float* to, unsigned pair) {
    to[0] = is_bfloat16 ? of_bfloat16(pair & 0xFFFF) : of_float16(pair & 0xFFFF);
    to[1] = is_bfloat16 ? of_bfloat16(pair >> 16) : of_float16(pair >> 16);
  };
  unpack(mine.a[0], a0), unpack(mine.a[0] + 2, a2);
  unpack(mine.a[1], a1), unpack(mine.a[1] + 2, a3);
  unpack(mine.b, b0), unpack(mine.b + 2, b1);
  bring(mine, line);
  const int lane = threadIdx.x % WARP;
  float* const sums[2][2] = {{&c0, &c1}, {&c2, &c3}};
  for (int half = 0; half < 2; half++)
    for (int column = 0; column < 2; column++) {
      double sum = *sums[half][column];
      for (int part = 0; part < 4; part++) {
        const Operands* a = (const Operands*)brought_by(lane / 4 * 4 + part);
        const Operands* b = (const Operands*)brought_by((lane % 4 * 2 + column) * 4 + part);
        for (int i = 0; i < 4; i++) sum += (double)a->a[half][i] * b->b[i];
      }
      *sums[half][column] = sum;
    }
}

}  // namespace cuda_on_host

inline size_t __cvta_generic_to_shared(const void* pointer) {
  return cuda_on_host::to_shared(pointer);
}
inline void* __cvta_global_to_generic(size_t address) { return (void*)address; }
