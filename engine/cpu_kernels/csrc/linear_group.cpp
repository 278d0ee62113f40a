// Linear layers over the group formats (GGUF's, of which --quantization int4 is Q4_1; 4 bits with a zero point; floats of
// four bits) with int8 activations, one scale for 32 inputs: an integer dot product a group, then one float32 multiply-add
// with the product of both scales. Minima (m, -dmin * mn, -d * z) meet the scaled sum of the row's group; constant offsets (q - 8) are taken
// off in integers, by what the dot product starts from.
#include "epilogue.h"
#include "group_floats.h"
#include "linear.h"

using namespace pageloom;

namespace {

constexpr int64_t kTileOutputs = kVectors * VW;  // 32 with AVX-512
constexpr int64_t kTileRows = VW == 16 ? 4 : 2;  // float and integer sums of all: 16 of 32 registers, or 8 of 16
constexpr int64_t kAhead = 4096;                 // bytes: how far ahead the first tile of rows asks for weights

// A format adds one group of 32 inputs, number `sub` of its group (of parity P), for the outputs from `lane` on.
template <class Layout, class Levels, int32_t kMiddle>
struct WithOffset : Layout {
  static constexpr GroupSum kSum = GroupSum::kStart;
  static constexpr int32_t kOffset = kMiddle;
  template <int R, int P>
  PAGELOOM_INLINE void add(const uint8_t* group, int64_t, int64_t lane, const GroupRows& x, Sums<R>& acc) {
    Dots<R> dots;
    start_at_sums<R>(x, dots);
    dot_levels<R>(Levels(group, 0, lane), x, dots);
    vf d[kVectors];
    for (int v = 0; v < kVectors; ++v) d[v] = load_halfs(group + Layout::kD + (lane + v * VW) * 2);
    add_scaled<R>(dots, d, x, acc);
  }
};

using Q4_0 = WithOffset<LayoutQ4_0, Nibbles, 8>;
using Q5_0 = WithOffset<LayoutQ5_0, FiveBits<LayoutQ5_0>, 16>;
using IQ4NL = WithOffset<LayoutIQ4NL, UnevenLevels, UnevenLevels::kOffset>;

// With a minimum, which `F` makes of the second half of an output.
template <class F, class Layout, class Levels>
struct WithMinimum : Layout {
  static constexpr GroupSum kSum = GroupSum::kScaled;
  static constexpr int32_t kOffset = 0;
  template <int R, int P>
  PAGELOOM_INLINE void add(const uint8_t* group, int64_t, int64_t lane, const GroupRows& x, Sums<R>& acc) {
    Dots<R> dots = {};
    dot_levels<R>(Levels(group, 0, lane), x, dots);
    vf d[kVectors], m[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      d[v] = load_halfs(group + Layout::kD + (lane + v * VW) * 2);
      m[v] = F::minimum(group, d[v], (lane + v * VW) * 2);
    }
    add_scaled<R>(dots, d, x, acc);
    add_minima<R>(m, x, acc);
  }
};

struct Q4_1 : WithMinimum<Q4_1, LayoutQ4_1, Nibbles> {
  PAGELOOM_INLINE vf minimum(const uint8_t* group, vf, int64_t at) { return load_halfs(group + kM + at); }
};

struct Q5_1 : WithMinimum<Q5_1, LayoutQ5_1, FiveBits<LayoutQ5_1>> {
  PAGELOOM_INLINE vf minimum(const uint8_t* group, vf, int64_t at) { return load_halfs(group + kM + at); }
};

struct Int4Group : WithMinimum<Int4Group, LayoutInt4Group, Nibbles> {
  PAGELOOM_INLINE vf minimum(const uint8_t* group, vf d, int64_t at) { return d * -load_halfs(group + kZ + at); }
};

struct Q8_0 : LayoutQ8_0 {
  static constexpr GroupSum kSum = GroupSum::kStart;
  static constexpr int32_t kOffset = kVnni ? 128 : 0;
  template <int R, int P>
  PAGELOOM_INLINE void add(const uint8_t* group, int64_t, int64_t lane, const GroupRows& x, Sums<R>& acc) {
    Dots<R> dots;
    start_at_sums<R>(x, dots);
    for (int i = 0; i < 8; ++i) {
      vi w[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        w[v] = load_as<vi>(group + lane * 4 + i * 4 * kPanel + v * kVectorBytes);
        if constexpr (kVnni) w[v] ^= kSigns;
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectors; ++v)
          dots[r][v] = kVnni ? dot_unsigned(dots[r][v], w[v], x.word(r, 4 * i))
                             : dot_signed(dots[r][v], w[v], x.word(r, 4 * i));
    }
    vf d[kVectors];
    for (int v = 0; v < kVectors; ++v) d[v] = load_halfs(group + kD + (lane + v * VW) * 2);
    add_scaled<R>(dots, d, x, acc);
  }
};

template <class F, int R>
void tile(const LinearProblem& p, const Operand& operand, int64_t row, int64_t panel, bool first_rows, bool past) {
  const uint8_t* const weight = p.weight + panel * p.panel_bytes;
  const int64_t groups = p.k / kGroup;
  alignas(64) float sums[R][kPanel];
  for (int64_t lane = 0; lane < kPanel; lane += kTileOutputs) {
    GroupRows x = {(const int8_t*)operand.data + row * operand.stride, operand.stride, operand.scales + row * groups,
                   operand.sums + row * groups, groups};
    const auto next = [&] { x.x += kGroup, ++x.scales, ++x.sums; };
    // Of a panel that is read at once what lies ahead; else each pass asks for its part of the next panel, so that memory
    // works in all of them.
    const auto ask = [&](const uint8_t* from, int64_t bytes) __attribute__((always_inline)) {
      constexpr int64_t kPasses = kPanel / kTileOutputs;
      if (kPasses == 1) return prefetch(from + kAhead, bytes, past);
      prefetch(from + p.panel_bytes + lane / kTileOutputs * (bytes / kPasses), bytes / kPasses, past);
    };
    Sums<R> acc = {};
    const uint8_t* const end = weight + p.k / F::kInputs * F::kBytes;
    for (const uint8_t* group = weight; group < end; group += F::kBytes) {
      if constexpr (F::kInputs == kGroup) {
        if (first_rows) ask(group, F::kBytes);
        F::template add<R, 0>(group, 0, lane, x, acc);
        next();
      } else {
        for (int64_t sub = 0; sub < F::kInputs / kGroup; sub += 2) {
          constexpr int64_t kPart = F::kBytes * 2 / (F::kInputs / kGroup);
          if (first_rows) ask(group + sub / 2 * kPart, kPart);
          F::template add<R, 0>(group, sub, lane, x, acc);
          next();
          F::template add<R, 1>(group, sub + 1, lane, x, acc);
          next();
        }
      }
    }
    if constexpr (__is_same(F, Nvfp4)) F::template divide<R>(end, lane, acc);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) storef(&sums[r][lane + v * VW], acc[r][v]);
  }
  settle();
  store_tile(p, row, R, panel, 1, sums[0]);
}

