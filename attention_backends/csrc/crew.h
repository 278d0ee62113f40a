// Threads that help the calling one, lent by one library (crew.cpp) to all others: plain C++17, nothing of torch.
#pragma once

#include <stdint.h>

#include <algorithm>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pageloom {

// One round of waiting by spinning: 20 to 50 ns.
inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

struct Crew {
  // body(context) on the calling thread, and on up to `threads` - 1 helpers from when they come: bodies share their work,
  // and the caller's must end with all of it done, or taken by another's. Returns when no body runs any more: a helper
  // that the system has not let run is not waited for.
  void (*run)(int64_t threads, void (*body)(void*), void* context);
  // In a body, with nothing in hand that others wait for: lets other processes have the core. False: the run has ended
  // meanwhile, nothing of it exists any more, and the body has to return.
  bool (*step_aside)();
};

// As many as the calling thread may use, itself included.
struct Threads {
  int64_t count;
  const Crew* crew;

  void run(int64_t threads, void (*body)(void*), void* context) const {
    if (std::min(threads, count) > 1)
      crew->run(std::min(threads, count), body, context);
    else
      body(context);
  }
};

}  // namespace pageloom
