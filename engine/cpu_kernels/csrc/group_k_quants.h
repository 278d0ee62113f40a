// Kernels of the formats whose blocks are 256 inputs (linear_group.cpp): a block's float16 scale times small whole numbers
// for each 32 or 16 inputs of it.
#pragma once

#include "group_dots.h"

namespace {

// A scale and a minimum for 32 inputs.
template <class Layout, class Levels>
struct WithMinima : Layout {
  static constexpr GroupSum kSum = GroupSum::kScaled;
  static constexpr int32_t kOffset = 0;
  template <int R, int P>
  PAGELOOM_INLINE void add(const uint8_t* group, int64_t sub, int64_t lane, const GroupRows& x, Sums<R>& acc) {
    Dots<R> dots = {};
    dot_levels<R>(Levels(group, sub, lane), x, dots);
    vf d[kVectors], m[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t o = lane + v * VW;
      d[v] = load_bytes(group + Layout::kScales + sub * kPanel + o) * load_halfs(group + Layout::kD + o * 2);
      m[v] = load_bytes(group + Layout::kMins + sub * kPanel + o) * -load_halfs(group + Layout::kDMin + o * 2);
    }
    add_scaled<R>(dots, d, x, acc);
    add_minima<R>(m, x, acc);
  }
};

using Q4K = WithMinima<LayoutQ4K, Nibbles>;
using Q5K = WithMinima<LayoutQ5K, FiveBits<LayoutQ5K>>;

struct IQ4XS : LayoutIQ4XS {
  static constexpr GroupSum kSum = GroupSum::kStart;
  static constexpr int32_t kOffset = UnevenLevels::kOffset;
  template <int R, int P>
  PAGELOOM_INLINE void add(const uint8_t* group, int64_t sub, int64_t lane, const GroupRows& x, Sums<R>& acc) {
    Dots<R> dots;
    start_at_sums<R>(x, dots);
    dot_levels<R>(UnevenLevels(group, sub, lane), x, dots);
    vf d[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t o = lane + v * VW;
      d[v] = load_signed_bytes(group + kScales + sub * kPanel + o) * load_halfs(group + kD + o * 2);
    }
    add_scaled<R>(dots, d, x, acc);
  }
};

// Two bits from `kFrom` of each byte to bits `kTo` and `kTo` + 1.
template <int kFrom, int kTo>
PAGELOOM_INLINE vi two_bits(vu x) {
  if constexpr (kFrom < kTo) x <<= kTo - kFrom;
  if constexpr (kFrom > kTo) x >>= kFrom - kTo;
  return (vi)x & (0x03030303 << kTo);
}

// Formats with a scale for 16 inputs, the first (H = 0) or the last of a group of 32, of parity P. `F::word` gives
// levels of inputs 4 i to 4 i + 3 of those.
template <class F, int R, int P, int H>
PAGELOOM_INLINE void dot_half(const uint8_t* group, int64_t sub, int64_t lane, const GroupRows& x, Dots<R>& dots) {
  for (int i = 0; i < 4; ++i) {
    vi w[kVectors];
    for (int v = 0; v < kVectors; ++v)
      w[v] = F::template word<P, H>(group, sub, i, lane * 4 + i * 4 * kPanel + v * kVectorBytes);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) dots[r][v] = dot_unsigned(dots[r][v], w[v], x.word(r, 16 * H + 4 * i));
  }
}

// In every lane; from memory at once: a word of a register would have to cross over.
template <int H>
PAGELOOM_INLINE vi half_sum(const GroupRows& x, int r) {
  const vi both = splat_word(x.sum_bits(r));
  return H == 0 ? (both << 16) >> 16 : both >> 16;
}

// Signed scales, and levels less `kMiddle`. `F::scale` gives those of 16 inputs at byte `at` of a block's.
template <class F, class Layout, int kMiddle>
struct SignedScales : Layout {
  static constexpr GroupSum kSum = GroupSum::kHalves;
  static constexpr int32_t kOffset = 0;

