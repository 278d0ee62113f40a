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
  const Stage* product;
  int64_t entries;  // of the order
  int64_t chunks;   // units of kAdapterRows entries
  int64_t columns;  // of a unit of B (A x)
};

AdapterShare share_of(const AdapterStage& s, int64_t unit) {
  const AdapterTables& t = s.problem.tables;
  const int64_t begin = unit / s.chunks * kAdapterRows, chunk = unit % s.chunks;
  const int64_t end = std::min(begin + kAdapterRows, s.entries);
  if (s.chunks == 1) return {begin, end, 0, t.parts, 0, t.max_rank};
  const int64_t part = chunk % t.parts, rank = chunk / t.parts * kAdapterRanks;
  return {begin, end, part, part + 1, rank, rank + kAdapterRanks};
}

bool shrink_some(Stage& stage, int64_t, Turn& turn) {
  static thread_local Arena arena;
  auto& s = static_cast<AdapterStage&>(stage);
  const int64_t bytes = (kAdapterRows + 1) * s.problem.layer.k * static_cast<int64_t>(sizeof(float));
  auto* const scratch = reinterpret_cast<float*>(arena.reserve(bytes));
  for (int64_t unit; (unit = s.next.fetch_add(1, std::memory_order_relaxed)) < s.units;) {
    s.kernels->shrink(s.problem, share_of(s, unit), scratch);
    s.finish(1);
    if (!turn.pass()) return false;
  }
  return true;
}

// A unit is some outputs of some rows.
bool finish_some(Stage& stage, int64_t, Turn& turn) {
  auto& s = static_cast<AdapterStage&>(stage);
  const LinearProblem& l = s.problem.layer;
  const int64_t outputs = l.gate == Gate::kNone ? l.n : l.n / 2;
  for (int64_t unit; (unit = s.next.fetch_add(1, std::memory_order_relaxed)) < s.units;) {
    const int64_t first = unit / s.chunks * kAdapterRows, begin = unit % s.chunks * s.columns;
    s.kernels->finish(s.problem, first, std::min(first + kAdapterRows, s.entries), begin,
                      std::min(begin + s.columns, outputs));
    s.finish(1);
    if (!turn.pass()) return false;
  }
  return true;
}

int64_t low_bytes(const LinearProblem& p, const AdapterTables& t) {
  return aligned(p.rows * t.parts * t.max_rank * static_cast<int64_t>(sizeof(float)));
}

// What the first row reads of A, then of B: for one thread, while the stage before it ends; others have the product's.
const uint8_t* first_factors(const Stage& stage, int64_t me, int64_t& bytes) {
  const auto& s = static_cast<const AdapterStage&>(stage);
  const AdapterTables& t = s.problem.tables;
  if (me > 0) return s.product == nullptr ? nullptr : s.product->ahead(*s.product, me, bytes);
  const int64_t row = t.order[0], slot = row < s.problem.layer.rows ? t.slots[row] : -1;
  if (slot < 0) return nullptr;
  const int64_t wide = s.product == nullptr ? adapter_blocks(s.problem.layer.n) * kAdapterBlock
                                            : t.parts * s.problem.layer.k;
  bytes = std::min(kAheadBytes, t.max_rank * wide * 2);
  return reinterpret_cast<const uint8_t*>((s.product == nullptr ? t.b : t.a) + slot * t.max_rank * wide);
}

// A core reads that many of what is in no cache.
constexpr int64_t kReadBytesPerNs = 10;

int64_t workers_for(int64_t products, int64_t units, int64_t threads) {
  const int64_t ns = products * 2 / kReadBytesPerNs;
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
  const int64_t groups = ceil_div(count, kAdapterRows);
  shrink.entries = count;
  shrink.chunks = groups >= kUnitsPerThread * threads_ ? 1 : tables.parts * ceil_div(tables.max_rank, kAdapterRanks);
  shrink.units = groups * shrink.chunks;
  shrink.workers = workers_for(ranks * p.k, shrink.units, threads_);
  shrink.work = shrink_some, shrink.ahead = first_factors, shrink.lets_pass = true;
  const int64_t outputs = layer.problem.gate == Gate::kNone ? p.n : p.n / 2;
  finish.columns = p.rows < threads_ ? kAdapterColumns / 4 : kAdapterColumns;
  finish.chunks = ceil_div(outputs, finish.columns);
  finish.entries = std::clamp<int64_t>(*tables.rows, p.rows, tables.most);  // all of this layer's rows are among them
  finish.units = ceil_div(finish.entries, kAdapterRows) * finish.chunks;
  finish.workers = workers_for(ranks * p.n / tables.parts + p.rows * p.n, finish.units, threads_);
  finish.work = finish_some, finish.ahead = first_factors;
  Stage* const product = linears.add(bare);
  shrink.product = product;
  stages.push_back(&shrink);
  stages.push_back(product);
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
