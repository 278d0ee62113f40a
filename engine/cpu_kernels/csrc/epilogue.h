// From a row's sums over a panel to what the layer returns: bias, gate, rounding, residual, store. Internal linkage.
#pragma once

#include "linear.h"
#include "simd.h"

namespace {

typedef uint16_t vh __attribute__((vector_size(PAGELOOM_VECTOR_BYTES / 2)));

PAGELOOM_INLINE vf load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)  // compilers widen a whole vector in halves
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  return (vf)(__builtin_convertvector(load_as<vh>(p), vu) << 16);
#endif
}

// To the nearest bf16, ties to even; NaN stays NaN. The result is a float that bf16 holds exactly. The instruction for it
// makes zero of what is smaller than the smallest normal number.
PAGELOOM_INLINE vf round_bf16(vf v) {
#if PAGELOOM_NATIVE_BF16
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)), 16);
#endif
  const vu u = (vu)v;
  return (vf)(((u + 0x7fffu + ((u >> 16) & 1u)) | (vu)(v != v)) & 0xffff0000u);
}

// `v` as round_bf16 returned it.
PAGELOOM_INLINE void store_bf16(uint16_t* p, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)v, 16)));
#else
  const vh h = __builtin_convertvector((vu)v >> 16, vh);
  memcpy(p, &h, sizeof h);
#endif
}

PAGELOOM_INLINE void store_rounded(uint16_t* p, vf v) {
#if PAGELOOM_NATIVE_BF16
  const __m256bh h = _mm512_cvtneps_pbh((__m512)v);
  memcpy(p, &h, sizeof h);
#else
  store_bf16(p, round_bf16(v));
#endif
}

// x / (1 + e^-t).
PAGELOOM_INLINE vf times_sigmoid(vf x, vf t) { return x / (1.0f + exp2_all(t * -1.4426950408889634f)); }

// SiLU, or GELU by its tanh: x / 2 * (1 + tanh(y)) = x / (1 + e^-2y), y = sqrt(2 / pi) * (x + 0.044715 x^3).
PAGELOOM_INLINE vf activated(vf x, pageloom::Gate gate) {
  if (gate == pageloom::Gate::kSiLU) return times_sigmoid(x, x);
  return times_sigmoid(x, x * (1.5957691216057308f + 0.07135481627136f * (x * x)));
}

// A gate and what it takes.
struct Gating {
  pageloom::Gate kind;
  float limit, alpha;
};

constexpr Gating kNoGate = {pageloom::Gate::kNone, 0.0f, 0.0f};

PAGELOOM_INLINE Gating gating_of(const pageloom::LinearProblem& p) { return {p.gate, p.gate_limit, p.gate_alpha}; }

// activation(gate) * up from values that were rounded; not rounded itself. NaN stays NaN in all of them.
PAGELOOM_INLINE vf gated(vf gate, vf up, const Gating& g) {
  if (g.kind != pageloom::Gate::kClampedSwiGLU) return round_bf16(activated(gate, g.kind)) * up;
  const vf limit = splat(g.limit);
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  return round_bf16(times_sigmoid(gate, gate * g.alpha)) * round_bf16(up + 1.0f);
}

constexpr int kPanelVectors = (int)(pageloom::kPanel / VW);

// One row of a whole panel from its sums `v`; pointers at its first output, `bias` and `residual` may be null.
PAGELOOM_INLINE void finish_values(vf (&v)[kPanelVectors], const uint16_t* bias, const uint16_t* residual, void* out,
                                   const Gating& gating, bool wide) {
  constexpr int kHalf = kPanelVectors / 2;
  const bool has_gate = gating.kind != pageloom::Gate::kNone;
  for (int i = 0; i < kPanelVectors; ++i)
    if (bias != nullptr) v[i] += load_bf16(bias + i * VW);
  for (int i = 0; i < (has_gate ? kHalf : kPanelVectors); ++i) {
    vf last = v[i];
    if (has_gate) last = gated(round_bf16(v[i]), round_bf16(v[i + kHalf]), gating);
    if (residual != nullptr) last = round_bf16(last) + load_bf16(residual + i * VW);
    if (wide)
      storef((float*)out + i * VW, round_bf16(last));
    else
      store_rounded((uint16_t*)out + i * VW, last);
  }
}

PAGELOOM_INLINE void finish_row(const float* sums, const uint16_t* bias, const uint16_t* residual, void* out,
                                const Gating& gating, bool wide) {
  vf v[kPanelVectors];
  for (int i = 0; i < kPanelVectors; ++i) v[i] = loadf(sums + i * VW);
  finish_values(v, bias, residual, out, gating, wide);
}

