// How a call is cut depends on the sequences alone, never on the number of threads or on the rest of the batch: a
// sequence's result is the same bit for bit alone, batched, on one thread or on sixty-four.
#include "schedule.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

namespace pageloom {
namespace {

constexpr int64_t kSerialWork = 1 << 15;  // lane operations below which waking threads costs more than it saves
constexpr int64_t kFewItems = 32;         // a sequence of fewer items is cut finer, so that all threads have some

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

struct SplitGroup {
  WorkItem rows;
  int64_t first_partial;  // in floats
  int64_t partial_stride;
  int32_t parts;
  int32_t pending;
};

struct Plan {
  std::vector<WorkItem> items;
  std::vector<SplitGroup> groups;
  int64_t partial_floats = 0;
  int64_t work = 0;
  const char* error = nullptr;

  void clear() {
    items.clear();
    groups.clear();
    partial_floats = 0;
    work = 0;
    error = nullptr;
  }
};

void add_tile(Plan& plan, const AttentionProblem& p, WorkItem item, bool may_split) {
  const int64_t rows = item.row_end - item.row_begin;
  const int64_t keys = rows > 32 ? 4 * kSplit : kSplit;  // adding up a part costs as much as 30 keys of all its rows
  const int64_t first_part = item.kv_begin / keys, last_part = (item.kv_end - 1) / keys;
  const bool split = may_split && last_part > first_part;
  plan.work += p.cache.num_kv_heads * (item.kv_end - item.kv_begin) * p.cache.padded_dim * (2 + rows) / 16;
  for (int64_t head = 0; head < p.cache.num_kv_heads; ++head) {
    item.kv_head = static_cast<int32_t>(head);
    item.split_group = -1;
    item.part = 0;
    if (!split) {
      plan.items.push_back(item);
      continue;
    }
    SplitGroup group{};
    group.rows = item;
    group.parts = group.pending = static_cast<int32_t>(last_part - first_part + 1);
    group.partial_stride = rows * (p.cache.padded_dim + kPartialExtra);
    group.first_partial = plan.partial_floats;
    plan.partial_floats += group.parts * group.partial_stride;
    WorkItem part = item;
    part.split_group = static_cast<int32_t>(plan.groups.size());
    plan.groups.push_back(group);
    for (int64_t i = first_part; i <= last_part; ++i, ++part.part) {
      part.kv_begin = static_cast<int32_t>(std::max<int64_t>(item.kv_begin, i * keys));
      part.kv_end = static_cast<int32_t>(std::min<int64_t>(item.kv_end, (i + 1) * keys));
      plan.items.push_back(part);
    }
  }
}

void make_plan(Plan& plan, const AttentionProblem& p, int64_t row_tile) {
  plan.clear();
  if (p.num_seqs > 0 && p.query_start_loc[0] < 0) plan.error = "attention: query_start_loc is negative";
  if (plan.error != nullptr) return;
  for (int64_t i = 0; i < p.num_seqs; ++i) {
    const int64_t queries = p.query_start_loc[i + 1] - p.query_start_loc[i], length = p.seq_lens[i];
    if (queries == 0) continue;
    if (queries < 0 || length < queries) {
      plan.error = "attention: a sequence has more queries than its length (query_start_loc, seq_lens)";
      return;
    }
    const int64_t rows = queries * p.group;
    const bool few = rows > row_tile && (rows + row_tile - 1) / row_tile * p.cache.num_kv_heads < kFewItems;
    const int64_t size = few ? std::max(kRowTile, row_tile / 2) : row_tile;
    const int64_t tiles = (rows + size - 1) / size;
    for (int64_t tile = tiles - 1; tile >= 0; --tile) {  // the longest first
      const int64_t begin = tile * size, end = std::min(rows, begin + size);
      const int64_t oldest = length - queries + begin / p.group, newest = length - queries + (end - 1) / p.group;
      WorkItem item{};
      item.seq = static_cast<int32_t>(i);
      item.row_begin = static_cast<int32_t>(begin);
      item.row_end = static_cast<int32_t>(end);
      item.kv_begin = static_cast<int32_t>(p.window > 0 ? std::max<int64_t>(0, oldest - p.window + 1) : 0);
      item.kv_end = static_cast<int32_t>(newest + 1);
      add_tile(plan, p, item, tiles == 1);
    }
  }
}

struct AttentionRun {
  const AttentionProblem& problem;
  const KernelTable& kernels;
  Plan& plan;
  float* partials;
  std::atomic<int64_t> next{0};
  std::atomic<bool> bad_block{false};
};

void attention_worker(void* context) {
  static thread_local Arena scratch_arena;
  auto& run = *static_cast<AttentionRun*>(context);
  void* scratch = scratch_arena.reserve(run.kernels.scratch_bytes(run.problem));
  const int64_t count = static_cast<int64_t>(run.plan.items.size());
  for (int64_t i; (i = run.next.fetch_add(1, std::memory_order_relaxed)) < count;) {
    const WorkItem& item = run.plan.items[i];
    SplitGroup* group = item.split_group < 0 ? nullptr : &run.plan.groups[item.split_group];
    float* base = group == nullptr ? nullptr : run.partials + group->first_partial;
    float* partial = group == nullptr ? nullptr : base + item.part * group->partial_stride;
    if (!run.kernels.attend(run.problem, item, scratch, partial)) {
      run.bad_block.store(true, std::memory_order_relaxed);
      return;
    }
    // Whoever delivers the last part of a group adds the group up.
    if (group != nullptr && __atomic_sub_fetch(&group->pending, 1, __ATOMIC_ACQ_REL) == 0) {
      run.kernels.combine(run.problem, group->rows, base, group->parts, group->partial_stride);
    }
  }
}

void run_threads(const Threads& threads, int64_t work, int64_t pieces, void (*body)(void*), void* context) {
  const int64_t count = std::min(threads.count, pieces);
  if (count <= 1 || work < kSerialWork) {
    body(context);
  } else {
    threads.run(count, body, context);
  }
}

template <class T>
void write_token(const CacheLayout& cache, int64_t head, int64_t slot, const T* k, const T* v) {
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  uint32_t* keys = cache.k_of(block, head) + offset;
  if constexpr (sizeof(T) == 4) {
    for (int64_t d = 0; d < cache.head_dim; ++d) memcpy(keys + d * cache.block_size, k + d, 4);
    memcpy(cache.v_of(block, head) + offset * cache.padded_dim, v, cache.head_dim * 4);
  } else {
    for (int64_t d = 0; d < cache.head_dim; d += 2) memcpy(keys + d / 2 * cache.block_size, k + d, 4);
    // 16-bit stores, never a read-modify-write of the lane: the neighbouring token may be another thread's.
    T* values = reinterpret_cast<T*>(cache.v_of(block, head) + offset / 2 * cache.padded_dim) + (offset & 1);
    for (int64_t d = 0; d < cache.head_dim; ++d) values[2 * d] = v[d];
  }
}

// Four 16-bit tokens of consecutive slots, the first a multiple of 4: K in transposes of 4 x 4 lanes, V in whole lanes.
void write_four_tokens(const CacheLayout& cache, int64_t head, int64_t slot, const uint16_t* k, int64_t k_stride,
                       const uint16_t* v, int64_t v_stride) {
  typedef uint32_t Four __attribute__((vector_size(16)));
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  uint32_t* keys = cache.k_of(block, head) + offset;
  for (int64_t d = 0; d < cache.head_dim; d += 8) {
    Four in[4];
    for (int i = 0; i < 4; ++i) memcpy(&in[i], k + i * k_stride + d, 16);
    const Four a = __builtin_shufflevector(in[0], in[1], 0, 4, 1, 5);
    const Four b = __builtin_shufflevector(in[2], in[3], 0, 4, 1, 5);
    const Four e = __builtin_shufflevector(in[0], in[1], 2, 6, 3, 7);
    const Four f = __builtin_shufflevector(in[2], in[3], 2, 6, 3, 7);
    const Four out[4] = {__builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7),
                         __builtin_shufflevector(e, f, 0, 1, 4, 5), __builtin_shufflevector(e, f, 2, 3, 6, 7)};
    for (int i = 0; i < 4; ++i) memcpy(keys + (d / 2 + i) * cache.block_size, &out[i], 16);
  }
  for (int64_t pair = 0; pair < 2; ++pair, v += 2 * v_stride) {
    uint32_t* values = cache.v_of(block, head) + (offset / 2 + pair) * cache.padded_dim;
    for (int64_t d = 0; d < cache.head_dim; ++d) values[d] = v[d] | static_cast<uint32_t>(v[v_stride + d]) << 16;
  }
}

struct WriteRun {
  const CacheLayout& cache;
  TokenView k, v;
  const int64_t* slots;
  int64_t num_tokens;
  std::atomic<int64_t> next{0};
  std::atomic<bool> bad_slot{false};
};

template <class T>
void write_range(WriteRun& run, int64_t begin, int64_t end) {
  const int64_t capacity = run.cache.num_blocks * run.cache.block_size;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t slot = run.slots[t];
    if (slot == -1) continue;
    if (slot < 0 || slot >= capacity) {
      run.bad_slot.store(true, std::memory_order_relaxed);
      return;
    }
    const T* k = static_cast<const T*>(run.k.data) + t * run.k.token_stride;
    const T* v = static_cast<const T*>(run.v.data) + t * run.v.token_stride;
    if constexpr (sizeof(T) == 2) {
      const int64_t* next = run.slots + t;
      if (t + 4 <= end && slot % 4 == 0 && next[1] == slot + 1 && next[2] == slot + 2 && next[3] == slot + 3) {
        for (int64_t head = 0; head < run.cache.num_kv_heads; ++head)
          write_four_tokens(run.cache, head, slot, k + head * run.k.head_stride, run.k.token_stride,
                            v + head * run.v.head_stride, run.v.token_stride);
        t += 3;
        continue;
      }
    }
    for (int64_t head = 0; head < run.cache.num_kv_heads; ++head)
      write_token<T>(run.cache, head, slot, k + head * run.k.head_stride, v + head * run.v.head_stride);
  }
}

