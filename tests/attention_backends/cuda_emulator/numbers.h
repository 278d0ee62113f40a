// 16- and 8-bit floating-point formats in portable arithmetic, with the roundings of the CUDA conversions.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace pageloom::emulator {

inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// Round to nearest even, keeping the bits from `drop` on.
inline uint32_t round_off(uint32_t bits, int drop) {
  return (bits + ((1u << (drop - 1)) - 1) + ((bits >> drop) & 1)) >> drop;
}

inline float bf16_to_float(uint16_t bits) { return float_of(uint32_t{bits} << 16); }

inline uint16_t float_to_bf16(float x) {
  if (isnan(x)) return 0x7fff;
  return static_cast<uint16_t>(round_off(bits_of(x), 16));
}

inline float f16_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));  // exact, subnormals included
}

inline uint16_t float_to_f16(float x) {
  if (isnan(x)) return 0x7fff;
  const uint32_t sign = (bits_of(x) >> 16) & 0x8000u;
  const float size = fabsf(x);
  uint32_t magnitude;
  if (size >= 65520.0f) {
    magnitude = 0x7c00;
  } else if (size < 0x1p-14f) {
    magnitude = static_cast<uint32_t>(nearbyintf(size * 0x1p24f));
  } else {
    magnitude = round_off(bits_of(size), 13) - (112u << 10);
  }
  return static_cast<uint16_t>(sign | magnitude);
}

inline float fp8_to_float(uint8_t bits) {
  const uint32_t sign = uint32_t{bits & 0x80u} << 24, magnitude = bits & 0x7fu;
  if (magnitude == 0x7f) return float_of(sign | 0x7fc00000u);
  return float_of(sign | bits_of(float_of(magnitude << 20) * 0x1p120f));
}

inline uint8_t float_to_fp8(float x) {
  if (isnan(x)) return 0x7f;
  const uint32_t sign = (bits_of(x) >> 24) & 0x80u;
  const float size = fminf(fabsf(x), 448.0f);
  const uint32_t magnitude = size < 0x1p-6f ? static_cast<uint32_t>(nearbyintf(size * 0x1p9f))
                                            : round_off(bits_of(size), 20) - (120u << 3);
  return static_cast<uint8_t>(sign | magnitude);
}

}  // namespace pageloom::emulator
