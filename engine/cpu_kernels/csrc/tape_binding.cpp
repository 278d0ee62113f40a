// Making and running tapes. A tape is a uint8 tensor; whoever holds it holds the weights that it points to.
#include <algorithm>
#include <cstring>

#include "adapters_binding.h"
#include "experts_binding.h"
#include "tape.h"

namespace pageloom {
namespace {

constexpr const char* kMake = "make_tape";
constexpr const char* kRun = "run_tape";

// Numbers of a program, in order. `engine.cpu_kernels.tape` writes them.
struct Reader {
  const std::vector<int64_t>& numbers;
  const std::vector<Tensor>& tensors;
  const std::vector<double>& reals;
  std::vector<TapeValue> values;
  size_t at = 0, real_at = 0;

  int64_t count() {
    const int64_t n = next();
    PAGELOOM_CHECK(n >= 0, kMake, ": a negative count, ", n);
    return n;
  }

  int64_t next() {
    PAGELOOM_CHECK(at < numbers.size(), kMake, ": the program ends early");
    return numbers[at++];
  }

  std::optional<Tensor> tensor() {
    const int64_t index = next();
    if (index < 0) return std::nullopt;
    PAGELOOM_CHECK(index < static_cast<int64_t>(tensors.size()), kMake, ": there is no tensor ", index);
    return tensors[index];
  }

  Tensor needed_tensor() {
    const std::optional<Tensor> found = tensor();
    PAGELOOM_CHECK(found.has_value(), kMake, ": a tensor is missing");
    return *found;
  }

  // A value's columns, and how many, of elements of `size` bytes.
  struct Columns {
    Ref ref;
    int64_t count;
  };

  Columns columns(int64_t size = 2) {
    const int64_t value = next(), offset = next(), count = next();
    PAGELOOM_CHECK(value < 0 || (value < static_cast<int64_t>(values.size()) && offset >= 0 && count > 0 &&
                                  offset + count <= values[value].columns),
                    kMake, ": columns ", offset, " to ", offset + count, " are not in value ", value);
    PAGELOOM_CHECK(value < 0 || values[value].size == size, kMake, ": value ", value, " has elements of another size than ", size);
    return {{value, offset}, value < 0 ? 0 : count};
  }

  Columns needed_columns(int64_t size = 2) {
    const Columns found = columns(size);
    PAGELOOM_CHECK(found.ref.value >= 0, kMake, ": a value is missing");
    return found;
  }

  // As many as `count`, or none.
  Ref ref(int64_t count, int64_t size = 2) {
    const Columns found = columns(size);
    PAGELOOM_CHECK(found.ref.value < 0 || found.count == count, kMake, ": ", found.count, " columns of value ", found.ref.value,
                    ", not ", count);
    return found.ref;
  }

  Ref needed_ref(int64_t count, int64_t size = 2) {
    const Ref found = ref(count, size);
    PAGELOOM_CHECK(found.value >= 0, kMake, ": a value is missing");
    return found;
  }

  // A whole value.
  Ref whole(int64_t count, int64_t size) {
    const Ref found = needed_ref(count, size);
    PAGELOOM_CHECK(values[found.value].columns == count, kMake, ": value ", found.value, " has more than ", count, " columns");
    return found;
  }

