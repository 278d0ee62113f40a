// Recurrences over sequences' tokens, whose states are matrices (gated delta nets, Mamba 2): token after token, with 32
// columns of a head's matrix in the first level of the caches. Columns do not need each other, and a token costs the same
// products alone or among many, so its bits are the same in any step.
#include <math.h>
#include <stddef.h>

#include <vector>

#include "epilogue.h"
#include "states.h"

using namespace pageloom;

namespace {

constexpr float kLengthEps = 1e-6f;
constexpr int64_t NV = kMixColumns / VW;

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
    uint16_t some[VW];
    store_rounded(some, v);
    memcpy((uint16_t*)to + at, some, (size_t)(count < VW ? count : VW) * 2);
  } else {
    memcpy((float*)to + at, &v, (size_t)(count < VW ? count : VW) * 4);
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

PAGELOOM_INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// The same of many. What 1 + y has lost of a small y is put right by what it holds of it.
PAGELOOM_INLINE vf softplus_all(vf x) {
  const vf y = exp2_all(x * 1.4426950408889634f), u = 1.0f + y, held = u - 1.0f;
  const vi exponent = ((vi)u - 0x3f3504f3) >> 23;  // of u / sqrt(1/2)
  const vf m = (vf)((vi)u - (exponent << 23)), s = (m - 1.0f) / (m + 1.0f), s2 = s * s;
  const vf series = 2.0f * s * (1.0f + s2 * (1.0f / 3 + s2 * (1.0f / 5 + s2 * (1.0f / 7 + s2 * (1.0f / 9)))));
  const vf log = series + __builtin_convertvector(exponent, vf) * 0.6931471805599453f;
  return x > 20.0f ? x : held == 0.0f ? y : log * (y / held);
}

// -- the convolution ---------------------------------------------------------------------------------------------------

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
void convolve_as(const MixProblem& p, int64_t begin, int64_t end) {
  const int64_t count = end - begin, before = p.taps - 1;
  for (int64_t s = 0; s < p.num_sequences; ++s) {
    const StateSequence& sequence = p.sequences[s];
    History h = {};
    if (sequence.read >= 0) read_history<kBf16>(p, sequence.read, begin, count, h);
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
}

void convolve(const MixProblem& p, int64_t begin, int64_t end) {
  p.bf16 ? convolve_as<true>(p, begin, end) : convolve_as<false>(p, begin, end);
}

// -- before and behind the recurrence ----------------------------------------------------------------------------------

PAGELOOM_INLINE float squares(const float* x, int64_t count) {
  vf sum{};
  for (int64_t i = 0; i < count; i += VW) {
    const vf v = load_some<false>(x, i, count - i);
    sum += v * v;
  }
  return reduce_add(sum);
}

PAGELOOM_INLINE void scale(float* x, int64_t count, float factor) {
  for (int64_t i = 0; i < count; i += VW)
    store_some<false>(x, i, load_some<false>(x, i, count - i) * splat(factor), count - i);
}

// How much is kept of each number of a head's keys.
template <bool kBf16>
void decay_keys(const MixProblem& p, int64_t t, const void* x) {
  for (int64_t h = 0; h < p.heads; ++h) {
    const vf rate = splat(p.rate[h] * 1.4426950408889634f);
    for (int64_t i = 0; i < p.keys; i += VW) {
      const int64_t at = h * p.keys + i, left = p.keys - i;
      const vf given = load_some<kBf16>(x, p.decay_at + at, left) + load_some<false>(p.decay_bias, at, left);
      store_some<false>(p.decay + t * p.heads * p.keys, at, exp2_all(softplus_all(given) * rate), left);
    }
  }
}

template <bool kBf16>
void prepare_as(const MixProblem& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const void* const x = row_of<kBf16>(p.x, t, p.x_stride);
    float* const mixed = p.mixed + t * p.channels;
    if (p.has_rule())
      for (int64_t g = 0; g < p.groups; ++g) {
        float *const q = mixed + p.q_at + g * p.keys, *const k = mixed + p.k_at + g * p.keys;
        scale(q, p.keys, 1.0f / sqrtf(squares(q, p.keys) + kLengthEps) / sqrtf((float)p.keys));
        scale(k, p.keys, 1.0f / sqrtf(squares(k, p.keys) + kLengthEps));
      }
    for (int64_t h = 0; h < p.heads; ++h) {
      float* const amount = p.amount + t * p.heads + h;
      if (p.has_rule()) *amount = 1.0f / (1.0f + expf(-scalar<kBf16>(x, p.amount_at + h)));
      if (p.decays != 1) continue;
      float step = softplus(scalar<kBf16>(x, p.decay_at + h) + p.decay_bias[h]);
      if (!p.has_rule()) *amount = step = fminf(fmaxf(step, p.lowest), p.highest);
      p.decay[t * p.heads + h] = expf(p.rate[h] * step);
    }
    if (p.decays != 1) decay_keys<kBf16>(p, t, x);
  }
}

void prepare(const MixProblem& p, int64_t begin, int64_t end) {
  p.bf16 ? prepare_as<true>(p, begin, end) : prepare_as<false>(p, begin, end);
}

template <bool kBf16>
void finish_delta(const MixProblem& p, const void* x, float* made, void* out) {
  for (int64_t h = 0; h < p.heads; ++h) {
    float* const head = made + h * p.values;
    for (int64_t v = 0; v < p.values; v += VW)
      store_some<false>(head, v, rounded<kBf16>(load_some<false>(head, v, p.values - v)), p.values - v);
    const vf factor = splat(1.0f / sqrtf(squares(head, p.values) / (float)p.values + p.norm_eps));
    for (int64_t v = 0; v < p.values; v += VW) {
      const int64_t left = p.values - v, at = h * p.values + v;
      const vf gate = load_some<kBf16>(x, p.gate_at + at, left), weights = load_some<false>(p.norm, v, left);
      if (p.kind == MixKind::kKimi) {
        store_some<kBf16>(out, at, times_sigmoid(load_some<false>(head, v, left) * factor * weights, gate), left);
        continue;
      }
      const vf normed = rounded<kBf16>(load_some<false>(head, v, left) * factor);
      const vf weighted = rounded<kBf16>(weights * normed);
      store_some<kBf16>(out, at, weighted * times_sigmoid(gate, gate), left);
    }
  }
}

template <bool kBf16>
void finish_mamba(const MixProblem& p, const void* x, const float* values, float* made, void* out) {
  for (int64_t h = 0; h < p.heads; ++h) {
    const vf share = splat(p.passed_on == nullptr ? 0.0f : p.passed_on[h]);
    for (int64_t v = 0; v < p.values; v += VW) {
      const int64_t left = p.values - v, at = h * p.values + v;
      const vf gate = load_some<kBf16>(x, p.gate_at + at, left);
      const vf read = load_some<false>(made, at, left) + load_some<false>(values, at, left) * share;
      store_some<false>(made, at, read * times_sigmoid(gate, gate), left);
    }
  }
  const int64_t width = p.inner() / p.groups;
  for (int64_t g = 0; g < p.groups; ++g) {
    float* const some = made + g * width;
    const float factor = p.norm == nullptr ? 1.0f : 1.0f / sqrtf(squares(some, width) / (float)width + p.norm_eps);
    for (int64_t i = 0; i < width; i += VW) {
      const int64_t left = width - i, at = g * width + i;
      vf v = load_some<false>(some, i, left) * splat(factor);
      if (p.norm != nullptr) v = v * load_some<false>(p.norm, at, left);
      store_some<kBf16>(out, at, v, left);
    }
  }
}

template <bool kBf16>
void finish_short(const MixProblem& p, const void* x, const float* mixed, void* out) {
  for (int64_t c = 0; c < p.channels; c += VW) {
    const int64_t left = p.channels - c;
    store_some<kBf16>(out, c, load_some<kBf16>(x, p.gate_at + c, left) * load_some<false>(mixed, c, left), left);
  }
}

template <bool kBf16>
void finish_as(const MixProblem& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const void* const x = row_of<kBf16>(p.x, t, p.x_stride);
    void* const out = (void*)row_of<kBf16>(p.out, t, p.out_stride);
    float* const made = p.made + t * p.inner();
    if (p.kind == MixKind::kShort)
      finish_short<kBf16>(p, x, p.mixed + t * p.channels, out);
    else if (p.has_rule())
      finish_delta<kBf16>(p, x, made, out);
    else
      finish_mamba<kBf16>(p, x, p.mixed + t * p.channels + p.v_at, made, out);
  }
}

