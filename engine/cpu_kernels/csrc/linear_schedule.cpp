// How a layer is cut over threads. Results never depend on it: a kernel computes each row and panel by itself, so any
// number of threads gives the same bits.
#include "linear_schedule.h"

#include <sched.h>
#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <memory>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pageloom {
namespace {

// Estimated nanoseconds of a core, only to decide whether another one is worth waking.
constexpr int64_t kSerialNs = 6000;
constexpr int64_t kBytesPerNs = 24, kProductsPerNs = 100;
constexpr int64_t kOwnRowsElements = 1 << 13;  // rows this small are prepared by each thread for itself
constexpr int64_t kPrepareRows = 8;            // rows that a thread prepares at once where they are shared
constexpr int64_t kMinChunkRows = 64;          // where rows are split as well as panels
constexpr int64_t kChunkElements = 3 << 17;    // inputs of a chunk of rows: they stay in the cache of their thread
constexpr int64_t kStreamedRows = 2;    // of so few, weights are all that counts:
constexpr int64_t kStreamedPanels = 8;  // as many streams of them at once as the kernels open
constexpr int64_t kUnitsPerThread = 6;         // what there should be at least, for a balance

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Grows, never shrinks: one per thread and use, so that a steady state allocates nothing.
class Arena {
 public:
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      size_ = bytes + bytes / 4;
      memory_.reset(new char[size_ + 64]);
    }
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) / 64 * 64);
  }

 private:
  std::unique_ptr<char[]> memory_;
  int64_t size_ = 0;
};

// Prepared rows in one piece of memory: data, then scales, then sums, each 64-byte aligned.
struct OperandLayout {
  OperandKind kind;
  int64_t stride = 0, data = 0, scales = 0, sums = 0;

  OperandLayout(const LinearProblem& p, OperandKind operand_kind) : kind(operand_kind) {
    const int64_t size = kind == OperandKind::kBFloat16 ? 2 : 1, groups = ceil_div(p.k, kGroup);
    stride = aligned(p.k * size);
    if (stride % 1024 == 0) stride += 64;  // else the same columns of all rows would share few sets of a cache
    data = p.rows * stride;
    if (kind == OperandKind::kInt8PerToken) scales = aligned(p.rows * 4);
    if (kind == OperandKind::kInt8PerGroup) scales = sums = aligned(p.rows * groups * 4);
    stride /= size;
  }

  int64_t bytes() const { return data + scales + sums; }

  Operand at(char* memory) const {
    return {kind, memory, stride, reinterpret_cast<float*>(memory + data),
            reinterpret_cast<float*>(memory + data + scales)};
  }
};

// What is left of the panels of one thread; others take from it when they have none of their own.
struct alignas(64) Range {
  std::atomic<int64_t> next;
  int64_t end;

  // A third of what is left, in multiples of `step` while there is more; false: nothing left.
  bool claim(int64_t step, int64_t& begin, int64_t& stop) {
    int64_t at = next.load(std::memory_order_relaxed);
    while (at < end) {
      const int64_t left = end - at, take = std::min(left, left <= 2 ? 1 : ceil_div(left, 3 * step) * step);
      if (!next.compare_exchange_weak(at, at + take, std::memory_order_relaxed)) continue;
      begin = at;
      stop = at + take;
      return true;
    }
    return false;
  }
};

struct LinearRun {
  const LinearProblem& problem;
  const LinearKernels& kernels;
  int64_t panels, row_chunks, workers, step;
  Range* ranges;
  const OperandLayout* layout;  // null: x itself is what kernels read
  char* shared;                 // prepared rows of all threads; null: each has its own
  int64_t scratch_bytes;
  std::atomic<int64_t> arrived{0};
  std::atomic<int64_t> next_row{0}, rows_ready{0};
};

void relax(int64_t round) {
#if defined(__x86_64__)
  _mm_pause();
#endif
  if (round % 64 == 63) sched_yield();
}

