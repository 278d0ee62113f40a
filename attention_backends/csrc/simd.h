// Vectors of 32-bit lanes, as wide as the ISA this TU is compiled for, and the three element types on top of them.
// GCC/Clang vector extensions carry most of it, so "portable" is the same code at 16 bytes (SSE2, NEON).
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define PAGELOOM_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define PAGELOOM_VECTOR_BYTES 32
#else
#define PAGELOOM_VECTOR_BYTES 16
#endif
#if defined(__AVX512BF16__)
#define PAGELOOM_NATIVE_BF16 1
#else
#define PAGELOOM_NATIVE_BF16 0
#endif
#define PAGELOOM_INLINE static inline __attribute__((always_inline))

// Everything has internal linkage: see kernels.h.
namespace {

typedef float vf __attribute__((vector_size(PAGELOOM_VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(PAGELOOM_VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(PAGELOOM_VECTOR_BYTES)));
constexpr int64_t VW = PAGELOOM_VECTOR_BYTES / 4;

template <class V, class S>
PAGELOOM_INLINE V load_as(const S* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
// A line that will be read: into the second level of the caches, or, with `past`, around it and what lies behind it.
PAGELOOM_INLINE void ask_for_line(const void* line, bool past) {
  past ? __builtin_prefetch(line, 0, 0) : __builtin_prefetch(line, 0, 2);
}
PAGELOOM_INLINE vf loadf(const float* p) { return load_as<vf>(p); }
PAGELOOM_INLINE void storef(float* p, vf v) { memcpy(p, &v, sizeof v); }
PAGELOOM_INLINE vf splat(float x) { return x - vf{}; }  // 0 + x would be computed: it is not x where x is -0
PAGELOOM_INLINE float bits_to_float(uint32_t x) {
  float f;
  memcpy(&f, &x, 4);
  return f;
}

// b where one of them is NaN.
PAGELOOM_INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// b where one of them is NaN.
PAGELOOM_INLINE vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

PAGELOOM_INLINE float reduce_max(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float r = v[0];
  for (int i = 1; i < VW; ++i) r = v[i] > r ? v[i] : r;
  return r;
#endif
}

PAGELOOM_INLINE float reduce_add(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float r = 0;
  for (int i = 0; i < VW; ++i) r += v[i];
  return r;
#endif
}

#if defined(__AVX512F__)
// 2^t for t <= 0, or just above by rounding: fit of 2^f over 0 <= f < 1 with 2^0 exact, relative error 3e-6. -inf gives 0,
// NaN stays NaN; below 2^-126 subnormals, which Intel is slow with unless they are flushed.
PAGELOOM_INLINE __m512 exp2_short(__m512 t) {
  const __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // t - floor(t)
  __m512 e = _mm512_set1_ps(0.013426686637103558f);
  e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(0.0522424690425396f));
  e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(0.2412802129983902f));
  e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(0.6930448412895203f));
  e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(e, t);  // e * 2^floor(t)
}
#endif

// 2^f for |f| <= 1/2: least-squares fit, relative error 2e-9 before rounding.
PAGELOOM_INLINE vf exp2_fraction(vf f) {
  vf p = splat(0.00015345810970757157f);
  p = p * f + 0.0013399930903688073f;
  p = p * f + 0.009618489071726799f;
  p = p * f + 0.05550328642129898f;
  p = p * f + 0.24022646248340607f;
  p = p * f + 0.6931471824645996f;
  return p * f + 1.0f;
}

// 2^t for t <= 0, or just above by rounding; exactly 0 below 2^-126 (so -inf gives 0, and NaN stays NaN). By
// exp2_fraction, or with a relative error of 3e-6 where the result meets 16-bit values anyway.
template <bool kPrecise>
PAGELOOM_INLINE vf exp2_of(vf t) {
#if defined(__AVX512F__)
  if constexpr (!kPrecise) {  // NaN is not less
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)t, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_mov_ps(normal, exp2_short((__m512)t));
  }
#endif
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
  vf clamped = vmax(t, splat(-127.0f));
  vf shifted = clamped + magic;
  vf f = clamped - (shifted - magic);
  vf p;
  if constexpr (kPrecise) {
    p = exp2_fraction(f);
  } else {
    p = splat(0.009570101276040077f);
    p = p * f + 0.05591785907745361f;
    p = p * f + 0.240247443318367f;
    p = p * f + 0.6931217908859253f;
    p = p * f + 0.9999992847442627f;
  }
  vi scaled = (vi)p + ((vi)shifted << 23);
  vf result = (vf)scaled;
  result = t < -126.0f ? splat(0.0f) : result;
  return t == t ? result : t;
}