void finish(const MixProblem& p, int64_t begin, int64_t end) {
  p.bf16 ? finish_as<true>(p, begin, end) : finish_as<false>(p, begin, end);
}

// -- the recurrence ----------------------------------------------------------------------------------------------------

// S'k of a head's columns. So many sums at once that none waits for another.
PAGELOOM_INLINE void held_by(const float* state, int64_t stride, const float* key, int64_t keys, vf (&held)[NV]) {
  constexpr int64_t kRows = NV >= 8 ? 1 : 8 / NV;
  vf sums[kRows][NV] = {};
  int64_t i = 0;
  for (; i + kRows <= keys; i += kRows)
#pragma GCC unroll 8
    for (int64_t r = 0; r < kRows; ++r) {
      const vf weight = splat(key[i + r]);
#pragma GCC unroll 8
      for (int64_t v = 0; v < NV; ++v) sums[r][v] += weight * loadf(state + (i + r) * stride + v * VW);
    }
  for (; i < keys; ++i)
    for (int64_t v = 0; v < NV; ++v) sums[0][v] += splat(key[i]) * loadf(state + i * stride + v * VW);
#pragma GCC unroll 8
  for (int64_t v = 0; v < NV; ++v) {
    held[v] = sums[0][v];
    for (int64_t r = 1; r < kRows; ++r) held[v] += sums[r][v];
  }
}