// Whoever claimed rows is running, so waiting for them ends.
void prepare_together(LinearRun& run, const Operand& operand) {
  const int64_t rows = run.problem.rows;
  for (int64_t begin; (begin = run.next_row.fetch_add(kPrepareRows, std::memory_order_relaxed)) < rows;) {
    const int64_t end = std::min(rows, begin + kPrepareRows);
    run.kernels.prepare(run.problem, operand, begin, end);
    run.rows_ready.fetch_add(end - begin, std::memory_order_release);
  }
  for (int64_t round = 0; run.rows_ready.load(std::memory_order_acquire) < rows; ++round) relax(round);
}

// Units are panels of the first chunk of rows, then of the second, and so on.
void compute_units(LinearRun& run, const Operand& operand, int64_t begin, int64_t end, void* scratch) {
  const int64_t rows = run.problem.rows;
  while (begin < end) {
    const int64_t chunk = begin / run.panels, first = begin % run.panels;
    const int64_t count = std::min(end - begin, run.panels - first);
    run.kernels.compute(run.problem, operand, rows * chunk / run.row_chunks, rows * (chunk + 1) / run.row_chunks, first,
                        first + count, scratch);
    begin += count;
  }
}

void worker(void* context) {
  static thread_local Arena arena;
  auto& run = *static_cast<LinearRun*>(context);
  const LinearProblem& p = run.problem;
  const bool own = run.layout != nullptr && run.shared == nullptr;
  char* const memory = arena.reserve(run.scratch_bytes + (own ? run.layout->bytes() : 0));
  Operand operand{OperandKind::kBFloat16, p.x, p.x_stride, nullptr, nullptr};
  if (own) {
    operand = run.layout->at(memory + run.scratch_bytes);
    run.kernels.prepare(p, operand, 0, p.rows);
  } else if (run.layout != nullptr) {
    operand = run.layout->at(run.shared);
    prepare_together(run, operand);
  }
  const int64_t me = run.arrived.fetch_add(1, std::memory_order_relaxed);
  for (int64_t i = 0; i < run.workers; ++i) {
    Range& range = run.ranges[(me + i) % run.workers];
    for (int64_t begin, end; range.claim(run.step, begin, end);) compute_units(run, operand, begin, end, memory);
  }
}

int64_t workers_for(const LinearProblem& p, int64_t panels, int64_t threads) {
  const int64_t ns = std::max(panels * p.panel_bytes / kBytesPerNs, p.rows * p.k * p.n / kProductsPerNs);
  return ns < kSerialNs ? 1 : std::min(threads, ns / (kSerialNs / 2));
}

int64_t row_chunks_for(const LinearProblem& p, int64_t panels, int64_t workers) {
  const int64_t near = ceil_div(p.rows * p.k, kChunkElements), most = std::max<int64_t>(p.rows / kMinChunkRows, 1);
  return std::min(workers == 1 ? near : std::max(near, ceil_div(kUnitsPerThread * workers, panels)), most);
}

}  // namespace

void run_linear(const LinearProblem& problem, const LinearKernels& kernels, const Threads& threads) {
  static thread_local Arena rows_arena, ranges_arena;
  if (problem.rows == 0 || problem.n == 0) return;
  const OperandKind kind = kernels.operand_kind(problem);
  const OperandLayout layout(problem, kind);
  const bool as_is = kind == OperandKind::kBFloat16 && problem.norm_weight == nullptr;
  const int64_t panels = ceil_div(problem.n, kPanel);
  int64_t workers = workers_for(problem, panels, threads.count);
  const int64_t row_chunks = row_chunks_for(problem, panels, workers), units = panels * row_chunks;
  workers = std::min(workers, units);
  auto* const ranges = reinterpret_cast<Range*>(ranges_arena.reserve(workers * sizeof(Range)));
  for (int64_t i = 0; i < workers; ++i) new (ranges + i) Range{{units * i / workers}, units * (i + 1) / workers};
  const int64_t step = problem.rows <= kStreamedRows ? kStreamedPanels : 2;
  LinearRun run{problem, kernels, panels, row_chunks, workers, step, ranges, as_is ? nullptr : &layout, nullptr, 0};
  run.scratch_bytes = aligned(static_cast<int64_t>(kernels.scratch_bytes(problem)));
  if (!as_is && workers > 1 && problem.rows * problem.k > kOwnRowsElements)
    run.shared = rows_arena.reserve(layout.bytes());
  if (workers == 1)
    worker(&run);
  else
    threads.run(workers, worker, &run);
}

}  // namespace pageloom
