// Floats of 8 bits (e4m3) with a float32 scale: a panel is decoded to bf16, in the layout of a bf16 panel, into memory
// that stays in this core's cache, and multiplied there by the bf16 kernels of this ISA. So a row's bits are those of the
// matrix e4m3 * scale, rounded to bf16.
#include "epilogue.h"
#include "group_formats.h"
#include "int_dot.h"
#include "linear.h"

using namespace pageloom;

namespace {

constexpr int64_t kAhead = 4096;  // bytes: how far ahead the weights are asked for

const LinearKernels* bf16_kernels() { return pageloom::PAGELOOM_FOR_ISA(linear_bf16)(); }

// Byte J of each lane, e4m3, as a float.
template <int J>
PAGELOOM_INLINE vf value_of(vu x) {
  const vu magnitude = J == 3 ? x >> 4 : x << (J == 3 ? 0 : 20 - 8 * J);
  return (vf)((x << (24 - 8 * J) & 0x80000000u) | (magnitude & 0x07f00000u)) * bits_to_float(0x7b800000u);
}

// Two consecutive inputs of VW outputs as a bf16 panel holds them: pairs, output by output.
PAGELOOM_INLINE void store_pairs(uint8_t* target, vf even, vf odd) {
#if PAGELOOM_NATIVE_BF16
  const __m512i order = (__m512i)_mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                                  22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  _mm512_storeu_si512(target, _mm512_permutexvar_epi16(order, both));
#else
  const vu pairs = (vu)round_bf16(even) >> 16 | (vu)round_bf16(odd);
  memcpy(target, &pairs, sizeof pairs);
#endif
}

// `inputs` inputs of VW outputs, from `from` on, to the bf16 panel's `target`.
PAGELOOM_INLINE void decode(const uint8_t* from, int64_t inputs, vf scale, uint8_t* target) {
  for (int64_t i = 0; i < inputs; i += 4, from += 4 * kPanel, target += 8 * kPanel) {
    prefetch(from + kAhead, kVectorBytes, false);
    const vu w = load_as<vu>(from);
    store_pairs(target, value_of<0>(w) * scale, value_of<1>(w) * scale);
    store_pairs(target + 4 * kPanel, value_of<2>(w) * scale, value_of<3>(w) * scale);
  }
}

void decode_panel(LayoutFloat8, const uint8_t* panel, int64_t k, uint8_t* target) {
  constexpr int64_t kAtOnce = 64;  // inputs that are taken for all outputs in turn, while their lines are near
  for (int64_t begin = 0; begin < k; begin += kAtOnce)
    for (int64_t o = 0; o < kPanel; o += VW)
      decode(panel + begin * kPanel + o * 4, begin + kAtOnce < k ? kAtOnce : k - begin,
             load_as<vf>(panel + k * kPanel + o * 4), target + begin * 2 * kPanel + o * 4);
}

void decode_panel(LayoutFloat8Block, const uint8_t* panel, int64_t k, uint8_t* target) {
  constexpr int64_t kInputs = LayoutFloat8Block::kInputs;
  for (int64_t begin = 0; begin < k; begin += kInputs, panel += LayoutFloat8Block::kBytes)
    for (int64_t o = 0; o < kPanel; o += VW)
      decode(panel + o * 4, kInputs, load_as<vf>(panel + LayoutFloat8Block::kD + o * 4),
             target + begin * 2 * kPanel + o * 4);
}

template <class F>
struct Kernels {
  static int64_t dense_bytes(const LinearProblem& p) { return 2 * p.k * kPanel; }

  // The same problem over one decoded panel, number `panel`: kernels find it where a whole matrix would have it.
  static LinearProblem dense(const LinearProblem& p, const void* memory, int64_t panel) {
    LinearProblem q = p;
    q.format = Format::kBFloat16;
    q.panel_bytes = dense_bytes(p);
    q.weight = (const uint8_t*)((uintptr_t)memory - (uintptr_t)(panel * q.panel_bytes));
    return q;
  }

  static OperandKind operand_kind(const LinearProblem& p) { return bf16_kernels()->operand_kind(dense(p, nullptr, 0)); }

  static void prepare(const LinearProblem& p, const Operand& target, int64_t row_begin, int64_t row_end) {
    bf16_kernels()->prepare(dense(p, nullptr, 0), target, row_begin, row_end);
  }

  static size_t scratch_bytes(const LinearProblem& p) {
    return dense_bytes(p) + bf16_kernels()->scratch_bytes(dense(p, nullptr, 0));
  }

  static void compute(const LinearProblem& p, const Operand& x, int64_t row_begin, int64_t row_end,
                      int64_t panel_begin, int64_t panel_end, void* scratch) {
    auto* const decoded = (uint8_t*)scratch;
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      decode_panel(F{}, p.weight + panel * p.panel_bytes, p.k, decoded);
      bf16_kernels()->compute(dense(p, decoded, panel), x, row_begin, row_end, panel, panel + 1,
                              decoded + dense_bytes(p));
    }
  }

  static constexpr LinearKernels kTable = {operand_kind, prepare, scratch_bytes, compute};
};

}  // namespace

const LinearKernels* pageloom::PAGELOOM_FOR_ISA(linear_float8)(Format format) {
  switch (format) {
    case Format::kFloat8: return &Kernels<LayoutFloat8>::kTable;
    case Format::kFloat8Block: return &Kernels<LayoutFloat8Block>::kTable;
    default: return nullptr;
  }
}
