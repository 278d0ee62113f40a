// Floats of 8 bits (e4m3) with a float32 scale: a panel is decoded to bf16, in the layout of a bf16 panel, into memory
// that stays in this core's cache, and multiplied there by the bf16 kernels of this ISA. So a row's bits are those of the
// matrix e4m3 * scale, rounded to bf16. Where pairs of bf16 are multiplied by instruction, few rows meet them as they are
// decoded: through memory it takes twice as long (measured at one row, Zen 5).
#include "epilogue.h"
#include "group_formats.h"
#include "int_dot.h"
#include "linear.h"

using namespace pageloom;

namespace {

constexpr int64_t kAhead = 4096;  // bytes: how far ahead the weights are asked for

const LinearKernels* bf16_kernels() { return pageloom::PAGELOOM_FOR_ISA(linear_bf16)(); }

#if PAGELOOM_NATIVE_BF16
// Bytes A and A + 1 of each lane, e4m3, as float16 of 1 / 256 of their values.
template <int A>
PAGELOOM_INLINE __m512i as_halves(vu x) {
  const __m512i order = _mm512_broadcast_i32x4(_mm_set_epi8(12 + A + 1, -1, 12 + A, -1, 8 + A + 1, -1, 8 + A, -1,  //
                                                            4 + A + 1, -1, 4 + A, -1, A + 1, -1, A, -1));
  const __m512i words = _mm512_shuffle_epi8((__m512i)x, order);
  return _mm512_and_si512(_mm512_srai_epi16(words, 1), _mm512_set1_epi16((int16_t)0xbfff));
}

// Scales of 16 outputs, those of the first and of the last 8 twice each, times 256.
struct PairScales {
  __m512 first, last;
  PairScales() = default;
  explicit PairScales(const uint8_t* scales) {
    const __m512 by_output = _mm512_mul_ps(_mm512_loadu_ps(scales), _mm512_set1_ps(256.0f));
    const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    first = _mm512_permutexvar_ps(twice, by_output);
    last = _mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(8)), by_output);
  }
};

// Inputs A and A + 1 of four as a bf16 panel holds them: pairs, output by output.
template <int A>
PAGELOOM_INLINE __m512i decode_pairs(vu four, const PairScales& scales) {
  const __m512i halves = as_halves<A>(four);
  const __m512 first = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), scales.first);
  const __m512 last = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), scales.last);
  return (__m512i)_mm512_cvtne2ps_pbh(last, first);
}

// `inputs` inputs of 16 outputs, from `from` on, to the bf16 panel's `target`.
PAGELOOM_INLINE void decode(const uint8_t* from, int64_t inputs, const uint8_t* scales, uint8_t* target) {
  const PairScales by_pair(scales);
  for (int64_t i = 0; i < inputs; i += 4, from += 4 * kPanel, target += 8 * kPanel) {
    prefetch(from + kAhead, kVectorBytes, false);
    const vu w = load_as<vu>(from);
    _mm512_storeu_si512(target, decode_pairs<0>(w, by_pair));
    _mm512_storeu_si512(target + 4 * kPanel, decode_pairs<2>(w, by_pair));
  }
}
#else
// Byte J of each lane, e4m3, as a float.
template <int J>
PAGELOOM_INLINE vf value_of(vu x) {
  const vu magnitude = J == 3 ? x >> 4 : x << (J == 3 ? 0 : 20 - 8 * J);
  return (vf)((x << (24 - 8 * J) & 0x80000000u) | (magnitude & 0x07f00000u)) * bits_to_float(0x7b800000u);
}

// `inputs` inputs of VW outputs, from `from` on, to the bf16 panel's `target`: pairs of inputs, output by output.
PAGELOOM_INLINE void decode(const uint8_t* from, int64_t inputs, const uint8_t* scales, uint8_t* target) {
  const vf scale = load_as<vf>(scales);
  const auto store = [](uint8_t* to, vf even, vf odd) __attribute__((always_inline)) {
    const vu pairs = (vu)round_bf16(even) >> 16 | (vu)round_bf16(odd);
    memcpy(to, &pairs, sizeof pairs);
  };
  for (int64_t i = 0; i < inputs; i += 4, from += 4 * kPanel, target += 8 * kPanel) {
    prefetch(from + kAhead, kVectorBytes, false);
    const vu w = load_as<vu>(from);
    store(target, value_of<0>(w) * scale, value_of<1>(w) * scale);
    store(target + 4 * kPanel, value_of<2>(w) * scale, value_of<3>(w) * scale);
  }
}
#endif

