// The Walsh-Hadamard transform of 64 values, not normalised: twice is 64 times the values. A quantised layer multiplies
// rotated rows by rotated weights: the product stays, and an outlier among 64 inputs is spread over all of them, so that
// the scale of the row fits the others too (QuaRot, Ashkboos et al. 2024). Butterflies of distance 1, 2, 4 ... 32 in
// this order: the same bits on every ISA, and in engine.cpu_kernels.rotation.
#pragma once

#include "simd.h"

namespace {

constexpr int64_t kRotated = 64;  // inputs that are rotated together; fewer at the end of a row are enlarged
constexpr float kEnlarged = 8.0f;  // root of kRotated: as much as a rotation enlarges values
constexpr int64_t kRotatedVectors = kRotated / VW;

struct Rotated {
  vf v[kRotatedVectors];
};

// Lane i of the result: lane i ^ S.
template <int S>
PAGELOOM_INLINE vf swap_lanes(vf x) {
#if defined(__AVX512F__)
  if constexpr (S <= 2) return (vf)_mm512_permute_ps((__m512)x, S == 1 ? 0xB1 : 0x4E);
  return (vf)_mm512_shuffle_f32x4((__m512)x, (__m512)x, S == 4 ? 0xB1 : 0x4E);
#elif defined(__AVX2__)
  if constexpr (S <= 2) return (vf)_mm256_permute_ps((__m256)x, S == 1 ? 0xB1 : 0x4E);
  return (vf)_mm256_permute2f128_ps((__m256)x, (__m256)x, 1);
#else
  vf r;
  for (int i = 0; i < VW; ++i) r[i] = x[i ^ S];
  return r;
#endif
}

// x[i] + x[i ^ S] where bit S of i is clear, x[i ^ S] - x[i] where it is set. Products with 1 and -1 are exact, fused or not.
template <int S>
PAGELOOM_INLINE vf butterfly(vf x) {
  vf sign;
  for (int i = 0; i < VW; ++i) sign[i] = i & S ? -1.0f : 1.0f;
  return swap_lanes<S>(x) + x * sign;
}

template <int S>
PAGELOOM_INLINE void butterflies(Rotated& x) {
  for (vf& v : x.v) v = butterfly<S>(v);
}

PAGELOOM_INLINE void rotate(Rotated& x) {
  butterflies<1>(x);
  butterflies<2>(x);
  if constexpr (VW > 4) butterflies<4>(x);
  if constexpr (VW > 8) butterflies<8>(x);
  for (int64_t distance = 1; distance < kRotatedVectors; distance *= 2)
    for (int64_t i = 0; i < kRotatedVectors; ++i)
      if ((i & distance) == 0) {
        const vf a = x.v[i], b = x.v[i + distance];
        x.v[i] = a + b;
        x.v[i + distance] = a - b;
      }
}

}  // namespace
