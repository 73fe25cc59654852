// Functions that Python calls.
#pragma once

#define HALFBYTE_API extern "C" __attribute__((visibility("default")))
