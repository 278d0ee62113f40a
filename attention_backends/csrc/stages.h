// Work of several threads in stages, none of which is owned by anybody: a thread takes units of the current stage while
// there are some, and a stage is complete when its units are counted as done. A thread that the system does not run holds
// nothing that others wait for, and joins them where they are when it comes back. No torch, nothing of the kernels.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <stdexcept>

#include "crew.h"
#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <chrono>
#endif

namespace pageloom {

// When a thread had better let others run: where something else wants its core, the system takes it away at the end of a
// time slice (milliseconds), in the middle of a unit, and all wait for that unit for as long as the other one's slice is.
// Who yields earlier than that, between two units, makes nobody wait. Where nothing else wants the core it is one system
// call (0.3 us) a millisecond.
class Turn {
 public:
  // `failed`: set where the work of a thread failed, and nobody may wait for it.
  Turn(const Threads& threads, const std::atomic<bool>& failed) : threads_(threads), failed_(failed) {}

  // Between units, with nothing in hand. False: all has ended meanwhile; leave without looking at it.
  bool pass() { return now() - began() < kTicks || step_aside(); }

  // Whether one of the two said so.
  bool over() const { return over_; }

  // A round of waiting for others. Who yields early gives its core to other processes for a whole time slice, again and
  // again; who never does may keep the core from the very thread that it waits for.
  bool relax(int64_t round) {
    pause();
    if (failed_.load(std::memory_order_relaxed)) over_ = true;
    return !over_ && (round < kSpinRounds || round % 64 != 0 || step_aside());
  }

 private:
  static constexpr int64_t kSpinRounds = 4096;  // of pauses before others are let run: about 0.15 ms
#if defined(__x86_64__)
  static constexpr int64_t kTicks = 3000000;  // of a time-stamp counter of 2 to 4 GHz: about a millisecond
  static int64_t now() { return static_cast<int64_t>(__rdtsc()); }
#else
  static constexpr int64_t kTicks = 1000000;
  static int64_t now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
#endif
  static int64_t& began() {
    static thread_local int64_t ticks = 0;
    return ticks;
  }

  bool step_aside() {
    over_ = threads_.crew != nullptr && !threads_.crew->step_aside();
    began() = now();
    return !over_;
  }

  const Threads& threads_;
  const std::atomic<bool>& failed_;
  bool over_ = false;
};

struct Stage {
  // Takes units until none is left to take; what it took is done, and counted, when it returns. Any number of threads
  // may call it, also when the stage is complete. False: `turn` said so.
  bool (*work)(Stage& stage, int64_t me, Turn& turn) = nullptr;
  int64_t units = 0;    // what there is to do
  int64_t workers = 1;  // threads that it is worth the trouble for; the others take part when those do not come
  // What `me` will read first of the weights of this stage, to be asked for while the stage before it ends; or null.
  const uint8_t* (*ahead)(const Stage& stage, int64_t me, int64_t& bytes) = nullptr;
  std::atomic<const char*> error{nullptr};  // a static string: what follows the stage is left out
  bool lets_pass = false;  // the stage behind it does not need it, and is complete when both are
  alignas(64) std::atomic<int64_t> next{0};  // for `work`
  alignas(64) std::atomic<int64_t> done{0};

  bool complete() const { return done.load(std::memory_order_acquire) >= units; }
  void finish(int64_t count) { done.fetch_add(count, std::memory_order_release); }
};

// Of one unit, which whoever comes first does: `Self::once` says null, or why it failed (a static string).
template <class Self>
struct SingleStage : Stage {
  SingleStage() {
    units = 1;
    work = [](Stage& stage, int64_t, Turn&) {
      if (stage.next.fetch_add(1, std::memory_order_relaxed) >= stage.units) return true;
      if (const char* failure = static_cast<Self&>(stage).once()) stage.error.store(failure, std::memory_order_relaxed);
      stage.finish(1);
      return true;
    };
  }
};

inline constexpr int64_t kHelpRounds = 512;     // before a thread does what it was not asked to: about 20 us
inline constexpr int64_t kAheadBytes = 1 << 18;  // of the next weights, asked for while others end a stage

// Threads that go through the same stages, in order. Each may come late, or not at all.
class StageRun {
 public:
  // `ends`: null, or where the nanoseconds (of the monotonic clock) go at which each stage was complete; zeros before.
  StageRun(Stage* const* stages, int64_t count, int64_t (*clock)() = nullptr, int64_t* ends = nullptr)
      : stages_(stages), count_(count), clock_(clock), ends_(ends) {}

