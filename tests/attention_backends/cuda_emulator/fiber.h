// A stackful context: the least that lets hundreds of emulated threads take turns on one CPU thread.
#pragma once

#include <stddef.h>

namespace pageloom::emulator {

// Runs `main` (which must never return) on its own stack, from the first switch to it.
class Fiber {
 public:
  static constexpr size_t STACK_BYTES = 256 * 1024;  // committed as touched; a page below faults

  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void start(void (*main)());
  // Both return when somebody switches back.
  void enter();  // scheduler -> this fiber
  void leave();  // this fiber -> scheduler

 private:
  char* stack_;
  void* context_ = nullptr;  // x86-64: the stack pointer; elsewhere a ucontext_t
};

}  // namespace pageloom::emulator
