// Attention calls, and writes and copies of the cache, as stages that any threads run (stages.h). Torch-free.
#pragma once

#include "kernels.h"
#include "plan.h"
#include "stages.h"

namespace pageloom {

// As many threads as `work` (lane operations) and the number of pieces are worth.
int64_t threads_worth(int64_t threads, int64_t work, int64_t pieces);

// Writes tokens' k and v to cache slots (block * block_size + offset); -1 is skipped. An int8 cache takes bfloat16.
struct WriteStage : Stage {
  CacheLayout cache;
  TokenView k, v;
  const int64_t* slots;
  int64_t num_tokens;

  WriteStage(const CacheLayout& cache, TokenView k, TokenView v, const int64_t* slots, int64_t num_tokens,
             int64_t threads);
};

// Attends. While problem.step is the same (and not 0), block tables must be, too: layers of one step share the work of
// cutting it, so such stages run one after another. `run`: a number of what is prepared together, or 0: of this stage.
struct AttendStage : Stage {
  AttentionProblem problem;
  const KernelTable& kernels;
  Plan& plan;  // see plan_of
  int64_t claim;  // items that a thread takes at once

  // `error` is set where the input is wrong.
  AttendStage(const AttentionProblem& asked, const KernelTable& kernels, int64_t threads, int64_t run);
};

// Copies block pairs[2i] of each source to block pairs[2i + 1] of its destination, which may be the same cache;
// `block_bytes` each.
void run_copy_blocks(const char* const* sources, char* const* destinations, const int64_t* block_bytes,
                     int64_t num_caches, const int64_t* pairs, int64_t num_pairs, const Threads& threads);

}  // namespace pageloom
