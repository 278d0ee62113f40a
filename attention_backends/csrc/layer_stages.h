// A layer's call as stages, for the operators and for callers in native code (native_call.h). All is checked before.
#pragma once

#include <string.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <optional>
#include <type_traits>

#include "native_call.h"
#include "native_group.h"
#include "schedule.h"

namespace pageloom {
namespace {  // of the one unit that includes it, and of this build

// Begin what native callers hold: another build's descriptor, or a step in the place of a layer, is refused.
char layer_tag, step_tag;

constexpr int64_t kMostRanks = 64;

// Ranks that divide a context, and which heads of a layer each has of q, and gives of k and v.
struct ContextRanks {
  NativeExchange gather, deal;
  void* group;
  int64_t size, rank;  // size 0: there are none
  int64_t queries[kMostRanks], keys[kMostRanks];
  void (*merge)(const MergeProblem&, int64_t begin, int64_t end);

  int64_t heads_of(int64_t other) const { return queries[other] + 2 * keys[other]; }
};

// How the heads of a layer attend to its cache; all checked.
struct Layer {
  const char* tag;
  CacheLayout cache;
  int64_t group;
  const KernelTable* kernels;
  int64_t window;
  float scale;
  float soft_cap;
  const float* sinks;  // of the heads that are merged here, where ranks divide a context
  ContextRanks ranks;

  int64_t num_heads() const { return group * cache.num_kv_heads; }
  int64_t own_heads() const { return ranks.size == 0 ? num_heads() : ranks.queries[ranks.rank]; }
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
  p.sinks = layer.ranks.size == 0 ? layer.sinks : nullptr;
  return p;
}

LayerStages stages_of(const Layer& layer, const Step& step, TokenView q, TokenView k, TokenView v, TokenView out,
                      int64_t threads, int64_t run) {
  return {{layer.cache, k, v, step.slots, step.num_tokens, threads},
          {problem_of(layer, step, q, out), *layer.kernels, threads, run}};
}

// What no sequence has of a native call's rows.
struct PadStage : SingleStage<PadStage> {
  uint16_t* out;
  int64_t stride, begin, end, columns;

  PadStage(const NativeRows& rows, int64_t num_tokens, int64_t columns)
      : out(rows.out), stride(rows.out_stride), begin(num_tokens), end(rows.rows), columns(columns) {}

  const char* once() {
    for (int64_t row = begin; row < end; ++row) memset(out + row * stride, 0, columns * sizeof(uint16_t));
    return nullptr;
  }
};

// What a call of ranks that divide a context has in scratch memory, of each token: their heads of q, k and v, and what
// this part, and then all parts, found.
struct ContextScratch {
  uint16_t *own, *gathered, *q, *k, *v;
  float *found, *dealt;

  // Bytes of a token.
  static int64_t bytes(const Layer& layer) {
    if (layer.ranks.size == 0) return 0;
    ContextScratch none{};
    return none.place(layer, nullptr, 0);
  }

  ContextScratch() = default;
  ContextScratch(const Layer& layer, void* memory, int64_t rows) { place(layer, static_cast<char*>(memory), rows); }

 private:
  int64_t place(const Layer& layer, char* memory, int64_t rows) {
    int64_t at = 0;
    const auto take = [&](auto*& buffer, int64_t elements) {
      buffer = reinterpret_cast<std::remove_reference_t<decltype(buffer)>>(memory + at * rows);
      at += (elements * static_cast<int64_t>(sizeof *buffer) + 63) / 64 * 64;
    };
    const int64_t dim = layer.cache.head_dim, keys = layer.cache.num_kv_heads, queries = layer.num_heads();
    take(own, layer.ranks.heads_of(layer.ranks.rank) * dim);
    take(gathered, (queries + 2 * keys) * dim);
    take(q, queries * dim), take(k, keys * dim), take(v, keys * dim);
    take(found, queries * (dim + 1));
    take(dealt, layer.ranks.size * layer.own_heads() * (dim + 1));
    return at;
  }
};

// Copies columns of rows; strides in elements.
void copy_columns(const uint16_t* from, int64_t from_stride, uint16_t* to, int64_t to_stride, int64_t columns,
                  int64_t rows) {
  for (int64_t row = 0; row < rows; ++row)
    memcpy(to + row * to_stride, from + row * from_stride, columns * sizeof(uint16_t));
}

// Of every token, all heads of all ranks. Whoever takes it waits for the other ranks, as in the next but two.
struct GatherStage : SingleStage<GatherStage> {
  const Layer& layer;
  NativeRows given;
  ContextScratch s;
  int64_t tokens;

