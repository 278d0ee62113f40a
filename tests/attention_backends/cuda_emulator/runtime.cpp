// Runs the blocks of a grid one after another, and the threads of a block as fibers that take turns. A warp's lanes
// run, in a shuffled order, until each waits in a collective or has ended; warps are picked at random. So code that
// lacks a barrier meets both orders.
#include <signal.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "fiber.h"
#include "memory.h"
#include "warp.h"

pageloom::emulator::Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace pageloom::emulator {

namespace {

constexpr int MOST_THREADS = 1024;
constexpr unsigned MOST_BLOCKS_YZ = 65535;
constexpr size_t SIGNAL_STACK_BYTES = 64 * 1024;

enum class State : uint8_t { ready, waiting, ended };

struct Thread {
  Fiber fiber;
  AsyncCopies copies;
  State state = State::ended;
  Op op = Op::none;
  Site site;
  void* operand = nullptr;
  int index = 0;
  int fenced_behind = 0;  // barriers of its block, when it fenced last
  bool added = false;     // and has not fenced since
};

struct Random {
  uint64_t state = 1;

  uint32_t next() {  // xorshift64*
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return static_cast<uint32_t>((state * 0x2545f4914f6cdd1dull) >> 32);
  }
  uint32_t below(uint32_t n) { return next() % n; }
};

struct Machine {
  std::mutex one_grid;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<int> ready_warps;
  std::unique_ptr<SharedMemory> shared;
  GlobalRanges ranges;
  Random random;
  Thread* current = nullptr;
  void (*entry)(const void*) = nullptr;
  const void* argument = nullptr;
  int num_threads = 0;
  int barriers = 0;        // that the block has passed
  int acquired_behind = 0;  // barriers, when a thread that had added fenced
  bool acquired = false;
  bool failed = false;
  std::string error;
  std::deque<std::string> errors;  // for ever: launchers hand them out
  sigjmp_buf after_fault;
  const char* fault_address = nullptr;
};

Machine machine;

std::string short_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

std::string where(Site site) { return short_name(site.file_name()) + ":" + std::to_string(site.line()); }

void record(const std::string& text, int thread) {
  if (machine.failed) return;
  machine.failed = true;
  machine.error = text + " [block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
                  std::to_string(blockIdx.z) + "), thread " + std::to_string(thread) + "]";
}

void thread_main() {
  machine.entry(machine.argument);
  Thread& self = *machine.current;
  if (!self.copies.all_waited_for()) record("a thread ended before it waited for its cp_async16", self.index);
  self.state = State::ended;
  self.fiber.leave();
}

void run_until_it_waits(Thread& thread) {
  threadIdx = {static_cast<unsigned>(thread.index), 0, 0};
  machine.current = &thread;
  thread.fiber.enter();
  machine.current = nullptr;
}

int lanes_of(int warp) { return std::min(LANES, machine.num_threads - warp * LANES); }

// All lanes of `warp` wait or have ended: execute their collective, if it is the warp's own. True if they may go on.
bool settle(int warp) {
  WarpCall call{Op::none, {}, {}};
  int first = -1;
  for (int lane = 0; lane < lanes_of(warp); ++lane) {
    const Thread& thread = *machine.threads[static_cast<size_t>(warp * LANES + lane)];
    if (thread.state == State::ended) continue;
    call.operands[lane] = thread.operand != nullptr ? thread.operand : &call;  // null means that the lane has ended
    if (first < 0) {
      first = thread.index;
      call.op = thread.op;
      call.site = thread.site;
    } else if (call.op != thread.op || call.site.line() != thread.site.line() ||
               strcmp(call.site.file_name(), thread.site.file_name()) != 0) {
      record("divergent warp: thread " + std::to_string(first) + " waits in " + name(call.op) + " at " +
                 where(call.site) + ", thread " + std::to_string(thread.index) + " in " + name(thread.op) + " at " +
                 where(thread.site),
             thread.index);
      return false;
    }
  }
  if (first < 0 || call.op == Op::block_sync) return false;
  if (const char* refused = execute(call); refused != nullptr) {
    record(where(call.site) + ": " + refused, first);
    return false;
  }
  for (int lane = 0; lane < lanes_of(warp); ++lane) {
    Thread& thread = *machine.threads[static_cast<size_t>(warp * LANES + lane)];
    if (thread.state == State::waiting) thread.state = State::ready;
  }
  return true;
}

bool run_warp(int warp) {
  const uint32_t stride = machine.random.next() | 1, offset = machine.random.next();
  for (uint32_t i = 0; i < LANES && !machine.failed; ++i) {
    const int lane = static_cast<int>((i * stride + offset) % LANES);
    if (lane >= lanes_of(warp)) continue;
    Thread& thread = *machine.threads[static_cast<size_t>(warp * LANES + lane)];
    if (thread.state == State::ready) run_until_it_waits(thread);
  }
  return !machine.failed && settle(warp);
}

// Every thread has ended or waits in sync_block (threads that have ended count as arrived, as on devices since sm_70).
bool release_block() {
  const Thread* first = nullptr;
  for (int i = 0; i < machine.num_threads; ++i) {
    const Thread& thread = *machine.threads[static_cast<size_t>(i)];
    if (thread.state == State::ended) continue;
    if (first == nullptr) first = &thread;
    if (first->site.line() != thread.site.line() || strcmp(first->site.file_name(), thread.site.file_name()) != 0) {
      record("divergent barrier: thread " + std::to_string(first->index) + " waits in sync_block at " +
                 where(first->site) + ", thread " + std::to_string(thread.index) + " at " + where(thread.site),
             thread.index);
      return false;
    }
  }
  if (first == nullptr) return false;
  ++machine.barriers;
  for (int i = 0; i < machine.num_threads; ++i) {
    Thread& thread = *machine.threads[static_cast<size_t>(i)];
    if (thread.state == State::waiting) thread.state = State::ready;
  }
  return true;
}

void run_warps() {
  const int warps = (machine.num_threads + LANES - 1) / LANES;
  const bool far_apart = machine.random.below(2) == 0;  // one warp runs as far as it can, or all advance together
  do {
    auto& ready = machine.ready_warps;
    ready.resize(static_cast<size_t>(warps));
    std::iota(ready.begin(), ready.end(), 0);
    while (!ready.empty() && !machine.failed) {
      const size_t pick = machine.random.below(static_cast<uint32_t>(ready.size()));
      bool more = run_warp(ready[pick]);
      while (more && far_apart) more = run_warp(ready[pick]);
      if (!more) {
        ready[pick] = ready.back();
        ready.pop_back();
      }
    }
  } while (!machine.failed && release_block());
}

void record_fault() {
  Thread* thread = machine.current;
  machine.current = nullptr;
  char text[160];
  const char* at = machine.fault_address;
  const char* kind = machine.shared->owns(at) ? "outside the block's shared memory" : "wild, or a stack is full";
  snprintf(text, sizeof text, "memory fault at %p: %s (%td bytes from the start of shared memory)",
           static_cast<const void*>(at), kind, at - machine.shared->begin());
  record(text, thread == nullptr ? -1 : thread->index);
}

void run_block(int shared_bytes) {
  machine.shared->reset(shared_bytes);
  machine.barriers = machine.acquired_behind = 0;
  machine.acquired = false;
  for (int i = 0; i < machine.num_threads; ++i) {
    Thread& thread = *machine.threads[static_cast<size_t>(i)];
    thread.index = i;
    thread.state = State::ready;
    thread.copies.clear();
    thread.fenced_behind = 0;
    thread.added = false;
    thread.fiber.start(thread_main);
  }
  if (sigsetjmp(machine.after_fault, 0) == 0) {
    run_warps();
  } else {
    record_fault();
  }
  if (!machine.shared->guards_intact()) record("bytes outside the block's shared memory were written", 0);
}

void on_fault(int number, siginfo_t* info, void*) {
  if (machine.current == nullptr) {  // not a kernel's doing: fault again, as if nobody listened
    signal(number, SIG_DFL);
    return;
  }
  machine.fault_address = static_cast<const char*>(info->si_addr);
  siglongjmp(machine.after_fault, 1);
}

// While a grid runs, memory faults of its threads are errors of the launch.
class FaultsAreErrors {
 public:
  FaultsAreErrors() : stack_(SIGNAL_STACK_BYTES) {
    stack_t own{};
    own.ss_sp = stack_.data();
    own.ss_size = stack_.size();
    sigaltstack(&own, &previous_stack_);
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &previous_segv_);
    sigaction(SIGBUS, &action, &previous_bus_);
  }
  ~FaultsAreErrors() {
    sigaction(SIGSEGV, &previous_segv_, nullptr);
    sigaction(SIGBUS, &previous_bus_, nullptr);
    sigaltstack(&previous_stack_, nullptr);
  }
  FaultsAreErrors(const FaultsAreErrors&) = delete;
  FaultsAreErrors& operator=(const FaultsAreErrors&) = delete;

 private:
  std::vector<char> stack_;
  stack_t previous_stack_{};
  struct sigaction previous_segv_ {}, previous_bus_{};
};

const char* keep(const std::string& text) { return machine.errors.emplace_back(text).c_str(); }

void run_blocks(Index3 grid, int shared_bytes) {
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  uint64_t stride = machine.random.next() % blocks + 1;
  while (std::gcd(stride, blocks) != 1) stride = stride % blocks + 1;
  uint64_t at = machine.random.next() % blocks;
  for (uint64_t i = 0; i < blocks && !machine.failed; ++i, at = (at + stride) % blocks) {
    blockIdx = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                static_cast<unsigned>(at / grid.x / grid.y)};
    run_block(shared_bytes);
  }
}

}  // namespace