void decode_panel(LayoutFloat8, const uint8_t* panel, int64_t k, uint8_t* target) {
  constexpr int64_t kAtOnce = 64;  // inputs that are taken for all outputs in turn, while their lines are near
  for (int64_t begin = 0; begin < k; begin += kAtOnce)
    for (int64_t o = 0; o < kPanel; o += VW)
      decode(panel + begin * kPanel + o * 4, begin + kAtOnce < k ? kAtOnce : k - begin,
             panel + k * kPanel + o * 4, target + begin * 2 * kPanel + o * 4);
}

void decode_panel(LayoutFloat8Block, const uint8_t* panel, int64_t k, uint8_t* target) {
  constexpr int64_t kInputs = LayoutFloat8Block::kInputs;
  for (int64_t begin = 0; begin < k; begin += kInputs, panel += LayoutFloat8Block::kBytes)
    for (int64_t o = 0; o < kPanel; o += VW)
      decode(panel + o * 4, kInputs, panel + LayoutFloat8Block::kD + o * 4,
             target + begin * 2 * kPanel + o * 4);
}

#if PAGELOOM_NATIVE_BF16 && !defined(__AMX_TILE__)
constexpr int64_t kFewRows = 4, kTogether = 2;  // rows, and panels, whose weights are multiplied as they are decoded

// R rows from `row` on times kCount panels: sums in the order of the bf16 kernels, hence their bits.
template <class F, int R, int kCount>
void multiply_decoded(const LinearProblem& p, const Operand& x, int64_t row, int64_t panel) {
  constexpr int kVectors = kPanel / VW;
  const bool past = p.reading.past != 0;
  const int64_t inputs = F::kInputs == 4 ? p.k : F::kInputs;  // of which an output has one scale
  __m512 acc[R][kCount * kVectors] = {};
  const uint16_t* const rows = (const uint16_t*)x.data + row * x.stride;
  const uint8_t* weight = p.weight + panel * p.panel_bytes;
  for (int64_t begin = 0; begin < p.k; begin += inputs, weight += inputs * kPanel + 4 * kPanel) {
    PairScales scales[kCount * kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kCount * kVectors; ++v) {
      const int64_t o = v % kVectors * VW;
      scales[v] = PairScales(weight + v / kVectors * p.panel_bytes + inputs * kPanel + o * 4);
    }
    for (int64_t i = 0; i < inputs; i += 4) {
#pragma GCC unroll 4
      for (int v = 0; v < kCount * kVectors; ++v) {
        const uint8_t* const from = weight + v / kVectors * p.panel_bytes + i * kPanel + v % kVectors * kVectorBytes;
        prefetch(from + kAhead, kVectorBytes, past);
        const vu w = load_as<vu>(from);
        const __m512bh first = (__m512bh)decode_pairs<0>(w, scales[v]), last = (__m512bh)decode_pairs<2>(w, scales[v]);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const uint16_t* const four = rows + r * x.stride + begin + i;
          acc[r][v] = _mm512_dpbf16_ps(acc[r][v], (__m512bh)_mm512_set1_epi32(load_word(four)), first);
          acc[r][v] = _mm512_dpbf16_ps(acc[r][v], (__m512bh)_mm512_set1_epi32(load_word(four + 2)), last);
        }
      }
    }
  }
  alignas(64) float sums[R][kCount * kPanel];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kCount * kVectors; ++v) storef(&sums[r][v * VW], (vf)acc[r][v]);
  store_tile(p, row, R, panel, kCount, sums[0]);
}

template <class F, int R>
void multiply_rows(const LinearProblem& p, const Operand& x, int64_t row, int64_t panel_begin, int64_t panel_end) {
  int64_t panel = panel_begin;
  for (; panel + kTogether <= panel_end; panel += kTogether) multiply_decoded<F, R, kTogether>(p, x, row, panel);
  if (panel < panel_end) multiply_decoded<F, R, 1>(p, x, row, panel);
}

// Whether it has multiplied them.
template <class F>
bool multiply_few(const LinearProblem& p, const Operand& x, int64_t row, int64_t rows, int64_t panel_begin,
                  int64_t panel_end) {
  using Rows = void (*)(const LinearProblem&, const Operand&, int64_t, int64_t, int64_t);
  static constexpr Rows kRows[] = {multiply_rows<F, 1>, multiply_rows<F, 2>, multiply_rows<F, 3>, multiply_rows<F, 4>};
  if (rows < 1 || rows > kFewRows) return false;
  kRows[rows - 1](p, x, row, panel_begin, panel_end);
  return true;
}
#else
template <class F>
bool multiply_few(const LinearProblem&, const Operand&, int64_t, int64_t, int64_t, int64_t) {
  return false;
}
#endif

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
    if (multiply_few<F>(p, x, row_begin, row_end - row_begin, panel_begin, panel_end)) return;
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
