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
constexpr int64_t kRotateElements = 1 << 14;   // fewer elements of heads are rotated by one thread
constexpr int64_t kChunkElements = 3 << 17;    // inputs of a chunk of rows: they stay in the cache of their thread
constexpr int64_t kStreamedRows = 2;    // of so few, weights are all that counts:
constexpr int64_t kStreamedPanels = 8;  // claims are of about as many panels, in whole sets of streams
constexpr int64_t kUnitsPerThread = 6;         // what there should be at least, for a balance
constexpr int64_t kSpinRounds = 4096;          // of pauses before others are let run: about 0.15 ms
constexpr int64_t kAheadBytes = 1 << 18;       // of the next layer's weights, asked for while others end this one

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

// One layer of a run: what its threads share.
struct Phase {
  const LinearProblem& problem;
  const LinearKernels& kernels;
  OperandLayout layout;
  bool as_is;  // x itself is what kernels read
  int64_t panels, row_chunks, units, workers, step, scratch_bytes;
  Range* ranges = nullptr;
  char* shared = nullptr;  // prepared rows of all threads; null: each has its own
  alignas(64) std::atomic<int64_t> next_row{0};
  std::atomic<int64_t> rows_ready{0};
  alignas(64) std::atomic<int64_t> units_done{0};

  Phase(const LinearLayer& layer, int64_t threads);
  bool own_rows() const { return !as_is && (workers == 1 || problem.rows * problem.k <= kOwnRowsElements); }
  int64_t thread_bytes() const { return scratch_bytes + (own_rows() ? layout.bytes() : 0); }
};

struct LinearRun {
  Phase* phases;
  int64_t count, thread_bytes;
  std::atomic<int64_t> arrived{0};
};

// Who yields early gives its core to other processes for a whole time slice, again and again; who never does may keep the
// core from the very thread that it waits for.
void relax(int64_t round) {
#if defined(__x86_64__)
  _mm_pause();
#endif
  if (round >= kSpinRounds && round % 64 == 0) sched_yield();
}

// Whoever claimed rows is running, so waiting for them ends.
void prepare_together(Phase& phase, const Operand& operand) {
  const int64_t rows = phase.problem.rows;
  for (int64_t begin; (begin = phase.next_row.fetch_add(kPrepareRows, std::memory_order_relaxed)) < rows;) {
    const int64_t end = std::min(rows, begin + kPrepareRows);
    phase.kernels.prepare(phase.problem, operand, begin, end);
    phase.rows_ready.fetch_add(end - begin, std::memory_order_release);
  }
  for (int64_t round = 0; phase.rows_ready.load(std::memory_order_acquire) < rows; ++round) relax(round);
}

// Units are panels of the first chunk of rows, then of the second, and so on.
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

// `me` among the phase's workers: its share, and then what others have not begun.
void take_part(Phase& phase, int64_t me, char* memory) {
  const LinearProblem& p = phase.problem;
  Operand operand{OperandKind::kBFloat16, p.x, p.x_stride, nullptr, nullptr};
  if (phase.own_rows()) {
    operand = phase.layout.at(memory + phase.scratch_bytes);
    phase.kernels.prepare(p, operand, 0, p.rows);
  } else if (!phase.as_is) {
    operand = phase.layout.at(phase.shared);
    prepare_together(phase, operand);
  }
  for (int64_t i = 0; i < phase.workers; ++i) {
    Range& range = phase.ranges[(me + i) % phase.workers];
    for (int64_t begin, end; range.claim(phase.step, begin, end);) {
      compute_units(phase, operand, begin, end, memory);
      phase.units_done.fetch_add(end - begin, std::memory_order_release);
    }
  }
}

// Until all outputs of `phase` are there. The memory is idle meanwhile, so the weights that this thread will read first
// after it are asked for. Whoever claimed units is running, so waiting for them ends.
void await(const Phase& phase, const Phase& next, int64_t me) {
  const int64_t first = me < next.workers ? next.ranges[me].next.load(std::memory_order_relaxed) % next.panels : 0;
  const uint8_t* const weights = next.problem.weight + first * next.problem.panel_bytes;
  const int64_t bytes = me < next.workers
                            ? std::min(kAheadBytes, (next.panels - first) * next.problem.panel_bytes)
                            : 0;
  int64_t asked = 0;
  for (int64_t round = 0; phase.units_done.load(std::memory_order_acquire) < phase.units; ++round) {
    if (asked < bytes)
      for (const int64_t stop = std::min(bytes, asked + 4 * 64); asked < stop; asked += 64)
        __builtin_prefetch(weights + asked, 0, 2);
    else
      relax(round);
  }
}

