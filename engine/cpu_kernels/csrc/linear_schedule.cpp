// How a layer is cut over threads. Results never depend on it: a kernel computes each row and panel by itself, so any
// number of threads gives the same bits.
#include "linear_schedule.h"

#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "linear_work.h"

namespace pageloom {
namespace {

constexpr int64_t kRotateElements = 1 << 14;  // fewer elements of heads are rotated by one thread

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
      layout(kernels.operand_kind(problem), problem.rows, problem.k),
      as_is(layout.kind == OperandKind::kBFloat16 && problem.norm_weight == nullptr),
      panels(problem.format == Format::kRotate ? 1 : ceil_div(problem.n, kPanel)),
      shared(shared_rows) {
  workers = workers_for(problem, panels, threads);
  row_chunks = row_chunks_for(problem, panels, workers);
  units = panels * row_chunks;
  workers = std::min(workers, units);
  step = claim_step(problem.rows, problem.reading.streams);  // a rotation has no streams
  const int64_t unit_ns = std::max<int64_t>(estimated_ns(problem, ceil_div(problem.rows, row_chunks), 1), 1);
  most = std::max<int64_t>(kClaimNs / unit_ns / step, 1) * step;
  work = take_part;
  if (problem.format != Format::kRotate) ahead = first_weights;
  scratch_bytes = aligned(static_cast<int64_t>(kernels.scratch_bytes(problem)));
}

std::atomic<Reading> chosen_reading{{kMostStreams, 0}};

}  // namespace

void set_reading(Reading chosen) { chosen_reading.store(chosen, std::memory_order_relaxed); }
Reading reading() { return chosen_reading.load(std::memory_order_relaxed); }

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