  // The first stage's error, or null. What a thread throws ends the run, and is thrown here; so does a stage's work that
  // leaves without a reason, because others would wait for it forever.
  const char* run(const Threads& threads) {
    int64_t workers = 1;
    for (int64_t i = 0; i < count_; ++i) workers = std::max(workers, stages_[i]->workers);
    threads_ = &threads;
    caller_ = here();
    threads.run(workers, take_part, this);
    if (failure_) std::rethrow_exception(failure_);
    for (int64_t i = 0; i < count_; ++i)
      if (const char* error = stages_[i]->error.load(std::memory_order_relaxed)) return error;
    return nullptr;
  }

 private:
  static const void* here() {
    static thread_local char place;
    return &place;
  }

  static void take_part(void* context) {
    auto& run = *static_cast<StageRun*>(context);
    try {
      run.go(here() == run.caller_ ? 0 : run.helpers_.fetch_add(1, std::memory_order_relaxed) + 1);
    } catch (...) {
      if (!run.failed_.exchange(true, std::memory_order_relaxed)) run.failure_ = std::current_exception();
    }
  }

  bool work(Stage& stage, int64_t me, Turn& turn) {
    if (stage.work(stage, me, turn)) return true;
    if (!turn.over()) throw std::runtime_error("a stage was left with work undone");
    return false;
  }

  void go(int64_t me) {
    Turn turn(*threads_, failed_);
    for (int64_t i = 0; i < count_; ++i) {
      Stage& stage = *stages_[i];
      if (stage.lets_pass && me < stage.workers && !work(stage, me, turn)) return;
      if (stage.lets_pass) continue;
      if (!complete(i) && !go_through(i, me, turn)) return;
      if (stage.error.load(std::memory_order_relaxed) != nullptr) return;
      if (ends_ != nullptr) note(i);
    }
  }

  // With those that let pass to it.
  bool complete(int64_t index) const {
    return stages_[index]->complete() && (index == 0 || !stages_[index - 1]->lets_pass || complete(index - 1));
  }

  // What threads that were asked to do have not come to do.
  bool help(int64_t index, int64_t me, Turn& turn) {
    for (; index > 0 && stages_[index - 1]->lets_pass; --index)
      if (!work(*stages_[index - 1], me, turn)) return false;
    return true;
  }

  bool go_through(int64_t index, int64_t me, Turn& turn) {
    Stage& stage = *stages_[index];
    const bool asked = me < stage.workers;
    if (asked && !work(stage, me, turn)) return false;
    int64_t bytes = 0, fetched = 0;
    const uint8_t* const weights = coming(index + 1, me, bytes);
    for (int64_t round = 0; !complete(index); ++round) {
      if (round == kHelpRounds && !help(index, me, turn)) return false;
      if (!asked && round == kHelpRounds && !work(stage, me, turn)) return false;
      if (fetched < bytes)
        for (const int64_t stop = std::min(bytes, fetched + 4 * 64); fetched < stop; fetched += 64)
          __builtin_prefetch(weights + fetched, 0, 2);
      else if (!turn.relax(round))
        return false;
    }
    return true;
  }

  // The next weights that are read, by this stage or the one behind it.
  const uint8_t* coming(int64_t index, int64_t me, int64_t& bytes) const {
    for (const int64_t end = std::min(count_, index + 2); index < end; ++index)
      if (const Stage& stage = *stages_[index]; stage.ahead != nullptr) return stage.ahead(stage, me, bytes);
    return nullptr;
  }

  void note(int64_t index) {
    int64_t never = 0;
    if (__atomic_load_n(ends_ + index, __ATOMIC_RELAXED) == 0)
      __atomic_compare_exchange_n(ends_ + index, &never, clock_(), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }

  const Threads* threads_ = nullptr;
  const void* caller_ = nullptr;
  Stage* const* stages_;
  int64_t count_;
  int64_t (*clock_)();
  int64_t* ends_;
  std::atomic<int64_t> helpers_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;  // of who failed first
};

}  // namespace pageloom
