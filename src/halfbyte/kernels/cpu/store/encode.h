// Floats to the bytes of a cache, for each instruction set.
#pragma once

#include <cstdint>

#include "attention/tiles.h"

namespace halfbyte {

// One row of `size` floats; `scales` is written where the format has block scales.
using Encode = void (*)(int format, const float* x, int size, float global_scale, uint8_t* data,
                        uint8_t* scales);

void encode_portable(int format, const float* x, int size, float global_scale, uint8_t* data,
                     uint8_t* scales);
#if HALFBYTE_X86
void encode_avx2(int format, const float* x, int size, float global_scale, uint8_t* data,
                 uint8_t* scales);
void encode_avx512(int format, const float* x, int size, float global_scale, uint8_t* data,
                   uint8_t* scales);
#endif

}  // namespace halfbyte
