#include "level.h"

#include <atomic>

#include "api.h"
#include "tiles.h"

#if HALFBYTE_X86
#include <cpuid.h>
#endif

namespace halfbyte {
namespace {

std::atomic<int> g_limit{-1};  // or none

Level highest() {
#if HALFBYTE_X86
  // Not every compiler's __builtin_cpu_supports knows F16C.
  unsigned eax, ebx, ecx = 0, edx;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx >> 29 & 1);
  __builtin_cpu_init();
  const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (vnni && __builtin_cpu_supports("avx512bf16")) return kAvx512Bf16;
  if (vnni) return kAvx512Vnni;
  if (avx512) return kAvx512;
  if (avx2) return kAvx2;
#endif
  return kPortable;
}

// Intel's dot products of bfloat16 take longer than twice as many products of floats.
Level fastest(Level highest) {
#if HALFBYTE_X86
  if (highest == kAvx512Bf16 && __builtin_cpu_is("intel")) return kAvx512Vnni;
#endif
  return highest;
}

#if HALFBYTE_X86
Kernels with_bfloat16(const PackedKernels& packed) {
  Kernels kernels = kAvx512Kernels;
  kernels.packed_bfloat16 = &packed;
  return kernels;
}
#endif

}  // namespace

Level current_level() {
  static const Level most = highest(), unasked = fastest(most);
  const int limit = g_limit;
  return limit < 0 ? unasked : most < limit ? most : (Level)limit;
}

const Kernels& kernels() {
#if HALFBYTE_X86
  static const Kernels vnni = with_bfloat16(kPackedVnni);
  static const Kernels bfloat16 = with_bfloat16(kPackedBfloat16Avx512);
  switch (current_level()) {
    case kAvx512Bf16:
      return bfloat16;
    case kAvx512Vnni:
      return vnni;
    case kAvx512:
      return kAvx512Kernels;
    case kAvx2:
      return kAvx2Kernels;
    default:
      break;
  }
#endif
  return kPortableKernels;
}

}  // namespace halfbyte

// The level that runs.
HALFBYTE_API int halfbyte_cpu_level() { return halfbyte::current_level(); }

// Use at most a level, or below 0 the fastest.
HALFBYTE_API void halfbyte_set_cpu_level(int limit) { halfbyte::g_limit = limit; }
