// RMSNorm of one row before the product, as engine.models.layers rounds it. Internal linkage.
#pragma once

#include "epilogue.h"

namespace {

PAGELOOM_INLINE float inverse_rms(const uint16_t* x, int64_t k, float eps) {
  vf even{}, odd{};
  int64_t i = 0;
  for (; i + 2 * VW <= k; i += 2 * VW) {
    const vf a = load_bf16(x + i), b = load_bf16(x + i + VW);
    even += a * a;
    odd += b * b;
  }
  float sum = reduce_add(even + odd);
  for (; i < k; ++i) sum += bits_to_float((uint32_t)x[i] << 16) * bits_to_float((uint32_t)x[i] << 16);
  return 1.0f / __builtin_sqrtf(sum / (float)k + eps);
}

// bf16 [k]: row `row` of x, normalised and weighted where the layer has a norm. `target` may not overlap x.
PAGELOOM_INLINE void normalise_row(const pageloom::LinearProblem& p, int64_t row, uint16_t* target) {
  const uint16_t* const x = p.x + row * p.x_stride;
  if (p.norm_weight == nullptr) {
    memcpy(target, x, p.k * 2);
    return;
  }
  const float scale = inverse_rms(x, p.k, p.norm_eps);
  int64_t i = 0;
  if (p.norm_wide) {
    const float* const weight = (const float*)p.norm_weight;
    for (; i + VW <= p.k; i += VW) store_rounded(target + i, loadf(weight + i) * (load_bf16(x + i) * scale));
    for (; i < p.k; ++i) target[i] = float_to_bf16(weight[i] * (bits_to_float((uint32_t)x[i] << 16) * scale));
    return;
  }
  const uint16_t* const weight = (const uint16_t*)p.norm_weight;
  for (; i + VW <= p.k; i += VW)
    store_bf16(target + i, round_bf16(load_bf16(weight + i) * round_bf16(load_bf16(x + i) * scale)));
  for (; i < p.k; ++i) {
    const float rounded = bits_to_float((uint32_t)float_to_bf16(bits_to_float((uint32_t)x[i] << 16) * scale) << 16);
    target[i] = float_to_bf16(bits_to_float((uint32_t)weight[i] << 16) * rounded);
  }
}

}  // namespace
