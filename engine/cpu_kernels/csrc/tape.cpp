#include "tape.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

namespace pageloom {
namespace {

template <class T, class S>
const T* after(const S* items, int64_t count) {
  return reinterpret_cast<const T*>(items + count);
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// What a tape's values are in this run.
struct Values {
  const TapeValue* of;
  std::vector<Rows> rows;

  template <class T = uint16_t>
  T* at(const Ref& ref) const {
    return reinterpret_cast<T*>(rows[ref.value].data + ref.offset * of[ref.value].size);
  }
  int64_t stride(const Ref& ref) const { return rows[ref.value].stride; }
};

void fill_in(LinearProblem& p, const TapeLayer& t, const Values& values, int64_t rows) {
  p.rows = rows;
  p.x = values.at(t.x), p.x_stride = values.stride(t.x);
  p.out = values.at(t.out), p.out_stride = values.stride(t.out);
  if (t.residual.value >= 0) p.residual = values.at(t.residual), p.residual_stride = values.stride(t.residual);
  if (t.rope.value >= 0) p.rotation.rope = values.at(t.rope), p.rotation.rope_stride = values.stride(t.rope);
}

void fill_in(RouteProblem& p, const TapeRoute& t, const Values& values, int64_t rows) {
  p.tokens = rows;
  p.logits = values.at<float>(t.logits), p.logits_stride = values.stride(t.logits);
  p.ids = values.at<int32_t>(t.ids);
  p.weights = values.at<float>(t.weights);
}

void fill_in(ExpertsProblem& p, const TapeExperts& t, const Values& values, int64_t rows) {
  p.tokens = rows;
  p.ids = values.at<int32_t>(t.ids);
  p.weights = values.at<float>(t.weights);
  p.gate_up.x = values.at(t.x), p.gate_up.x_stride = values.stride(t.x);
  p.out = values.at(t.out), p.out_stride = values.stride(t.out);
  if (t.residual.value >= 0) p.residual = values.at(t.residual), p.residual_stride = values.stride(t.residual);
}

// Whoever takes it waits for the other ranks, and this rank's other threads for him.
struct SumStage : SingleStage<SumStage> {
  NativeAllReduce function;
  void* group;
  NativeSumRows rows;

  const char* once() { return function(group, rows); }
};

int64_t adapter_bytes_of(const Tape& tape, const std::vector<LinearLayer>& layers) {
  int64_t most = 0;
  for (int64_t i = 0; i < tape.layers; ++i)
    if (const AdapterTables& adapters = layers_of(tape)[i].adapters; has_adapters(adapters))
      most = std::max(most, adapter_bytes(layers[i].problem, adapters));
  return most;
}

// Stages of a run's sums.
class SumStages {
 public:
  explicit SumStages(int64_t count) : stages_(std::make_unique<SumStage[]>(count)) {}

  // Null, or why it is refused.
  const char* add(const TapeSum& sum, const Values& values, int64_t rows, std::vector<Stage*>& stages) {
    SumStage& stage = stages_[added_++];
    const bool adds = sum.residual.value >= 0;
    if (adds && rows > 1 && values.stride(sum.residual) != sum.columns) return "rows of a sum's residual lie apart";
    stage.function = sum.function, stage.group = sum.group;
    stage.rows = {values.at(sum.x), adds ? values.at(sum.residual) : nullptr, values.at(sum.out), rows, sum.columns};
    stages.push_back(&stage);
    return nullptr;
  }

 private:
  std::unique_ptr<SumStage[]> stages_;
  int64_t added_ = 0;
};

// What a run's threads share; kept, so that a steady state allocates nothing.
struct Shared {
  Values values;
  std::vector<LinearLayer> layers;
  std::vector<RouteProblem> routes;
  std::vector<ExpertsProblem> experts;
  std::vector<Stage*> stages;
  std::vector<int64_t> first_stage;  // of each step, and their number
  std::vector<int64_t> ends;
  std::vector<char> calls;
  int64_t runs = 0;

  char* call_memory(int64_t bytes) {
    if (static_cast<int64_t>(calls.size()) < bytes + 64) calls.resize(bytes + 64);
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(calls.data()) + 63) / 64 * 64);
  }
};

const char* prepare(const TapeAttention& a, Shared& shared, int64_t rows, const void* step, int64_t threads,
                    char*& memory) {
  const auto data = [&](const Ref& ref) { return shared.values.at(ref); };
  const auto stride = [&](const Ref& ref) { return shared.values.stride(ref); };
  Stage* made[kNativeStages] = {};
  const char* error = a.functions->prepare(a.layer, step,
                                           {data(a.q), stride(a.q), data(a.k), stride(a.k), data(a.v), stride(a.v),
                                            data(a.out), stride(a.out), rows,
                                            a.scratch.value < 0 ? nullptr : shared.values.at<float>(a.scratch)},
                                           threads, shared.runs, memory, made);
  memory += (a.functions->bytes + 63) / 64 * 64;
  for (Stage* stage : made)
    if (error == nullptr && stage != nullptr) shared.stages.push_back(stage);
  return error;
}

void fill_in(const Tape& tape, Shared& shared, int64_t rows, const Rows* inputs, const Rows* results, char* scratch) {
  Values& values = shared.values;
  values.of = values_of(tape);
  values.rows.clear(), shared.layers.clear(), shared.routes.clear(), shared.experts.clear();
  for (int64_t i = 0; i < tape.values; ++i) {
    const TapeValue& v = values.of[i];
    values.rows.push_back(v.place == Place::kInput    ? inputs[v.index]
                          : v.place == Place::kResult ? results[v.index]
                                                      : Rows{scratch + rows * v.index, v.columns});
  }
  for (int64_t i = 0; i < tape.layers; ++i) {
    shared.layers.push_back(layers_of(tape)[i].layer);
    fill_in(shared.layers.back().problem, layers_of(tape)[i], values, rows);
  }
  for (int64_t i = 0; i < tape.routes; ++i) {
    shared.routes.push_back(routes_of(tape)[i].problem);
    fill_in(shared.routes.back(), routes_of(tape)[i], values, rows);
  }
  for (int64_t i = 0; i < tape.experts; ++i) {
    shared.experts.push_back(experts_of(tape)[i].problem);
    fill_in(shared.experts.back(), experts_of(tape)[i], values, rows);
  }
}

// A step begins when the stages before it are complete.
void tell_times(const Tape& tape, const Shared& shared, int64_t began, int64_t* times) {
  for (int64_t i = 0; i <= tape.steps; ++i) {
    const int64_t stage = shared.first_stage[i];
    times[i] = stage == 0 ? began : shared.ends[stage - 1];
  }
  times[tape.steps] = now_ns();
}

}  // namespace

