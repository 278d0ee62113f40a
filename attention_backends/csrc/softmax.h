// What the online softmax of all kernels has in common. Compiled once per ISA, with each of them.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kFloor = -1e30f;  // the running maximum starts here, so that -inf - maximum is never NaN

// Whether scores stay as they are up to the exponential, whose exponents are in units of `factor_of`. Maxima are, too, and
// subtracted before: a product that is rounded there and fused here would differ by more than 2^7 where scores are huge.
PAGELOOM_INLINE bool is_plain(const pageloom::AttentionProblem& p) {
  return p.soft_cap == 0 && p.scale > 0 && p.cache.dtype != pageloom::Dtype::kInt8;
}
PAGELOOM_INLINE float factor_of(const pageloom::AttentionProblem& p) { return is_plain(p) ? p.scale * kLog2e : 1.0f; }

// What a row's values, weighted by 2^(score - maximum), are multiplied with at its end. `head`: of the queries. The sink
// joins here, when all of the row's keys are in `sum`: once, however they were split.
template <bool kPrecise>
PAGELOOM_INLINE float inverse_sum(const pageloom::AttentionProblem& p, int64_t head, float maximum, float sum) {
  if (p.sinks == nullptr) return sum == 0 ? 0 : 1 / sum;  // a row that sees no key gives 0; a NaN stays in its row
  const float sink = p.sinks[head] * kLog2e, top = sink > maximum ? sink : maximum;
  const float decay = exp2_of<kPrecise>(splat(maximum - top))[0];
  return decay / (sum * decay + exp2_of<kPrecise>(splat(sink - top))[0]);
}

// A row of one part of a context; the logarithm is natural. 0 and -inf where it sees no key. `maximum` is in units of
// log2.
PAGELOOM_INLINE void write_part(const pageloom::AttentionProblem& p, const pageloom::WorkItem& item,
                                const pageloom::RowCursor& at, const float* accumulator, float maximum, float sum) {
  float* const out = (float*)p.out.data + item.place_of(p, p.out, at);
  const float inverse = sum == 0 ? 0 : 1 / sum;
  for (int64_t d = 0; d < p.cache.head_dim; ++d) out[d] = accumulator[d] * inverse;
  out[p.cache.head_dim] = sum == 0 ? -__builtin_inff() : maximum / kLog2e + __builtin_logf(sum);
}

}  // namespace
