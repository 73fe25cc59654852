// The instruction set in use.
#pragma once

namespace halfbyte {

enum Level { kPortable, kAvx2, kAvx512, kAvx512Bf16 };

// The best that this CPU has, up to the level that was set.
Level current_level();

}  // namespace halfbyte
