// The items of a plan: threads take them from one queue, and whoever delivers the last part of some rows adds the parts
// up, in order.
#include "schedule.h"

#include <algorithm>
#include <atomic>
#include <memory>

namespace pageloom {
namespace {

constexpr int64_t kSmallItem = 1 << 13;   // lane operations of an item of which a thread takes many at once
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

void deliver(const AttendStage& stage, SplitGroup& group) {
  if (__atomic_sub_fetch(&group.pending, 1, __ATOMIC_ACQ_REL) != 0) return;
  stage.kernels.combine(stage.problem, group.rows, stage.plan.partials() + group.first_partial, group.parts,
                        group.partial_stride);
  group.pending = group.parts;  // for the step's next layer
}

void attend_item(AttendStage& stage, const WorkItem& item, const WorkItem* next, void* scratch) {
  const AttentionProblem& p = stage.problem;
  if (!stage.kernels.attend(p, item, next, scratch, stage.plan.partials()))
    stage.error.store("attention: block_tables names a block outside the KV cache", std::memory_order_relaxed);
  if (item.split_group >= 0) deliver(stage, stage.plan.groups[item.split_group]);
  if (item.shared < 0) return;
  for (int64_t t = 0; t < (item.row_end - item.row_begin) / p.group; ++t) {
    const int32_t group = p.shared[item.shared + t].split_group;
    if (group >= 0) deliver(stage, stage.plan.groups[group + item.kv_head]);
  }
}

bool attend(Stage& given, int64_t, Turn& turn) {
  static thread_local Arena arena;
  auto& stage = static_cast<AttendStage&>(given);
  void* const scratch = arena.reserve(stage.kernels.scratch_bytes(stage.problem));
  for (int64_t i; (i = stage.next.fetch_add(stage.claim, std::memory_order_relaxed)) < stage.units;) {
    const int64_t end = std::min(i + stage.claim, stage.units);
    for (int64_t at = i; at < end; ++at) {
      const int64_t next = at + 1 < end ? at + 1 : stage.next.load(std::memory_order_relaxed);
      attend_item(stage, stage.plan.items[at], next < stage.units ? &stage.plan.items[next] : nullptr, scratch);
    }
    stage.finish(end - i);
    if (!turn.pass()) return false;
  }
  return true;
}

}  // namespace

int64_t threads_worth(int64_t threads, int64_t work, int64_t pieces) {
  return work < kSerialWork ? 1 : std::max<int64_t>(std::min(threads, pieces), 1);
}

AttendStage::AttendStage(const AttentionProblem& asked, const KernelTable& table, int64_t threads, int64_t run)
    : problem(asked), kernels(table), plan(plan_of(asked, table.row_tile, run)) {
  error = plan.error;
  work = attend;
  units = plan.error == nullptr ? static_cast<int64_t>(plan.items.size()) : 0;
  workers = threads_worth(threads, plan.work, units);
  problem.shared = plan.shared.data();
  // Heads of a sequence lie side by side in its pages: one thread takes them, and its prefetcher has them at hand. Where
  // there are plenty it takes two sequences', since it can ask for what it knows that it comes to next.
  const int64_t heads = problem.cache.num_kv_heads, plenty = units / (8 * std::max<int64_t>(threads, 1) * heads);
  claim = plenty >= 2 && plan.work / units <= kSmallItem ? 2 * heads : plenty >= 1 ? heads : 1;
}

}  // namespace pageloom