  double real() {
    PAGELOOM_CHECK(real_at < reals.size(), kMake, ": reals end early");
    return reals[real_at++];
  }
};

// ---- operators: what their schemas say, in order, and then their results

TapeLayer read_linear(Reader& r) {
  const Reader::Columns x = r.needed_columns();
  Matrix m{};
  m.k = x.count;
  m.weight = r.needed_tensor();
  m.n = r.next(), m.format = r.next();
  m.bias = r.tensor();
  m.norm_weight = r.tensor();
  m.norm_eps = r.real();
  const Reader::Columns residual = r.columns();
  m.gate = r.next();
  m.wide = r.next() != 0;
  m.adds = residual.ref.value >= 0;
  TapeLayer t{checked_layer(m, r.next(), kMake), x.ref, residual.ref, {}, {}, {}};
  const int64_t n = t.layer.problem.out_stride;
  PAGELOOM_CHECK(residual.count == 0 || residual.count == n, kMake, ": a residual of ", residual.count, " columns, not ", n);
  t.out = r.needed_ref(n, m.wide ? 4 : 2);
  return t;
}

TapeLayer read_adapted(Reader& r) {
  const Reader::Columns x = r.needed_columns();
  Matrix m{};
  m.k = x.count;
  m.weight = r.needed_tensor();
  m.n = r.next(), m.format = r.next();
  m.bias = r.tensor();
  m.norm_weight = r.tensor();
  m.norm_eps = r.real();
  const Reader::Columns residual = r.columns();
  m.gate = r.next();
  m.adds = residual.ref.value >= 0;
  TapeLayer t{checked_layer(m, kAuto, kMake), x.ref, residual.ref, {}, {}, {}};
  const int64_t n = t.layer.problem.out_stride;
  PAGELOOM_CHECK(residual.count == 0 || residual.count == n, kMake, ": a residual of ", residual.count, " columns, not ", n);
  const Tensor step = r.needed_tensor(), a = r.needed_tensor(), b = r.needed_tensor();
  const Tensor ranks = r.needed_tensor(), ends = r.needed_tensor();
  t.adapters = checked_adapters({step, a, b, ranks, ends}, t.layer.problem, kMake);
  t.out = r.needed_ref(n);
  return t;
}

TapeLayer read_rotation(Reader& r) {
  const Reader::Columns x = r.needed_columns(), rope = r.columns();
  Heads h{};
  h.n = x.count;
  h.rotary_dim = rope.count;
  h.q_norm = r.tensor();
  h.k_norm = r.tensor();
  h.norm_eps = r.real();
  h.q_heads = r.next(), h.k_heads = r.next(), h.head_dim = r.next();
  const Ref residual = r.ref(h.n);
  h.adds = residual.value >= 0;
  return {checked_rotation(h, kMake), x.ref, residual, rope.ref, r.needed_ref(h.n), {}};
}

TapeRoute read_route(Reader& r) {
  const Reader::Columns logits = r.needed_columns(4);
  Routing routing{};
  routing.kind = r.next(), routing.top_k = r.next();
  routing.normalise = r.next() != 0;
  routing.bias = r.tensor();
  routing.groups = r.next(), routing.top_groups = r.next();
  routing.scale = r.real();
  TapeRoute t{checked_route(routing, logits.count, kMake), logits.ref, {}, {}};
  t.ids = r.whole(routing.top_k, 4);
  t.weights = r.whole(routing.top_k, 4);
  return t;
}

TapeExperts read_experts(Reader& r) {
  const Reader::Columns x = r.needed_columns(), ids = r.needed_columns(4), weights = r.needed_columns(4);
  PAGELOOM_CHECK(r.values[ids.ref.value].columns == ids.count && r.values[weights.ref.value].columns == ids.count &&
                     weights.count == ids.count,
                 kMake, ": ids and weights must be whole values of as many columns");
  ExpertMatrices m{};
  m.gate_up = r.needed_tensor();
  m.down = r.needed_tensor();
  m.n_inner = r.next(), m.gate_up_format = r.next(), m.down_format = r.next();
  m.gate_up_bias = r.tensor();
  m.down_bias = r.tensor();
  m.places = r.tensor();
  const Ref residual = r.ref(x.count);
  m.gate = r.next();
  m.limit = r.real(), m.alpha = r.real();
  TapeExperts t{checked_experts(m, x.count, ids.count, r.next(), kMake), x.ref, ids.ref, weights.ref, residual, {}};
  t.out = r.needed_ref(x.count);
  return t;
}

TapeAttention read_attention(Reader& r) {
  TapeAttention a{};
  a.functions = reinterpret_cast<const NativeAttention*>(r.next());
  a.layer = r.needed_tensor().data_ptr();
  a.step = r.count();
  const Reader::Columns q = r.needed_columns(), k = r.needed_columns();
  a.q = q.ref, a.k = k.ref;
  a.v = r.needed_ref(k.count);
  a.out = r.needed_ref(q.count);
  a.scratch = r.columns(4).ref;
  PAGELOOM_CHECK(a.functions != nullptr, kMake, ": an attention without its functions");
  return a;
}

TapeSum read_sum(Reader& r) {
  TapeSum s{};
  s.function = reinterpret_cast<NativeAllReduce>(r.next());
  s.group = reinterpret_cast<void*>(r.next());
  PAGELOOM_CHECK(s.function != nullptr && s.group != nullptr, kMake, ": a sum without its group");
  const Reader::Columns x = r.needed_columns();
  s.columns = x.count;
  s.x = x.ref;
  PAGELOOM_CHECK(r.values[s.x.value].columns == s.columns, kMake, ": a sum of ", s.columns, " columns of more");
  s.residual = r.ref(s.columns);
  PAGELOOM_CHECK(s.residual.value < 0 || r.values[s.residual.value].columns == s.columns, kMake,
                 ": a sum's residual has more than ", s.columns, " columns");
  s.out = r.whole(s.columns, 2);
  return s;
}

// The calls of a program, each kind by itself.
struct Calls {
  std::vector<TapeStep> steps;
  std::vector<TapeCall> calls;
  std::vector<TapeLayer> layers;
  std::vector<TapeRoute> routes;
  std::vector<TapeExperts> experts;
  std::vector<TapeAttention> attentions;
  std::vector<TapeSum> sums;