// S = decay S + k added'; read = S'q. `kEach`: there is a decay of each number of a key.
template <bool kEach>
PAGELOOM_INLINE void take_over(float* state, int64_t stride, const float* key, const float* query, int64_t keys,
                               const float* decay, const vf (&added)[NV], vf (&read)[NV]) {
  constexpr int64_t kRows = NV >= 8 ? 1 : 2;
  const vf all = splat(*decay);
  vf sums[kRows][NV] = {};
  int64_t i = 0;
  for (; i + kRows <= keys; i += kRows)
#pragma GCC unroll 2
    for (int64_t r = 0; r < kRows; ++r) {
      const vf k = splat(key[i + r]), q = splat(query[i + r]), kept = kEach ? splat(decay[i + r]) : all;
      float* const row = state + (i + r) * stride;
#pragma GCC unroll 8
      for (int64_t v = 0; v < NV; ++v) {
        const vf cell = loadf(row + v * VW) * kept + k * added[v];
        storef(row + v * VW, cell);
        sums[r][v] += q * cell;
      }
    }
  for (; i < keys; ++i)
    for (int64_t v = 0; v < NV; ++v) {
      float* const row = state + i * stride + v * VW;
      const vf cell = loadf(row) * (kEach ? splat(decay[i]) : all) + splat(key[i]) * added[v];
      storef(row, cell);
      sums[0][v] += splat(query[i]) * cell;
    }
#pragma GCC unroll 8
  for (int64_t v = 0; v < NV; ++v) {
    read[v] = sums[0][v];
    for (int64_t r = 1; r < kRows; ++r) read[v] += sums[r][v];
  }
}

