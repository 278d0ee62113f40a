// Arithmetic on vectors of tokens: order keys, exp, log and the noise of engine/sampling/noise.py.
//
// Nothing here may depend on where in a vector a token stands, so nothing is left to the compiler's choice between a
// product and a sum or one fused operation: contraction is off, and `fused` says where it is wanted.
#pragma once

#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "simd.h"

namespace {

constexpr float kInfinity = __builtin_inff();

PAGELOOM_INLINE vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Integers that order as floats do; +0 and -0 are equal.
PAGELOOM_INLINE int32_t order_key(float x) {
  const float positive_zero = x + 0.0f;
  int32_t bits;
  memcpy(&bits, &positive_zero, 4);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
PAGELOOM_INLINE float key_value(int32_t key) { return bits_to_float((uint32_t)(key ^ ((key >> 31) & 0x7fffffff))); }

// The first `count` of VW floats; the others are `filler`.
PAGELOOM_INLINE vf load_some(const float* p, int64_t count, float filler) {
  if (count >= VW) return loadf(p);
  float lanes[VW];
  for (int64_t i = 0; i < VW; ++i) lanes[i] = i < count ? p[i] : filler;
  return loadf(lanes);
}

// log p up to a constant that makes the largest 0.
PAGELOOM_INLINE vf scaled_logit(vf x, float top, float temperature) { return (x - top) / splat(temperature); }
PAGELOOM_INLINE float scaled_one(float x, float top, float temperature) { return (x - top) / temperature; }

// e^x for x <= 0, to about one unit in the last place; 0 below -87 (Cephes' reduction and polynomial).
PAGELOOM_INLINE vf exp_precise(vf x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
  const vf clamped = vmax(x, splat(-87.0f));
  const vf shifted = fused(clamped, splat(1.44269504088896341f), splat(magic));
  const vf n = shifted - magic;
  vf r = fused(n, splat(-0.693359375f), clamped);
  r = fused(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fused(p, r, splat(1.3981999507e-3f));
  p = fused(p, r, splat(8.3334519073e-3f));
  p = fused(p, r, splat(4.1665795894e-2f));
  p = fused(p, r, splat(1.6666665459e-1f));
  p = fused(p, r, splat(5.0000001201e-1f));
  p = fused(p, r * r, r) + 1.0f;
  const vf result = (vf)((vi)p + ((vi)shifted << 23));
  return x < -87.0f ? splat(0.0f) : result;
}

// 2^t for t <= 0 (not NaN) with a relative error of 3e-7, by minimax polynomials; next to nothing below 2^-126.
PAGELOOM_INLINE vf exp2_rough(vf t) {
#if defined(__AVX512F__)
  constexpr int kAboveFloor = 0x09;  // the fraction that rounding down leaves; 0 of an infinity
  const vf f = (vf)_mm512_reduce_ps((__m512)t, kAboveFloor);
  vf p = splat(0.0018775739008560777f);
  p = fused(p, f, splat(0.008989347144961357f));
  p = fused(p, f, splat(0.05582631379365921f));
  p = fused(p, f, splat(0.24015362560749054f));
  p = fused(p, f, splat(0.6931530833244324f));
  p = fused(p, f, splat(0.9999999403953552f));
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)t);  // by 2^floor(t)
#else
  const float magic = 12582912.0f;
  const vf clamped = vmax(t, splat(-126.0f));
  const vf shifted = clamped + magic;
  const vf f = clamped - (shifted - magic);
  vf p = splat(0.0013264700537547469f);
  p = fused(p, f, splat(0.009671514853835106f));
  p = fused(p, f, splat(0.05550733953714371f));
  p = fused(p, f, splat(0.24022242426872253f));
  p = fused(p, f, splat(0.6931470036506653f));
  p = fused(p, f, splat(1.0f));
  return (vf)((vi)p + ((vi)shifted << 23));
#endif
}

// log of a positive normal number, to about one unit in the last place (Cephes' polynomial).
PAGELOOM_INLINE vf log_precise(vf x) {
  const vi bits = (vi)x;
  const vi exponent = (bits - 0x3f3504f3) >> 23;  // so that the mantissa lies in [sqrt(1/2), sqrt(2))
  const vf e = __builtin_convertvector(exponent, vf);
  const vf f = (vf)(bits - (exponent << 23)) - 1.0f;
  const vf z = f * f;
  vf p = splat(7.0376836292e-2f);
  p = fused(p, f, splat(-1.1514610310e-1f));
  p = fused(p, f, splat(1.1676998740e-1f));
  p = fused(p, f, splat(-1.2420140846e-1f));
  p = fused(p, f, splat(1.4249322787e-1f));
  p = fused(p, f, splat(-1.6668057665e-1f));
  p = fused(p, f, splat(2.0000714765e-1f));
  p = fused(p, f, splat(-2.4999993993e-1f));
  p = fused(p, f, splat(3.3333331174e-1f));
  p = p * f * z;
  p = fused(e, splat(-2.12194440e-4f), p);
  p = fused(z, splat(-0.5f), p);
  return fused(e, splat(0.693359375f), f + p);
}

struct DrawKeys {
  uint32_t k0, k1;
};

PAGELOOM_INLINE uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

PAGELOOM_INLINE DrawKeys draw_keys(int64_t seed_words, int64_t position) {
  const uint32_t at = (uint32_t)position;
  return {mixed((uint32_t)seed_words + at * 0x9e3779b9u),
          mixed((uint32_t)((uint64_t)seed_words >> 32) + at * 0x85ebca6bu)};
}

constexpr uint32_t kTokenStep = 0x9e3779b9u;

// 31 random bits for each token; `words`: token * kTokenStep.
PAGELOOM_INLINE vu random_bits(vu words, DrawKeys keys) {
  vu x = words + keys.k0;
  x ^= x >> 16;
  x = x * 0x7feb352du + keys.k1;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (vu)((vi)x >> 16);
}

constexpr float kUnit = 4.656612595521636e-10f;  // 2^-31 * (1 - 2^-24)

// log(E), E = -log1p(-u) exponential with mean 1.
PAGELOOM_INLINE vf log_exponential(vu bits) {
  const vf u = (__builtin_convertvector((vi)bits, vf) + 0.5f) * kUnit;
  const vf w = 1.0f - u;
  const vf lost = (1.0f - w) - u;  // exactly what rounding took from w
  const vf log1p = log_precise(w) + lost / w;
  return log_precise(-log1p);
}

}  // namespace
