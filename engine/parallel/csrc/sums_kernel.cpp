#include "sums.h"

#include "simd.h"

namespace pageloom {
namespace {

// Numbers of a kind, VW at a time or the first `n`, as float32: `load` widens them, `rounded` is what `store` keeps.
struct Wide {
  using Storage = float;
  PAGELOOM_INLINE vf load(const float* from, int64_t n) {
    if (n == VW) return loadf(from);
    vf x{};
    memcpy(&x, from, n * sizeof *from);
    return x;
  }
  PAGELOOM_INLINE vf rounded(vf x) { return x; }
  PAGELOOM_INLINE void store(float* to, vf x, int64_t n) { memcpy(to, &x, n * sizeof *to); }
};

typedef uint16_t Halves __attribute__((vector_size(PAGELOOM_VECTOR_BYTES / 2)));

PAGELOOM_INLINE Halves load_halves(const uint16_t* from, int64_t n) {
  if (n == VW) return load_as<Halves>(from);
  Halves x{};
  memcpy(&x, from, n * sizeof *from);
  return x;
}

struct Brain {
  using Storage = uint16_t;
  PAGELOOM_INLINE vf load(const uint16_t* from, int64_t n) {
    return (vf)(__builtin_convertvector(load_halves(from, n), vu) << 16);
  }
  // Not the CPU's own conversion, which makes zeros of subnormals.
  PAGELOOM_INLINE vf rounded(vf x) {
    const vu bits = (vu)x, nearest = bits + 0x7fffu + (bits >> 16 & 1u);
    return (vf)((x != x ? bits | 0x400000u : nearest) & 0xffff0000u);
  }
  PAGELOOM_INLINE void store(uint16_t* to, vf x, int64_t n) {
    const Halves kept = __builtin_convertvector((vu)rounded(x) >> 16, Halves);
    memcpy(to, &kept, n * sizeof *to);
  }
};

struct Half {
  using Storage = uint16_t;
  PAGELOOM_INLINE vf load(const uint16_t* from, int64_t n) { return widen(load_halves(from, n)); }
  PAGELOOM_INLINE vf rounded(vf x) { return widen(narrow(x)); }
  PAGELOOM_INLINE void store(uint16_t* to, vf x, int64_t n) {
    const Halves kept = narrow(x);
    memcpy(to, &kept, n * sizeof *to);
  }

 private:
  PAGELOOM_INLINE vf widen(Halves x) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)x);
#else
    return Float16::widen(__builtin_convertvector(x, vu));
#endif
  }
  PAGELOOM_INLINE Halves narrow(vf x) {
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
    return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    Halves kept;
    for (int i = 0; i < VW; ++i) kept[i] = Float16::from_float(x[i]);
    return kept;
#endif
  }
};

template <class Part, class Out>
PAGELOOM_INLINE void sum_some(const void* const* parts, int64_t num_parts, const void* residual, void* out, int64_t at,
                              int64_t n) {
  vf sum = Part::load(static_cast<const typename Part::Storage*>(parts[0]) + at, n);
  for (int64_t i = 1; i < num_parts; ++i) sum += Part::load(static_cast<const typename Part::Storage*>(parts[i]) + at, n);
  if (residual != nullptr)
    sum = Out::rounded(sum) + Out::load(static_cast<const typename Out::Storage*>(residual) + at, n);
  Out::store(static_cast<typename Out::Storage*>(out) + at, sum, n);
}

template <class Part, class Out>
void sum_of(const void* const* parts, int64_t num_parts, const void* residual, void* out, int64_t count) {
  int64_t at = 0;
  for (; at + VW <= count; at += VW) sum_some<Part, Out>(parts, num_parts, residual, out, at, VW);
  if (at < count) sum_some<Part, Out>(parts, num_parts, residual, out, at, count - at);
}

void sum(const void* const* parts, int64_t num_parts, Float part_type, const void* residual, void* out, Float out_type,
         int64_t count) {
  if (part_type == Float::kBrain16) return sum_of<Brain, Brain>(parts, num_parts, residual, out, count);
  if (part_type == Float::kHalf16) return sum_of<Half, Half>(parts, num_parts, residual, out, count);
  if (out_type == Float::kBrain16) return sum_of<Wide, Brain>(parts, num_parts, residual, out, count);
  if (out_type == Float::kHalf16) return sum_of<Wide, Half>(parts, num_parts, residual, out, count);
  return sum_of<Wide, Wide>(parts, num_parts, residual, out, count);
}

}  // namespace

namespace PAGELOOM_KERNELS {
extern const SumKernels kSums;
const SumKernels kSums = {sum};
}  // namespace PAGELOOM_KERNELS

}  // namespace pageloom
