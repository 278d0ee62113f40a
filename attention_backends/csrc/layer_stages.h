// A layer's call as stages, for the operators and for callers in native code (native_call.h). All is checked before.
#pragma once

#include <string.h>

#include <atomic>
#include <new>

#include "native_call.h"
#include "schedule.h"

namespace pageloom {
namespace {  // of the one unit that includes it, and of this build

// Begin what native callers hold: another build's descriptor, or a step in the place of a layer, is refused.
char layer_tag, step_tag;

// How the heads of a layer attend to its cache; all checked.
struct Layer {
  const char* tag;
  CacheLayout cache;
  int64_t group;
  const KernelTable* kernels;
  int64_t window;
  float scale;
  float soft_cap;
  const float* sinks;
};

// What the layers of a step have in common; all checked.
struct Step {
  const char* tag;
  AttentionProblem tables;  // nothing else of it is set
  const int64_t* slots;
  int64_t num_tokens;
};

struct LayerStages {
  WriteStage write;
  AttendStage attend;
};

AttentionProblem problem_of(const Layer& layer, const Step& step, TokenView q, TokenView out) {
  AttentionProblem p = step.tables;
  p.cache = layer.cache;
  p.q = q;
  p.out = out;
  p.group = layer.group;
  p.window = layer.window;
  p.scale = layer.scale;
  p.soft_cap = layer.soft_cap;
  p.sinks = layer.sinks;
  return p;
}

LayerStages stages_of(const Layer& layer, const Step& step, TokenView q, TokenView k, TokenView v, TokenView out,
                      int64_t threads, int64_t run) {
  return {{layer.cache, k, v, step.slots, step.num_tokens, threads},
          {problem_of(layer, step, q, out), *layer.kernels, threads, run}};
}

// What no sequence has of a native call's rows.
struct PadStage : Stage {
  uint16_t* out;
  int64_t stride, begin, end, columns;

  PadStage(const NativeRows& rows, int64_t num_tokens, int64_t columns)
      : out(rows.out), stride(rows.out_stride), begin(num_tokens), end(rows.rows), columns(columns) {
    units = begin < end;
    work = [](Stage& stage, int64_t, Turn&) {
      auto& pad = static_cast<PadStage&>(stage);
      if (pad.next.fetch_add(1, std::memory_order_relaxed) >= pad.units) return true;
      for (int64_t row = pad.begin; row < pad.end; ++row)
        memset(pad.out + row * pad.stride, 0, pad.columns * sizeof(uint16_t));
      pad.finish(1);
      return true;
    };
  }
};

struct NativeCall {
  PadStage pad;
  LayerStages stages;
};

// Of native_call.h.
const char* prepare_natively(const void* given_layer, const void* given_step, const NativeRows& rows, int64_t threads,
                             int64_t run, void* memory, Stage** stages) noexcept {
  const auto* layer = static_cast<const Layer*>(given_layer);
  const auto* step = static_cast<const Step*>(given_step);
  if (layer == nullptr || layer->tag != &layer_tag) return "attention: `layer` is not from this library's native_layer";
  if (step == nullptr || step->tag != &step_tag) return "attention: `step` is not from this library's native_step";
  if (rows.rows < step->num_tokens) return "attention: the step has more tokens than NativeRows.rows";
  const int64_t head_dim = layer->cache.head_dim, heads = layer->group * layer->cache.num_kv_heads;
  const auto view = [&](const uint16_t* data, int64_t stride) {
    return TokenView{const_cast<uint16_t*>(data), stride, head_dim};
  };
  try {
    auto* call = new (memory) NativeCall{
        {rows, step->num_tokens, heads * head_dim},
        stages_of(*layer, *step, view(rows.q, rows.q_stride), view(rows.k, rows.k_stride), view(rows.v, rows.v_stride),
                  view(rows.out, rows.out_stride), threads, run)};
    stages[0] = call->pad.units > 0 ? &call->pad : nullptr;
    stages[1] = &call->stages.write;
    stages[2] = &call->stages.attend;
    return call->stages.attend.error;
  } catch (...) {
    return "attention: out of memory";
  }
}

}  // namespace
}  // namespace pageloom
