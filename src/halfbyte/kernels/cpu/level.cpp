#include "level.h"

#include <atomic>

#include "api.h"
#include "tiles.h"

#if HALFBYTE_X86
#include <cpuid.h>
#endif

namespace halfbyte {
namespace {

std::atomic<int> g_limit{kAvx512Bf16};

Level best() {
#if HALFBYTE_X86
  // Not every compiler's __builtin_cpu_supports knows F16C.
  unsigned eax, ebx, ecx = 0, edx;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx >> 29 & 1);
  __builtin_cpu_init();
  const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512) return __builtin_cpu_supports("avx512bf16") ? kAvx512Bf16 : kAvx512;
  if (avx2) return kAvx2;
#endif
  return kPortable;
}

#if HALFBYTE_X86
Kernels with_bfloat16() {
  Kernels kernels = kAvx512Kernels;
  kernels.packed_bfloat16 = &kPackedBfloat16Avx512;
  return kernels;
}
#endif

}  // namespace

Level current_level() {
  static const Level highest = best();
  const int limit = g_limit;
  return highest < limit ? highest : (Level)limit;
}

const Kernels& kernels() {
#if HALFBYTE_X86
  static const Kernels bfloat16 = with_bfloat16();
  switch (current_level()) {
    case kAvx512Bf16:
      return bfloat16;
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

// Use at most a level; the one that will run.
HALFBYTE_API int halfbyte_cpu_level(int limit) {
  halfbyte::g_limit = limit;
  return halfbyte::current_level();
}