// 2^t for any t, with exp2_fraction: infinity from 128 on, next to 0 below -126, NaN stays NaN.
PAGELOOM_INLINE vf exp2_all(vf t) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(t));  // a value: contracted with what follows, t - f would be no whole number
  const __m512 f = _mm512_reduce_ps((__m512)t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (vf)_mm512_scalef_ps((__m512)exp2_fraction((vf)f), (__m512)(t - (vf)f));
#else
  const float magic = 12582912.0f + 126;  // as in exp2_of; the integer's low bits are the exponent of half the power
  const vf clamped = vmin(splat(128.0f), vmax(splat(-125.0f), t)), shifted = clamped + magic;
  const vf half = (vf)((vi)shifted << 23);  // 2^128 has no exponent of its own
  return exp2_fraction(clamped - (shifted - magic)) * half * 2.0f;
#endif
}

// tanh to a few ulp: Cephes' odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
PAGELOOM_INLINE vf tanh_all(vf x) {
  vf a = x < 0.0f ? -x : x;
  vf e = exp2_of<true>(a * -2.8853900817779268f);  // e^(-2|x|)
  vf far = (1.0f - e) / (1.0f + e);
  far = x < 0.0f ? -far : far;
  vf z = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  vf near = x + x * z * p;
  return a < 0.625f ? near : far;
}

PAGELOOM_INLINE uint16_t float_to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if (x != x) return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// Element types of a cache. Cell: kernels.h. Storage: of queries and outputs. kWords: 32-bit words of the broadcast
// operand (queries, probabilities) that meet one cell. kPacked: that operand is pairs of bfloat16, or of 16-bit integers.
// kScaled: cells are integers, and tokens have scales, as have the operand's rows. Sum: what products add up in.
struct Float32 {
  using Storage = float;
  using Cell = uint32_t;
  using Sum = vf;
  static constexpr int kPerLane = 1, kWords = 1;
  static constexpr bool kPrecise = true, kPacked = false, kScaled = false, kBFloat16Out = false;
  PAGELOOM_INLINE vu load(const Cell* p) { return load_as<vu>(p); }
  PAGELOOM_INLINE vf mac(vf acc, uint32_t a, vu lanes) { return acc + splat(bits_to_float(a)) * (vf)lanes; }
  PAGELOOM_INLINE vf low(vu lanes) { return (vf)lanes; }
  PAGELOOM_INLINE vf high(vu lanes) { return (vf)lanes; }
  PAGELOOM_INLINE vf as_float(vf sum) { return sum; }
  PAGELOOM_INLINE float to_float(float x) { return x; }
  PAGELOOM_INLINE float from_float(float x) { return x; }
};

struct BFloat16 {
  using Storage = uint16_t;
  using Cell = uint32_t;
  using Sum = vf;
  static constexpr int kPerLane = 2, kWords = PAGELOOM_NATIVE_BF16 ? 1 : 2;
  static constexpr bool kPrecise = false, kPacked = PAGELOOM_NATIVE_BF16, kScaled = false, kBFloat16Out = true;
  PAGELOOM_INLINE vu load(const Cell* p) { return load_as<vu>(p); }
  PAGELOOM_INLINE vf mac(vf acc, uint32_t a, vu lanes) {
#if PAGELOOM_NATIVE_BF16
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)lanes);
#else
    return acc + splat(bits_to_float(a << 16)) * low(lanes) + splat(bits_to_float(a & 0xffff0000u)) * high(lanes);
#endif
  }
  PAGELOOM_INLINE vf low(vu lanes) { return (vf)(lanes << 16); }
  PAGELOOM_INLINE vf high(vu lanes) { return (vf)(lanes & 0xffff0000u); }
  PAGELOOM_INLINE vf as_float(vf sum) { return sum; }
  PAGELOOM_INLINE float to_float(uint16_t x) { return bits_to_float((uint32_t)x << 16); }
  PAGELOOM_INLINE uint16_t from_float(float x) { return float_to_bf16(x); }
};

struct Float16 {
  using Storage = uint16_t;
  using Cell = uint32_t;
  using Sum = vf;
  static constexpr int kPerLane = 2, kWords = 2;
  static constexpr bool kPrecise = false, kPacked = false, kScaled = false, kBFloat16Out = false;
  PAGELOOM_INLINE vu load(const Cell* p) { return load_as<vu>(p); }
  PAGELOOM_INLINE vf mac(vf acc, uint32_t, vu) { return acc; }  // never called: kWords == 2
  // Half bits in the low 16 of each lane. Multiplying by 2^112 moves the exponent bias and makes subnormals right.
  PAGELOOM_INLINE vf widen(vu h) {
    vf magnitude = (vf)((h & 0x7fffu) << 13) * 5.192296858534828e33f;
    vu bits = (vu)magnitude;
    bits = (h & 0x7c00u) == 0x7c00u ? (bits | 0x7f800000u) : bits;
    return (vf)(bits | ((h & 0x8000u) << 16));
  }
  PAGELOOM_INLINE vf low(vu lanes) { return widen(lanes & 0xffffu); }
  PAGELOOM_INLINE vf high(vu lanes) { return widen(lanes >> 16); }
  PAGELOOM_INLINE vf as_float(vf sum) { return sum; }
  PAGELOOM_INLINE float to_float(uint16_t x) {
    _Float16 h;
    memcpy(&h, &x, 2);
    return (float)h;
  }
  PAGELOOM_INLINE uint16_t from_float(float x) {
    _Float16 h = (_Float16)x;
    uint16_t u;
    memcpy(&u, &h, 2);
    return u;
  }
};

