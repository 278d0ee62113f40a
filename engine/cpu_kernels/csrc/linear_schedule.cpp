// How a layer is cut over threads. Results never depend on it: a kernel computes each row and panel by itself, so any
// number of threads gives the same bits.
#include "linear_schedule.h"

#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <type_traits>

namespace pageloom {
namespace {

// Estimated nanoseconds of a core, only to decide whether another one is worth waking.
constexpr int64_t kSerialNs = 6000;
constexpr int64_t kBytesPerNs = 24, kProductsPerNs = 100;
constexpr int64_t kOwnRowsElements = 1 << 13;  // rows this small are prepared by each thread for itself
constexpr int64_t kPrepareRows = 8;            // rows that a thread prepares at once where they are shared
constexpr int64_t kMinChunkRows = 64;          // where rows are split as well as panels
constexpr int64_t kRotateElements = 1 << 14;   // fewer elements of heads are rotated by one thread
constexpr int64_t kChunkElements = 3 << 17;    // inputs of a chunk of rows: they stay in the cache of their thread
constexpr int64_t kStreamedRows = 2;    // of so few, weights are all that counts:
constexpr int64_t kStreamedPanels = 8;  // claims are of about as many panels, in whole sets of streams
constexpr int64_t kUnitsPerThread = 6;         // what there should be at least, for a balance
constexpr int64_t kClaimNs = 100000;           // what a thread holds at most, where a unit is not more

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Grows, never shrinks: one per thread and use, so that a steady state allocates nothing.
class Arena {
 public:
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset(new char[bytes + bytes / 4 + 64]);
      size_ = bytes + bytes / 4;
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

// What is left of the panels that one thread begins with; others take from it when theirs are done.
struct alignas(64) Range {
  std::atomic<int64_t> next;
  int64_t end;

  // A third of what is left and at most `most`, in multiples of `step` while there is more; false: nothing left.
  bool claim(int64_t step, int64_t most, int64_t& begin, int64_t& stop) {
    int64_t at = next.load(std::memory_order_relaxed);
    while (at < end) {
      const int64_t left = end - at;
      const int64_t take = std::min({left, most, left <= 2 ? 1 : ceil_div(left, 3 * step) * step});
      if (!next.compare_exchange_weak(at, at + take, std::memory_order_relaxed)) continue;
      begin = at;
      stop = at + take;
      return true;
    }
    return false;
  }
};

// One layer of a run. Its units are panels of the first chunk of rows, then of the second, and so on.
struct Phase : Stage {
  const LinearProblem& problem;
  const LinearKernels& kernels;
  OperandLayout layout;
  bool as_is;  // x itself is what kernels read
  int64_t panels, row_chunks, step, most, scratch_bytes;
  Range* ranges = nullptr;  // one for each worker
  char* const* shared;      // where rows go that are prepared for all threads
  std::atomic<int64_t> rows_ready{0};

