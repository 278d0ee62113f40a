// The threads that a library's operators compute with.
#pragma once

#include "crew.h"
#include "torch_abi.h"

namespace pageloom {

// The crew that the process lends this library's operators (`lend_crew`); without it they run in the calling thread alone.
inline __attribute__((visibility("hidden"))) const Crew* lent_crew = nullptr;

inline void lend_crew(int64_t address) { lent_crew = reinterpret_cast<const Crew*>(static_cast<intptr_t>(address)); }

// As many threads as torch has for the calling one.
inline Threads lent_threads() {
  uint32_t count = 1;
  if (lent_crew != nullptr) PAGELOOM_TORCH(torch_get_num_threads(&count));
  return {count, lent_crew};
}

}  // namespace pageloom
