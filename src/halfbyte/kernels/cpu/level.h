// The instruction set in use.
#pragma once

namespace halfbyte {

enum Level { kPortable, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16 };

// The highest that this CPU has up to the level that was set; if none was, its fastest.
Level current_level();

}  // namespace halfbyte
