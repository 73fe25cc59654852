// The activation between the two products of an expert.

#pragma once
#include "kernels/runtime/basics.cuh"

struct Activation {
  float alpha, limit, up_offset;  // limit infinite: none

  // gate * sigmoid(alpha * gate) * (up + up_offset), clamped; comparisons keep NaN.
  __device__ __forceinline__ float operator()(float gate, float up) const {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;  // apart from the next: nested, they become a branch
    up = up < -limit ? -limit : up;
    return __fdividef(gate, 1.0f + ex2(gate * alpha * -1.44269504f)) * (up + up_offset);
  }
};
