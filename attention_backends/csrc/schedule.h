// Splits one attention call into work items and runs them on whatever threads the caller lends. Torch-free.
#pragma once

#include "kernels.h"

namespace pageloom {

// Runs body(context) on up to `threads` threads at once and returns when all have; one call per thread.
using RunOnThreads = void (*)(int64_t threads, void (*body)(void*), void* context);

struct Threads {
  int64_t count;
  RunOnThreads run;
};

// Null where all went well, otherwise what is wrong with the input (a static string).
const char* run_attention(const AttentionProblem& problem, const KernelTable& kernels, const Threads& threads);

// Writes tokens' k and v to cache slots (block * block_size + offset); -1 is skipped.
const char* run_write(const CacheLayout& cache, TokenView k, TokenView v, const int64_t* slots, int64_t num_tokens,
                      const Threads& threads);

// Copies block pairs[2i] to pairs[2i + 1] in each of the caches, `block_bytes` each.
void run_copy_blocks(char* const* caches, const int64_t* block_bytes, int64_t num_caches, const int64_t* pairs,
                     int64_t num_pairs, const Threads& threads);

}  // namespace pageloom
