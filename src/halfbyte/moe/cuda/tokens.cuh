// Tokens in shared memory, as operand B wants them: columns of x.
//
// A row has K padded to PART_K, with zeros. Lane c of four reads octets 2 c + j of each 64 k, j = 0, 1 (values.cuh). They
// are stored as octets 4 j + c, so that the four lanes of a column read 64 consecutive bytes. Rows are 64 bytes longer
// than a multiple of 128. So there are no bank conflicts.
//
// The macros are those of experts.cu and token.cu.

#pragma once
#include "kernels/runtime/copies.cuh"

#define X_OCTETS (PARTS_OF_K * PART_K / 8)  // of 16 bytes, in a row
#if SINGLE
#define X_ROW_BYTES (X_OCTETS * 16 + 192)  // with zeros behind, see single.cuh
#else
#define X_ROW_BYTES (X_OCTETS * 16 + 64)
#endif
#define X_LOADS 4  // in flight, per thread

// The offset of an octet in its row.
__device__ __forceinline__ int place_of(int octet) { return (octet / 8 * 8 + octet % 2 * 4 + octet % 8 / 2) * 16; }

// Starts to copy an octet of a row; beyond K zeros.
__device__ __forceinline__ void copy_octet(u8* to, const u16* row, int octet) {
  const bool exists = PARTS_OF_K * PART_K == K || octet * 8 < K;
  copy16_or_zeros(shared_address(to) + place_of(octet), row + (exists ? octet * 8 : 0), exists);
}

// Starts to copy a row of x; `thread` of THREADS_OF_ROW that do it, which commit and wait as for weights. Not through
// L1: the previous kernel may have written x while this one had begun.
template <int THREADS_OF_ROW>
__device__ __forceinline__ void copy_token(u8* to, const u16* row, int thread) {
  for (int octet = thread; octet < X_OCTETS; octet += THREADS_OF_ROW) copy_octet(to, row, octet);
}

// Octets of tokens between global and shared memory, X_LOADS per thread. `address_of(i)`: of the i-th token.
struct Octets {
  uint4 v[X_LOADS];

  // Loads octets `first`, first + THREADS, ... of all tokens, one token after another.
  template <class AddressOf>
  __device__ __forceinline__ void load(int rows, int first, const AddressOf& address_of) {
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
      const int at = first + i * THREADS, row = at / X_OCTETS, octet = at % X_OCTETS;
      v[i] = make_uint4(0, 0, 0, 0);
      if (row < rows && octet * 8 < K) v[i] = __ldcg((const uint4*)(address_of(row) + octet * 8));
    }
  }

  __device__ __forceinline__ void store(u8* to, int rows, int first) {
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
      const int at = first + i * THREADS, row = at / X_OCTETS;
      if (row >= rows) break;
#if SINGLE
      v[i].x = multiply2(v[i].x, SINGLE_FACTOR), v[i].y = multiply2(v[i].y, SINGLE_FACTOR);
      v[i].z = multiply2(v[i].z, SINGLE_FACTOR), v[i].w = multiply2(v[i].w, SINGLE_FACTOR);
#endif
      *(uint4*)(to + row * X_ROW_BYTES + place_of(at % X_OCTETS)) = v[i];
    }
  }
};

// Loads tokens; called by all threads, before a barrier. With `is_loaded`, `octets` already has those from threadIdx.x
// on.
template <class AddressOf>
__device__ __forceinline__ void load_rows(u8* to, int rows, const AddressOf& address_of, Octets& octets,
                                          bool is_loaded = false) {
#if SINGLE
  for (int i = threadIdx.x; i < rows * 12; i += THREADS)
    *(uint4*)(to + i / 12 * X_ROW_BYTES + (X_OCTETS + i % 12) * 16) = make_uint4(0, 0, 0, 0);
#endif
#pragma unroll 1
  for (int first = threadIdx.x; first < rows * X_OCTETS; first += THREADS * X_LOADS) {
    if (first >= THREADS || !is_loaded) octets.load(rows, first, address_of);
    octets.store(to, rows, first);
  }
}