void worker(void* context) {
  static thread_local Arena arena;
  auto& run = *static_cast<LinearRun*>(context);
  char* const memory = arena.reserve(run.thread_bytes);
  const int64_t me = run.arrived.fetch_add(1, std::memory_order_relaxed);
  for (int64_t i = 0; i < run.count; ++i) {
    Phase& phase = run.phases[i];
    if (me < phase.workers) take_part(phase, me, memory);
    if (i + 1 < run.count) await(phase, run.phases[i + 1], me);
  }
}

int64_t workers_for(const LinearProblem& p, int64_t panels, int64_t threads) {
  if (p.format == Format::kRotate) return p.rows * p.n < kRotateElements ? 1 : threads;
  const int64_t ns = std::max(panels * p.panel_bytes / kBytesPerNs, p.rows * p.k * p.n / kProductsPerNs);
  return ns < kSerialNs ? 1 : std::min(threads, ns / (kSerialNs / 2));
}

int64_t row_chunks_for(const LinearProblem& p, int64_t panels, int64_t workers) {
  if (p.format == Format::kRotate) return std::min(p.rows, workers == 1 ? 1 : kUnitsPerThread * workers);
  const int64_t near = ceil_div(p.rows * p.k, kChunkElements), most = std::max<int64_t>(p.rows / kMinChunkRows, 1);
  return std::min(workers == 1 ? near : std::max(near, ceil_div(kUnitsPerThread * workers, panels)), most);
}

Phase::Phase(const LinearLayer& layer, int64_t threads)
    : problem(layer.problem),
      kernels(*layer.kernels),
      layout(problem, kernels.operand_kind(problem)),
      as_is(layout.kind == OperandKind::kBFloat16 && problem.norm_weight == nullptr),
      panels(problem.format == Format::kRotate ? 1 : ceil_div(problem.n, kPanel)) {
  workers = workers_for(problem, panels, threads);
  row_chunks = row_chunks_for(problem, panels, workers);
  units = panels * row_chunks;
  workers = std::min(workers, units);
  const int64_t set = std::max<int64_t>(problem.streams, 1);  // a rotation has none
  step = problem.rows > kStreamedRows ? 2 : ceil_div(kStreamedPanels, set) * set;
  scratch_bytes = aligned(static_cast<int64_t>(kernels.scratch_bytes(problem)));
}

std::atomic<int64_t> chosen_streams{kMostStreams};

}  // namespace

void set_streams(int64_t streams) { chosen_streams.store(streams, std::memory_order_relaxed); }
int64_t streams() { return chosen_streams.load(std::memory_order_relaxed); }

void run_linears(const LinearLayer* layers, int64_t count, const Threads& threads) {
  static thread_local Arena rows_arena, phases_arena;
  if (count == 0 || layers[0].problem.rows == 0) return;
  const int64_t ranges_bytes = threads.count * static_cast<int64_t>(sizeof(Range));
  const int64_t phase_bytes = aligned(sizeof(Phase)) + ranges_bytes;
  char* memory = phases_arena.reserve(count * phase_bytes);
  auto* const phases = reinterpret_cast<Phase*>(memory);
  memory += count * aligned(sizeof(Phase));
  LinearRun run{phases, count, 0};
  int64_t workers = 1, shared_bytes = 0;
  for (int64_t i = 0; i < count; ++i, memory += ranges_bytes) {
    Phase& phase = *new (phases + i) Phase(layers[i], threads.count);
    phase.ranges = reinterpret_cast<Range*>(memory);
    for (int64_t w = 0; w < phase.workers; ++w)
      new (phase.ranges + w) Range{{phase.units * w / phase.workers}, phase.units * (w + 1) / phase.workers};
    workers = std::max(workers, phase.workers);
    run.thread_bytes = std::max(run.thread_bytes, phase.thread_bytes());
    if (!phase.as_is && !phase.own_rows()) shared_bytes = std::max(shared_bytes, phase.layout.bytes());
  }
  char* const shared = rows_arena.reserve(shared_bytes);  // of one phase at a time
  for (int64_t i = 0; i < count; ++i) phases[i].shared = shared;
  if (workers == 1)
    worker(&run);
  else
    threads.run(workers, worker, &run);
}

}  // namespace pageloom
