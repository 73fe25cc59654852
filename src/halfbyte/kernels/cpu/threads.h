// Work shared among threads.
#pragma once

namespace halfbyte {

// work(context, i) once for every i < count, on up to `threads` threads, the caller's included; in
// no particular order, one item after the other as threads become free.
void parallel_for(int count, int threads, void (*work)(void*, int), void* context);

}  // namespace halfbyte
