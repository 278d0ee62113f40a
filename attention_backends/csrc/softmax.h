// What the online softmax of all kernels has in common. Compiled once per ISA, with each of them.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kFloor = -1e30f;  // the running maximum starts here, so that -inf - maximum is never NaN

// What a row's values, weighted by 2^(score - maximum), are multiplied with at its end. `head`: of the queries. The sink
// joins here, when all of the row's keys are in `sum`: once, however they were split.
template <bool kPrecise>
PAGELOOM_INLINE float inverse_sum(const pageloom::AttentionProblem& p, int64_t head, float maximum, float sum) {
  if (p.sinks == nullptr) return sum == 0 ? 0 : 1 / sum;  // a row that sees no key gives 0; a NaN stays in its row
  const float sink = p.sinks[head] * kLog2e, top = sink > maximum ? sink : maximum;
  const float decay = exp2_of<kPrecise>(splat(maximum - top))[0];
  return decay / (sum * decay + exp2_of<kPrecise>(splat(sink - top))[0]);
}

}  // namespace