  GatherStage(const Layer& layer, const NativeRows& rows, const ContextScratch& scratch, int64_t tokens)
      : layer(layer), given(rows), s(scratch), tokens(tokens) {}

  const char* once() {
    const ContextRanks& ranks = layer.ranks;
    const int64_t dim = layer.cache.head_dim, own = ranks.heads_of(ranks.rank) * dim;
    const int64_t queries = ranks.queries[ranks.rank] * dim, keys = ranks.keys[ranks.rank] * dim;
    copy_columns(given.q, given.q_stride, s.own, own, queries, tokens);
    copy_columns(given.k, given.k_stride, s.own + queries, own, keys, tokens);
    copy_columns(given.v, given.v_stride, s.own + queries + keys, own, keys, tokens);
    int64_t columns[kMostRanks], total = 0;
    for (int64_t rank = 0; rank < ranks.size; ++rank) total += columns[rank] = ranks.heads_of(rank) * dim;
    if (const char* error = ranks.gather(ranks.group, {s.own, s.gathered, tokens, columns, false})) return error;
    const uint16_t* from = s.gathered;
    const int64_t all_queries = layer.num_heads() * dim, all_keys = layer.cache.num_kv_heads * dim;
    uint16_t *q = s.q, *k = s.k, *v = s.v;
    for (int64_t rank = 0; rank < ranks.size; ++rank) {
      const auto take = [&](uint16_t*& to, int64_t stride, int64_t heads) {
        copy_columns(from, total, to, stride, heads * dim, tokens);
        from += heads * dim, to += heads * dim;
      };
      take(q, all_queries, ranks.queries[rank]);
      take(k, all_keys, ranks.keys[rank]);
      take(v, all_keys, ranks.keys[rank]);
    }
    return nullptr;
  }
};

struct DealStage : SingleStage<DealStage> {
  const Layer& layer;
  ContextScratch s;
  int64_t tokens;

  DealStage(const Layer& layer, const ContextScratch& scratch, int64_t tokens)
      : layer(layer), s(scratch), tokens(tokens) {}

  const char* once() {
    int64_t columns[kMostRanks];
    for (int64_t rank = 0; rank < layer.ranks.size; ++rank)
      columns[rank] = layer.ranks.queries[rank] * (layer.cache.head_dim + 1);
    return layer.ranks.deal(layer.ranks.group, {s.found, s.dealt, tokens, columns, true});
  }
};

struct MergeStage : Stage {
  static constexpr int64_t kRows = 16;  // that a thread takes at once

  MergeProblem problem;
  void (*merge)(const MergeProblem&, int64_t begin, int64_t end);
  int64_t tokens;

  MergeStage(const MergeProblem& problem, decltype(merge) merge, int64_t tokens, int64_t threads)
      : problem(problem), merge(merge), tokens(tokens) {
    units = (tokens + kRows - 1) / kRows;
    workers = threads_worth(threads, tokens * problem.parts * problem.heads * problem.head_dim, units);
    work = [](Stage& stage, int64_t, Turn& turn) {
      auto& self = static_cast<MergeStage&>(stage);
      for (int64_t i; (i = self.next.fetch_add(1, std::memory_order_relaxed)) < self.units;) {
        self.merge(self.problem, i * kRows, std::min((i + 1) * kRows, self.tokens));
        self.finish(1);
        if (!turn.pass()) return false;
      }
      return true;
    };
  }
};

// Every head's rows, some at a time.
struct ProductStage : Stage {
  static constexpr int64_t kRows = 32;  // that a thread takes at once

  HeadProduct problem;
  decltype(KernelTable::product) product;
  int64_t tokens, chunks;

