#include "fiber.h"

#include <stdint.h>
#include <sys/mman.h>

#include <new>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace pageloom::emulator {

namespace {

constexpr size_t GUARD_BYTES = 64 * 1024;  // a multiple of every page size in use

}  // namespace

Fiber::Fiber() {
  constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* region = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_NONE, FLAGS, -1, 0);
  if (region == MAP_FAILED) throw std::bad_alloc();
  stack_ = static_cast<char*>(region) + GUARD_BYTES;
  if (mprotect(stack_, STACK_BYTES, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
#if !defined(__x86_64__)
  context_ = new ucontext_t;
#endif
}

Fiber::~Fiber() {
  munmap(stack_ - GUARD_BYTES, GUARD_BYTES + STACK_BYTES);
#if !defined(__x86_64__)
  delete static_cast<ucontext_t*>(context_);
#endif
}

#if defined(__x86_64__)

// Saves what the ABI makes the callee's, swaps stacks, restores. (rdi: where to keep the old stack pointer; rsi: the
// new one)
extern "C" void pageloom_emulator_switch(void** keep, void* to);
asm(R"(
.text
.local pageloom_emulator_switch
.type pageloom_emulator_switch, @function
pageloom_emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size pageloom_emulator_switch, .-pageloom_emulator_switch
)");

static void* scheduler_stack;

void Fiber::start(void (*main)()) {
  auto** top = reinterpret_cast<void**>(stack_ + STACK_BYTES);
  *--top = nullptr;  // the return address that `main` must not use; leaves the stack aligned as after a call
  *--top = reinterpret_cast<void*>(main);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context_ = top;
}

void Fiber::enter() { pageloom_emulator_switch(&scheduler_stack, context_); }
void Fiber::leave() { pageloom_emulator_switch(&context_, scheduler_stack); }

#else

static ucontext_t scheduler_context;

void Fiber::start(void (*main)()) {
  auto& context = *static_cast<ucontext_t*>(context_);
  getcontext(&context);
  context.uc_stack.ss_sp = stack_;
  context.uc_stack.ss_size = STACK_BYTES;
  context.uc_link = nullptr;
  makecontext(&context, main, 0);
}

void Fiber::enter() { swapcontext(&scheduler_context, static_cast<ucontext_t*>(context_)); }
void Fiber::leave() { swapcontext(static_cast<ucontext_t*>(context_), &scheduler_context); }

#endif

}  // namespace pageloom::emulator
