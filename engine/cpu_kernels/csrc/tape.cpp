#include "tape.h"

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

const char* attend(const TapeAttention& a, const std::vector<Rows>& values, int64_t rows, const void* step) {
  const auto stride = [&](const Ref& ref) { return values[ref.value].stride; };
  return a.function(a.layer, step,
                    {at(values, a.q), stride(a.q), at(values, a.k), stride(a.k), at(values, a.v), stride(a.v),
                     at(values, a.out), stride(a.out), rows});
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
  std::vector<Rows> values(tape.values);
  for (int64_t i = 0; i < tape.values; ++i) {
    const TapeValue& v = values_of(tape)[i];
    values[i] = v.place == Place::kInput    ? inputs[v.index]
                : v.place == Place::kResult ? results[v.index]
                                            : Rows{reinterpret_cast<uint16_t*>(scratch + rows * v.index), v.columns};
  }
  std::vector<LinearLayer> layers;
  for (int64_t i = 0; i < tape.steps; ++i) {
    const TapeStep& step = steps_of(tape)[i];
    if (times != nullptr) times[i] = now_ns();
    if (step.count == 0) {
      const TapeAttention& attention = attentions_of(tape)[step.first];
      const char* error = attend(attention, values, rows, attention_steps[attention.step]);
      if (error != nullptr) return error;
      continue;
    }
    layers.clear();
    for (int64_t j = 0; j < step.count; ++j) {
      const TapeLayer& layer = layers_of(tape)[step.first + j];
      layers.push_back(layer.layer);
      fill_in(layers.back().problem, layer, values, rows);
    }
    run_linears(layers.data(), step.count, threads);
  }
  if (times != nullptr) times[tape.steps] = now_ns();
  return nullptr;
}

}  // namespace pageloom