  Phase(const LinearLayer& layer, int64_t threads, char* const* shared_rows);
  bool own_rows() const { return !as_is && (workers == 1 || problem.rows * problem.k <= kOwnRowsElements); }
  int64_t thread_bytes() const { return scratch_bytes + (own_rows() ? layout.bytes() : 0); }
};

// `next` counts rows here.
bool prepare_together(Phase& phase, const Operand& operand, Turn& turn) {
  const int64_t rows = phase.problem.rows;
  for (int64_t begin; (begin = phase.next.fetch_add(kPrepareRows, std::memory_order_relaxed)) < rows;) {
    const int64_t end = std::min(rows, begin + kPrepareRows);
    phase.kernels.prepare(phase.problem, operand, begin, end);
    phase.rows_ready.fetch_add(end - begin, std::memory_order_release);
    if (!turn.pass()) return false;
  }
  for (int64_t round = 0; phase.rows_ready.load(std::memory_order_acquire) < rows; ++round)
    if (!turn.relax(round)) return false;
  return true;
}

void compute_units(const Phase& phase, const Operand& operand, int64_t begin, int64_t end, void* scratch) {
  const int64_t rows = phase.problem.rows, chunks = phase.row_chunks;
  while (begin < end) {
    const int64_t chunk = begin / phase.panels, first = begin % phase.panels;
    const int64_t count = std::min(end - begin, phase.panels - first);
    phase.kernels.compute(phase.problem, operand, rows * chunk / chunks, rows * (chunk + 1) / chunks, first,
                          first + count, scratch);
    begin += count;
  }
}

// What `me` begins with, and then what others have not begun.
bool take_part(Stage& stage, int64_t me, Turn& turn) {
  static thread_local Arena arena;
  auto& phase = static_cast<Phase&>(stage);
  const LinearProblem& p = phase.problem;
  char* const memory = arena.reserve(phase.thread_bytes());
  Operand operand{OperandKind::kBFloat16, p.x, p.x_stride, nullptr, nullptr};
  if (phase.own_rows()) {
    operand = phase.layout.at(memory + phase.scratch_bytes);
    phase.kernels.prepare(p, operand, 0, p.rows);
  } else if (!phase.as_is) {
    operand = phase.layout.at(*phase.shared);
    if (!prepare_together(phase, operand, turn)) return false;
  }
  for (int64_t i = 0; i < phase.workers; ++i) {
    Range& range = phase.ranges[(me + i) % phase.workers];
    for (int64_t begin, end; range.claim(phase.step, phase.most, begin, end);) {
      compute_units(phase, operand, begin, end, memory);
      phase.finish(end - begin);
      if (!turn.pass()) return false;
    }
  }
  return true;
}

const uint8_t* first_weights(const Stage& stage, int64_t me, int64_t& bytes) {
  const auto& phase = static_cast<const Phase&>(stage);
  if (me >= phase.workers) return nullptr;
  const int64_t first = phase.ranges[me].next.load(std::memory_order_relaxed) % phase.panels;
  bytes = std::min(kAheadBytes, (phase.panels - first) * phase.problem.panel_bytes);
  return phase.problem.weight + first * phase.problem.panel_bytes;
}

int64_t estimated_ns(const LinearProblem& p, int64_t rows, int64_t panels) {
  return std::max(panels * p.panel_bytes / kBytesPerNs, rows * p.k * panels * kPanel / kProductsPerNs);
}

int64_t workers_for(const LinearProblem& p, int64_t panels, int64_t threads) {
  if (p.format == Format::kRotate) return p.rows * p.n < kRotateElements ? 1 : threads;
  const int64_t ns = estimated_ns(p, p.rows, panels);
  return ns < kSerialNs ? 1 : std::min(threads, ns / (kSerialNs / 2));
}

int64_t row_chunks_for(const LinearProblem& p, int64_t panels, int64_t workers) {
  if (p.format == Format::kRotate) return std::min(p.rows, workers == 1 ? 1 : kUnitsPerThread * workers);
  const int64_t near = ceil_div(p.rows * p.k, kChunkElements), most = std::max<int64_t>(p.rows / kMinChunkRows, 1);
  return std::min(workers == 1 ? near : std::max(near, ceil_div(kUnitsPerThread * workers, panels)), most);
}

Phase::Phase(const LinearLayer& layer, int64_t threads, char* const* shared_rows)
    : problem(layer.problem),
      kernels(*layer.kernels),
      layout(problem, kernels.operand_kind(problem)),
      as_is(layout.kind == OperandKind::kBFloat16 && problem.norm_weight == nullptr),
      panels(problem.format == Format::kRotate ? 1 : ceil_div(problem.n, kPanel)),
      shared(shared_rows) {
  workers = workers_for(problem, panels, threads);
  row_chunks = row_chunks_for(problem, panels, workers);
  units = panels * row_chunks;
  workers = std::min(workers, units);
  const int64_t set = std::max<int64_t>(problem.streams, 1);  // a rotation has none
  step = problem.rows > kStreamedRows ? 2 : ceil_div(kStreamedPanels, set) * set;
  const int64_t unit_ns = std::max<int64_t>(estimated_ns(problem, ceil_div(problem.rows, row_chunks), 1), 1);
  most = std::max<int64_t>(kClaimNs / unit_ns / step, 1) * step;
  work = take_part;
  if (problem.format != Format::kRotate) ahead = first_weights;
  scratch_bytes = aligned(static_cast<int64_t>(kernels.scratch_bytes(problem)));
}

std::atomic<int64_t> chosen_streams{kMostStreams};

}  // namespace

void set_streams(int64_t streams) { chosen_streams.store(streams, std::memory_order_relaxed); }
int64_t streams() { return chosen_streams.load(std::memory_order_relaxed); }

LinearStages::LinearStages(int64_t layers, int64_t threads) : threads_(threads) {
  static thread_local Arena arena;
  at_ = arena.reserve(layers * (aligned(sizeof(Phase)) + threads * static_cast<int64_t>(sizeof(Range))));
}

Stage* LinearStages::add(const LinearLayer& layer) {
  static thread_local Arena arena;
  static_assert(std::is_trivially_destructible_v<Phase> && std::is_trivially_destructible_v<Range>);
  Phase& phase = *new (at_) Phase(layer, threads_, &rows_);
  phase.ranges = reinterpret_cast<Range*>(at_ + aligned(sizeof(Phase)));
  for (int64_t w = 0; w < phase.workers; ++w)
    new (phase.ranges + w) Range{{phase.units * w / phase.workers}, phase.units * (w + 1) / phase.workers};
  at_ = reinterpret_cast<char*>(phase.ranges + threads_);
  if (!phase.as_is && !phase.own_rows()) rows_ = arena.reserve(phase.layout.bytes());  // of one stage at a time
  return &phase;
}

void run_linear(const LinearLayer& layer, const Threads& threads) {
  if (layer.problem.rows == 0) return;
  LinearStages stages(1, threads.count);
  Stage* const stage = stages.add(layer);
  StageRun(&stage, 1).run(threads);
}

}  // namespace pageloom
