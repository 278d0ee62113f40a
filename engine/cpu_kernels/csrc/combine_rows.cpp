// What a token's experts made of it, weighted and summed: the last stage of a mixture of experts.
#include <stddef.h>

#include "epilogue.h"
#include "experts.h"

using namespace pageloom;

namespace {

// Columns [at, at + VW) of a token.
PAGELOOM_INLINE vf sum_of(const CombineProblem& p, int64_t token, int64_t at) {
  vf sum{};
  for (int64_t j = 0; j < p.top_k; ++j) {
    const int64_t choice = token * p.top_k + j;
    sum += splat(p.weights[choice]) * load_bf16(p.rows + p.positions[choice] * p.row_stride + at);
  }
  return round_bf16(sum);
}

void combine(const CombineProblem& p, int64_t token_begin, int64_t token_end) {
  for (int64_t token = token_begin; token < token_end; ++token) {
    const uint16_t* const residual = p.residual == nullptr ? nullptr : p.residual + token * p.residual_stride;
    uint16_t* const out = p.out + token * p.out_stride;
    int64_t at = 0;
    for (; at + VW <= p.columns; at += VW) {
      vf last = sum_of(p, token, at);
      if (residual != nullptr) last += load_bf16(residual + at);
      store_rounded(out + at, last);
    }
    if (at == p.columns) continue;
    const int64_t left = p.columns - at;  // rows are as long as whole vectors, residual and out are not
    uint16_t some[VW] = {}, whole[VW];
    if (residual != nullptr) memcpy(some, residual + at, left * 2);
    vf last = sum_of(p, token, at);
    if (residual != nullptr) last += load_bf16(some);
    store_rounded(whole, last);
    memcpy(out + at, whole, left * 2);
  }
}

}  // namespace

CombineRows pageloom::PAGELOOM_FOR_ISA(combine_rows)() { return combine; }