// One token through the columns of a head from `column` on; `state`: those of its matrix, rows `stride` apart.
PAGELOOM_INLINE void go_on(const MixProblem& p, int64_t t, int64_t head, int64_t column, int64_t count, float* state,
                           int64_t stride) {
  const float* const mixed = p.mixed + t * p.channels;
  const int64_t group = head / (p.heads / p.groups);
  const float *const key = mixed + p.k_at + group * p.keys, *const query = mixed + p.q_at + group * p.keys;
  const float *const decay = p.decay + (t * p.heads + head) * p.decays, amount = p.amount[t * p.heads + head];
  vf added[NV], read[NV];
  for (int64_t v = 0; v < NV; ++v) {
    const int64_t left = count - v * VW;
    added[v] = left > 0 ? load_some<false>(mixed, p.v_at + head * p.values + column + v * VW, left) : vf{};
  }
  vf held[NV];
  if (p.kind == MixKind::kDelta) {
    held_by(state, stride, key, p.keys, held);
    for (int64_t v = 0; v < NV; ++v) added[v] -= splat(*decay) * held[v];
  } else if (p.kind == MixKind::kKimi) {
    alignas(64) float kept[kMostKeys];
    for (int64_t i = 0; i < p.keys; i += VW)
      store_some<false>(kept, i, load_some<false>(key, i, p.keys - i) * load_some<false>(decay, i, p.keys - i), VW);
    held_by(state, stride, kept, p.keys, held);
    for (int64_t v = 0; v < NV; ++v) added[v] -= held[v];
  }
  for (int64_t v = 0; v < NV; ++v) added[v] *= splat(amount);
  if (p.decays == 1)
    take_over<false>(state, stride, key, query, p.keys, decay, added, read);
  else
    take_over<true>(state, stride, key, query, p.keys, decay, added, read);
  for (int64_t v = 0; v < NV && v * VW < count; ++v)
    store_some<false>(p.made, t * p.inner() + head * p.values + column + v * VW, read[v], count - v * VW);
}

// All columns of a head for a sequence's one token: its matrix is read and written as it lies.
void recur_once(const MixProblem& p, int64_t sequence, int64_t head) {
  static thread_local std::vector<float> whole;
  whole.resize((size_t)(p.keys * p.values));
  const StateSequence& s = p.sequences[sequence];
  const int64_t size = p.keys * p.values * 4, from = p.start + p.matrices_at + head * size;
  if (s.read >= 0)
    StateBytes(p.place, s.read, from).read(whole.data(), size);
  else
    memset(whole.data(), 0, (size_t)size);
  for (int64_t column = 0; column < p.values; column += kMixColumns)
    go_on(p, s.begin, head, column, kMixColumns, whole.data() + column, p.values);
  if (s.first_write < p.writes_end(sequence))
    StateBytes(p.place, p.writes[s.first_write].written, from).write(whole.data(), size);
}

void recur(const MixProblem& p, int64_t sequence, int64_t head, int64_t column) {
  const StateSequence& s = p.sequences[sequence];
  if (s.end - s.begin == 1 && p.values % kMixColumns == 0) {
    if (column == 0) recur_once(p, sequence, head);
    return;
  }
  alignas(64) float state[kMostKeys * kMixColumns];
  const int64_t count = p.values - column < kMixColumns ? p.values - column : kMixColumns;
  const int64_t from = p.start + p.matrices_at + (head * p.keys * p.values + column) * 4, rest = (p.values - count) * 4;
  memset(state, 0, (size_t)(p.keys * kMixColumns) * 4);
  if (s.read >= 0) {
    StateBytes bytes(p.place, s.read, from);
    for (int64_t i = 0; i < p.keys; ++i) bytes.read(state + i * kMixColumns, count * 4, i + 1 < p.keys ? rest : 0);
  }
  int64_t write = s.first_write;
  const int64_t writes_end = p.writes_end(sequence);
  for (int64_t t = s.begin; t < s.end; ++t) {
    go_on(p, t, head, column, count, state, kMixColumns);
    if (write < writes_end && p.writes[write].end == t + 1) {
      StateBytes bytes(p.place, p.writes[write++].written, from);
      for (int64_t i = 0; i < p.keys; ++i) bytes.write(state + i * kMixColumns, count * 4, i + 1 < p.keys ? rest : 0);
    }
  }
}

const MixKernels kKernels = {convolve, prepare, recur, finish};

}  // namespace

const MixKernels* pageloom::PAGELOOM_FOR_ISA(mix_states)() { return &kKernels; }