const char* run_grid(Index3 grid, int threads, int shared_bytes, void (*entry)(const void*), const void* argument) {
  const std::lock_guard<std::mutex> lock(machine.one_grid);
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return nullptr;
  if (threads < 1 || threads > MOST_THREADS) return keep(std::to_string(threads) + " threads in a block");
  if (shared_bytes < 0 || shared_bytes > SharedMemory::MOST_BYTES) {
    return keep(std::to_string(shared_bytes) + " bytes of shared memory in a block");
  }
  if (grid.x > 0x7fffffffu || grid.y > MOST_BLOCKS_YZ || grid.z > MOST_BLOCKS_YZ) return keep("the grid is too large");
  if (machine.shared == nullptr) machine.shared = std::make_unique<SharedMemory>();
  while (machine.threads.size() < static_cast<size_t>(threads)) machine.threads.push_back(std::make_unique<Thread>());
  const FaultsAreErrors faults;
  machine.failed = false;
  machine.entry = entry;
  machine.argument = argument;
  machine.num_threads = threads;
  gridDim = grid;
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  run_blocks(grid, shared_bytes);
  return machine.failed ? keep(machine.error) : nullptr;
}

void meet(Op op, void* operand, Site site) {
  Thread& self = *machine.current;
  if (op == Op::block_sync || op == Op::warp_sync) self.copies.publish();
  self.op = op;
  self.operand = operand;
  self.site = site;
  self.state = State::waiting;
  self.fiber.leave();
}

