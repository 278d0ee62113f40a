// Rows of activations to int8: RMSNorm where the layer has one, then one scale for a row, which is turned first
// (hadamard.h), or for 32 inputs. What is quantised are the bf16 values that a bf16 layer would multiply. Every ISA makes the same bits: sums of squares (of
// bf16 values: exact products) run over 32 virtual lanes, added in one order.
//
// Rows, or groups of 32, with a NaN or an infinity get the scale NaN and zeros; those below 2^-110 count as zeros.
#pragma once

#include "epilogue.h"
#include "hadamard.h"
#include "int_dot.h"
#include "linear.h"

namespace {

constexpr int64_t kBlock = 32;                // inputs taken at a time
constexpr int64_t kBlockVectors = kBlock / VW;
constexpr uint32_t kNotFinite = 0x7f800000u;  // as bits of |x|: this and above
constexpr float kSmallest = 7.7037197775489434e-34f;  // 2^-110
constexpr float kLevels = 127.0f;

struct Block {
  vf v[kBlockVectors];
};

PAGELOOM_INLINE vi nearest(vf x) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
  return (vi)_mm_cvtps_epi32((__m128)x);
#else
  vi r;
  for (int i = 0; i < VW; ++i) r[i] = (int32_t)__builtin_rintf(x[i]);
  return r;
#endif
}

PAGELOOM_INLINE vu larger(vu a, vu b) {
#if defined(__AVX512F__)
  return (vu)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vu)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
  return (vi)a > (vi)b ? a : b;  // magnitudes: the sign bit is clear
#endif
}

PAGELOOM_INLINE uint32_t largest_lane(vu v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32((__m512i)v);
#else
  uint32_t r = v[0];
  for (int i = 1; i < VW; ++i) r = v[i] > r ? v[i] : r;
  return r;
#endif
}

PAGELOOM_INLINE Block widen_block(const uint16_t* p, int64_t count) {
  uint16_t padded[kBlock];
  if (count < kBlock) {
    for (int64_t i = 0; i < kBlock; ++i) padded[i] = i < count ? p[i] : 0;
    p = padded;
  }
  Block b;
  for (int64_t i = 0; i < kBlockVectors; ++i) b.v[i] = load_bf16(p + i * VW);
  return b;
}

PAGELOOM_INLINE Block load_floats(const float* p, int64_t count) {
  float padded[kBlock];
  if (count < kBlock) {
    for (int64_t i = 0; i < kBlock; ++i) padded[i] = i < count ? p[i] : 0.0f;
    p = padded;
  }
  Block b;
  for (int64_t i = 0; i < kBlockVectors; ++i) b.v[i] = loadf(p + i * VW);
  return b;
}

struct NormedRow {
  const uint16_t* x;
  const void* norm_weight;
  bool norm_wide;
  float inverse_rms;
  int64_t k;
};

