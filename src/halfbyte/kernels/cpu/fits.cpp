// Checks lengths and page numbers of a batch in one pass, for every call.

#include <cstdint>

#include "api.h"

// Returns 1 if starts[seqs + 1] ascend from 0 to `tokens`, lengths[seqs] are at least 0 and need at most
// `max_pages` pages each, and those pages in tables[seqs][max_pages] are in 0 .. num_pages - 1; else 0.
HALFBYTE_API int halfbyte_fits(const int32_t* starts, const int32_t* lengths, const int32_t* tables,
                               int64_t seqs, int64_t max_pages, int64_t tokens, int64_t num_pages,
                               int64_t block_size) {
  if (starts[0] != 0 || starts[seqs] != tokens) return 0;
  for (int64_t s = 0; s < seqs; s++) {
    if (starts[s + 1] < starts[s] || lengths[s] < 0) return 0;
    const int64_t pages = (lengths[s] + block_size - 1) / block_size;
    if (pages > max_pages) return 0;
    bool outside = false;  // no branch in the loop, so that it vectorizes
    for (int64_t i = 0; i < pages; i++)
      outside |= (uint32_t)tables[s * max_pages + i] >= (uint64_t)num_pages;
    if (outside) return 0;
  }
  return 1;
}
