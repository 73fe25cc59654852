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

// Loads rows pairs[0] / top_k, ... of x; called by all threads, before a barrier. `top_k` is 1 if x has a row per pair.
__device__ __forceinline__ void load_tokens(u8* to, const u16* x, const int* pairs, int count, int top_k) {
  const int total = count * X_OCTETS;
#if SINGLE
  if (threadIdx.x < 12) ((uint4*)to)[X_OCTETS + threadIdx.x] = make_uint4(0, 0, 0, 0);
#endif
  for (int first = threadIdx.x; first < total; first += THREADS * X_LOADS) {
    uint4 v[X_LOADS];
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
      const int at = first + i * THREADS, column = at / X_OCTETS, octet = at % X_OCTETS;
      v[i] = make_uint4(0, 0, 0, 0);
      if (at < total && octet * 8 < K) v[i] = __ldcg((const uint4*)(x + (u64)(pairs[column] / top_k) * K + octet * 8));
    }
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
      const int at = first + i * THREADS;
      if (at >= total) break;
#if SINGLE
      v[i].x = multiply2(v[i].x, SINGLE_FACTOR), v[i].y = multiply2(v[i].y, SINGLE_FACTOR);
      v[i].z = multiply2(v[i].z, SINGLE_FACTOR), v[i].w = multiply2(v[i].w, SINGLE_FACTOR);
#endif
      *(uint4*)(to + at / X_OCTETS * X_ROW_BYTES + place_of(at % X_OCTETS)) = v[i];
    }
  }
}
