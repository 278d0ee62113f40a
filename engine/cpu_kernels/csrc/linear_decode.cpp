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

// Input `i` of 32, as nibbles of a panel hold it.
int nibble_at(const uint8_t* nibbles, int64_t output, int64_t i) {
  const int byte = nibbles[i % 16 / 4 * 4 * kPanel + output * 4 + i % 4];
  return i < 16 ? byte & 15 : byte >> 4;
}

void decode_int8(const uint8_t* panel, int64_t output, int64_t k, uint16_t* target) {
  float scale;
  memcpy(&scale, panel + k * kPanel + output * 4, 4);
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
  for (; at < k; ++at) target[at] = float_to_bf16(value(at));
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

float value(LayoutQ4K, const uint8_t* group, int64_t output, int64_t i) {
  const int64_t sub = i / kGroup, at = sub * kPanel + output;
  const float scale = (float)group[LayoutQ4K::kScales + at] * half_at(group + LayoutQ4K::kD, output);
  const float minimum = (float)group[LayoutQ4K::kMins + at] * half_at(group + LayoutQ4K::kDMin, output);
  volatile float product = (float)nibble_at(group + sub * kNibbleBytes, output, i % kGroup) * scale;  // never fused
  return product - minimum;
}

float value(LayoutQ6K, const uint8_t* group, int64_t output, int64_t i) {
  const int64_t sub = i / kGroup, within = i % kGroup;
  const uint8_t* const high = group + LayoutQ6K::kHigh + sub / 2 * kHighBytes;
  const int bits = high[within % 16 / 4 * 4 * kPanel + output * 4 + within % 4] >> (sub % 2 * 4 + within / 16 * 2);
  const int q = nibble_at(group + sub * kNibbleBytes, output, within) | (bits & 3) << 4;
  const auto scale = (int8_t)group[LayoutQ6K::kScales + i / 16 * kPanel + output];
  return (float)(q - 32) * ((float)scale * half_at(group + LayoutQ6K::kD, output));
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
    default: return nullptr;
  }
}

}  // namespace pageloom
