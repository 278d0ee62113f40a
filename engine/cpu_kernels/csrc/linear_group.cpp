// Linear layers over the group formats (GGUF's Q4_0, Q4_1, Q8_0, Q4_K, Q6_K; --quantization int4 is Q4_1; 4 bits with a
// zero point) with int8 activations, one scale for 32 inputs: an integer dot product a group, then one float32
// multiply-add with the product of both scales. Minima (m, -dmin * mn, -d * z) meet the scaled sum of the row's group;
// constant offsets (q - 8) are taken off in integers, by what the dot product starts from.
#include "epilogue.h"
#include "group_formats.h"
#include "int_dot.h"
#include "linear.h"
#include "prepare_rows.h"

using namespace pageloom;

namespace {

constexpr int64_t kVectors = 2;                  // vectors of outputs that a tile holds for each of its rows
constexpr int64_t kTileOutputs = kVectors * VW;  // 32 with AVX-512
constexpr int64_t kTileRows = VW == 16 ? 4 : 2;  // float and integer sums of all: 16 of 32 registers, or 8 of 16
constexpr int64_t kAhead = 4096;                 // bytes: how far ahead the first tile of rows asks for weights
constexpr int32_t kLow = 0x0f0f0f0f, kBits45 = 0x30303030, kSigns = (int32_t)0x80808080;

// R rows at one group of 32 inputs.
struct GroupRows {
  const int8_t* x;
  int64_t stride;
  const float* scales;  // of this group; rows are `groups` apart, sums too
  const float* sums;
  int64_t groups;

  __attribute__((always_inline)) vi word(int r, int64_t at) const { return splat_word(load_word(x + r * stride + at)); }
  __attribute__((always_inline)) float scale(int r) const { return scales[r * groups]; }
  __attribute__((always_inline)) float sum(int r) const { return sums[r * groups]; }
  __attribute__((always_inline)) int32_t sum_bits(int r) const { return load_word(sums + r * groups); }
};

template <int R>
using Dots = vi[R][kVectors];
template <int R>
using Sums = vf[R][kVectors];

template <int R>
PAGELOOM_INLINE void start_at_sums(const GroupRows& x, Dots<R>& dots) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) dots[r][v] = splat_word(x.sum_bits(r));
}

template <int R>
PAGELOOM_INLINE void dot_nibbles(const uint8_t* nibbles, const GroupRows& x, Dots<R>& dots) {
  for (int i = 0; i < 4; ++i) {
    vi low[kVectors], high[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const vu both = load_as<vu>(nibbles + i * 4 * kPanel + v * kVectorBytes);
      low[v] = (vi)both & kLow;
      high[v] = (vi)(both >> 4) & kLow;
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) {
        dots[r][v] = dot_unsigned(dots[r][v], low[v], x.word(r, 4 * i));
        dots[r][v] = dot_unsigned(dots[r][v], high[v], x.word(r, 16 + 4 * i));
      }
  }
}

template <int R>
PAGELOOM_INLINE void add_scaled(const Dots<R>& dots, const vf (&d)[kVectors], const GroupRows& x, Sums<R>& acc) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) acc[r][v] = fused(to_float(dots[r][v]), d[v] * splat(x.scale(r)), acc[r][v]);
}

template <int R>
PAGELOOM_INLINE void add_minima(const vf (&m)[kVectors], const GroupRows& x, Sums<R>& acc) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) acc[r][v] = fused(m[v], splat(x.sum(r)), acc[r][v]);
}

// A format adds one group of 32 inputs, number `sub` of its group (of parity P), for the outputs from `lane` on.
struct Q4_0 : LayoutQ4_0 {
  static constexpr GroupSum kSum = GroupSum::kStart;
  static constexpr int32_t kOffset = 8;
  template <int R, int P>
  PAGELOOM_INLINE void add(const uint8_t* group, int64_t, int64_t lane, const GroupRows& x, Sums<R>& acc) {
    Dots<R> dots;
    start_at_sums<R>(x, dots);
    dot_nibbles<R>(group + lane * 4, x, dots);
    vf d[kVectors];
    for (int v = 0; v < kVectors; ++v) d[v] = load_halfs(group + kD + (lane + v * VW) * 2);
    add_scaled<R>(dots, d, x, acc);
  }
};

// Four bits and a minimum, which `F` makes of the second half of an output.
template <class F, class Layout>
struct WithMinimum : Layout {
  static constexpr GroupSum kSum = GroupSum::kScaled;
  static constexpr int32_t kOffset = 0;
  template <int R, int P>
  PAGELOOM_INLINE void add(const uint8_t* group, int64_t, int64_t lane, const GroupRows& x, Sums<R>& acc) {
    Dots<R> dots = {};
    dot_nibbles<R>(group + lane * 4, x, dots);
    vf d[kVectors], m[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      d[v] = load_halfs(group + Layout::kD + (lane + v * VW) * 2);
      m[v] = F::minimum(group, d[v], (lane + v * VW) * 2);
    }
    add_scaled<R>(dots, d, x, acc);
    add_minima<R>(m, x, acc);
  }
};

struct Q4_1 : WithMinimum<Q4_1, LayoutQ4_1> {
  PAGELOOM_INLINE vf minimum(const uint8_t* group, vf, int64_t at) { return load_halfs(group + kM + at); }
};

