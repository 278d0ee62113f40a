#include "tape.h"

#include <algorithm>
#include <chrono>
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

uint16_t* at(const std::vector<Rows>& values, const Ref& ref) { return values[ref.value].data + ref.offset; }

void fill_in(LinearProblem& p, const TapeLayer& t, const std::vector<Rows>& values, int64_t rows) {
  p.rows = rows;
  p.x = at(values, t.x);
  p.x_stride = values[t.x.value].stride;
  p.out = at(values, t.out);
  p.out_stride = values[t.out.value].stride;
  if (t.residual.value >= 0) {
    p.residual = at(values, t.residual);
    p.residual_stride = values[t.residual.value].stride;
  }
  if (t.rope.value >= 0) {
    p.rotation.rope = at(values, t.rope);
    p.rotation.rope_stride = values[t.rope.value].stride;
  }
}

// What a run's threads share; kept, so that a steady state allocates nothing.
struct Shared {
  std::vector<Rows> values;
  std::vector<LinearLayer> layers;
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
  const auto data = [&](const Ref& ref) { return at(shared.values, ref); };
  const auto stride = [&](const Ref& ref) { return shared.values[ref.value].stride; };
  Stage* made[kNativeStages] = {};
  const char* error = a.functions->prepare(a.layer, step,
                                           {data(a.q), stride(a.q), data(a.k), stride(a.k), data(a.v), stride(a.v),
                                            data(a.out), stride(a.out), rows},
                                           threads, shared.runs, memory, made);
  memory += (a.functions->bytes + 63) / 64 * 64;
  for (Stage* stage : made)
    if (error == nullptr && stage != nullptr) shared.stages.push_back(stage);
  return error;
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
const TapeLayer* layers_of(const Tape& tape) { return after<TapeLayer>(steps_of(tape), tape.steps); }
const TapeAttention* attentions_of(const Tape& tape) { return after<TapeAttention>(layers_of(tape), tape.layers); }

int64_t bytes_of(const Tape& tape) {
  return reinterpret_cast<const char*>(attentions_of(tape) + tape.attentions) - reinterpret_cast<const char*>(&tape);
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
  shared.values.clear(), shared.layers.clear(), shared.stages.clear(), shared.first_stage.clear();
  for (int64_t i = 0; i < tape.values; ++i) {
    const TapeValue& v = values_of(tape)[i];
    shared.values.push_back(v.place == Place::kInput    ? inputs[v.index]
                            : v.place == Place::kResult ? results[v.index]
                                                        : Rows{reinterpret_cast<uint16_t*>(scratch + rows * v.index), v.columns});
  }
  for (int64_t i = 0; i < tape.layers; ++i) {
    const TapeLayer& layer = layers_of(tape)[i];
    shared.layers.push_back(layer.layer);
    fill_in(shared.layers.back().problem, layer, shared.values, rows);
  }
  LinearStages linears(tape.layers, threads.count);
  char* memory = shared.call_memory(tape.call_bytes);
  for (int64_t i = 0; i < tape.steps; ++i) {
    const TapeStep& step = steps_of(tape)[i];
    shared.first_stage.push_back(static_cast<int64_t>(shared.stages.size()));
    for (int64_t j = 0; j < step.count; ++j) shared.stages.push_back(linears.add(shared.layers[step.first + j]));
    if (step.count > 0) continue;
    const TapeAttention& attention = attentions_of(tape)[step.first];
    const char* error = prepare(attention, shared, rows, attention_steps[attention.step], threads.count, memory);
    if (error != nullptr) return error;
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
