#include "level.h"

#include <atomic>

#include "api.h"
#include "attention/tiles.h"

#if HALFBYTE_X86
#include <cpuid.h>
#endif

namespace halfbyte {
namespace {

std::atomic<int> g_limit{-1};  // or none

#if HALFBYTE_X86
// Reads CPUID directly: `__builtin_cpu_supports` does not know F16C everywhere, and is always false
// in libraries built by Zig.
struct Cpuid {
  unsigned a = 0, b = 0, c = 0, d = 0;

  explicit Cpuid(unsigned leaf, unsigned subleaf = 0) {
    __get_cpuid_count(leaf, subleaf, &a, &b, &c, &d);
  }
};

bool has(unsigned bits, int bit) { return bits >> bit & 1; }

// Whether the OS saves these registers: 2 of SSE, 4 of AVX, 0xe0 of AVX-512.
bool keeps(unsigned registers) {
  if (!has(Cpuid(1).c, 27)) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & registers) == registers;
}

bool is_intel() {
  const Cpuid vendor(0);
  return vendor.b == 0x756e6547 && vendor.d == 0x49656e69 && vendor.c == 0x6c65746e;
}
#endif

Level highest() {
#if HALFBYTE_X86
  const Cpuid one(1), seven(7);
  const bool fma = has(one.c, 12), f16c = has(one.c, 29), avx2 = has(seven.b, 5);
  if (!(fma && f16c && avx2 && keeps(0x6))) return kPortable;
  const bool f = has(seven.b, 16), dq = has(seven.b, 17), bw = has(seven.b, 30);
  if (!(f && dq && bw && has(seven.b, 31) && keeps(0xe6))) return kAvx2;
  if (!has(seven.c, 11)) return kAvx512;
  return seven.a >= 1 && has(Cpuid(7, 1).a, 5) ? kAvx512Bf16 : kAvx512Vnni;
#else
  return kPortable;
#endif
}

// Intel's dot products of bfloat16 take longer than twice as many products of floats.
Level fastest(Level highest) {
#if HALFBYTE_X86
  if (highest == kAvx512Bf16 && is_intel()) return kAvx512Vnni;
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
