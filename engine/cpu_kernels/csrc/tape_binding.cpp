// Making and running tapes. A tape is a uint8 tensor; whoever holds it holds the weights that it points to.
#include <algorithm>
#include <cstring>

#include "binding.h"
#include "tape.h"

namespace pageloom {
namespace {

constexpr const char* kMake = "make_tape";
constexpr const char* kRun = "run_tape";

// Numbers of a program, in order. `engine.cpu_kernels.tape` writes them.
struct Reader {
  const std::vector<int64_t>& numbers;
  const std::vector<Tensor>& tensors;
  std::vector<TapeValue> values;
  size_t at = 0;

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

  // `columns` of a value.
  Ref ref(int64_t columns) {
    const int64_t value = next(), offset = next();
    PAGELOOM_CHECK(value < 0 || (value < static_cast<int64_t>(values.size()) && offset >= 0 &&
                                  offset + columns <= values[value].columns),
                    kMake, ": columns ", offset, " to ", offset + columns, " are not in value ", value);
    return {value, offset};
  }

  Ref needed_ref(int64_t columns) {
    const Ref found = ref(columns);
    PAGELOOM_CHECK(found.value >= 0, kMake, ": a value is missing");
    return found;
  }
};

TapeLayer read_matrix(Reader& r, double norm_eps, int64_t isa) {
  Matrix m{};
  m.weight = r.needed_tensor();
  m.n = r.next(), m.k = r.next(), m.format = r.next();
  m.bias = r.tensor();
  m.norm_weight = r.tensor();
  m.norm_eps = norm_eps;
  m.gate = r.next();
  TapeLayer t{checked_layer(m, isa, kMake), {}, {}, {}, {}};
  t.x = r.needed_ref(m.k);
  t.residual = r.ref(t.layer.problem.out_stride);
  t.out = r.needed_ref(t.layer.problem.out_stride);
  return t;
}

TapeLayer read_rotation(Reader& r, double norm_eps) {
  Heads h{};
  h.n = r.next(), h.q_heads = r.next(), h.k_heads = r.next(), h.head_dim = r.next();
  h.rotary_dim = r.next();
  h.q_norm = r.tensor();
  h.k_norm = r.tensor();
  h.norm_eps = norm_eps;
  TapeLayer t{};
  t.x = r.needed_ref(h.n);
  t.rope = r.ref(h.rotary_dim);
  PAGELOOM_CHECK((t.rope.value >= 0) == (h.rotary_dim > 0), kMake, ": a rope of ", h.rotary_dim, " columns in value ", t.rope.value);
  t.residual = r.ref(h.n);
  h.adds = t.residual.value >= 0;
  t.layer = checked_rotation(h, kMake);
  t.out = r.needed_ref(h.n);
  return t;
}

TapeAttention read_attention(Reader& r) {
  TapeAttention a{};
  a.functions = reinterpret_cast<const NativeAttention*>(r.next());
  a.layer = r.needed_tensor().data_ptr();
  a.step = r.count();
  const int64_t q = r.next(), kv = r.next();
  a.q = r.needed_ref(q);
  a.k = r.needed_ref(kv);
  a.v = r.needed_ref(kv);
  a.out = r.needed_ref(q);
  PAGELOOM_CHECK(a.functions != nullptr, kMake, ": an attention without its functions");
  return a;
}

template <class T>
char* append(char* at, const std::vector<T>& items) {
  std::memcpy(at, items.data(), items.size() * sizeof(T));
  return at + items.size() * sizeof(T);
}

Tensor new_bytes(int64_t size) { return Tensor::empty({size}, ScalarType::Byte); }

Tensor make_tape(std::vector<Tensor> tensors, std::vector<int64_t> program, std::vector<double> norm_eps, int64_t isa) {
  Reader r{program, tensors, {}};
  Tape tape{};
  tape.values = r.count();
  for (int64_t i = 0; i < tape.values; ++i) {
    const int64_t columns = r.next(), place = r.next(), index = r.next();
    PAGELOOM_CHECK(columns > 0 && place >= 0 && place <= 2 && index >= 0, kMake, ": value ", i, " is malformed");
    r.values.push_back({columns, static_cast<Place>(place), index});
    tape.inputs += r.values.back().place == Place::kInput;
    tape.results += r.values.back().place == Place::kResult;
    if (r.values.back().place == Place::kScratch)
      tape.scratch_bytes = std::max(tape.scratch_bytes, (index + columns * 2 + 63) / 64 * 64);
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
  std::vector<TapeStep> steps;
  std::vector<TapeLayer> layers;
  std::vector<TapeAttention> attentions;
  size_t eps = 0;
  for (int64_t left = r.count(); left > 0; --left) {
    const int64_t count = r.count();
    steps.push_back({static_cast<int64_t>(count == 0 ? attentions.size() : layers.size()), count});
    if (count == 0) {
      attentions.push_back(read_attention(r));
      tape.attention_steps = std::max(tape.attention_steps, attentions.back().step + 1);
      tape.call_bytes += (attentions.back().functions->bytes + 63) / 64 * 64;
    }
    for (int64_t i = 0; i < count; ++i) {
      PAGELOOM_CHECK(eps < norm_eps.size(), kMake, ": norm_eps ends early");
      const double layer_eps = norm_eps[eps++];
      layers.push_back(r.next() == 0 ? read_matrix(r, layer_eps, isa) : read_rotation(r, layer_eps));
    }
  }
  PAGELOOM_CHECK(r.at == program.size() && eps == norm_eps.size(), kMake, ": the program goes on behind its end");
  tape.steps = steps.size(), tape.layers = layers.size(), tape.attentions = attentions.size();
  tape.bytes = bytes_of(tape);
  Tensor made = new_bytes(tape.bytes);
  char* const memory = static_cast<char*>(made.data_ptr());
  std::memcpy(memory, &tape, sizeof tape);
  append(append(append(append(memory + sizeof tape, r.values), steps), layers), attentions);
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
      given[v.index] = {const_cast<uint16_t*>(data), stride};
    } else if (v.place == Place::kResult) {
      results[v.index] = new_output(rows, v.columns, false);
      returned[v.index] = {static_cast<uint16_t*>(results[v.index].data_ptr()), v.columns};
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
  m.define("make_tape(Tensor[] tensors, int[] program, float[] norm_eps, int isa) -> Tensor");
  m.define("run_tape(Tensor tape, Tensor[] inputs, Tensor[] attention_steps, Tensor? times) -> Tensor[]");
});

const Operators kAnywhere(PAGELOOM_NAMESPACE, "CompositeExplicitAutograd", [](Operators& m) {
  m.implement<make_tape>("make_tape");
  m.implement<run>("run_tape");
});

}  // namespace
}  // namespace pageloom
