// The tokens of an entry in shared memory, as operand B wants them: columns of x.
//
// A row has K padded to PART_K, with zeros. Eight k, a chunk of 16 bytes, are in the order 0 4 1 5 2 6 3 7 (values.cuh).
// Lane t of four reads chunks 4 t + j of each 128 k, j = 0 .. 3 (k = 32 t + 8 j .. + 7). They are stored as chunks
// 4 j + t, so that the four lanes of a column read 64 consecutive bytes. Rows are 64 bytes longer than a multiple of
// 128. So there are no bank conflicts.
//
// The macros are those of experts.cu.

#pragma once
#include "moe/cuda/routing.cuh"

#define X_CHUNKS (PARTS_OF_K * PART_K / 8)  // of 16 bytes, in a row
#define X_ROW_BYTES (X_CHUNKS * 16 + 64)
#define X_LOADS 4  // in flight, per thread

// Copies the tokens of the entry at hand; called by all threads, between barriers. `top_k` is 1 if x has a row per pair.
__device__ __forceinline__ void load_tokens(u8* to, const u16* x, const Routing& routing, int top_k) {
  const int total = *routing.num_own * X_CHUNKS;
  for (int first = threadIdx.x; first < total; first += THREADS * X_LOADS) {
    uint4 v[X_LOADS];
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
      const int at = first + i * THREADS, column = at / X_CHUNKS, chunk = at % X_CHUNKS;
      v[i] = make_uint4(0, 0, 0, 0);
      // Not through L1: the previous kernel may have written x while this one had begun.
      if (at < total && chunk * 8 < K)
        v[i] = __ldcg((const uint4*)(x + (u64)(routing.own_pairs[column] / top_k) * K + chunk * 8));
    }
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
      const int at = first + i * THREADS, column = at / X_CHUNKS, chunk = at % X_CHUNKS;
      if (at >= total) break;
      const int place = chunk / 16 * 16 + chunk % 4 * 4 + chunk % 16 / 4;
      *(uint4*)(to + column * X_ROW_BYTES + place * 16) =
          make_uint4(__byte_perm(v[i].x, v[i].z, 0x5410), __byte_perm(v[i].x, v[i].z, 0x7632),
                     __byte_perm(v[i].y, v[i].w, 0x5410), __byte_perm(v[i].y, v[i].w, 0x7632));
    }
  }
}