const TapeValue* values_of(const Tape& tape) { return after<TapeValue>(&tape, 1); }
const TapeStep* steps_of(const Tape& tape) { return after<TapeStep>(values_of(tape), tape.values); }
const TapeCall* calls_of(const Tape& tape) { return after<TapeCall>(steps_of(tape), tape.steps); }
const TapeLayer* layers_of(const Tape& tape) { return after<TapeLayer>(calls_of(tape), tape.calls); }
const TapeRoute* routes_of(const Tape& tape) { return after<TapeRoute>(layers_of(tape), tape.layers); }
const TapeExperts* experts_of(const Tape& tape) { return after<TapeExperts>(routes_of(tape), tape.routes); }
const TapeAttention* attentions_of(const Tape& tape) { return after<TapeAttention>(experts_of(tape), tape.experts); }

const TapeSum* sums_of(const Tape& tape) { return after<TapeSum>(attentions_of(tape), tape.attentions); }

int64_t bytes_of(const Tape& tape) {
  return reinterpret_cast<const char*>(sums_of(tape) + tape.sums) - reinterpret_cast<const char*>(&tape);
}

const char* run_tape(const Tape& tape, int64_t rows, const Rows* inputs, const Rows* results, char* scratch,
                     const void* const* attention_steps, const Threads& threads, int64_t* times) {
  static thread_local Shared shared;
  const int64_t began = now_ns();
  if (rows == 0) {
    if (times != nullptr) std::fill(times, times + tape.steps + 1, began);
    return nullptr;
  }
  ++shared.runs;
  shared.stages.clear(), shared.first_stage.clear();
  fill_in(tape, shared, rows, inputs, results, scratch);
  LinearStages linears(tape.layers, threads.count);
  const int64_t for_adapters = adapter_bytes_of(tape, shared.layers);
  AdapterStages adapted(for_adapters > 0 ? tape.layers : 0, for_adapters, threads.count);
  RouteStages routes(tape.routes, threads.count);
  ExpertStages experts(shared.experts.data(), tape.experts, threads.count);
  SumStages sums(tape.sums);
  char* memory = shared.call_memory(tape.call_bytes);
  for (int64_t i = 0; i < tape.steps; ++i) {
    const TapeStep& step = steps_of(tape)[i];
    shared.first_stage.push_back(static_cast<int64_t>(shared.stages.size()));
    for (int64_t j = step.first; j < step.first + step.count; ++j) {
      const TapeCall call = calls_of(tape)[j];
      if (call.kind == TapeKind::kLayer) {
        const AdapterTables& adapters = layers_of(tape)[call.index].adapters;
        if (has_adapters(adapters))
          adapted.add(shared.layers[call.index], adapters, linears, shared.stages);
        else
          shared.stages.push_back(linears.add(shared.layers[call.index]));
      }
      if (call.kind == TapeKind::kRoute) shared.stages.push_back(routes.add(shared.routes[call.index]));
      if (call.kind == TapeKind::kExperts) experts.add(call.index, shared.stages);
      const char* error = nullptr;
      if (call.kind == TapeKind::kSum) error = sums.add(sums_of(tape)[call.index], shared.values, rows, shared.stages);
      if (call.kind == TapeKind::kAttention) {
        const TapeAttention& attention = attentions_of(tape)[call.index];
        error = prepare(attention, shared, rows, attention_steps[attention.step], threads.count, memory);
      }
      if (error != nullptr) return error;
    }
  }
  const auto count = static_cast<int64_t>(shared.stages.size());
  shared.first_stage.push_back(count);
  if (times != nullptr) shared.ends.assign(count, 0);
  const char* error =
      StageRun(shared.stages.data(), count, now_ns, times != nullptr ? shared.ends.data() : nullptr).run(threads);
  if (times != nullptr && error == nullptr) tell_times(tape, shared, began, times);
  return error;
}

}  // namespace pageloom