  ProductStage(const HeadProduct& problem, decltype(product) product, int64_t heads, int64_t tokens, int64_t threads)
      : problem(problem), product(product), tokens(tokens), chunks((tokens + kRows - 1) / kRows) {
    units = heads * chunks;
    workers = threads_worth(threads, tokens * heads * problem.depth * problem.outs / 8, units);
    work = [](Stage& stage, int64_t, Turn& turn) {
      auto& self = static_cast<ProductStage&>(stage);
      for (int64_t i; (i = self.next.fetch_add(1, std::memory_order_relaxed)) < self.units;) {
        const int64_t begin = i % self.chunks * kRows;
        self.product(self.problem, i / self.chunks, begin, std::min(begin + kRows, self.tokens));
        self.finish(1);
        if (!turn.pass()) return false;
      }
      return true;
    };
  }
};

struct ContextStages {
  GatherStage gather;
  DealStage deal;
  MergeStage merge;

  ContextStages(const Layer& layer, const NativeRows& rows, const ContextScratch& s, const MergeProblem& merged,
                int64_t tokens, int64_t threads)
      : gather(layer, rows, s, tokens), deal(layer, s, tokens), merge(merged, layer.ranks.merge, tokens, threads) {}
};

struct NativeCall {
  PadStage pad;
  LayerStages stages;
  std::optional<ContextStages> context;
};

// Of native_call.h.
const char* prepare_natively(const void* given_layer, const void* given_step, const NativeRows& rows, int64_t threads,
                             int64_t run, void* memory, Stage** stages) noexcept {
  const auto* layer = static_cast<const Layer*>(given_layer);
  const auto* step = static_cast<const Step*>(given_step);
  if (layer == nullptr || layer->tag != &layer_tag) return "attention: `layer` is not from this library's native_layer";
  if (step == nullptr || step->tag != &step_tag) return "attention: `step` is not from this library's native_step";
  if (rows.rows < step->num_tokens) return "attention: the step has more tokens than NativeRows.rows";
  const ContextRanks& ranks = layer->ranks;
  if (step->tables.parts != std::max<int64_t>(ranks.size, 1) || step->tables.part != ranks.rank)
    return "attention: `step` is of another part of the context than `layer`";
  const int64_t dim = layer->cache.head_dim, tokens = step->num_tokens;
  const auto view = [&](const uint16_t* data, int64_t stride) {
    return TokenView{const_cast<uint16_t*>(data), stride, dim};
  };
  const TokenView out = view(rows.out, rows.out_stride);
  try {
    const auto whole = [&] {
      return stages_of(*layer, *step, view(rows.q, rows.q_stride), view(rows.k, rows.k_stride),
                       view(rows.v, rows.v_stride), out, threads, run);
    };
    const ContextScratch s = ranks.size == 0 ? ContextScratch{} : ContextScratch(*layer, rows.scratch, rows.rows);
    const int64_t heads = layer->num_heads(), keys = layer->cache.num_kv_heads;
    const auto in_part = [&] {
      return stages_of(*layer, *step, view(s.q, heads * dim), view(s.k, keys * dim), view(s.v, keys * dim),
                       {s.found, heads * (dim + 1), dim + 1}, threads, run);
    };
    auto* call = new (memory) NativeCall{{rows, tokens, layer->own_heads() * dim}, ranks.size == 0 ? whole() : in_part(), {}};
    if (ranks.size > 0 && tokens > 0) {
      const MergeProblem merged{s.dealt, ranks.size, layer->own_heads(), dim, layer->sinks, out, Dtype::kBFloat16};
      call->context.emplace(*layer, rows, s, merged, tokens, threads);
    }
    int64_t made = 0;
    if (tokens < rows.rows) stages[made++] = &call->pad;
    if (call->context) stages[made++] = &call->context->gather;
    stages[made++] = &call->stages.write;
    stages[made++] = &call->stages.attend;
    if (call->context) stages[made++] = &call->context->deal, stages[made++] = &call->context->merge;
    return call->stages.attend.error;
  } catch (...) {
    return "attention: out of memory";
  }
}

}  // namespace
}  // namespace pageloom
