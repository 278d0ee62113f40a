// Rows of bfloat16 or float32 numbers as vectors of floats, and the convolution of layers that keep states.
#pragma once

#include <string.h>

#include "epilogue.h"
#include "states.h"

namespace pageloom {
namespace {

template <bool kBf16>
PAGELOOM_INLINE vf load_some(const void* from, int64_t at, int64_t count) {
  if constexpr (kBf16) {
    const uint16_t* const p = (const uint16_t*)from + at;
    if (count >= VW) return load_bf16(p);
    uint16_t some[VW] = {};
    memcpy(some, p, (size_t)count * 2);
    return load_bf16(some);
  }
  const float* const p = (const float*)from + at;
  if (count >= VW) return loadf(p);
  float some[VW] = {};
  memcpy(some, p, (size_t)count * 4);
  return loadf(some);
}

template <bool kBf16>
PAGELOOM_INLINE void store_some(void* to, int64_t at, vf v, int64_t count) {
  if constexpr (kBf16) {
    uint16_t* const p = (uint16_t*)to + at;
    if (count >= VW) return store_rounded(p, v);
    uint16_t some[VW];
    store_rounded(some, v);
    memcpy(p, some, (size_t)count * 2);
  } else {
    float* const p = (float*)to + at;
    if (count >= VW) return storef(p, v);
    memcpy(p, &v, (size_t)count * 4);
  }
}

template <bool kBf16>
PAGELOOM_INLINE vf rounded(vf v) {
  return kBf16 ? round_bf16(v) : v;
}

template <bool kBf16>
PAGELOOM_INLINE float scalar(const void* from, int64_t at) {
  return kBf16 ? bits_to_float((uint32_t)((const uint16_t*)from)[at] << 16) : ((const float*)from)[at];
}

template <bool kBf16>
PAGELOOM_INLINE const void* row_of(const void* rows, int64_t row, int64_t stride) {
  return (const char*)rows + row * stride * (kBf16 ? 2 : 4);
}

// The last inputs of some channels, the newest last, as floats.
struct History {
  float rows[kMostTaps][kMixChannels];
};

template <bool kBf16>
void read_history(const MixProblem& p, int64_t first, int64_t begin, int64_t count, History& h) {
  constexpr int64_t kBytes = kBf16 ? 2 : 4;
  StateBytes bytes(p.place, first, p.start + begin * kBytes);
  for (int64_t tap = 0; tap + 1 < p.taps; ++tap) {
    alignas(64) char some[kMixChannels * 4] = {};
    bytes.read(some, count * kBytes, tap + 2 < p.taps ? (p.channels - count) * kBytes : 0);
    for (int64_t c = 0; c < count; c += VW) storef(h.rows[tap] + c, load_some<kBf16>(some, c, VW));
  }
}

template <bool kBf16>
void write_history(const MixProblem& p, int64_t first, int64_t begin, int64_t count, const History& h) {
  constexpr int64_t kBytes = kBf16 ? 2 : 4;
  StateBytes bytes(p.place, first, p.start + begin * kBytes);
  for (int64_t tap = 0; tap + 1 < p.taps; ++tap) {
    alignas(64) char some[kMixChannels * 4];
    for (int64_t c = 0; c < count; c += VW) store_some<kBf16>(some, c, loadf(h.rows[tap] + c), VW);
    bytes.write(some, count * kBytes, tap + 2 < p.taps ? (p.channels - count) * kBytes : 0);
  }
}

template <bool kBf16>
void convolve_as(const MixProblem& p, int64_t s, int64_t begin, int64_t end) {
  const int64_t count = end - begin, before = p.taps - 1;
  const StateSequence& sequence = p.sequences[s];
  if (sequence.begin == sequence.end) return;
  alignas(64) History h;
  if (sequence.read >= 0)
    read_history<kBf16>(p, sequence.read, begin, count, h);
  else
    memset(h.rows, 0, sizeof(h.rows[0]) * (size_t)before);
  int64_t write = sequence.first_write;
  const int64_t writes_end = p.writes_end(s);
  for (int64_t t = sequence.begin; t < sequence.end; ++t) {
    const void* const x = row_of<kBf16>(p.x, t, p.x_stride);
    float* const to = p.mixed + t * p.channels + begin;
    for (int64_t c = 0; c < count; c += VW) {
      const int64_t left = count - c;
      vf own = load_some<kBf16>(x, p.mixed_at + begin + c, left);
      if (p.kind == MixKind::kShort) own = rounded<kBf16>(own * load_some<kBf16>(x, p.amount_at + begin + c, left));
      vf sum{};
      for (int64_t tap = 0; tap < before; ++tap)
        sum += loadf(h.rows[tap] + c) * load_some<false>(p.conv_weight, tap * p.channels + begin + c, left);
      sum += own * load_some<false>(p.conv_weight, before * p.channels + begin + c, left);
      if (p.conv_bias != nullptr) sum += load_some<false>(p.conv_bias, begin + c, left);
      sum = rounded<kBf16>(sum);
      store_some<false>(to, c, p.kind == MixKind::kShort ? sum : rounded<kBf16>(times_sigmoid(sum, sum)), left);
      storef(h.rows[before] + c, own);
    }
    memmove(h.rows[0], h.rows[1], sizeof(h.rows[0]) * (size_t)before);
    if (write < writes_end && p.writes[write].end == t + 1)
      write_history<kBf16>(p, p.writes[write++].written, begin, count, h);
  }
}

void convolve(const MixProblem& p, int64_t sequence, int64_t begin, int64_t end) {
  p.bf16 ? convolve_as<true>(p, sequence, begin, end) : convolve_as<false>(p, sequence, begin, end);
}

}  // namespace
}  // namespace pageloom
