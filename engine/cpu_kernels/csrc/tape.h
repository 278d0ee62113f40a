// A tape: what happens to all rows of a step between two points of a model, as native calls in order. It is made once
// (its weights, kernels and shapes are checked then) and run for every step, without anybody else's code in between:
// between two layers a caller's own code would have to come from memory again, because weights stream through the caches.
#pragma once

#include "adapters_schedule.h"
#include "experts_schedule.h"
#include "linear_schedule.h"
#include "native_call.h"
#include "native_group.h"

namespace pageloom {

// Columns [offset, ...) of a value; value -1: none.
struct Ref {
  int64_t value = -1, offset = 0;
};

struct TapeLayer {
  LinearLayer layer;  // without rows, x, residual, rope, out
  Ref x, residual, rope, out;
  AdapterTables adapters;  // of a layer that has none: all zeros
};

struct TapeRoute {
  RouteProblem problem;  // without tokens, logits, ids, weights
  Ref logits, ids, weights;
};

struct TapeExperts {
  ExpertsProblem problem;  // without tokens, ids, weights, x, residual, out
  Ref x, ids, weights, residual, out;
};

// Ranks add up what each has made of all rows.
struct TapeSum {
  NativeAllReduce function;
  void* group;
  int64_t columns;
  Ref x, residual, out;
};

struct TapeAttention {
  const NativeAttention* functions;
  const void* layer;
  int64_t step;  // which of a run's steps it takes
  Ref q, k, v, out, scratch;
};

enum class TapeKind : int64_t { kLayer = 0, kRoute = 1, kExperts = 2, kAttention = 3, kSum = 4 };

// Number `index` of its kind.
struct TapeCall {
  TapeKind kind;
  int64_t index;
};

// Calls whose time is told together. The stages of all steps are of one run (stages.h).
struct TapeStep {
  int64_t first, count;
};

// Where a value's rows are: input number `index`; result number `index`, which the caller keeps; or in scratch memory,
// `index` bytes a row behind its start (a multiple of 64), where values that are never needed together share a place.
enum class Place : int64_t { kInput = 0, kResult = 1, kScratch = 2 };

struct TapeValue {
  int64_t columns, size;  // bytes of an element: 2, bf16, or 4, float32 or int32, in scratch memory only
  Place place;
  int64_t index;
};

// Followed in memory by its values, steps, calls, layers, routes, experts, attentions and sums. Trivially copyable, all
// of it.
struct Tape {
  int64_t bytes, inputs, results, values, steps, calls, layers, routes, experts, attentions, sums;
  int64_t attention_steps;  // as many has a run
  int64_t call_bytes;       // memory of all calls of attentions, 64-byte aligned
  int64_t scratch_bytes;    // a row
};

const TapeValue* values_of(const Tape& tape);
const TapeStep* steps_of(const Tape& tape);
const TapeCall* calls_of(const Tape& tape);
const TapeLayer* layers_of(const Tape& tape);
const TapeRoute* routes_of(const Tape& tape);
const TapeExperts* experts_of(const Tape& tape);
const TapeAttention* attentions_of(const Tape& tape);
const TapeSum* sums_of(const Tape& tape);
int64_t bytes_of(const Tape& tape);

// Rows of a value during a run.
struct Rows {
  char* data;
  int64_t stride;  // elements between two rows
};

// `inputs`, `results`: as many as the tape has. `scratch`: 64-byte aligned, rows * scratch_bytes. `attention_steps`:
// what the attention's functions take. `times`: null, or where the steps' starts and the last one's end go, in
// nanoseconds of the monotonic clock. Null, or a stage's error; what was in the results is lost then.
const char* run_tape(const Tape& tape, int64_t rows, const Rows* inputs, const Rows* results, char* scratch,
                     const void* const* attention_steps, const Threads& threads, int64_t* times);

}  // namespace pageloom
