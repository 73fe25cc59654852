// The activation of SwiGLU.

#pragma once
#include "kernels/runtime/basics.cuh"


// silu(gate) * up, silu(x) = x / (1 + e^-x). The approximate division has an error of two units in the last place of
// float32, and gives 0 for e^-x from 2^126 on, where silu(x) is above -2^-119.
__device__ __forceinline__ float silu_and_multiply(float gate, float up) {
  return __fdividef(gate, 1.0f + ex2(-LOG2E * gate)) * up;
}