void fail(Site site, const char* format, ...) {
  char text[240];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  record(where(site) + ": " + text, machine.current->index);
  for (;;) machine.current->fiber.leave();
}

char* shared_memory() { return machine.shared->begin(); }

void check_shared_row(const void* row, Site site) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fail(site, "ldmatrix of a row that is not aligned to 16 bytes");
  if (!machine.shared->holds(row, 16)) {
    fail(site, "ldmatrix outside the block's shared memory, %td bytes from its start",
         static_cast<const char*>(row) - machine.shared->begin());
  }
}

void fence() {
  Thread& self = *machine.current;
  self.fenced_behind = machine.barriers;
  if (!self.added) return;
  self.added = false;
  machine.acquired = true;
  machine.acquired_behind = machine.barriers;
}

void check_release(Site site) {
  Thread& self = *machine.current;
  if (machine.barriers == 0) fail(site, "atomic_add before the block has met: what others wrote is not before it");
  if (self.fenced_behind != machine.barriers) {
    fail(site, "atomic_add without a fence of its own thread behind the barrier: what others wrote may come after it");
  }
  self.added = true;
}

void check_acquired(Site site) {
  if (!machine.acquired) fail(site, "a read of what other blocks wrote without a fence behind the atomic_add");
  if (machine.acquired_behind == machine.barriers) {
    fail(site, "a read of what other blocks wrote without a barrier behind the fence");
  }
}

void check_access(const void* at, Site site, const char* what) {
  if (reinterpret_cast<uintptr_t>(at) % 16 != 0) fail(site, "%s at an address that is not aligned to 16 bytes", what);
  if (machine.shared->owns(at)) {
    if (!machine.shared->holds(at, 16)) {
      fail(site, "%s outside the block's shared memory, %td bytes from its start", what,
           static_cast<const char*>(at) - machine.shared->begin());
    }
  } else if (!machine.ranges.allow(at, 16)) {
    fail(site, "%s outside every registered range of global memory, at %p", what, at);
  }
}

void cp_async16(void* shared, const void* global, bool valid, Site site) {
  if (!machine.shared->owns(shared)) fail(site, "cp_async16 to memory that is not shared");
  check_access(shared, site, "cp_async16");
  if (valid) {
    if (machine.shared->owns(global)) fail(site, "cp_async16 from shared memory");
    check_access(global, site, "cp_async16");
  }
  machine.current->copies.issue(shared, global, valid);
}

void cp_async_commit() { machine.current->copies.commit(); }
void cp_async_wait(int at_most_pending) { machine.current->copies.wait(at_most_pending); }

}  // namespace pageloom::emulator

extern "C" {
void pageloom_emulator_seed(uint64_t seed) {
  auto& random = pageloom::emulator::machine.random;
  random.state = seed * 0x9e3779b97f4a7c15ull + 0x1234567ull;
  if (random.state == 0) random.state = 1;
  for (int i = 0; i < 4; ++i) random.next();
}
void pageloom_emulator_register(const void* begin, int64_t bytes) {
  pageloom::emulator::machine.ranges.add(begin, bytes);
}
void pageloom_emulator_clear_ranges() { pageloom::emulator::machine.ranges.clear(); }
}
