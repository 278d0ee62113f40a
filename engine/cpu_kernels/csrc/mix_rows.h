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

// A convolution's input, of channels from `at` on.
template <bool kBf16>
PAGELOOM_INLINE vf input_of(const MixProblem& p, const void* x, int64_t at, int64_t left) {
  const vf own = load_some<kBf16>(x, p.mixed_at + at, left);
  return p.kind == MixKind::kShort ? rounded<kBf16>(own * load_some<kBf16>(x, p.amount_at + at, left)) : own;
}

constexpr int64_t kConvolvedAtOnce = 4;  // tokens: more rows, a power of two apart, would share a set of the cache

// Of `kTokens` tokens from `t` on one vector of channels from `begin` + `c` on, whose history stays in registers. `kTaps`: 0,
// as many as there are. Sums are made first and activated behind: a CPU looks ahead over few exponentials with all around them.
template <bool kBf16, int64_t kTaps, int64_t kTokens>
PAGELOOM_INLINE void convolve_vector(const MixProblem& p, int64_t t, int64_t begin, int64_t c, int64_t left, History& h) {
  constexpr int64_t kRoom = kTaps > 0 ? kTaps : kMostTaps;
  const int64_t before = (kTaps > 0 ? kTaps : p.taps) - 1;
  vf past[kRoom], weight[kRoom], sums[kTokens];
#pragma GCC unroll 4
  for (int64_t tap = 0; tap <= before; ++tap) {
    weight[tap] = load_some<false>(p.conv_weight, tap * p.channels + begin + c, left);
    if (tap < before) past[tap] = loadf(h.rows[tap] + c);
  }
  const bool has_bias = p.conv_bias != nullptr, is_short = p.kind == MixKind::kShort;
  const vf bias = has_bias ? load_some<false>(p.conv_bias, begin + c, left) : vf{};
#pragma GCC unroll 4
  for (int64_t i = 0; i < kTokens; ++i) {
    past[before] = input_of<kBf16>(p, row_of<kBf16>(p.x, t + i, p.x_stride), begin + c, left);
    vf sum{};
#pragma GCC unroll 4
    for (int64_t tap = 0; tap <= before; ++tap) sum += past[tap] * weight[tap];
#pragma GCC unroll 4
    for (int64_t tap = 0; tap < before; ++tap) past[tap] = past[tap + 1];
    sums[i] = rounded<kBf16>(has_bias ? sum + bias : sum);
  }
#pragma GCC unroll 4
  for (int64_t tap = 0; tap < before; ++tap) storef(h.rows[tap] + c, past[tap]);
#pragma GCC unroll 4
  for (int64_t i = 0; i < kTokens; ++i) {
    const vf sum = sums[i], made = is_short ? sum : rounded<kBf16>(times_sigmoid(sum, sum));
    store_some<false>(p.mixed_of(t + i) + begin + c, 0, made, left);
  }
}

// The same of `count` channels; all whole vectors are made by the same code.
template <bool kBf16, int64_t kTaps, int64_t kTokens>
void convolve_some(const MixProblem& p, int64_t t, int64_t begin, int64_t count, History& h) {
  int64_t c = 0;
  for (; c + VW <= count; c += VW) convolve_vector<kBf16, kTaps, kTokens>(p, t, begin, c, VW, h);
  if (c < count) convolve_vector<kBf16, kTaps, kTokens>(p, t, begin, c, count - c, h);
}

// The last inputs before token `t`: the step's own back to where a state of the sequence was written last, or to its first
// token, then those that this state holds. (The one that was read at first may lie where another has been written since.)
template <bool kBf16>
void find_history(const MixProblem& p, int64_t sequence, int64_t t, int64_t begin, int64_t count, History& h) {
  const StateSequence& s = p.sequences[sequence];
  const int64_t write = p.next_write(sequence);
  const bool wrote = write > s.first_write;
  const int64_t held = wrote ? p.writes[write - 1].written : s.read;
  const int64_t before = p.taps - 1, own = t - (wrote ? p.writes[write - 1].end : s.begin);
  if (own < before && held >= 0)
    read_history<kBf16>(p, held, begin, count, h);
  else if (own < before)
    memset(h.rows, 0, sizeof(h.rows[0]) * (size_t)before);
  for (int64_t tap = 0; own > 0 && tap < before; ++tap) {
    if (tap + own < before) {
      memcpy(h.rows[tap], h.rows[tap + own], sizeof h.rows[0]);
      continue;
    }
    const void* const x = row_of<kBf16>(p.x, t - before + tap, p.x_stride);
    for (int64_t c = 0; c < count; c += VW) storef(h.rows[tap] + c, input_of<kBf16>(p, x, begin + c, count - c));
  }
}

template <bool kBf16, int64_t kTaps>
void convolve_as(const MixProblem& p, int64_t s, int64_t begin, int64_t end) {
  const int64_t count = end - begin, before = p.taps - 1;
  const StateSequence& sequence = p.sequences[s];
  const int64_t first = p.begin_of(sequence), last = p.end_of(sequence);
  if (first == last) return;
  alignas(64) History h;
  find_history<kBf16>(p, s, first, begin, count, h);
  int64_t write = p.next_write(s);
  const int64_t writes_end = p.writes_end(s);
  for (int64_t t = first, until; t < last; t = until) {
    const int64_t free = write < writes_end && p.writes[write].end < last ? p.writes[write].end : last;
    until = t + kConvolvedAtOnce <= free ? t + kConvolvedAtOnce : t + 1;
    const auto some = until == t + 1 ? convolve_some<kBf16, kTaps, 1> : convolve_some<kBf16, kTaps, kConvolvedAtOnce>;
    some(p, t, begin, count, h);
    if (write < writes_end && p.writes[write].end == until)
      write_history<kBf16>(p, p.writes[write++].written, begin, count, h);
  }
}

template <bool kBf16>
void convolve_taps(const MixProblem& p, int64_t sequence, int64_t begin, int64_t end) {
  const auto go = p.taps == 4 ? convolve_as<kBf16, 4> : p.taps == 3 ? convolve_as<kBf16, 3> : convolve_as<kBf16, 0>;
  go(p, sequence, begin, end);
}

void convolve(const MixProblem& p, int64_t sequence, int64_t begin, int64_t end) {
  p.bf16 ? convolve_taps<true>(p, sequence, begin, end) : convolve_taps<false>(p, sequence, begin, end);
}

}  // namespace
}  // namespace pageloom
