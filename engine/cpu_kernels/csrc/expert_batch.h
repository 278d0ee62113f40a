// Some tokens on their way through a mixture of experts: what its stages share. Seen by units that are compiled once only.
#pragma once

#include "experts_schedule.h"
#include "linear_work.h"

namespace pageloom {

struct Segment {
  int64_t expert, row_begin, row_end;  // rows by position
};

struct Batch;
struct BatchStage : Stage {
  Batch* batch = nullptr;
};

// One of the two matrix products. Its units are the panels of the first segment, then of the second, and so on.
struct Product : BatchStage {
  LinearProblem problem;  // of expert 0; x, out: by position; rows: the most that an expert has
  const LinearKernels* kernels = nullptr;
  OperandLayout layout{OperandKind::kBFloat16, 0, 0};
  Operand operand;         // rows prepared for all threads
  bool own_rows = false;   // each thread prepares them for itself
  int64_t panels = 0, expert_bytes = 0, step = 1, most = 1, scratch_bytes = 0;
  Range* ranges = nullptr;  // one for each worker
};

// What the stages of some tokens share. What depends on the ids is written by `sort`, before all other stages.
struct Batch {
  ExpertsProblem p;  // of these tokens
  int64_t choices;
  int64_t rows;        // choices whose experts are here
  int32_t* positions;  // [tokens][top_k]; -1: the expert is elsewhere
  int64_t* begins;     // [experts + 1]: first row of each expert
  Segment* segments;
  int64_t segment_count;
  uint16_t* hidden;    // bf16 by position: what the first product puts out
  uint16_t* products;  // the second
  int64_t hidden_stride, product_stride;
  BatchStage sort, gather, quantise, combine;
  Product first, second;
};

// Memory laid out piece by piece; from address 0 it is only measured.
struct Room {
  uintptr_t at;

  template <class T>
  T* take(int64_t count) {
    const uintptr_t here = at;
    at += static_cast<uintptr_t>(aligned(count * static_cast<int64_t>(sizeof(T))));
    return reinterpret_cast<T*>(here);
  }
};

// Counts and sorts the choices of experts that are here and deals out both products' units. False: an id is outside the
// experts that are known; nothing may follow then.
bool sort_choices(Batch& batch);

}  // namespace pageloom
