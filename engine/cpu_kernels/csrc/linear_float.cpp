// float32 weights, bf16 rows, float32 outputs that nothing rounds: what a router's logits are made by. Outputs are few, so
// weights stay in the caches between rows, and one row waits for memory.
#include <stddef.h>

#include "epilogue.h"

using namespace pageloom;

namespace {

constexpr int kRows = 4;  // that meet a panel at once

// R rows from `row` on and one panel: every sum in the order of inputs, however many rows there are.
template <int R>
void multiply(const LinearProblem& p, const Operand& x, int64_t row, int64_t panel) {
  const float* const w = (const float*)(p.weight + panel * p.panel_bytes);
  const uint16_t* const from = (const uint16_t*)x.data + row * x.stride;
  vf sums[R][kPanelVectors] = {};
  for (int64_t i = 0; i < p.k; ++i)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf input = splat(bits_to_float((uint32_t)from[r * x.stride + i] << 16));
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) sums[r][v] += input * loadf(w + i * kPanel + v * VW);
    }
  const int64_t first = panel * kPanel, valid = p.n - first < kPanel ? p.n - first : kPanel;
  for (int r = 0; r < R; ++r) memcpy((float*)p.out + (row + r) * p.out_stride + first, sums[r], (size_t)valid * 4);
}

void compute(const LinearProblem& p, const Operand& x, int64_t row_begin, int64_t row_end, int64_t panel_begin,
             int64_t panel_end, void*) {
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    int64_t row = row_begin;
    for (; row + kRows <= row_end; row += kRows) multiply<kRows>(p, x, row, panel);
    for (; row < row_end; ++row) multiply<1>(p, x, row, panel);
  }
}

OperandKind operand_kind(const LinearProblem&) { return OperandKind::kBFloat16; }
void prepare(const LinearProblem&, const Operand&, int64_t, int64_t) {}
size_t scratch_bytes(const LinearProblem&) { return 0; }

const LinearKernels kKernels = {operand_kind, prepare, scratch_bytes, compute};

}  // namespace

const LinearKernels* pageloom::PAGELOOM_FOR_ISA(linear_float)() { return &kKernels; }
