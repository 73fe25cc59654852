// The instruction set in use.
#pragma once

namespace halfbyte {

enum Level { kPortable, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16 };

// The highest level of this CPU up to the level that was set; its fastest if none was set.
Level current_level();

}  // namespace halfbyte
