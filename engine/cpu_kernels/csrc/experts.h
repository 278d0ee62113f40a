// A mixture of experts: routing, and the gated MLPs that tokens chose, as stages of a run over the kernels of linear.h.
// Plain data only, as there: a unit of one ISA includes it.
#pragma once

#include "linear.h"

namespace pageloom {

// One of a token's experts, out of how many it takes, is a choice. Choices are numbered token by token; sorted by expert
// (and by number within one), so that an expert's rows lie together, each has a position, or -1: it brings nothing.
//
// out[t] = residual[t] + bf16(sum over j of weights[t][j] * rows[positions[t][j]]), summed in float32 in the order of j.
struct CombineProblem {
  int64_t top_k, columns;
  const int32_t* positions;  // [tokens][top_k]
  const float* weights;      // [tokens][top_k]
  const uint16_t* rows;      // bf16, by position: what the experts made of their rows, row_stride elements apart
  int64_t row_stride;
  const uint16_t* residual;  // bf16 [tokens][columns], or null
  int64_t residual_stride;
  uint16_t* out;  // bf16 [tokens][columns]
  int64_t out_stride;
};

using CombineRows = void (*)(const CombineProblem&, int64_t token_begin, int64_t token_end);

#define PAGELOOM_DECLARE_COMBINE(isa) CombineRows combine_rows_##isa();
PAGELOOM_DECLARE_COMBINE(portable)
PAGELOOM_DECLARE_COMBINE(avx2)
PAGELOOM_DECLARE_COMBINE(avx512)
PAGELOOM_DECLARE_COMBINE(avx512bf16)

}  // namespace pageloom
