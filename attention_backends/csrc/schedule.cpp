// Runs the items of a plan: threads take them from one queue, and whoever delivers the last part of some rows adds the
// parts up, in order.
#include "schedule.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "plan.h"

namespace pageloom {
namespace {

constexpr int64_t kSerialWork = 1 << 15;  // lane operations below which waking threads costs more than it saves

// Grows, never shrinks: one per thread, so that a steady state allocates nothing.
class Arena {
 public:
  void* reserve(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset(new char[bytes + bytes / 4]);
      size_ = bytes + bytes / 4;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<char[]> memory_;
  int64_t size_ = 0;
};

struct AttentionRun {
  const AttentionProblem& problem;
  const KernelTable& kernels;
  Plan& plan;
  float* partials;
  int64_t threads;
  std::atomic<int64_t> next{0};
  std::atomic<bool> bad_block{false};

  void deliver(SplitGroup& group) {
    if (__atomic_sub_fetch(&group.pending, 1, __ATOMIC_ACQ_REL) != 0) return;
    kernels.combine(problem, group.rows, partials + group.first_partial, group.parts, group.partial_stride);
  }
};

void attention_worker(void* context) {
  static thread_local Arena scratch_arena;
  auto& run = *static_cast<AttentionRun*>(context);
  const AttentionProblem& p = run.problem;
  void* scratch = scratch_arena.reserve(run.kernels.scratch_bytes(p));
  const int64_t count = static_cast<int64_t>(run.plan.items.size());
  // Heads of a sequence lie side by side in its pages: one thread takes them, and its prefetcher has them at hand.
  const int64_t heads = p.cache.num_kv_heads, step = count >= 8 * run.threads * heads ? heads : 1;
  for (int64_t i = 0, end = 0; i < end || (i = run.next.fetch_add(step, std::memory_order_relaxed)) < count; ++i) {
    if (i >= end) end = std::min(i + step, count);
    const WorkItem& item = run.plan.items[i];
    if (!run.kernels.attend(p, item, scratch, run.partials)) {
      run.bad_block.store(true, std::memory_order_relaxed);
      return;
    }
    if (item.split_group >= 0) run.deliver(run.plan.groups[item.split_group]);
    if (item.shared < 0) continue;
    for (int64_t t = 0; t < (item.row_end - item.row_begin) / p.group; ++t) {
      const int32_t group = p.shared[item.shared + t].split_group;
      if (group >= 0) run.deliver(run.plan.groups[group + item.kv_head]);
    }
  }
}

}  // namespace

void run_threads(const Threads& threads, int64_t work, int64_t pieces, void (*body)(void*), void* context) {
  const int64_t count = std::min(threads.count, pieces);
  if (count <= 1 || work < kSerialWork) {
    body(context);
  } else {
    threads.run(count, body, context);
  }
}

const char* run_attention(const AttentionProblem& asked, const KernelTable& kernels, const Threads& threads) {
  static thread_local Arena partials_arena;
  AttentionProblem problem = asked;
  Plan& plan = plan_of(problem, kernels.row_tile);
  if (plan.error != nullptr) return plan.error;
  if (plan.items.empty()) return nullptr;
  problem.shared = plan.shared.data();
  auto* partials = static_cast<float*>(partials_arena.reserve(plan.partial_floats * 4));
  AttentionRun run{problem, kernels, plan, partials, threads.count};
  run_threads(threads, plan.work, static_cast<int64_t>(plan.items.size()), attention_worker, &run);
  return run.bad_block.load() ? "attention: block_tables names a block outside the KV cache" : nullptr;
}

}  // namespace pageloom
