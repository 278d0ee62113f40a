// Each thread that computes has helpers of its own, as with OpenMP. Two things are different here. Nobody waits for a
// helper that is not in a run: where another process has its core, the work goes on without it. And a helper that has
// nothing to do spins for as long as one step's kernels are apart, then sleeps, so that its core is free between steps.
#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "crew.h"
#include "torch_abi.h"

namespace pageloom {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(200);
constexpr int64_t kRoundsOfClock = 32;     // of pauses between two looks at the clock
constexpr int64_t kRoundsOfYield = 4096;   // of pauses before who waits lets others run: about 0.15 ms
constexpr int64_t kMostHelpers = 1 << 10;

// A run's number, whether helpers may enter, and how many are in it.
struct State {
  uint64_t word;
  static constexpr uint64_t kOpen = 1 << 15, kMembers = kOpen - 1, kRun = 1 << 16;
  bool open() const { return word & kOpen; }
  int64_t members() const { return word & kMembers; }
  uint64_t run() const { return word / kRun; }
};

// Counts; who sleeps until it counts on is woken.
class Bell {
 public:
  uint32_t count() const { return count_.load(std::memory_order_seq_cst); }

  // Wakes up to `most` sleepers.
  void ring(int64_t most) {
    count_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake(most);
  }

  void sleep(uint32_t heard) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (count() == heard) wait(heard);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
#if defined(__linux__)
  void wake(int64_t most) { syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0); }
  void wait(uint32_t heard) { syscall(SYS_futex, &count_, FUTEX_WAIT_PRIVATE, heard, nullptr, nullptr, 0); }
#else
  void wake(int64_t) {
    const std::lock_guard lock(mutex_);
    rung_.notify_all();
  }
  void wait(uint32_t heard) {
    std::unique_lock lock(mutex_);
    rung_.wait(lock, [&] { return count() != heard; });
  }
  std::mutex mutex_;
  std::condition_variable rung_;
#endif
  alignas(64) std::atomic<uint32_t> count_{0};
  std::atomic<int64_t> sleepers_{0};
};

class Team;
thread_local Team* inside = nullptr;  // whose run this thread is in as a helper
thread_local bool calls = false;      // this thread runs a body of its own run

class Team : public std::enable_shared_from_this<Team> {
 public:
  void run(int64_t threads, void (*body)(void*), void* context) {
    hire(threads - 1);
    body_ = body;
    context_ = context;
    seats_ = threads - 1;
    const State before{state_.load(std::memory_order_relaxed)};
    state_.store((before.run() + 1) * State::kRun | State::kOpen, std::memory_order_release);
    bell_.ring(threads - 1);
    const Open until_the_end(*this);
    body(context);
  }

  // The system's numbers of the first `count` helpers.
  std::vector<int64_t> ids(int64_t count) {
    hire(count);
    for (std::unique_lock lock(mutex_); static_cast<int64_t>(ids_.size()) < hired_;) introduced_.wait(lock);
    return {ids_.begin(), ids_.begin() + std::min(count, hired_)};
  }

  void dismiss() {
    dismissed_.store(true, std::memory_order_release);
    bell_.ring(kMostHelpers);
  }

  void leave() { state_.fetch_sub(1, std::memory_order_release); }

  // Whether run number `run` is open, and has a seat: it is taken then.
  bool enter(uint64_t run) {
    State now{state_.load(std::memory_order_acquire)};
    while (now.open() && now.run() == run && now.members() < seats_)
      if (state_.compare_exchange_weak(now.word, now.word + 1, std::memory_order_acquire)) return true;
    return false;
  }

  uint64_t current() const { return State{state_.load(std::memory_order_acquire)}.run(); }

 private:
  // While the caller's body runs: also where it throws, nobody is left in it.
  struct Open {
    Team& team;
    explicit Open(Team& of) : team(of) { calls = true; }
    ~Open() {
      calls = false;
      team.state_.fetch_and(~State::kOpen, std::memory_order_acq_rel);
      for (int64_t round = 0; State{team.state_.load(std::memory_order_acquire)}.members() > 0; ++round) {
        pause();
        if (round >= kRoundsOfYield && round % 64 == 0) sched_yield();
      }
    }
  };

  // Where the system gives no more threads, there are fewer.
  void hire(int64_t helpers) {
    try {
      for (; hired_ < std::min(helpers, kMostHelpers); ++hired_)
        std::thread([team = shared_from_this()] { team->help(); }).detach();
    } catch (const std::system_error&) {
    }
  }

  void help() {
    introduce();
    for (uint32_t heard = 0;;) {
      await(heard);
      heard = bell_.count();  // before what the bell was rung for is looked at
      if (dismissed_.load(std::memory_order_acquire)) return;
      if (!enter(current())) continue;
      inside = this;
      body_(context_);
      if (inside != nullptr) leave();
      inside = nullptr;
    }
  }

  void introduce() {
    const std::lock_guard lock(mutex_);
#if defined(__linux__)
    ids_.push_back(syscall(SYS_gettid));
#else
    ids_.push_back(0);
#endif
    introduced_.notify_all();
  }

  void await(uint32_t heard) {
    const auto until = Clock::now() + kSpin;
    for (int64_t round = 1; bell_.count() == heard; ++round) {
      pause();
      if (round % kRoundsOfClock == 0 && Clock::now() > until) bell_.sleep(heard);
    }
  }

  alignas(64) std::atomic<uint64_t> state_{0};
  void (*body_)(void*) = nullptr;
  void* context_ = nullptr;
  std::atomic<int64_t> seats_{0};
  std::atomic<bool> dismissed_{false};
  Bell bell_;
  std::mutex mutex_;  // of ids_
  std::condition_variable introduced_;
  std::vector<int64_t> ids_;
  int64_t hired_ = 0;  // the calling thread's
};

// Helpers go with the thread that they help; they end by themselves.
struct Employer {
  std::shared_ptr<Team> team = std::make_shared<Team>();
  ~Employer() { team->dismiss(); }
};

Team& team_of_this_thread() {
  static thread_local Employer employer;
  return *employer.team;
}

void run(int64_t threads, void (*body)(void*), void* context) {
  if (inside != nullptr || calls)  // a run within a run has no helpers
    body(context);
  else
    team_of_this_thread().run(threads, body, context);
}

bool step_aside() {
  Team* const team = inside;
  if (team == nullptr) {
    sched_yield();
    return true;
  }
  const uint64_t run = team->current();  // this helper is a member, so it is its own
  team->leave();
  sched_yield();
  if (team->enter(run)) return true;
  inside = nullptr;
  return false;
}

int64_t crew() {
  static const Crew functions{run, step_aside};
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(&functions));
}

// The system's thread numbers of `count` helpers of the calling thread.
std::vector<int64_t> helpers(int64_t count) {
  PAGELOOM_CHECK(count >= 0 && count < kMostHelpers, "helpers: ", count, " is not in [0, ", kMostHelpers, ")");
  return team_of_this_thread().ids(count);
}

const Operators kDefined(PAGELOOM_NAMESPACE, [](Operators& m) {
  m.define("crew() -> int");
  m.define("helpers(int count) -> int[]");
});

const Operators kAnywhere(PAGELOOM_NAMESPACE, "CompositeExplicitAutograd", [](Operators& m) {
  m.implement<crew>("crew");
  m.implement<helpers>("helpers");
});

}  // namespace
}  // namespace pageloom
