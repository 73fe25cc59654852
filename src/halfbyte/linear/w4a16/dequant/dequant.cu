// Dequantizes weights in the order of packed_weight.py to bfloat16 or float16 [rows, k], for a dense matmul, bit
// for bit as numerics/nvfp4.py does.
//
// A CTA has 64 rows and 256 k, a warp 16 of the rows. The result goes through shared memory, so that
// rows are written 512 bytes at a time.
//
// Macro: X_BF16, see values.cuh

#include "linear/w4a16/values.cuh"

#define BLOCKS 4                      // of 64 k
#define ROW_BYTES (BLOCKS * 128 + 16)  // padded by 16 against bank conflicts

struct Params {
  const u8* weight;        // [rows/64, blocks, 2048]
  const u8* weight_scale;  // [rows/64, blocks, 256]
  const float* row_scale;  // [rows padded to 64]
  u16* out;                // [rows, k]
  int rows, k;
  int blocks;  // of 64 k, in K padded
};

extern "C" __global__ void __launch_bounds__(128) linear_unpack(Params p) {
  __shared__ __align__(16) u8 shared[4 * 16 * ROW_BYTES];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
  const int chunks = (p.blocks + BLOCKS - 1) / BLOCKS;
  const int tile = blockIdx.x / chunks, first = blockIdx.x % chunks * BLOCKS;
  const u64 at = (u64)tile * p.blocks + first;
  const u8* weight = p.weight + at * 2048 + warp * 512 + lane * 16;
  const u8* scale = p.weight_scale + at * 256 + warp / 2 * 128 + g * 16 + warp % 2 * 8;
  const int row = tile * 64 + warp * 16;

  uint4 words[BLOCKS];
  uint2 scales[BLOCKS];
#pragma unroll
  for (int i = 0; i < BLOCKS; i++)
    if (first + i < p.blocks) {
      words[i] = __ldcs((const uint4*)(weight + i * 2048));
      scales[i] = __ldcs((const uint2*)(scale + i * 256));
    }
  const float factors[2] = {p.row_scale[row + g], p.row_scale[row + g + 8]};
  // The previous kernel may still read the memory that is written below.
  wait_for_previous();
  allow_next();

  u8* rows = shared + warp * 16 * ROW_BYTES;
#pragma unroll
  for (int i = 0; i < BLOCKS; i++)
    if (first + i < p.blocks) {
      const u32 w[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
      u32 s[4];
      unpack_scales(s, scales[i].x, SCALE_EXPONENT);
      unpack_scales(s + 2, scales[i].y, SCALE_EXPONENT);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        u32 a[4];
        unpack_operand(a, w[j], s[j]);
#pragma unroll
        for (int half = 0; half < 4; half++) {
          const float factor = factors[half & 1];
          *(u32*)(rows + (g + 8 * (half & 1)) * ROW_BYTES + i * 128 + j * 32 + half / 2 * 16 + c * 4) =
              pack_pair(lower_to_float(a[half]) * factor, upper_to_float(a[half]) * factor);
        }
      }
    }
  __syncwarp();
  const int k = first * 64 + lane * 8;
#pragma unroll
  for (int i = 0; i < 16; i++)
    if (row + i < p.rows && k < p.k)
      *(uint4*)(p.out + (u64)(row + i) * p.k + k) = *(const uint4*)(rows + i * ROW_BYTES + lane * 16);
}

// Empty kernel, for the occupancy query of max active clusters (gpu.py).
extern "C" __global__ void __launch_bounds__(1024) linear_probe() {}
