// What the kernels of the group formats have in common (linear_group.cpp): rows of int8 activations at one group of 32
// inputs, weights as bytes of a vector, the integer dot product of both, and what it is scaled with.
#pragma once

#include "group_formats.h"
#include "int_dot.h"
#include "prepare_rows.h"

namespace {

using pageloom::kPanel;

constexpr int64_t kVectors = 2;  // vectors of outputs that a tile holds for each of its rows
constexpr int32_t kLow = 0x0f0f0f0f, kSigns = (int32_t)0x80808080;

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

// Levels of one group of 32 inputs, number `sub` of a block, for the outputs from `lane` on: `load` gives inputs 4 i to
// 4 i + 3, and those 16 behind them. kSigned: they may be negative.
struct Nibbles {
  static constexpr bool kSigned = false;
  const uint8_t* nibbles;
  Nibbles(const uint8_t* group, int64_t sub, int64_t lane) : nibbles(group + sub * kNibbleBytes + lane * 4) {}
  __attribute__((always_inline)) void load(int i, int v, vi& first, vi& last) const {
    const vu both = load_as<vu>(nibbles + i * 4 * kPanel + v * kVectorBytes);
    first = (vi)both & kLow;
    last = (vi)(both >> 4) & kLow;
  }
};

template <class Layout>
struct FiveBits {
  static constexpr bool kSigned = false;
  Nibbles nibbles;
  vu fifth[kVectors];
  FiveBits(const uint8_t* group, int64_t sub, int64_t lane) : nibbles(group, sub, lane) {
    const uint8_t* const bits = group + Layout::kFifth + sub * kBitBytes + lane * 4;
    for (int v = 0; v < kVectors; ++v) fifth[v] = load_as<vu>(bits + v * kVectorBytes);
  }
  __attribute__((always_inline)) void load(int i, int v, vi& first, vi& last) const {
    nibbles.load(i, v, first, last);
    first |= (vi)(fifth[v] << (4 - i)) & 0x10101010;
    last |= (vi)(fifth[v] >> i) & 0x10101010;
  }
};

// A nibble is the number of an entry; levels are entries plus an offset that makes them unsigned, where `dot_unsigned`
// is then exact for all of them.
template <const int8_t (&kEntries)[16]>
struct LookedUp {
  static constexpr int32_t least() {
    int32_t low = kEntries[0];
    for (const int8_t entry : kEntries) low = entry < low ? entry : low;
    return low;
  }
  static constexpr int32_t most() {
    int32_t high = kEntries[0];
    for (const int8_t entry : kEntries) high = entry > high ? entry : high;
    return high;
  }
  static constexpr bool kSigned = !kVnni && most() - least() > 127;
  static constexpr int32_t kOffset = kSigned ? 0 : -least();
  struct Bytes {
    int8_t at[16];
  };
  static constexpr Bytes shifted() {
    Bytes bytes = {};
    for (int i = 0; i < 16; ++i) bytes.at[i] = (int8_t)(kEntries[i] + kOffset);
    return bytes;
  }
  static constexpr Bytes kLevels = shifted();

  Nibbles nibbles;
  LookedUp(const uint8_t* group, int64_t sub, int64_t lane) : nibbles(group, sub, lane) {}
  __attribute__((always_inline)) void load(int i, int v, vi& first, vi& last) const {
    nibbles.load(i, v, first, last);
    first = look_up(kLevels.at, first);
    last = look_up(kLevels.at, last);
  }
};

using UnevenLevels = LookedUp<kUnevenLevels>;
using E2M1 = LookedUp<kTwiceE2M1>;

template <int R, class Levels>
PAGELOOM_INLINE void dot_levels(const Levels& levels, const GroupRows& x, Dots<R>& dots) {
  for (int i = 0; i < 4; ++i) {
    vi first[kVectors], last[kVectors];
    for (int v = 0; v < kVectors; ++v) levels.load(i, v, first[v], last[v]);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) {
        dots[r][v] = dot<Levels::kSigned>(dots[r][v], first[v], x.word(r, 4 * i));
        dots[r][v] = dot<Levels::kSigned>(dots[r][v], last[v], x.word(r, 16 + 4 * i));
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

}  // namespace
