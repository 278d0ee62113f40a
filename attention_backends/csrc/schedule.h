// Runs attention calls, and writes and copies of the cache, on whatever threads the caller lends. Torch-free.
#pragma once

#include "kernels.h"

namespace pageloom {

// Runs body(context) on up to `threads` threads at once and returns when all have; one call per thread.
using RunOnThreads = void (*)(int64_t threads, void (*body)(void*), void* context);

struct Threads {
  int64_t count;
  RunOnThreads run;
};

// body(context) on as many threads as `work` (lane operations) and the number of pieces are worth.
void run_threads(const Threads& threads, int64_t work, int64_t pieces, void (*body)(void*), void* context);

// Null where all went well, otherwise what is wrong with the input (a static string). While problem.step is the same
// (and not 0), block tables must be, too: layers of one step share the work of cutting it.
const char* run_attention(const AttentionProblem& problem, const KernelTable& kernels, const Threads& threads);

// Writes tokens' k and v to cache slots (block * block_size + offset); -1 is skipped. An int8 cache takes bfloat16.
const char* run_write(const CacheLayout& cache, TokenView k, TokenView v, const int64_t* slots, int64_t num_tokens,
                      const Threads& threads);

// Copies block pairs[2i] of each source to block pairs[2i + 1] of its destination, which may be the same cache;
// `block_bytes` each.
void run_copy_blocks(const char* const* sources, char* const* destinations, const int64_t* block_bytes,
                     int64_t num_caches, const int64_t* pairs, int64_t num_pairs, const Threads& threads);

}  // namespace pageloom
