// Types and small functions shared by attention and linear kernels.

#pragma once

typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define LOG2E 1.4426950408889634f
#define NEG_INF (-__int_as_float(0x7f800000))

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ uint4 load16(u32 address) {
  uint4 y;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
               : "r"(address)
               : "memory");
  return y;
}

__device__ __forceinline__ void store16(u32 address, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ __forceinline__ u32 load_shared_word(u32 address) {
  u32 y;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(y) : "r"(address));
  return y;
}

__device__ __forceinline__ void store_float(u32 address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

__device__ __forceinline__ void store_float2(u32 address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void store_float4(u32 address, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

__device__ __forceinline__ float2 load_float2(u32 address) {
  float2 y;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(y.x), "=f"(y.y) : "r"(address) : "memory");
  return y;
}

__device__ __forceinline__ void load4(float* to, const float* from) {
  const float4 x = *(const float4*)from;
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

// Four 8 x 8 matrices of 16-bit values.
__device__ __forceinline__ void ldmatrix4(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void ldmatrix4_trans(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void stmatrix4_trans(u32 address, const u32* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// 1 / sqrt(size), for the sizes that kernels rotate: 64, 128 and 256.
__device__ __forceinline__ constexpr float hadamard_norm(int size) {
  return size == 64 ? 0.125f : size == 256 ? 0.0625f : 0.08838834764831845f;
}

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Transposes 4 x 4 words over four lanes, STRIDE apart: exchanges with the next lane, then with the one after that.
template <int STRIDE>
__device__ __forceinline__ void transpose_words(u32* w) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool is_upper = threadIdx.x & STRIDE * distance;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (j & distance) continue;
      const u32 got = __shfl_xor_sync(~0u, is_upper ? w[j] : w[j | distance], STRIDE * distance);
      if (is_upper) w[j] = got;
      else w[j | distance] = got;
    }
  }
}

// (a & mask) | (b & ~mask), as one instruction.
__device__ __forceinline__ u32 select_bits(u32 a, u32 b, u32 mask) {
  u32 y;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(y) : "r"(a), "r"(b), "r"(mask));
  return y;
}

// Broadcasts one half. In this form ptxas folds it into the multiplication (`.H0_H0`, `.H1_H1`).
__device__ __forceinline__ u32 both_low(u32 x) {
  u32 y;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ u32 both_high(u32 x) {
  u32 y;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}" : "=r"(y) : "r"(x));
  return y;
}

// Programmatic dependent launch: results of the previous kernel may be read after wait_for_previous; allow_next lets the
// next kernel start, once all CTAs have called it or ended.
//
// A layer's small kernels (norms, SwiGLU, rotary embedding, merge, router) call allow_next before they wait: when they
// end, the next kernel's CTAs are there and have loaded weights. These may have started before kernels further back have
// ended. Hence the rules:
//
//   - Before its wait a kernel reads nothing but weights and writes nothing. (Positions it may read for a prefetch, or if it
//     reads them again later.)
//   - At least one thread of a launch waits, so that a kernel ends after those in front.
//   - Exceptions. A store, and products of experts, call allow_next only after their own wait, when all kernels before
//     them have ended. So before its wait decode behind a store may access everything except what the store writes,
//     merge behind such a decode may read the plan, and the second product of experts and their sum the
//     router's ids and weights.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void allow_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// A load before wait_for_previous, which may find what was there before. Volatile, so that L1 does not keep it.
__device__ __forceinline__ i64 load_early(const i64* address) {
  i64 y;
  asm volatile("ld.volatile.global.s64 %0, [%1];" : "=l"(y) : "l"(address));
  return y;
}

// Asks for a line of 128 bytes in L2. Unlike a load it may stand before wait_for_previous, whatever the previous kernel
// writes: L2 has the written bytes.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// The same for a table, one line per thread of the grid; lines beyond are left out.
__device__ __forceinline__ void prefetch_table(const void* table, u32 bytes) {
  const u32 at = (blockIdx.x * blockDim.x + threadIdx.x) * 128;
  if (at < bytes) prefetch_l2((const u8*)table + at);
}
