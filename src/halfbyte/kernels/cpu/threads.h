// Work shared among threads.
#pragma once

namespace halfbyte {

// Calls work(context, i) once for every i < count, on up to `threads` threads including the caller.
// Threads take the next item when they become free.
void parallel_for(int count, int threads, void (*work)(void*, int), void* context);

}  // namespace halfbyte