using Tile = void (*)(const LinearProblem&, const Operand&, int64_t row, int64_t panel, bool first_rows, bool past);

template <class F>
struct Kernels {
  static OperandKind operand_kind(const LinearProblem&) { return OperandKind::kInt8PerGroup; }

  static void prepare(const LinearProblem& p, const Operand& target, int64_t row_begin, int64_t row_end) {
    quantise_groups(p, target, row_begin, row_end, F::kSum, F::kOffset);
  }

  static size_t scratch_bytes(const LinearProblem&) { return 0; }

  static void compute(const LinearProblem& p, const Operand& x, int64_t row_begin, int64_t row_end,
                      int64_t panel_begin, int64_t panel_end, void*) {
#if defined(__AVX512F__)
    static constexpr Tile kTiles[kTileRows] = {tile<F, 1>, tile<F, 2>, tile<F, 3>, tile<F, 4>};
#else
    static constexpr Tile kTiles[kTileRows] = {tile<F, 1>, tile<F, 2>};
#endif
    const int64_t tiles = (row_end - row_begin + kTileRows - 1) / kTileRows;
    const bool past = p.reading.past != 0 && tiles == 1 && kTileOutputs == kPanel;  // nothing is used twice
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      int64_t row = row_begin;
      for (int64_t t = 0; t < tiles; ++t) {  // of nearly equal size
        const int64_t count = (row_end - row + tiles - t - 1) / (tiles - t);
        kTiles[count - 1](p, x, row, panel, t == 0, past);
        row += count;
      }
    }
  }

  static constexpr LinearKernels kTable = {operand_kind, prepare, scratch_bytes, compute};
};

}  // namespace

const LinearKernels* pageloom::PAGELOOM_FOR_ISA(linear_group)(Format format) {
  switch (format) {
    case Format::kQ4_0: return &Kernels<Q4_0>::kTable;
    case Format::kQ4_1: return &Kernels<Q4_1>::kTable;
    case Format::kQ8_0: return &Kernels<Q8_0>::kTable;
    case Format::kQ4K: return &Kernels<Q4K>::kTable;
    case Format::kQ6K: return &Kernels<Q6K>::kTable;
    case Format::kInt4Group: return &Kernels<Int4Group>::kTable;
    case Format::kQ5_0: return &Kernels<Q5_0>::kTable;
    case Format::kQ5_1: return &Kernels<Q5_1>::kTable;
    case Format::kQ5K: return &Kernels<Q5K>::kTable;
    case Format::kQ3K: return &Kernels<Q3K>::kTable;
    case Format::kQ2K: return &Kernels<Q2K>::kTable;
    case Format::kIQ4NL: return &Kernels<IQ4NL>::kTable;
    case Format::kIQ4XS: return &Kernels<IQ4XS>::kTable;
    case Format::kMxfp4: return &Kernels<Mxfp4>::kTable;
    case Format::kNvfp4: return &Kernels<Nvfp4>::kTable;
    default: return nullptr;
  }
}
