// What a token's experts made of it, weighted and summed: the last stage of a mixture of experts.
#include <stddef.h>

#include "epilogue.h"
#include "experts.h"

using namespace pageloom;

namespace {

// N vectors of columns from `at` on: so many sums do not wait for each other. Asks for the same of the next token.
template <int N>
PAGELOOM_INLINE void sum_choices(const CombineProblem& p, int64_t token, int64_t next, int64_t at, vf (&sums)[N]) {
  for (int i = 0; i < N; ++i) sums[i] = vf{};
  for (int64_t j = 0; j < p.top_k; ++j) {
    const int32_t position = p.positions[token * p.top_k + j], coming = p.positions[next * p.top_k + j];
    const char* const ahead = (const char*)(p.rows + (coming < 0 ? 0 : coming) * p.row_stride + at);
    for (int64_t byte = 0; byte < N * VW * 2; byte += 64) __builtin_prefetch(ahead + byte);
    if (position < 0) continue;
    const uint16_t* const row = p.rows + position * p.row_stride + at;
    const vf weight = splat(p.weights[token * p.top_k + j]);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) sums[i] += weight * load_bf16(row + i * VW);
  }
}

PAGELOOM_INLINE void finish(vf sum, const uint16_t* residual, uint16_t* out) {
  vf last = round_bf16(sum);
  if (residual != nullptr) last += load_bf16(residual);
  store_rounded(out, last);
}

// The columns that are left, fewer than a vector.
PAGELOOM_INLINE vf sum_some(const CombineProblem& p, int64_t token, int64_t at, int64_t left) {
  vf sum{};
  for (int64_t j = 0; j < p.top_k; ++j) {
    const int32_t position = p.positions[token * p.top_k + j];
    if (position < 0) continue;
    uint16_t some[VW] = {};
    memcpy(some, p.rows + position * p.row_stride + at, left * 2);
    sum += splat(p.weights[token * p.top_k + j]) * load_bf16(some);
  }
  return sum;
}

PAGELOOM_INLINE void finish_some(vf sum, const uint16_t* residual, uint16_t* out, int64_t left) {
  uint16_t some[VW] = {}, whole[VW];
  if (residual != nullptr) memcpy(some, residual, left * 2);
  finish(sum, residual == nullptr ? nullptr : some, whole);
  memcpy(out, whole, left * 2);
}

void combine(const CombineProblem& p, int64_t token_begin, int64_t token_end) {
  constexpr int N = 4;
  for (int64_t token = token_begin; token < token_end; ++token) {
    const int64_t next = token + 1 < token_end ? token + 1 : token;
    const uint16_t* const residual = p.residual == nullptr ? nullptr : p.residual + token * p.residual_stride;
    uint16_t* const out = p.out + token * p.out_stride;
    const auto residual_at = [&](int64_t at) { return residual == nullptr ? nullptr : residual + at; };
    int64_t at = 0;
    for (; at + N * VW <= p.columns; at += N * VW) {
      vf sums[N];
      sum_choices(p, token, next, at, sums);
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) finish(sums[i], residual_at(at + i * VW), out + at + i * VW);
    }
    for (; at + VW <= p.columns; at += VW) {
      vf sum[1];
      sum_choices(p, token, next, at, sum);
      finish(sum[0], residual_at(at), out + at);
    }
    if (const int64_t left = p.columns - at; left > 0)
      finish_some(sum_some(p, token, at, left), residual_at(at), out + at, left);
  }
}

}  // namespace

CombineRows pageloom::PAGELOOM_FOR_ISA(combine_rows)() { return combine; }
