// Rows of quantised matrices as bf16, for the embedding that shares its weights with the unembedding: the exact value
// of each weight in float32, in the order in which engine.weights.gguf_dequant computes it, rounded once.
#include "epilogue.h"
#include "group_formats.h"
#include "hadamard.h"
#include "linear_schedule.h"
#include "simd.h"

namespace pageloom {
namespace {

float half_at(const uint8_t* p, int64_t output) {
  uint16_t bits;
  memcpy(&bits, p + 2 * output, 2);
  return Float16::to_float(bits);
}

float float_at(const uint8_t* p, int64_t output) {
  float x;
  memcpy(&x, p + 4 * output, 4);
  return x;
}

// Input `i` of 32, as nibbles of a panel hold it.
int nibble_at(const uint8_t* nibbles, int64_t output, int64_t i) {
  const int byte = nibbles[i % 16 / 4 * 4 * kPanel + output * 4 + i % 4];
  return i < 16 ? byte & 15 : byte >> 4;
}

// Two bits of input `i` of 256, and one bit, as panels hold them.
int two_bits_at(const uint8_t* bits, int64_t output, int64_t i) {
  const int64_t sub = i / kGroup, within = i % kGroup;
  const int byte = bits[sub / 2 * kHighBytes + within % 16 / 4 * 4 * kPanel + output * 4 + within % 4];
  return byte >> (sub % 2 * 4 + within / 16 * 2) & 3;
}
int bit_at(const uint8_t* bits, int64_t output, int64_t i) {
  return bits[i / kGroup * kBitBytes + output * 4 + i % 4] >> i % kGroup / 4 & 1;
}

void decode_int8(const uint8_t* panel, int64_t output, int64_t k, uint16_t* target) {
  const float scale = float_at(panel + k * kPanel, output);
  const auto value = [&](int64_t i) { return (float)(int8_t)panel[i / 4 * 4 * kPanel + output * 4 + i % 4] * scale; };
  int64_t at = 0;
  for (; at + kRotated <= k; at += kRotated) {
    float turned[kRotated];
    for (int64_t i = 0; i < kRotated; ++i) turned[i] = value(at + i);
    Rotated x;
    memcpy(&x, turned, sizeof x);
    rotate(x);
    for (int64_t i = 0; i < kRotatedVectors; ++i) store_rounded(target + at + i * VW, x.v[i]);
  }
  for (; at < k; ++at) target[at] = float_to_bf16(value(at) * kEnlarged);
}

float value(LayoutQ4_0, const uint8_t* group, int64_t output, int64_t i) {
  return (float)(nibble_at(group, output, i) - 8) * half_at(group + LayoutQ4_0::kD, output);
}

float value(LayoutQ4_1, const uint8_t* group, int64_t output, int64_t i) {
  const float product = (float)nibble_at(group, output, i) * half_at(group + LayoutQ4_1::kD, output);
  return product + half_at(group + LayoutQ4_1::kM, output);
}

float value(LayoutInt4Group, const uint8_t* group, int64_t output, int64_t i) {
  const float above = (float)nibble_at(group, output, i) - half_at(group + LayoutInt4Group::kZ, output);
  return above * half_at(group + LayoutInt4Group::kD, output);
}

float value(LayoutQ8_0, const uint8_t* group, int64_t output, int64_t i) {
  const auto q = (int8_t)group[i / 4 * 4 * kPanel + output * 4 + i % 4];
  return (float)q * half_at(group + LayoutQ8_0::kD, output);
}

float value(LayoutQ5_0, const uint8_t* group, int64_t output, int64_t i) {
  const int q = nibble_at(group, output, i) | bit_at(group + LayoutQ5_0::kFifth, output, i) << 4;
  return (float)(q - 16) * half_at(group + LayoutQ5_0::kD, output);
}

float value(LayoutQ5_1, const uint8_t* group, int64_t output, int64_t i) {
  const int q = nibble_at(group, output, i) | bit_at(group + LayoutQ5_1::kFifth, output, i) << 4;
  volatile float product = (float)q * half_at(group + LayoutQ5_1::kD, output);  // never fused
  return product + half_at(group + LayoutQ5_1::kM, output);
}

float value(LayoutIQ4NL, const uint8_t* group, int64_t output, int64_t i) {
  return (float)kUnevenLevels[nibble_at(group, output, i)] * half_at(group + LayoutIQ4NL::kD, output);
}

// Level `q` with a block's two scales, times these of its part.
template <class F>
float above_minimum(const uint8_t* group, int64_t output, int q, int scale, int minimum) {
  volatile float product = (float)q * ((float)scale * half_at(group + F::kD, output));  // never fused
  return product - (float)minimum * half_at(group + F::kDMin, output);
}

float value(LayoutQ4K, const uint8_t* group, int64_t output, int64_t i) {
  using F = LayoutQ4K;
  const int64_t sub = i / kGroup, at = sub * kPanel + output;
  const int q = nibble_at(group + sub * kNibbleBytes, output, i % kGroup);
  return above_minimum<F>(group, output, q, group[F::kScales + at], group[F::kMins + at]);
}

float value(LayoutQ5K, const uint8_t* group, int64_t output, int64_t i) {
  using F = LayoutQ5K;
  const int64_t sub = i / kGroup, at = sub * kPanel + output;
  const int q = nibble_at(group + sub * kNibbleBytes, output, i % kGroup) | bit_at(group + F::kFifth, output, i) << 4;
  return above_minimum<F>(group, output, q, group[F::kScales + at], group[F::kMins + at]);
}

float value(LayoutQ2K, const uint8_t* group, int64_t output, int64_t i) {
  using F = LayoutQ2K;
  const int both = group[F::kScales + i / 16 * kPanel + output];
  return above_minimum<F>(group, output, two_bits_at(group, output, i), both & 15, both >> 4);
}

float value(LayoutQ3K, const uint8_t* group, int64_t output, int64_t i) {
  const int q = two_bits_at(group, output, i) | bit_at(group + LayoutQ3K::kThird, output, i) << 2;
  const auto scale = (int8_t)group[LayoutQ3K::kScales + i / 16 * kPanel + output];
  return (float)(q - 4) * ((float)scale * half_at(group + LayoutQ3K::kD, output));
}

float value(LayoutQ6K, const uint8_t* group, int64_t output, int64_t i) {
  const int high = two_bits_at(group + LayoutQ6K::kHigh, output, i);
  const int q = nibble_at(group + i / kGroup * kNibbleBytes, output, i % kGroup) | high << 4;
  const auto scale = (int8_t)group[LayoutQ6K::kScales + i / 16 * kPanel + output];
  return (float)(q - 32) * ((float)scale * half_at(group + LayoutQ6K::kD, output));
}

float value(LayoutIQ4XS, const uint8_t* group, int64_t output, int64_t i) {
  const int64_t sub = i / kGroup;
  const int level = kUnevenLevels[nibble_at(group + sub * kNibbleBytes, output, i % kGroup)];
  const auto scale = (int8_t)group[LayoutIQ4XS::kScales + sub * kPanel + output];
  return (float)level * ((float)scale * half_at(group + LayoutIQ4XS::kD, output));
}

float e4m3_at(const uint8_t* p) {
  return bits_to_float((uint32_t)(*p & 0x80) << 24 | (uint32_t)(*p & 0x7f) << 20) * 0x1p120f;
}

float value(LayoutMxfp4, const uint8_t* group, int64_t output, int64_t i) {
  const int64_t sub = i / kGroup;
  const uint32_t exponent = group[LayoutMxfp4::kScales + sub * kPanel + output];
  const float power = bits_to_float(exponent != 0 ? exponent << 23 : 0x400000);
  return (float)kTwiceE2M1[nibble_at(group + sub * kNibbleBytes, output, i % kGroup)] * 0.5f * power;
}

void decode_nvfp4(const uint8_t* panel, int64_t output, int64_t k, uint16_t* target) {
  const float total = float_at(panel + k / LayoutNvfp4::kInputs * LayoutNvfp4::kBytes, output);
  for (int64_t i = 0; i < k; ++i) {
    const uint8_t* const group = panel + i / kGroup * LayoutNvfp4::kBytes;
    const float scale = e4m3_at(group + LayoutNvfp4::kScales + i % kGroup / 16 * kPanel + output) / total;
    target[i] = float_to_bf16((float)kTwiceE2M1[nibble_at(group, output, i % kGroup)] * 0.5f * scale);
  }
}

void decode_float8(const uint8_t* panel, int64_t output, int64_t k, uint16_t* target) {
  const float scale = float_at(panel + k * kPanel, output);
  for (int64_t i = 0; i < k; ++i)
    target[i] = float_to_bf16(e4m3_at(panel + i / 4 * 4 * kPanel + output * 4 + i % 4) * scale);
}

float value(LayoutFloat8Block, const uint8_t* group, int64_t output, int64_t i) {
  return e4m3_at(group + i / 4 * 4 * kPanel + output * 4 + i % 4) * float_at(group + LayoutFloat8Block::kD, output);
}

template <class F>
void decode_groups(const uint8_t* panel, int64_t output, int64_t k, uint16_t* target) {
  for (int64_t begin = 0; begin < k; begin += F::kInputs, panel += F::kBytes)
    for (int64_t i = 0; i < F::kInputs; ++i) target[begin + i] = float_to_bf16(value(F{}, panel, output, i));
}

}  // namespace

DecodeRow quantised_row_decoder(Format format) {
  switch (format) {
    case Format::kInt8: return decode_int8;
    case Format::kQ4_0: return decode_groups<LayoutQ4_0>;
    case Format::kQ4_1: return decode_groups<LayoutQ4_1>;
    case Format::kQ8_0: return decode_groups<LayoutQ8_0>;
    case Format::kQ4K: return decode_groups<LayoutQ4K>;
    case Format::kQ6K: return decode_groups<LayoutQ6K>;
    case Format::kInt4Group: return decode_groups<LayoutInt4Group>;
    case Format::kQ5_0: return decode_groups<LayoutQ5_0>;
    case Format::kQ5_1: return decode_groups<LayoutQ5_1>;
    case Format::kQ5K: return decode_groups<LayoutQ5K>;
    case Format::kQ3K: return decode_groups<LayoutQ3K>;
    case Format::kQ2K: return decode_groups<LayoutQ2K>;
    case Format::kIQ4NL: return decode_groups<LayoutIQ4NL>;
    case Format::kIQ4XS: return decode_groups<LayoutIQ4XS>;
    case Format::kMxfp4: return decode_groups<LayoutMxfp4>;
    case Format::kNvfp4: return decode_nvfp4;
    case Format::kFloat8: return decode_float8;
    case Format::kFloat8Block: return decode_groups<LayoutFloat8Block>;
    default: return nullptr;
  }
}

}  // namespace pageloom