// `sums`: float32 [32], 64-byte aligned, of row `row` and the outputs of panel `panel`. Rounding points are those of
// separate layers: the product (with its bias) to bf16, then what is added or multiplied, to bf16 again.
// wide: float32 values that were rounded to bf16. Never writes outputs that the matrix does not have.
PAGELOOM_INLINE void store_panel_row(const pageloom::LinearProblem& p, int64_t row, int64_t panel, const float* sums) {
  using pageloom::kPanel;
  const int64_t first = panel * kPanel, valid = p.n - first;
  const int64_t outputs = p.gate != pageloom::Gate::kNone ? kPanel / 2 : kPanel, size = p.wide ? 4 : 2;
  const uint16_t* bias = p.bias == nullptr ? nullptr : p.bias + first;
  const uint16_t* residual = p.residual == nullptr ? nullptr : p.residual + row * p.residual_stride + panel * outputs;
  char* const out = (char*)p.out + (row * p.out_stride + panel * outputs) * size;
  if (valid >= kPanel) {
    finish_row(sums, bias, residual, out, gating_of(p), p.wide);
    return;
  }
  uint16_t some_bias[kPanel] = {}, some_residual[kPanel] = {};  // gated layers have whole panels only
  if (bias != nullptr) memcpy(some_bias, bias, valid * 2);
  if (residual != nullptr) memcpy(some_residual, residual, valid * 2);
  float whole[kPanel];
  finish_row(sums, bias == nullptr ? nullptr : some_bias, residual == nullptr ? nullptr : some_residual, whole,
             kNoGate, p.wide);
  memcpy(out, whole, valid * size);
}

// The common ways in which sums become outputs, for kernels that have code of its own for each.
enum class Store { kPlain, kWide, kResidual, kGated, kAny };

PAGELOOM_INLINE Store store_of(const pageloom::LinearProblem& p) {
  if (p.bias != nullptr || p.n % pageloom::kPanel != 0) return Store::kAny;
  if (p.gate != pageloom::Gate::kNone) return p.residual == nullptr && !p.wide ? Store::kGated : Store::kAny;
  if (p.wide) return p.residual == nullptr ? Store::kWide : Store::kAny;
  return p.residual == nullptr ? Store::kPlain : Store::kResidual;
}

// As store_panel_row.
template <Store S>
PAGELOOM_INLINE void store_panel_values(const pageloom::LinearProblem& p, int64_t row, int64_t panel,
                                        vf (&v)[kPanelVectors]) {
  if constexpr (S == Store::kAny) {
    alignas(64) float sums[pageloom::kPanel];
    for (int i = 0; i < kPanelVectors; ++i) storef(sums + i * VW, v[i]);
    store_panel_row(p, row, panel, sums);
    return;
  }
  const int64_t first = panel * (S == Store::kGated ? pageloom::kPanel / 2 : pageloom::kPanel);
  auto* const out = (char*)p.out + (row * p.out_stride + first) * (S == Store::kWide ? 4 : 2);
  const uint16_t* const residual = S == Store::kResidual ? p.residual + row * p.residual_stride + first : nullptr;
  finish_values(v, nullptr, residual, out, S == Store::kGated ? gating_of(p) : kNoGate, S == Store::kWide);
}

template <Store S>
void store_tile_as(const pageloom::LinearProblem& p, int64_t row, int64_t rows, int64_t panel, int64_t panels,
                   const float* sums) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < panels; ++i, sums += pageloom::kPanel) {
      vf v[kPanelVectors];
      for (int j = 0; j < kPanelVectors; ++j) v[j] = loadf(sums + j * VW);
      store_panel_values<S>(p, row + r, panel + i, v);
    }
}

// A tile of `rows` rows and `panels` panels from its sums, float32 [rows][panels][32].
PAGELOOM_INLINE void store_tile(const pageloom::LinearProblem& p, int64_t row, int64_t rows, int64_t panel,
                                int64_t panels, const float* sums) {
  switch (store_of(p)) {
    case Store::kPlain: return store_tile_as<Store::kPlain>(p, row, rows, panel, panels, sums);
    case Store::kWide: return store_tile_as<Store::kWide>(p, row, rows, panel, panels, sums);
    case Store::kResidual: return store_tile_as<Store::kResidual>(p, row, rows, panel, panels, sums);
    case Store::kGated: return store_tile_as<Store::kGated>(p, row, rows, panel, panels, sums);
    case Store::kAny: return store_tile_as<Store::kAny>(p, row, rows, panel, panels, sums);
  }
}

}  // namespace