  template <class T>
  void add(TapeKind kind, std::vector<T>& of_kind, const T& call) {
    calls.push_back({kind, static_cast<int64_t>(of_kind.size())});
    of_kind.push_back(call);
  }

  // Numbers as in tape_program.py.
  void read(Reader& r) {
    switch (const int64_t kind = r.next()) {
      case 0: return add(TapeKind::kAttention, attentions, read_attention(r));
      case 1: return add(TapeKind::kLayer, layers, read_linear(r));
      case 2: return add(TapeKind::kLayer, layers, read_rotation(r));
      case 3: return add(TapeKind::kRoute, routes, read_route(r));
      case 4: return add(TapeKind::kExperts, experts, read_experts(r));
      case 5: return add(TapeKind::kSum, sums, read_sum(r));
      case 6: return add(TapeKind::kLayer, layers, read_adapted(r));
      default: refuse(kMake, ": no call is of kind ", kind);
    }
  }
};

void read_values(Reader& r, Tape& tape) {
  tape.values = r.count();
  for (int64_t i = 0; i < tape.values; ++i) {
    const int64_t columns = r.next(), size = r.next(), place = r.next(), index = r.next();
    PAGELOOM_CHECK(columns > 0 && place >= 0 && place <= 2 && index >= 0 && (size == 2 || (size == 4 && place == 2)), kMake,
                    ": value ", i, " is malformed");
    r.values.push_back({columns, size, static_cast<Place>(place), index});
    tape.inputs += r.values.back().place == Place::kInput;
    tape.results += r.values.back().place == Place::kResult;
    if (r.values.back().place == Place::kScratch)
      tape.scratch_bytes = std::max(tape.scratch_bytes, (index + columns * size + 63) / 64 * 64);
  }
  std::vector<bool> taken(tape.results);
  for (const TapeValue& v : r.values) {
    PAGELOOM_CHECK(v.place == Place::kScratch ? v.index % 64 == 0
                                               : v.index < (v.place == Place::kInput ? tape.inputs : tape.results),
                    kMake, ": a value's index ", v.index, " does not fit its place");
    if (v.place != Place::kResult) continue;
    PAGELOOM_CHECK(!taken[v.index], kMake, ": two values are result ", v.index);
    taken[v.index] = true;
  }
}

template <class T>
char* append(char* at, const std::vector<T>& items) {
  std::memcpy(at, items.data(), items.size() * sizeof(T));
  return at + items.size() * sizeof(T);
}

Tensor new_bytes(int64_t size) { return Tensor::empty({size}, ScalarType::Byte); }

Tensor make_tape(std::vector<Tensor> tensors, std::vector<int64_t> program, std::vector<double> reals) {
  Reader r{program, tensors, reals, {}};
  Tape tape{};
  read_values(r, tape);
  Calls read;
  for (int64_t left = r.count(); left > 0; --left) {
    const int64_t count = r.count();
    read.steps.push_back({static_cast<int64_t>(read.calls.size()), count});
    for (int64_t i = 0; i < count; ++i) read.read(r);
  }
  PAGELOOM_CHECK(r.at == program.size() && r.real_at == reals.size(), kMake, ": the program goes on behind its end");
  for (const TapeAttention& a : read.attentions) {
    tape.attention_steps = std::max(tape.attention_steps, a.step + 1);
    tape.call_bytes += (a.functions->bytes + 63) / 64 * 64;
  }
  tape.steps = read.steps.size(), tape.calls = read.calls.size(), tape.layers = read.layers.size();
  tape.routes = read.routes.size(), tape.experts = read.experts.size(), tape.attentions = read.attentions.size();
  tape.sums = read.sums.size();
  tape.bytes = bytes_of(tape);
  Tensor made = new_bytes(tape.bytes);
  char* at = static_cast<char*>(made.data_ptr());
  std::memcpy(at, &tape, sizeof tape);
  at = append(append(append(at + sizeof tape, r.values), read.steps), read.calls);
  append(append(append(append(append(at, read.layers), read.routes), read.experts), read.attentions), read.sums);
  return made;
}

// `inputs`: bf16 [rows, columns] each, contiguous in their last dimension. `attention_steps`: at least as many as the
// tape's attentions name.
// `times`: int64 [steps + 1], filled as `run_tape` says.
std::vector<Tensor> run(Tensor made, std::vector<Tensor> inputs, std::vector<Tensor> attention_steps,
                        std::optional<Tensor> times) {
  PAGELOOM_CHECK(on_cpu_of(made, ScalarType::Byte) && made.numel() >= static_cast<int64_t>(sizeof(Tape)), kRun,
                  ": not a tape");
  const auto& tape = *static_cast<const Tape*>(made.data_ptr());
  PAGELOOM_CHECK(made.numel() == tape.bytes && tape.bytes == bytes_of(tape), kRun, ": not a tape");
  PAGELOOM_CHECK(static_cast<int64_t>(inputs.size()) == tape.inputs && tape.inputs > 0, kRun, ": ", inputs.size(),
                  " inputs, not ", tape.inputs);
  PAGELOOM_CHECK(static_cast<int64_t>(attention_steps.size()) >= tape.attention_steps, kRun, ": ",
                  attention_steps.size(), " attention steps, not ", tape.attention_steps);
  PAGELOOM_CHECK(!times.has_value() || (on_cpu_of(*times, ScalarType::Long) && times->is_contiguous() &&
                                         times->numel() == tape.steps + 1),
                  kRun, ": times must be contiguous int64 [", tape.steps + 1, "]");
  PAGELOOM_CHECK(inputs[0].dim() > 0, kRun, ": an input must be bfloat16 rows, not a scalar");
  const int64_t rows = inputs[0].size(0);
  std::vector<Rows> given(tape.inputs), returned(tape.results);
  std::vector<Tensor> results(tape.results);
  for (int64_t i = 0; i < tape.values; ++i) {
    const TapeValue& v = values_of(tape)[i];
    if (v.place == Place::kInput) {
      int64_t stride = 0;
      const uint16_t* const data = rows_of(inputs[v.index], v.columns, stride, kRun, "an input");
      PAGELOOM_CHECK(inputs[v.index].size(0) == rows, kRun, ": inputs differ in their rows");
      given[v.index] = {reinterpret_cast<char*>(const_cast<uint16_t*>(data)), stride};
    } else if (v.place == Place::kResult) {
      results[v.index] = new_output(rows, v.columns, false);
      returned[v.index] = {static_cast<char*>(results[v.index].data_ptr()), v.columns};
    }
  }
  const Tensor scratch = new_bytes(rows * tape.scratch_bytes + 64);
  char* const memory = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(scratch.data_ptr()) + 63) / 64 * 64);
  std::vector<const void*> steps;
  for (const Tensor& step : attention_steps) steps.push_back(step.data_ptr());
  const char* error = run_tape(tape, rows, given.data(), returned.data(), memory, steps.data(),
                               lent_threads(), times.has_value() ? static_cast<int64_t*>(times->data_ptr()) : nullptr);
  PAGELOOM_CHECK(error == nullptr, kRun, ": ", error);
  return results;
}

const Operators kDefined(PAGELOOM_NAMESPACE, [](Operators& m) {
  m.define("make_tape(Tensor[] tensors, int[] program, float[] reals) -> Tensor");
  m.define("run_tape(Tensor tape, Tensor[] inputs, Tensor[] attention_steps, Tensor? times) -> Tensor[]");
});

const Operators kAnywhere(PAGELOOM_NAMESPACE, "CompositeExplicitAutograd", [](Operators& m) {
  m.implement<make_tape>("make_tape");
  m.implement<run>("run_tape");
});

}  // namespace
}  // namespace pageloom