void write_worker(void* context) {
  constexpr int64_t kChunk = 32;
  auto& run = *static_cast<WriteRun*>(context);
  for (int64_t begin; (begin = run.next.fetch_add(kChunk, std::memory_order_relaxed)) < run.num_tokens;) {
    const int64_t end = std::min(run.num_tokens, begin + kChunk);
    run.cache.dtype == Dtype::kFloat32 ? write_range<float>(run, begin, end) : write_range<uint16_t>(run, begin, end);
  }
}

struct CopyRun {
  char* const* caches;
  const int64_t* block_bytes;
  int64_t count, num_pairs;
  const int64_t* pairs;
  std::atomic<int64_t> next{0};
};

void copy_worker(void* context) {
  auto& run = *static_cast<CopyRun*>(context);
  for (int64_t i; (i = run.next.fetch_add(1, std::memory_order_relaxed)) < run.count;) {
    const int64_t cache = i / run.num_pairs, bytes = run.block_bytes[cache];
    const int64_t* pair = run.pairs + 2 * (i % run.num_pairs);
    memcpy(run.caches[cache] + pair[1] * bytes, run.caches[cache] + pair[0] * bytes, bytes);
  }
}

}  // namespace

const char* run_attention(const AttentionProblem& problem, const KernelTable& kernels, const Threads& threads) {
  static thread_local Plan plan;
  static thread_local Arena partials_arena;
  make_plan(plan, problem, kernels.row_tile);
  if (plan.error != nullptr) return plan.error;
  if (plan.items.empty()) return nullptr;
  auto* partials = static_cast<float*>(partials_arena.reserve(plan.partial_floats * 4));
  AttentionRun run{problem, kernels, plan, partials};
  run_threads(threads, plan.work, static_cast<int64_t>(plan.items.size()), attention_worker, &run);
  return run.bad_block.load() ? "attention: block_tables names a block outside the KV cache" : nullptr;
}

const char* run_write(const CacheLayout& cache, TokenView k, TokenView v, const int64_t* slots, int64_t num_tokens,
                      const Threads& threads) {
  WriteRun run{cache, k, v, slots, num_tokens};
  const int64_t work = num_tokens * cache.num_kv_heads * cache.head_dim;
  run_threads(threads, work, (num_tokens + 31) / 32, write_worker, &run);
  return run.bad_slot.load() ? "attention: slot_mapping names a slot outside the KV cache" : nullptr;
}

void run_copy_blocks(char* const* caches, const int64_t* block_bytes, int64_t num_caches, const int64_t* pairs,
                     int64_t num_pairs, const Threads& threads) {
  if (num_pairs == 0 || num_caches == 0) return;
  CopyRun run{caches, block_bytes, num_caches * num_pairs, num_pairs, pairs};
  run_threads(threads, run.count * block_bytes[0] / 4, run.count, copy_worker, &run);
}

}  // namespace pageloom