// int8 keys and values become 16-bit integers as they are loaded and meet queries and probabilities of 15 bits and a sign,
// which have a scale for each row: sums are exact, the same on every ISA.
struct Int8 {
  using Storage = uint16_t;
  using Cell = uint16_t;
  using Sum = vi;
  static constexpr int kPerLane = 2, kWords = 1;
  static constexpr bool kPrecise = false, kPacked = true, kScaled = true, kBFloat16Out = true;
  PAGELOOM_INLINE vu load(const Cell* p) {
    typedef int8_t Bytes __attribute__((vector_size(PAGELOOM_VECTOR_BYTES / 2)));
    typedef int16_t Halves __attribute__((vector_size(PAGELOOM_VECTOR_BYTES)));
    return (vu)__builtin_convertvector(load_as<Bytes>(p), Halves);
  }
  PAGELOOM_INLINE vi mac(vi acc, uint32_t a, vu lanes) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)lanes, _mm512_set1_epi32((int)a));
#elif defined(__AVX512BW__)
    return acc + (vi)_mm512_madd_epi16((__m512i)lanes, _mm512_set1_epi32((int)a));
#elif defined(__AVX2__)
    return acc + (vi)_mm256_madd_epi16((__m256i)lanes, _mm256_set1_epi32((int)a));
#elif defined(__SSE2__)
    return acc + (vi)_mm_madd_epi16((__m128i)lanes, _mm_set1_epi32((int)a));
#else
    const vi low = (vi)(lanes << 16) >> 16, high = (vi)lanes >> 16;
    return acc + low * (int32_t)(int16_t)a + high * ((int32_t)a >> 16);
#endif
  }
  PAGELOOM_INLINE vf as_float(vi sum) { return __builtin_convertvector(sum, vf); }
  PAGELOOM_INLINE float to_float(uint16_t x) { return BFloat16::to_float(x); }
  PAGELOOM_INLINE uint16_t from_float(float x) { return float_to_bf16(x); }
};

constexpr float kInt16 = 32767.0f;
constexpr float kRoundToInt = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits

// VW values times `inverse`, rounded, as 16-bit integers.
PAGELOOM_INLINE void store_int16(int16_t* to, vf v, float inverse) {
  typedef int16_t Halves __attribute__((vector_size(PAGELOOM_VECTOR_BYTES / 2)));
  const Halves rounded = __builtin_convertvector((vi)(v * inverse + kRoundToInt), Halves);
  memcpy(to, &rounded, sizeof rounded);
}
// What to multiply values up to `largest` by; 0 where they vanish or are not finite.
PAGELOOM_INLINE float inverse_unit(float largest) {
  return largest >= 1e-30f && largest <= 3.0e38f ? kInt16 / largest : 0.0f;
}

#if PAGELOOM_NATIVE_BF16
// A vector, or the first `room` of it.
PAGELOOM_INLINE void store_bfloat16(uint16_t* to, vf v, int64_t room) {
  const __m256bh packed = _mm512_cvtneps_pbh((__m512)v);
  if (room >= VW)
    memcpy(to, &packed, sizeof packed);
  else
    memcpy(to, &packed, room * 2);
}
#endif

// Writes VW probabilities where the next product reads them: packed to bf16 where the CPU multiplies bf16, else as
// float.
template <class T>
PAGELOOM_INLINE void store_operand(uint32_t* row, int64_t index, vf v) {
#if PAGELOOM_NATIVE_BF16
  if constexpr (T::kPacked) {
    __m256bh packed = _mm512_cvtneps_pbh((__m512)v);
    memcpy((uint16_t*)row + index, &packed, sizeof packed);
    return;
  }
#endif
  memcpy(row + index, &v, sizeof v);
}

// The same of two vectors that follow each other, as bfloat16: where the CPU multiplies it.
PAGELOOM_INLINE void store_pairs(uint32_t* row, int64_t index, vf low, vf high) {
#if PAGELOOM_NATIVE_BF16
  const __m512bh packed = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  memcpy((uint16_t*)row + index, &packed, sizeof packed);
#endif
}

template <class T>
PAGELOOM_INLINE void store_nothing(uint32_t* row, int64_t index) {
  if constexpr (T::kScaled) {
    memset((int16_t*)row + index, 0, VW * 2);
  } else {
    store_operand<T>(row, index, vf{});
  }
}

}  // namespace
