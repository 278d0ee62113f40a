// How a mixture of experts is cut over threads. Rows are sorted by expert (expert_sort.cpp); then a unit is a panel of one expert for its
// rows, as in a layer, and each thread begins with an equal share of the cost. Results never depend on it: a kernel
// computes each row and panel by itself, and a token's sum runs over its choices in their order.
#include <string.h>

#include <type_traits>

#include "expert_batch.h"

namespace pageloom {
namespace {

constexpr int64_t kMostChoices = 1 << 14;      // of tokens that go through all stages at once, where there are more
constexpr int64_t kCombineElements = 1 << 16;  // fewer products are added up by one thread
constexpr const char* kBadId = "an id is outside the experts";

// In equal parts; 1 where there are no tokens.
int64_t tokens_at_once(const ExpertsProblem& p) {
  const int64_t most = std::max<int64_t>(kMostChoices / p.top_k, 1), parts = std::max<int64_t>(ceil_div(p.tokens, most), 1);
  return std::max<int64_t>(ceil_div(p.tokens, parts), 1);
}

// Whether one thread sorts and gathers as one unit.
bool is_small(const ExpertsProblem& p) { return p.tokens * p.gate_up.k <= kOwnRowsElements; }

ExpertsProblem part_of(const ExpertsProblem& p, int64_t begin, int64_t tokens) {
  ExpertsProblem part = p;
  part.tokens = tokens;
  part.ids += begin * p.top_k;
  part.weights += begin * p.top_k;
  part.gate_up.x += begin * p.gate_up.x_stride;
  if (p.residual != nullptr) part.residual += begin * p.residual_stride;
  part.out += begin * p.out_stride;
  return part;
}

// Rows that are shared by all batches, one after another.
struct RowMemory {
  char *gathered, *quantised;
  uint16_t *hidden, *products;
};

RowMemory lay_out_rows(const ExpertsProblem& p, int64_t choices, Room& room) {
  const OperandLayout gathered(p.gate_up_kernels->operand_kind(p.gate_up), choices, p.gate_up.k);
  const OperandLayout quantised(p.down_kernels->operand_kind(p.down), choices, p.down.k);
  RowMemory rows;
  rows.gathered = room.take<char>(gathered.bytes());
  rows.quantised = room.take<char>(quantised.kind == OperandKind::kBFloat16 ? 0 : quantised.bytes());
  rows.hidden = room.take<uint16_t>(choices * row_bytes_of(p.down.k * 2) / 2);
  rows.products = room.take<uint16_t>(choices * aligned(p.down.n * 2) / 2);
  return rows;
}

// ---- rows

void copy_row(const Operand& from, int64_t row, const Operand& to, int64_t position, const OperandLayout& layout, int64_t k) {
  const int64_t size = layout.kind == OperandKind::kBFloat16 ? 2 : 1;
  const auto row_of = [&](const Operand& o, int64_t at) { return static_cast<char*>(const_cast<void*>(o.data)) + at * o.stride * size; };
  memcpy(row_of(to, position), row_of(from, row), k * size);
  const int64_t scales = layout.scales == 0 ? 0 : layout.kind == OperandKind::kInt8PerToken ? 1 : layout.groups;
  if (scales > 0) memcpy(const_cast<float*>(to.scales) + position * scales, from.scales + row * scales, scales * 4);
  if (layout.sums > 0) memcpy(const_cast<float*>(to.sums) + position * scales, from.sums + row * scales, scales * 4);
}

// Where rows are prepared on their way. A thread has it before it takes any.
char* gather_memory(const Batch& b) {
  static thread_local Arena arena;
  const OperandLayout some(b.first.layout.kind, kPrepareRows, b.first.problem.k);
  return some.kind == OperandKind::kBFloat16 ? nullptr : arena.reserve(some.bytes());
}

// Rows of tokens [begin, end), prepared once, to the positions of their choices.
void gather_rows(Batch& b, int64_t begin, int64_t end) {
  const Product& first = b.first;
  LinearProblem p = first.problem;
  p.x = b.p.gate_up.x;
  p.x_stride = b.p.gate_up.x_stride;
  for (int64_t at = begin; at < end; at += kPrepareRows) {
    const int64_t count = std::min(kPrepareRows, end - at);
    Operand rows{OperandKind::kBFloat16, p.x + at * p.x_stride, p.x_stride, nullptr, nullptr};
    if (first.layout.kind != OperandKind::kBFloat16) {
      const OperandLayout some(first.layout.kind, kPrepareRows, p.k);
      rows = some.at(gather_memory(b));
      LinearProblem q = p;
      q.x += at * p.x_stride;
      first.kernels->prepare(q, rows, 0, count);
    }
    for (int64_t i = 0; i < count * b.p.top_k; ++i)
      if (const int64_t position = b.positions[at * b.p.top_k + i]; position >= 0)
        copy_row(rows, i / b.p.top_k, first.operand, position, first.layout, p.k);
  }
}

bool sort_unit(Stage& stage, int64_t, Turn&) {
  Batch& b = *static_cast<BatchStage&>(stage).batch;
  gather_memory(b);
  if (stage.next.fetch_add(1, std::memory_order_relaxed) > 0) return true;
  if (!sort_choices(b))
    stage.error.store(kBadId, std::memory_order_relaxed);
  else if (is_small(b.p))
    gather_rows(b, 0, b.p.tokens);
  stage.finish(1);
  return true;
}

// Units are rows, taken some at a time.
template <void (*rows)(Batch&, int64_t, int64_t)>
bool take_rows(Stage& stage, int64_t, Turn& turn) {
  Batch& b = *static_cast<BatchStage&>(stage).batch;
  gather_memory(b);
  for (int64_t begin; (begin = stage.next.fetch_add(kPrepareRows, std::memory_order_relaxed)) < stage.units;) {
    const int64_t end = std::min(stage.units, begin + kPrepareRows);
    rows(b, begin, end);
    stage.finish(end - begin);
    if (!turn.pass()) return false;
  }
  return true;
}

void quantise_rows(Batch& b, int64_t begin, int64_t end) {
  b.second.kernels->prepare(b.second.problem, b.second.operand, begin, end);
}

void combine_tokens(Batch& b, int64_t begin, int64_t end) {
  const ExpertsProblem& p = b.p;
  p.combine({p.top_k, p.down.n, b.positions, p.weights, b.products, b.product_stride, p.residual, p.residual_stride,
             p.out, p.out_stride},
            begin, end);
}

struct Combine : Stage {
  CombineProblem problem;
  CombineRows rows = nullptr;
};

bool combine_some(Stage& stage, int64_t, Turn& turn) {
  const Combine& combine = static_cast<Combine&>(stage);
  for (int64_t begin; (begin = stage.next.fetch_add(kPrepareRows, std::memory_order_relaxed)) < stage.units;) {
    const int64_t end = std::min(stage.units, begin + kPrepareRows);
    combine.rows(combine.problem, begin, end);
    stage.finish(end - begin);
    if (!turn.pass()) return false;
  }
  return true;
}

// ---- products

void compute_units(const Product& product, const Operand& operand, int64_t begin, int64_t end, void* scratch) {
  const Segment* const segments = product.batch->segments;
  LinearProblem p = product.problem;
  while (begin < end) {
    const Segment& segment = segments[begin / product.panels];
    const int64_t first = begin % product.panels, count = std::min(end - begin, product.panels - first);
    p.weight = product.problem.weight + segment.expert * product.expert_bytes;
    if (p.bias != nullptr) p.bias = product.problem.bias + segment.expert * p.n;
    product.kernels->compute(p, operand, segment.row_begin, segment.row_end, first, first + count, scratch);
    begin += count;
  }
}

// What `me` begins with, and then what others have not begun.
bool multiply(Stage& stage, int64_t me, Turn& turn) {
  static thread_local Arena arena;
  auto& product = static_cast<Product&>(stage);
  char* const memory = arena.reserve(product.scratch_bytes + (product.own_rows ? product.layout.bytes() : 0));
  Operand operand = product.operand;
  if (product.own_rows) {
    operand = product.layout.at(memory + product.scratch_bytes);
    product.kernels->prepare(product.problem, operand, 0, product.batch->rows);
  }
  for (int64_t i = 0; i < product.workers; ++i) {
    Range& range = product.ranges[(me + i) % product.workers];
    for (int64_t begin, end; range.claim(product.step, product.most, begin, end);) {
      compute_units(product, operand, begin, end, memory);
      product.finish(end - begin);
      if (!turn.pass()) return false;
    }
  }
  return true;
}

const uint8_t* first_weights(const Stage& stage, int64_t me, int64_t& bytes) {
  const auto& product = static_cast<const Product&>(stage);
  if (me >= product.workers || !product.batch->sort.complete()) return nullptr;
  const int64_t unit = product.ranges[me].next.load(std::memory_order_relaxed);
  if (unit >= product.units) return nullptr;
  const int64_t panel = unit % product.panels;
  bytes = std::min(kAheadBytes, (product.panels - panel) * product.problem.panel_bytes);
  return product.problem.weight + product.batch->segments[unit / product.panels].expert * product.expert_bytes +
         panel * product.problem.panel_bytes;
}

// ---- making stages

int64_t workers_for(const LinearProblem& p, int64_t choices, int64_t experts, int64_t threads) {
  const int64_t panels = ceil_div(p.n, kPanel), used = std::min(choices, experts);
  const int64_t ns = std::max(estimated_ns(p, 0, panels * used), estimated_ns(p, choices, panels));
  return ns < kSerialNs ? 1 : std::min(threads, ns / (kSerialNs / 2));
}

void make_product(Batch& b, Product& product, const LinearProblem& problem, const LinearKernels* kernels, int64_t threads,
                  char* rows) {
  product.batch = &b;
  product.problem = problem;
  product.kernels = kernels;
  product.layout = OperandLayout(kernels->operand_kind(problem), b.choices, problem.k);
  product.operand = product.layout.at(rows);
  product.panels = ceil_div(problem.n, kPanel);
  product.expert_bytes = product.panels * problem.panel_bytes;
  product.workers = workers_for(problem, b.choices, b.p.experts, threads);
  product.work = multiply;
  product.ahead = first_weights;
}

void make_rows(Batch& b, BatchStage& stage, int64_t units, int64_t workers, bool (*work)(Stage&, int64_t, Turn&)) {
  stage.batch = &b;
  stage.units = units;
  stage.workers = workers;
  stage.work = work;
}

// The batch of `p`'s tokens; nothing is written where `room` only measures.
Batch* make_batch(const ExpertsProblem& p, int64_t threads, Room& room, char* memory) {
  static_assert(std::is_trivially_destructible_v<Batch> && std::is_trivially_destructible_v<Range>);
  const bool measured = room.at == 0;
  const int64_t choices = p.tokens * p.top_k;
  Batch* const b = room.take<Batch>(1);
  int32_t* const positions = room.take<int32_t>(choices);
  int64_t* const begins = room.take<int64_t>(p.experts + 1);
  Segment* const segments = room.take<Segment>(std::min(p.experts, choices) + choices / kMinChunkRows);
  Range* const ranges = room.take<Range>(2 * threads);
  if (measured) return nullptr;
  new (b) Batch{};
  b->p = p;
  b->choices = choices;
  b->positions = positions, b->begins = begins, b->segments = segments;
  for (int64_t i = 0; i < 2 * threads; ++i) new (ranges + i) Range{};
  Room rows{reinterpret_cast<uintptr_t>(memory)};
  const RowMemory r = lay_out_rows(p, choices, rows);
  b->hidden = r.hidden, b->products = r.products;
  b->hidden_stride = row_bytes_of(p.down.k * 2) / 2;
  b->product_stride = aligned(p.down.n * 2) / 2;
  make_product(*b, b->first, p.gate_up, p.gate_up_kernels, threads, r.gathered);
  b->first.ranges = ranges;
  b->first.problem.out = b->hidden, b->first.problem.out_stride = b->hidden_stride;
  make_product(*b, b->second, p.down, p.down_kernels, threads, r.quantised);
  b->second.ranges = ranges + threads;
  b->second.problem.x = b->hidden, b->second.problem.x_stride = b->hidden_stride;
  b->second.problem.out = b->products, b->second.problem.out_stride = b->product_stride;
  if (b->second.layout.kind == OperandKind::kBFloat16)
    b->second.operand = {OperandKind::kBFloat16, b->hidden, b->hidden_stride, nullptr, nullptr};
  else
    b->second.own_rows = b->second.workers == 1 || choices * p.down.k <= kOwnRowsElements;
  make_rows(*b, b->sort, 1, 1, sort_unit);
  make_rows(*b, b->gather, p.tokens, b->first.workers, take_rows<gather_rows>);
  make_rows(*b, b->quantise, choices, b->second.workers, take_rows<quantise_rows>);
  make_rows(*b, b->combine, p.tokens, choices * p.down.n < kCombineElements ? 1 : b->second.workers, take_rows<combine_tokens>);
  return b;
}

}  // namespace

ExpertStages::ExpertStages(const ExpertsProblem* problems, int64_t count, int64_t threads)
    : problems_(problems), threads_(threads) {
  static thread_local Arena states, rows;
  Room state{0};
  int64_t row_bytes = 0;
  for (int64_t i = 0; i < count; ++i) {
    const ExpertsProblem& p = problems[i];
    const int64_t at_once = tokens_at_once(p);
    for (int64_t begin = 0; begin < p.tokens; begin += at_once) {
      Room measure{0};
      make_batch(part_of(p, begin, std::min(at_once, p.tokens - begin)), threads, measure, nullptr);
      state.at += measure.at;
    }
    Room measure{0};
    lay_out_rows(p, at_once * p.top_k, measure);
    row_bytes = std::max(row_bytes, static_cast<int64_t>(measure.at));
  }
  at_ = states.reserve(static_cast<int64_t>(state.at));
  rows_ = rows.reserve(row_bytes);
}

void ExpertStages::add(int64_t index, std::vector<Stage*>& stages) {
  const ExpertsProblem& p = problems_[index];
  const int64_t at_once = tokens_at_once(p);
  for (int64_t begin = 0; begin < p.tokens; begin += at_once) {
    Room room{reinterpret_cast<uintptr_t>(at_)};
    Batch& b = *make_batch(part_of(p, begin, std::min(at_once, p.tokens - begin)), threads_, room, rows_);
    at_ = reinterpret_cast<char*>(room.at);
    stages.push_back(&b.sort);
    if (!is_small(b.p)) stages.push_back(&b.gather);
    stages.push_back(&b.first);
    if (b.second.layout.kind != OperandKind::kBFloat16 && !b.second.own_rows) stages.push_back(&b.quantise);
    stages.push_back(&b.second);
    stages.push_back(&b.combine);
  }
}

void run_combine(const CombineProblem& problem, int64_t tokens, CombineRows rows, const Threads& threads) {
  static thread_local Arena arena;
  static_assert(std::is_trivially_destructible_v<Combine>);
  Combine& combine = *new (arena.reserve(sizeof(Combine))) Combine{};
  combine.problem = problem;
  combine.rows = rows;
  combine.units = tokens;
  combine.workers = tokens * problem.top_k * problem.columns < kCombineElements
                        ? 1
                        : std::min(threads.count, ceil_div(tokens, kPrepareRows));
  combine.work = combine_some;
  Stage* const stage = &combine;
  StageRun(&stage, 1).run(threads);
}

const char* run_experts(const ExpertsProblem& problem, const Threads& threads) {
  static thread_local std::vector<Stage*> stages;
  stages.clear();
  ExpertStages experts(&problem, 1, threads.count);
  experts.add(0, stages);
  return StageRun(stages.data(), static_cast<int64_t>(stages.size())).run(threads);
}

}  // namespace pageloom