  PAGELOOM_INLINE vf scale(const uint8_t* group, int64_t at, int64_t o) {
    return load_signed_bytes(group + Layout::kScales + at) * load_halfs(group + Layout::kD + o * 2);
  }

  template <int R, int P, int H>
  PAGELOOM_INLINE void add_half(const uint8_t* group, int64_t sub, int64_t lane, const GroupRows& x, Sums<R>& acc) {
    Dots<R> dots;
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) dots[r][v] = half_sum<H>(x, r) * -kMiddle;
    dot_half<F, R, P, H>(group, sub, lane, x, dots);
    vf d[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t o = lane + v * VW;
      d[v] = F::scale(group, (2 * sub + H) * kPanel + o, o);
    }
    add_scaled<R>(dots, d, x, acc);
  }

  template <int R, int P>
  PAGELOOM_INLINE void add(const uint8_t* group, int64_t sub, int64_t lane, const GroupRows& x, Sums<R>& acc) {
    add_half<R, P, 0>(group, sub, lane, x, acc);
    add_half<R, P, 1>(group, sub, lane, x, acc);
  }
};

struct Q6K : SignedScales<Q6K, LayoutQ6K, 32> {
  template <int P, int H>
  PAGELOOM_INLINE vi word(const uint8_t* group, int64_t sub, int, int64_t at) {
    const vu nibbles = load_as<vu>(group + sub * kNibbleBytes + at);
    const vu high = load_as<vu>(group + kHigh + sub / 2 * kHighBytes + at);
    return ((vi)(H == 0 ? nibbles : nibbles >> 4) & kLow) | two_bits<4 * P + 2 * H, 4>(high);
  }
};

struct Q3K : SignedScales<Q3K, LayoutQ3K, 4> {
  template <int P, int H>
  PAGELOOM_INLINE vi word(const uint8_t* group, int64_t sub, int i, int64_t at) {
    const vu low = load_as<vu>(group + sub / 2 * kHighBytes + at);
    const vu third = load_as<vu>(group + kThird + sub * kBitBytes + at - i * 4 * kPanel);
    return two_bits<4 * P + 2 * H, 0>(low) | ((vi)(third >> (4 * H + i) << 2) & 0x04040404);
  }
};

struct Q2K : LayoutQ2K {
  static constexpr GroupSum kSum = GroupSum::kHalves;
  static constexpr int32_t kOffset = 0;

  template <int P, int H>
  PAGELOOM_INLINE vi word(const uint8_t* group, int64_t sub, int, int64_t at) {
    return two_bits<4 * P + 2 * H, 0>(load_as<vu>(group + sub / 2 * kHighBytes + at));
  }

  template <int R, int P, int H>
  PAGELOOM_INLINE void add_half(const uint8_t* group, int64_t sub, int64_t lane, const GroupRows& x, Sums<R>& acc) {
    Dots<R> dots = {};
    dot_half<Q2K, R, P, H>(group, sub, lane, x, dots);
    vf d[kVectors], m[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t o = lane + v * VW;
      const vi both = load_byte_lanes(group + kScales + (2 * sub + H) * kPanel + o);
      d[v] = to_float(both & 15) * load_halfs(group + kD + o * 2);
      m[v] = to_float(both >> 4) * -load_halfs(group + kDMin + o * 2);
    }
    add_scaled<R>(dots, d, x, acc);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v)
        acc[r][v] = fused(m[v], splat(x.scale(r)) * to_float(half_sum<H>(x, r)), acc[r][v]);
  }

  template <int R, int P>
  PAGELOOM_INLINE void add(const uint8_t* group, int64_t sub, int64_t lane, const GroupRows& x, Sums<R>& acc) {
    add_half<R, P, 0>(group, sub, lane, x, acc);
    add_half<R, P, 1>(group, sub, lane, x, acc);
  }
};

}  // namespace
