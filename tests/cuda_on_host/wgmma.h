// C++ for SM90's matmuls, for build.py: `wgmma` with A in registers and B in shared memory,
// and `stmatrix`. It runs warp by warp: it is not checked that the four warps of a warpgroup arrive
// together, with the same B.
//
// At random, a matmul reads B when it is issued or when it is waited for: so both B that has not arrived yet
// and B that is overwritten too early show. Until the wait, its sums are NaN, and A must not change.

#pragma once
#include "ptx.h"

namespace cuda_on_host {

// The matrix [16, columns] of a descriptor: 8 x 8 matrices of 128 bytes, a row of 16 bytes per
// column, with strides along k and along columns; or, with the 128-byte swizzle, 8 columns of 128
// bytes each, with the stride to the next 8. `by_rows`, always with that swizzle: 8 rows of 64 columns each, 128 bytes,
// with strides to the next 8 rows and to the next 64 columns.
inline unsigned operand_b(unsigned long long descriptor, int k, int column, bool by_rows) {
  const auto field = [=](int shift) { return (unsigned)(descriptor >> shift & 0x3FFF) * 16; };
  if (by_rows) {
    if (descriptor >> 62 != 1) refuse("wgmma of rows with another swizzle");
    const unsigned place = field(0) + k / 8 * field(32) + column / 64 * field(16) + k % 8 * 128 + column % 64 * 2;
    return load<unsigned short>(place ^ place / 128 % 8 * 16);
  }
  const unsigned columns = field(0) + column / 8 * field(32);
  if (descriptor >> 62 == 0)
    return load<unsigned short>(columns + k / 8 * field(16) + column % 8 * 16 + k % 8 * 2);
  if (descriptor >> 62 != 1) refuse("wgmma of an operand with another swizzle");
  const unsigned place = columns + column % 8 * 128 + k * 2;
  return load<unsigned short>(place ^ place / 128 % 8 * 16);
}

inline float of_16_bits(unsigned x, bool is_bfloat16) {
  return is_bfloat16 ? of_bfloat16(x) : of_float16(x);
}

// A lane's sums are those of rows g and g + 8 of its warp's 16 and columns 8 i + 2 c, 8 i + 2 c + 1, where g is
// lane / 4 and c lane % 4.
inline std::vector<float> products(const Matmul& x) {
  std::vector<float> y(x.columns / 2);
  for (unsigned i = 0; i < y.size(); i++) {
    const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; k++)
      sum += (double)x.rows[i / 2 % 2][k] * of_16_bits(operand_b(x.b, k, column, x.by_rows), x.is_bfloat16);
    y[i] = sum;
  }
  return y;
}

struct LaneOperands {
  unsigned words[4];
  unsigned long long b;
};

// d = a b, or d += a b, in halves or in bfloat16.
inline void wgmma(int columns, float* d, const unsigned* a, unsigned long long b, bool add,
                  bool is_bfloat16 = false, bool by_rows = false, int line = __builtin_LINE()) {
  LaneOperands mine{{a[0], a[1], a[2], a[3]}, b};
  bring(mine, line);
  Matmul x{d,       a,   {a[0], a[1], a[2], a[3]}, {}, b,
           columns, add, is_bfloat16,              {}, this_thread().matmul_groups, by_rows};
  const int lane = threadIdx.x % WARP;
  for (int part = 0; part < 4; part++) {
    const LaneOperands& other = *(const LaneOperands*)brought_by(lane / 4 * 4 + part);
    if (other.b != b) fail("block %u, thread %u: lanes have several B", blockIdx.x, threadIdx.x);
    for (int i = 0; i < 4; i++)
      for (int half = 0; half < 2; half++)
        x.rows[i % 2][i / 2 * 8 + 2 * part + half] =
            of_16_bits(other.words[i] >> 16 * half & 0xFFFF, is_bfloat16);
  }
  if (next_random() & 1) x.product = products(x);
  Thread& thread = this_thread();
  if (!thread.sums.count(d)) {
    thread.sums[d] = {d, d + columns / 2};
    std::fill(d, d + columns / 2, NAN);
  }
  thread.matmuls.push_back(std::move(x));
}

inline void commit_matmuls() { this_thread().matmul_groups++; }

// Waits until at most the last `left` groups are pending. A warp's lanes do so together, at random late.
inline void wait_for_matmuls(int left, int line = __builtin_LINE()) {
  bring(next_random() % 64 ? 0 : 40, line);
  for (int turns = *(const int*)brought_by(0); turns > 0; turns--) stop(NOWHERE, line);
  Thread& thread = this_thread();
  auto x = thread.matmuls.begin();
  for (; x != thread.matmuls.end() && x->group < thread.matmul_groups - left; x++) {
    if (memcmp(x->a, x->words, sizeof x->words))
      fail("block %u, thread %u: A changes under a matmul", blockIdx.x, threadIdx.x);
    const std::vector<float> product = x->product.empty() ? products(*x) : x->product;
    std::vector<float>& sums = thread.sums[x->d];
    for (unsigned i = 0; i < sums.size(); i++) sums[i] = x->add ? sums[i] + product[i] : product[i];
  }
  thread.matmuls.erase(thread.matmuls.begin(), x);
  for (auto done = thread.sums.begin(); done != thread.sums.end();) {
    const auto& [d, sums] = *done;
    bool under_way = false;
    for (const Matmul& other : thread.matmuls) under_way |= other.d == d;
    if (!under_way) std::copy(sums.begin(), sums.end(), d);
    done = under_way ? std::next(done) : thread.sums.erase(done);
  }
}

// Stores four 8 x 8 matrices of halves, transposed: a lane has rows 2 c and 2 c + 1 of column g of each, and gives
// the address of row lane % 8 of matrix lane / 8.
struct Columns4 {
  unsigned words[4];
};

inline void store_transposed_matrices(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d,
                                      int line = __builtin_LINE()) {
  bring(Columns4{{a, b, c, d}}, line);
  const int lane = threadIdx.x % WARP, row = lane % 8;
  unsigned short halves[8];
  for (int column = 0; column < 8; column++) {
    const Columns4& other = *(const Columns4*)brought_by(column * 4 + row / 2);
    halves[column] = other.words[lane / 8] >> 16 * (row % 2);
  }
  memcpy(at(address, 16), halves, 16);
}

}  // namespace cuda_on_host
