// Integer dot products of four bytes a lane, exact on every ISA (no saturating pair ever meets values that could
// saturate it), and the few conversions that quantised layers need. Internal linkage, on top of simd.h.
#pragma once

#include "simd.h"

namespace {

constexpr int64_t kVectorBytes = PAGELOOM_VECTOR_BYTES;
#if defined(__AVX512VNNI__)
constexpr bool kVnni = true;
#else
constexpr bool kVnni = false;
#endif

PAGELOOM_INLINE vi splat_word(int32_t x) { return vi{} + x; }

PAGELOOM_INLINE int32_t load_word(const void* p) {
  int32_t w;
  memcpy(&w, p, 4);
  return w;
}

// One multiply-add with a single rounding where the ISA has it, whatever the compiler contracts elsewhere.
PAGELOOM_INLINE vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

PAGELOOM_INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

// Two products of 16-bit halves a lane, summed.
PAGELOOM_INLINE vi multiply_halves(vi a, vi b) {
#if defined(__AVX512BW__)
  return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Signed bytes 0 and 2, or 1 and 3, of each lane as 16-bit halves.
PAGELOOM_INLINE vi even_bytes(vi x) {
  typedef int16_t halves __attribute__((vector_size(PAGELOOM_VECTOR_BYTES)));
  return (vi)(((halves)x << 8) >> 8);
}
PAGELOOM_INLINE vi odd_bytes(vi x) {
  typedef int16_t halves __attribute__((vector_size(PAGELOOM_VECTOR_BYTES)));
  return (vi)((halves)x >> 8);
}

// acc + sum over the four bytes of a lane of signed w times signed x.
PAGELOOM_INLINE vi dot_signed(vi acc, vi w, vi x) {
  return acc + multiply_halves(even_bytes(w), even_bytes(x)) + multiply_halves(odd_bytes(w), odd_bytes(x));
}

// The same for unsigned w <= 127 and signed -127 <= x: a pair is at most 2 * 127 * 127 < 2^15. With VNNI any w.
PAGELOOM_INLINE vi dot_unsigned(vi acc, vi w, vi x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)w, (__m512i)x);
  return acc + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, (__m256i)x);
  return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  return dot_signed(acc, w, x);
#endif
}

template <bool kSigned>
PAGELOOM_INLINE vi dot(vi acc, vi w, vi x) {
  return kSigned ? dot_signed(acc, w, x) : dot_unsigned(acc, w, x);
}

// Each byte of `x`, from 0 to 15, becomes that entry of the table.
PAGELOOM_INLINE vi look_up(const int8_t (&table)[16], vi x) {
#if defined(__AVX512BW__)
  return (vi)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), (__m512i)x);
#elif defined(__AVX2__)
  return (vi)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), (__m256i)x);
#else
  alignas(64) uint8_t bytes[kVectorBytes];
  memcpy(bytes, &x, sizeof bytes);
  for (uint8_t& byte : bytes) byte = (uint8_t)table[byte];
  return load_as<vi>(bytes);
#endif
}

// VW consecutive halfs, or bytes, as lanes.
PAGELOOM_INLINE vf load_halfs(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vu lanes;
  for (int i = 0; i < VW; ++i) lanes[i] = (uint32_t)p[2 * i] | (uint32_t)p[2 * i + 1] << 8;
  return Float16::widen(lanes);
#endif
}

PAGELOOM_INLINE vi load_byte_lanes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  vi lanes;
  for (int i = 0; i < VW; ++i) lanes[i] = p[i];
  return lanes;
#endif
}

PAGELOOM_INLINE vf load_bytes(const uint8_t* p) { return to_float(load_byte_lanes(p)); }

PAGELOOM_INLINE vf load_signed_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  vf lanes;
  for (int i = 0; i < VW; ++i) lanes[i] = (float)(int8_t)p[i];
  return lanes;
#endif
}

// VW consecutive e4m3 (finite), or powers of two with a bias of 127 (e8m0), as lanes.
PAGELOOM_INLINE vf load_e4m3(const uint8_t* p) {
  // The exponent of a float has a bias that is larger by 120; subnormal numbers are so in both.
  const vu bits = (vu)load_byte_lanes(p);
  return (vf)((bits & 0x80u) << 24 | (bits & 0x7fu) << 20) * bits_to_float(0x7b800000u);
}

PAGELOOM_INLINE vf load_e8m0(const uint8_t* p) {
  const vu bits = (vu)load_byte_lanes(p) << 23;
  return (vf)(bits | ((vu)(bits == 0) & 0x400000u));  // the lowest is a subnormal float
}

// Sums in memory are values: nothing after this may be contracted with what made them, so that every ISA rounds alike.
PAGELOOM_INLINE void settle() { __asm__ volatile("" ::: "memory"); }

// Lines of [p, p + bytes). Past the end of the weights it is harmless.
PAGELOOM_INLINE void prefetch(const uint8_t* p, int64_t bytes, bool past) {
  for (int64_t i = 0; i < bytes; i += 64) ask_for_line(p + i, past);
}

}  // namespace
