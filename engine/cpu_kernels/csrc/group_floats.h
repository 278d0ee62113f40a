// Kernels of floats of four bits (linear_group.cpp): twice an e2m1 is a whole number, and multiplied as an integer.
#pragma once

#include "group_k_quants.h"

namespace {

// A power of two for 32 inputs.
struct Mxfp4 : LayoutMxfp4 {
  static constexpr GroupSum kSum = GroupSum::kStart;
  static constexpr int32_t kOffset = E2M1::kOffset;
  template <int R, int P>
  PAGELOOM_INLINE void add(const uint8_t* group, int64_t sub, int64_t lane, const GroupRows& x, Sums<R>& acc) {
    Dots<R> dots;
    start_at_sums<R>(x, dots);
    dot_levels<R>(E2M1(group, sub, lane), x, dots);
    vf d[kVectors];
    for (int v = 0; v < kVectors; ++v) d[v] = load_e8m0(group + kScales + sub * kPanel + lane + v * VW) * 0.5f;
    add_scaled<R>(dots, d, x, acc);
  }
};

// An e4m3 for 16 inputs, and a float for an output, by which its sum is divided in the end.
struct Nvfp4 : SignedScales<Nvfp4, LayoutNvfp4, E2M1::kOffset> {
  PAGELOOM_INLINE vf scale(const uint8_t* group, int64_t at, int64_t) { return load_e4m3(group + kScales + at) * 0.5f; }

  template <int P, int H>
  PAGELOOM_INLINE vi word(const uint8_t* group, int64_t, int, int64_t at) {
    const vu both = load_as<vu>(group + at);
    return look_up(E2M1::kLevels.at, (vi)(H == 0 ? both : both >> 4) & kLow);
  }

  // `behind`: what lies behind the groups of the panel.
  template <int R>
  PAGELOOM_INLINE void divide(const uint8_t* behind, int64_t lane, Sums<R>& acc) {
    for (int v = 0; v < kVectors; ++v) {
      const vf inverse = splat(1.0f) / load_as<vf>(behind + (lane + v * VW) * 4);
      for (int r = 0; r < R; ++r) acc[r][v] *= inverse;
    }
  }
};

}  // namespace