PAGELOOM_INLINE NormedRow open_row(const pageloom::LinearProblem& p, int64_t row) {
  NormedRow r = {p.x + row * p.x_stride, p.norm_weight, p.norm_wide, 1.0f, p.k};
  if (r.norm_weight == nullptr) return r;
  Block total = {};
  for (int64_t at = 0; at < p.k; at += kBlock) {
    const Block b = widen_block(r.x + at, p.k - at);
    for (int64_t i = 0; i < kBlockVectors; ++i) total.v[i] += b.v[i] * b.v[i];
  }
  float lanes[kBlock];
  memcpy(lanes, &total, sizeof lanes);
  settle();
  for (int64_t width = kBlock / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  r.inverse_rms = 1.0f / __builtin_sqrtf(lanes[0] / (float)p.k + p.norm_eps);
  return r;
}

// Inputs [at, at + 32) of the row, 0 past its end.
PAGELOOM_INLINE Block load_block(const NormedRow& r, int64_t at) {
  Block b = widen_block(r.x + at, r.k - at);
  if (r.norm_weight == nullptr) return b;
  if (r.norm_wide) {
    const Block w = load_floats((const float*)r.norm_weight + at, r.k - at);
    for (int64_t i = 0; i < kBlockVectors; ++i) b.v[i] = round_bf16(w.v[i] * (b.v[i] * r.inverse_rms));
    return b;
  }
  const Block w = widen_block((const uint16_t*)r.norm_weight + at, r.k - at);
  for (int64_t i = 0; i < kBlockVectors; ++i) b.v[i] = round_bf16(w.v[i] * round_bf16(b.v[i] * r.inverse_rms));
  return b;
}

PAGELOOM_INLINE vu magnitude(const Block& b) {
  vu top = {};
  for (int64_t i = 0; i < kBlockVectors; ++i) top = larger(top, (vu)b.v[i] & 0x7fffffffu);
  return top;
}

// How values with this largest magnitude become int8: x * inverse, and back: q * scale.
struct Quantiser {
  float scale, inverse;
};

PAGELOOM_INLINE Quantiser quantiser_of(uint32_t top) {
  if (top >= kNotFinite) return {__builtin_nanf(""), 0.0f};
  const float largest = bits_to_float(top);
  if (largest < kSmallest) return {0.0f, 0.0f};
  return {largest / kLevels, kLevels / largest};
}

// The int8 values of a block, and stored.
PAGELOOM_INLINE void quantise_block(const Block& b, const Quantiser& q, int8_t* target, vi (&levels)[kBlockVectors]) {
  for (int64_t i = 0; i < kBlockVectors; ++i) {
    const vf scaled = b.v[i] * q.inverse;
    // 0 * inf is NaN: groups that are not finite have the inverse 0 and become zeros here.
    levels[i] = nearest(scaled == scaled ? scaled : vf{});
  }
#if defined(__AVX512F__)
  for (int64_t i = 0; i < kBlockVectors; ++i)
    _mm_storeu_si128((__m128i*)(target + i * VW), _mm512_cvtepi32_epi8((__m512i)levels[i]));
#else
  alignas(64) int32_t lanes[kBlock];
  memcpy(lanes, levels, sizeof lanes);
  for (int64_t i = 0; i < kBlock; ++i) target[i] = (int8_t)lanes[i];
#endif
}

// `count` of 64 int8 values, stored with `flip` (0x80 in each byte: offset to unsigned) applied. What rows that are not
// finite become does not matter: their scale is NaN.
PAGELOOM_INLINE void quantise_turned(const Rotated& x, const Quantiser& q, uint8_t flip, int8_t* target, int64_t count) {
#if defined(__AVX512F__)
  if (count >= kRotated) {
    __m512i levels[4];
    for (int i = 0; i < 4; ++i) levels[i] = _mm512_cvtps_epi32((__m512)(x.v[i] * q.inverse));
    // Packed within lanes of 128 bits, then put in order.
    const __m512i low = _mm512_packs_epi32(levels[0], levels[1]), high = _mm512_packs_epi32(levels[2], levels[3]);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
    _mm512_storeu_si512(target, _mm512_xor_si512(bytes, _mm512_set1_epi8((char)flip)));
    return;
  }
#endif
  alignas(64) int32_t lanes[kRotated];
  for (int64_t i = 0; i < kRotatedVectors; ++i) {
    const vf scaled = x.v[i] * q.inverse;
    const vi level = nearest(scaled == scaled ? scaled : vf{});
    memcpy(lanes + i * VW, &level, sizeof level);
  }
  for (int64_t i = 0; i < count && i < kRotated; ++i) target[i] = (int8_t)((uint8_t)lanes[i] ^ flip);
}

// Inputs [at, at + 64) of the row, turned where there are as many, and else enlarged as much: one scale is for all.
PAGELOOM_INLINE Rotated load_rotated(const NormedRow& r, int64_t at) {
  Rotated x;
  for (int64_t half = 0; half < 2; ++half) {
    const Block b = load_block(r, at + half * kBlock);
    for (int64_t i = 0; i < kBlockVectors; ++i) x.v[half * kBlockVectors + i] = b.v[i];
  }
  if (at + kRotated <= r.k) {
    rotate(x);
  } else {
    for (vf& v : x.v) v *= kEnlarged;
  }
  return x;
}

constexpr int64_t kHeld = 4096;  // inputs of a row whose turned values are kept rather than computed twice

// Rows [begin, end) with one scale each.
PAGELOOM_INLINE void quantise_rows(const pageloom::LinearProblem& p, const pageloom::Operand& target, int64_t begin,
                                   int64_t end, uint8_t flip) {
  Rotated kept[kHeld / kRotated];
  const bool keep = p.k <= kHeld;
  for (int64_t row = begin; row < end; ++row) {
    const NormedRow r = open_row(p, row);
    vu top = {};
    for (int64_t at = 0; at < p.k; at += kRotated) {
      const Rotated x = load_rotated(r, at);
      for (int64_t i = 0; i < kRotated; i += 32) __builtin_prefetch(r.x + p.x_stride + at + i);  // of the next row
      for (const vf& v : x.v) top = larger(top, (vu)v & 0x7fffffffu);
      if (keep) kept[at / kRotated] = x;
    }
    const Quantiser q = quantiser_of(largest_lane(top));
    int8_t* const to = (int8_t*)target.data + row * target.stride;
    for (int64_t at = 0; at < p.k; at += kRotated) {
      quantise_turned(keep ? kept[at / kRotated] : load_rotated(r, at), q, flip, to + at, p.k - at);
    }
    const_cast<float*>(target.scales)[row] = q.scale;
  }
}

// What a format's kernel adds for each group of a row, 4 bytes in Operand::sums.
enum class GroupSum { kScaled, kStart, kHalves };

// kScaled: float scale * sum. kStart: int32 -offset * sum, what the integer dot starts from. kHalves: two int16, the
// sums of the first and of the last 16 inputs.
PAGELOOM_INLINE uint32_t group_sum(const vi* levels, float scale, GroupSum kind, int32_t offset) {
#if defined(__AVX512F__)
  const int32_t first = _mm512_reduce_add_epi32((__m512i)levels[0]), last = _mm512_reduce_add_epi32((__m512i)levels[1]);
#else
  alignas(64) int32_t lanes[kBlock];
  memcpy(lanes, levels, sizeof lanes);
  int32_t first = 0, last = 0;
  for (int64_t i = 0; i < kBlock / 2; ++i) first += lanes[i], last += lanes[kBlock / 2 + i];
#endif
  if (kind == GroupSum::kHalves) return (uint32_t)(uint16_t)first | (uint32_t)(uint16_t)last << 16;
  if (kind == GroupSum::kStart) return (uint32_t)(-offset * (first + last));
  const float scaled = scale * (float)(first + last);
  uint32_t bits;
  memcpy(&bits, &scaled, 4);
  return bits;
}

// Rows [begin, end) with a scale for each 32 inputs; k is a multiple of 32.
PAGELOOM_INLINE void quantise_groups(const pageloom::LinearProblem& p, const pageloom::Operand& target, int64_t begin,
                                     int64_t end, GroupSum kind, int32_t offset) {
  const int64_t groups = p.k / kBlock;
  for (int64_t row = begin; row < end; ++row) {
    const NormedRow r = open_row(p, row);
    int8_t* const to = (int8_t*)target.data + row * target.stride;
    float* const scales = const_cast<float*>(target.scales) + row * groups;
    float* const sums = const_cast<float*>(target.sums) + row * groups;
    for (int64_t g = 0; g < groups; ++g) {
      const Block b = load_block(r, g * kBlock);
      const Quantiser q = quantiser_of(largest_lane(magnitude(b)));
      vi levels[kBlockVectors];
      quantise_block(b, q, to + g * kBlock, levels);
      scales[g] = q.scale;
      const uint32_t bits = group_sum(levels, q.scale, kind, offset);
      memcpy(sums + g, &bits, 4);
    }
  }
}

}  // namespace
