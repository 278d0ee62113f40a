// How a layer with adapters is cut over threads. Results never depend on it.
#include "adapters_schedule.h"

#include <type_traits>

#include "linear_work.h"

namespace pageloom {

#define PAGELOOM_WEAK __attribute__((weak))
extern const AdapterKernels* adapters_portable() PAGELOOM_WEAK;
extern const AdapterKernels* adapters_avx2() PAGELOOM_WEAK;
extern const AdapterKernels* adapters_avx512() PAGELOOM_WEAK;
extern const AdapterKernels* adapters_avx512bf16() PAGELOOM_WEAK;

namespace {

struct AdapterStage : Stage {
  AdapterProblem problem;
  const AdapterKernels* kernels;
  int64_t chunks;  // of a row
};

// A unit is 16 ranks of a part of a row.
bool shrink_some(Stage& stage, int64_t, Turn& turn) {
  static thread_local Arena arena;
  auto& s = static_cast<AdapterStage&>(stage);
  auto* const scratch = reinterpret_cast<uint16_t*>(arena.reserve(s.problem.layer.k * 2 + 64));
  for (int64_t unit; (unit = s.next.fetch_add(1, std::memory_order_relaxed)) < s.units;) {
    const int64_t entry = unit / s.chunks, part = unit % s.chunks % s.problem.tables.parts;
    const int64_t first = unit % s.chunks / s.problem.tables.parts * kAdapterRanks;
    const int64_t row = s.problem.tables.order[entry];
    if (row < s.problem.layer.rows) s.kernels->shrink(s.problem, row, part, first, first + kAdapterRanks, scratch);
    s.finish(1);
    if (!turn.pass()) return false;
  }
  return true;
}

// A unit is 512 outputs of a row.
bool finish_some(Stage& stage, int64_t, Turn& turn) {
  auto& s = static_cast<AdapterStage&>(stage);
  const LinearProblem& l = s.problem.layer;
  const int64_t outputs = l.gate == Gate::kNone ? l.n : l.n / 2;
  for (int64_t unit; (unit = s.next.fetch_add(1, std::memory_order_relaxed)) < s.units;) {
    const int64_t begin = unit % s.chunks * kAdapterColumns;
    s.kernels->finish(s.problem, unit / s.chunks, begin, std::min(begin + kAdapterColumns, outputs));
    s.finish(1);
    if (!turn.pass()) return false;
  }
  return true;
}

int64_t low_bytes(const LinearProblem& p, const AdapterTables& t) {
  return aligned(p.rows * t.parts * t.max_rank * static_cast<int64_t>(sizeof(float)));
}

int64_t workers_for(int64_t products, int64_t units, int64_t threads) {
  const int64_t ns = products * 2 / kBytesPerNs;
  return ns < kSerialNs ? 1 : std::min({threads, units, ns / (kSerialNs / 2)});
}

// Of the adapters that rows have. Whoever tries a piece while a step runs meets that step's rows: none of them is believed.
int64_t ranks_of(const AdapterTables& t, int64_t rows, int64_t count) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = t.order[i], slot = row < rows ? t.slots[row] : -1;
    for (int64_t part = 0; slot >= 0 && part < t.parts; ++part) sum += t.ranks[slot * t.parts + part];
  }
  return sum;
}

}  // namespace

const AdapterKernels* adapter_kernels_of(int64_t isa) {
  const auto best = [&](int64_t of) { return (isa == kAuto || isa >= of) && isa_available(of); };
  if (adapters_avx512bf16 != nullptr && best(kAvx512Bf16)) return adapters_avx512bf16();
  if (adapters_avx512 != nullptr && best(kAvx512)) return adapters_avx512();
  if (adapters_avx2 != nullptr && best(kAvx2)) return adapters_avx2();
  return adapters_portable();
}

int64_t adapter_bytes(const LinearProblem& problem, const AdapterTables& tables) {
  const int64_t product = problem.gate == Gate::kNone ? 0 : aligned(problem.rows * problem.n * 2);
  return low_bytes(problem, tables) + product;
}

namespace {

int64_t bytes_of_layer() { return aligned(sizeof(LinearLayer)) + 2 * aligned(sizeof(AdapterStage)); }

}  // namespace

AdapterStages::AdapterStages(int64_t layers, int64_t bytes, int64_t threads) : threads_(threads) {
  static thread_local Arena stages, memory;
  if (layers > 0) at_ = stages.reserve(layers * bytes_of_layer()), memory_ = memory.reserve(bytes);
}

void AdapterStages::add(const LinearLayer& layer, const AdapterTables& tables, LinearStages& linears,
                        std::vector<Stage*>& stages) {
  static_assert(std::is_trivially_destructible_v<AdapterStage> && std::is_trivially_destructible_v<LinearLayer>);
  LinearLayer& bare = *new (at_) LinearLayer(layer);
  AdapterStage& shrink = *new (at_ + aligned(sizeof(LinearLayer))) AdapterStage{};
  AdapterStage& finish = *new (at_ + aligned(sizeof(LinearLayer)) + aligned(sizeof(AdapterStage))) AdapterStage{};
  at_ += bytes_of_layer();
  LinearProblem& p = bare.problem;
  if (p.gate != Gate::kNone) p.out = memory_ + low_bytes(p, tables), p.out_stride = p.n;
  p.gate = Gate::kNone, p.residual = nullptr;
  shrink.problem = {layer.problem, tables, static_cast<const uint16_t*>(p.out), p.out_stride,
                    reinterpret_cast<float*>(memory_)};
  finish.problem = shrink.problem;
  shrink.kernels = finish.kernels = adapter_kernels_of(kAuto);
  const int64_t count = *tables.count, ranks = ranks_of(tables, p.rows, count);
  shrink.chunks = tables.parts * ceil_div(tables.max_rank, kAdapterRanks);
  shrink.units = count * shrink.chunks;
  shrink.workers = workers_for(ranks * p.k, shrink.units, threads_);
  shrink.work = shrink_some;
  finish.chunks = ceil_div(layer.problem.gate == Gate::kNone ? p.n : p.n / 2, kAdapterColumns);
  finish.units = p.rows * finish.chunks;
  finish.workers = workers_for(ranks * p.n / tables.parts + p.rows * p.n, finish.units, threads_);
  finish.work = finish_some;
  stages.push_back(linears.add(bare));
  stages.push_back(&shrink);
  stages.push_back(&finish);
}

void run_adapted(const LinearLayer& layer, const AdapterTables& tables, const Threads& threads) {
  if (layer.problem.rows == 0) return;
  if (!has_adapters(tables)) return run_linear(layer, threads);
  LinearStages linears(1, threads.count);
  AdapterStages adapted(1, adapter_bytes(layer.problem, tables), threads.count);
  std::vector<Stage*> stages;
  adapted.add(layer, tables, linears, stages);
  StageRun(stages.data(), static_cast<int64_t>(stages.size())).run(threads);
}

}  // namespace pageloom
