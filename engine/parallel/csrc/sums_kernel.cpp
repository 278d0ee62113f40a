#include "sums.h"

#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace pageloom {
namespace {

constexpr int64_t kBlock = 1024;  // numbers that are added up at a time, in the first level of the caches

inline float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

struct Float32 {
  using Storage = float;
  static void widen(const float* from, float* to, int64_t n) { memcpy(to, from, n * 4); }
  static void add(const float* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] += from[i];
  }
  static void round(const float* from, float* to, int64_t n) { memcpy(to, from, n * 4); }
};

struct Brain16 {
  using Storage = uint16_t;
  static void widen(const uint16_t* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = bits_to_float(uint32_t{from[i]} << 16);
  }
  static void add(const uint16_t* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] += bits_to_float(uint32_t{from[i]} << 16);
  }
  // Not the CPU's own conversion, which makes zeros of subnormals.
  static void round(const float* from, uint16_t* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = float_to_bits(from[i]);
      const uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, nan = bits >> 16 | 0x40u;
      to[i] = static_cast<uint16_t>(from[i] != from[i] ? nan : nearest);
    }
  }
};

struct Half16 {
  using Storage = uint16_t;
  static float widen_one(uint16_t bits) {
    _Float16 x;
    memcpy(&x, &bits, 2);
    return static_cast<float>(x);
  }
  static void widen(const uint16_t* from, float* to, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    for (; i < n; ++i) to[i] = widen_one(from[i]);
  }
  static void add(const uint16_t* from, float* to, int64_t n) {
    float wide[kBlock];
    widen(from, wide, n);
    Float32::add(wide, to, n);
  }
  static void round(const float* from, uint16_t* to, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
    for (; i < n; ++i) {
      const _Float16 x = static_cast<_Float16>(from[i]);
      memcpy(to + i, &x, 2);
    }
  }
};

template <class Part, class Out>
void sum_of(const void* const* parts, int64_t num_parts, const void* residual, void* out, int64_t count) {
  alignas(64) float sums[kBlock];
  auto* const to = static_cast<typename Out::Storage*>(out);
  const auto* const rest = static_cast<const typename Out::Storage*>(residual);
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = count - at < kBlock ? count - at : kBlock;
    Part::widen(static_cast<const typename Part::Storage*>(parts[0]) + at, sums, n);
    for (int64_t i = 1; i < num_parts; ++i)
      Part::add(static_cast<const typename Part::Storage*>(parts[i]) + at, sums, n);
    if (rest != nullptr) {
      Out::round(sums, to + at, n);
      Out::widen(to + at, sums, n);
      Out::add(rest + at, sums, n);
    }
    Out::round(sums, to + at, n);
  }
}

template <class Part>
void sum_to(const void* const* parts, int64_t num_parts, const void* residual, void* out, Float out_type,
            int64_t count) {
  switch (out_type) {
    case Float::k32: return sum_of<Part, Float32>(parts, num_parts, residual, out, count);
    case Float::kBrain16: return sum_of<Part, Brain16>(parts, num_parts, residual, out, count);
    case Float::kHalf16: return sum_of<Part, Half16>(parts, num_parts, residual, out, count);
  }
}

void sum(const void* const* parts, int64_t num_parts, Float part_type, const void* residual, void* out, Float out_type,
         int64_t count) {
  switch (part_type) {
    case Float::k32: return sum_to<Float32>(parts, num_parts, residual, out, out_type, count);
    case Float::kBrain16: return sum_of<Brain16, Brain16>(parts, num_parts, residual, out, count);
    case Float::kHalf16: return sum_of<Half16, Half16>(parts, num_parts, residual, out, count);
  }
}

}  // namespace

namespace PAGELOOM_KERNELS {
extern const SumKernels kSums;
const SumKernels kSums = {sum};
}  // namespace PAGELOOM_KERNELS

}  // namespace pageloom
