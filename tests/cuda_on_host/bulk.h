// SM90 features other than matmuls, for build.py: TMA to both CTAs of a cluster and back to memory, bulk
// copies, barriers of other CTAs and stores to their memory, named barriers, and flags in memory that
// clusters wait for.

#pragma once
#include "wgmma.h"

namespace cuda_on_host {

inline int cluster_rank() { return (cta - ctas) % cluster_size; }

// The same address in another CTA of the cluster. A CTA's shared memory is smaller than 2^24.
inline unsigned map_to_rank(unsigned address, unsigned rank) {
  if (rank >= (unsigned)cluster_size) fail("block %u: no CTA has rank %u", blockIdx.x, rank);
  return address | (rank + 1) << 24;
}

inline Cta& cta_of(unsigned mapped) { return cta_of_rank((mapped >> 24) - 1); }
inline unsigned address_of(unsigned mapped) { return mapped & 0xFFFFFF; }

inline void expect_mapped(unsigned barrier, int bytes) {
  Cta& other = cta_of(barrier);
  if (other.ended) fail("block %u arrives at a barrier of a CTA that has ended", blockIdx.x);
  arrive_and_expect(other, address_of(barrier), bytes);
}
inline void arrive_mapped(unsigned barrier) { expect_mapped(barrier, 0); }

inline void send_floats(unsigned to, float a, float b, float c, float d, unsigned barrier) {
  if (to >> 24 != barrier >> 24) fail("block %u: a barrier counts bytes of another CTA", blockIdx.x);
  const float values[] = {a, b, c, d};
  const unsigned char* const bytes = (const unsigned char*)values;
  send(cta_of(to), address_of(to), 16, {bytes, bytes + sizeof values}, address_of(barrier));
}

inline void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  if (bytes % 16 || (size_t)from % 16) fail("a bulk copy of %u bytes from %p", bytes, from);
  const unsigned char* const first = (const unsigned char*)from;
  send(*cta, to, 16, {first, first + bytes}, barrier);
}

// Bytes of a row of a box: 64 or 128.
inline unsigned box_width(const BoxMap& map) {
  const unsigned width = map.box[0] * map.value_bytes;
  if (width != 64 && width != 128) refuse("boxes of rows that are of neither 64 nor 128 bytes");
  return width;
}

// Chunk `i` of a box: its address in the matrix (null beyond it), and in the box, with the swizzle of its width.
inline unsigned char* chunk_in_matrix(const BoxMap& map, int value, int first_row, unsigned i) {
  const unsigned chunks = box_width(map) / 16;
  const unsigned column = value + i % chunks * 16 / map.value_bytes, row = first_row + i / chunks;
  if (column >= map.sizes[0] || row >= map.sizes[1]) return nullptr;
  return map.memory + row * map.strides[0] + column * map.value_bytes;
}
inline unsigned chunk_in_box(unsigned address, unsigned i, unsigned width) {
  return i * 16 ^ (address + i * 16) / 128 % (width / 16) * 16;
}

// Multicast: a box to the same address in all CTAs of `mask`, counted by their barriers at one address.
inline void copy_box(unsigned to, const void* tensor_map, int value, int first_row, unsigned barrier,
                     unsigned mask) {
  const BoxMap& map = *(const BoxMap*)tensor_map;
  check_map(map);
  if (mask >> cluster_size) fail("block %u: a box for CTAs that are not there", blockIdx.x);
  std::vector<unsigned char> bytes(map.box[1] * box_width(map));
  for (unsigned i = 0; i < bytes.size() / 16; i++)
    if (const unsigned char* from = chunk_in_matrix(map, value, first_row, i))
      memcpy(&bytes[chunk_in_box(to, i, box_width(map))], from, 16);
  for (int rank = 0; rank < cluster_size; rank++)
    if (mask >> rank & 1) send(cta_of_rank(rank), to, 128, bytes, barrier);
}

// A box of four dimensions, to this CTA.
inline void copy_box_4d(unsigned to, const void* tensor_map, int value, int row, int plane, int cube,
                        unsigned barrier) {
  const BoxMap& map = *(const BoxMap*)tensor_map;
  check_map(map);
  if (map.strides[1] % 16 || map.strides[2] % 16) fail("a tensor map that the driver refuses");
  const unsigned width = box_width(map), chunks = width / 16;
  std::vector<unsigned char> bytes(map.box[1] * map.box[2] * map.box[3] * width);
  for (unsigned i = 0; i < bytes.size() / 16; i++) {
    const unsigned column = value + i % chunks * 16 / map.value_bytes, y = row + i / chunks % map.box[1];
    const unsigned z = plane + i / chunks / map.box[1] % map.box[2];
    const unsigned u = cube + i / chunks / map.box[1] / map.box[2];
    if (column < map.sizes[0] && y < map.sizes[1] && z < map.sizes[2] && u < map.sizes[3])
      memcpy(&bytes[chunk_in_box(to, i, width)],
             map.memory + y * map.strides[0] + z * map.strides[1] + u * map.strides[2] + column * map.value_bytes, 16);
  }
  send(*cta, to, 128, std::move(bytes), barrier);
}

// A box from shared memory; at random it is read at once or when it is waited for.
inline void store_box(const void* tensor_map, int value, int first_row, unsigned from) {
  const BoxMap map = *(const BoxMap*)tensor_map;
  check_map(map);
  const unsigned width = box_width(map);
  at(*cta, from, map.box[1] * width, 128);
  const auto store = [=] {
    for (unsigned i = 0; i < map.box[1] * width / 16; i++)
      if (unsigned char* to = chunk_in_matrix(map, value, first_row, i))
        memcpy(to, at(from + chunk_in_box(from, i, width), 16), 16);
  };
  if (next_random() & 1)
    store();
  else
    this_thread().stores.push_back(store);
}

inline void wait_for_stores() {
  for (const auto& store : this_thread().stores) store();
  this_thread().stores.clear();
}

// A named barrier of `threads` threads. A thread that only arrives does not wait; a warp's lanes arrive together.
inline bool meet(int number, int count, bool waits, bool says_so, int line = __builtin_LINE()) {
  if (!waits) stop(AT_WARP, line);
  NamedBarrier& barrier = cta->named[number];
  barrier.any |= says_so;
  if (++barrier.arrived == count) {
    barrier.found = barrier.any;
    barrier.arrived = 0, barrier.any = false;
    barrier.phase++;
  } else if (waits) {
    wait_while_it_is(barrier.phase, line);
  }
  return barrier.found;
}

// Writes a word to shared memory, for other threads to read.
inline unsigned exchange(unsigned address, unsigned value, int line = __builtin_LINE()) {
  may_give_way(line);
  const unsigned before = load<unsigned>(address);
  store(address, value);
  return before;
}

inline void set_flag(unsigned long long* flag, unsigned long long value, int line = __builtin_LINE()) {
  may_give_way(line);
  *flag = value;
}

inline void add_to_flag(unsigned long long* flag, unsigned long long value, int line = __builtin_LINE()) {
  may_give_way(line);
  *flag += value;
}

// Polls a flag in memory. If it has not changed since the last poll, the thread yields until its lower
// half changes.
inline unsigned long long look_at_flag(const unsigned long long* flag, int line = __builtin_LINE()) {
  Thread& thread = this_thread();
  if (thread.flag == flag && thread.seen_flag == *flag) wait_while_it_is(*(const int*)flag, line);
  thread.flag = flag, thread.seen_flag = *flag;
  return *flag;
}

}  // namespace cuda_on_host