struct Int4Group : WithMinimum<Int4Group, LayoutInt4Group> {
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

struct Q4K : LayoutQ4K {
  static constexpr GroupSum kSum = GroupSum::kScaled;
  static constexpr int32_t kOffset = 0;
  template <int R, int P>
  PAGELOOM_INLINE void add(const uint8_t* group, int64_t sub, int64_t lane, const GroupRows& x, Sums<R>& acc) {
    Dots<R> dots = {};
    dot_nibbles<R>(group + sub * kNibbleBytes + lane * 4, x, dots);
    vf d[kVectors], m[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t o = lane + v * VW;
      d[v] = load_bytes(group + kScales + sub * kPanel + o) * load_halfs(group + kD + o * 2);
      m[v] = load_bytes(group + kMins + sub * kPanel + o) * -load_halfs(group + kDMin + o * 2);
    }
    add_scaled<R>(dots, d, x, acc);
    add_minima<R>(m, x, acc);
  }
};

struct Q6K : LayoutQ6K {
  static constexpr GroupSum kSum = GroupSum::kHalves;
  static constexpr int32_t kOffset = 0;

  template <int kShift>  // two bits from `kShift` of each byte to bits 4 and 5
  PAGELOOM_INLINE vi to_bits45(vu x) {
    if constexpr (kShift < 4) x <<= 4 - kShift;
    if constexpr (kShift > 4) x >>= kShift - 4;
    return (vi)x & kBits45;
  }

  template <int R, int P, int H>  // the first (H = 0) or the last 16 inputs, which have a scale of their own
  PAGELOOM_INLINE void add_half(const uint8_t* group, int64_t sub, int64_t lane, const GroupRows& x, Sums<R>& acc) {
    Dots<R> dots;
    for (int r = 0; r < R; ++r) {
      const vi both = splat_word(x.sum_bits(r));
      for (int v = 0; v < kVectors; ++v) dots[r][v] = (H == 0 ? (both << 16) >> 16 : both >> 16) * -32;
    }
    const uint8_t* const low = group + sub * kNibbleBytes + lane * 4;
    const uint8_t* const high = group + kHigh + sub / 2 * kHighBytes + lane * 4;
    for (int i = 0; i < 4; ++i) {
      vi w[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = i * 4 * kPanel + v * kVectorBytes;
        const vu nibbles = load_as<vu>(low + at);
        w[v] = ((vi)(H == 0 ? nibbles : nibbles >> 4) & kLow) | to_bits45<4 * P + 2 * H>(load_as<vu>(high + at));
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectors; ++v) dots[r][v] = dot_unsigned(dots[r][v], w[v], x.word(r, 16 * H + 4 * i));
    }
    vf d[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t o = lane + v * VW;
      d[v] = load_signed_bytes(group + kScales + (2 * sub + H) * kPanel + o) * load_halfs(group + kD + o * 2);
    }
    add_scaled<R>(dots, d, x, acc);
  }

  template <int R, int P>
  PAGELOOM_INLINE void add(const uint8_t* group, int64_t sub, int64_t lane, const GroupRows& x, Sums<R>& acc) {
    add_half<R, P, 0>(group, sub, lane, x, acc);
    add_half<R, P, 1>(group, sub, lane, x, acc);
  }
};

template <class F, int R>
void tile(const LinearProblem& p, const Operand& operand, int64_t row, int64_t panel, bool first_rows) {
  const uint8_t* const weight = p.weight + panel * p.panel_bytes;
  const int64_t groups = p.k / kGroup;
  alignas(64) float sums[R][kPanel];
  for (int64_t lane = 0; lane < kPanel; lane += kTileOutputs) {
    GroupRows x = {(const int8_t*)operand.data + row * operand.stride, operand.stride, operand.scales + row * groups,
                   operand.sums + row * groups, groups};
    const auto next = [&] { x.x += kGroup, ++x.scales, ++x.sums; };
    Sums<R> acc = {};
    const uint8_t* const end = weight + p.k / F::kInputs * F::kBytes;
    for (const uint8_t* group = weight; group < end; group += F::kBytes) {
      if constexpr (F::kInputs == kGroup) {
        if (first_rows && lane == 0) prefetch(group + kAhead, F::kBytes);
        F::template add<R, 0>(group, 0, lane, x, acc);
        next();
      } else {
        for (int64_t sub = 0; sub < kSubGroups; sub += 2) {
          constexpr int64_t kPart = F::kBytes * 2 / kSubGroups;
          if (first_rows && lane == 0) prefetch(group + sub / 2 * kPart + kAhead, kPart);
          F::template add<R, 0>(group, sub, lane, x, acc);
          next();
          F::template add<R, 1>(group, sub + 1, lane, x, acc);
          next();
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) storef(&sums[r][lane + v * VW], acc[r][v]);
  }
  settle();
  store_tile(p, row, R, panel, 1, sums[0]);
}

using Tile = void (*)(const LinearProblem&, const Operand&, int64_t row, int64_t panel, bool first_rows);

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
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      int64_t row = row_begin;
      for (int64_t t = 0; t < tiles; ++t) {  // of nearly equal size
        const int64_t count = (row_end - row + tiles - t - 1) / (tiles - t);
        kTiles[count - 1](p, x, row, panel, t == 0);
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
    default: return nullptr;
  }
}
