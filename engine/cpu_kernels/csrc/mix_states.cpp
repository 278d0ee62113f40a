// Recurrences over sequences' tokens, whose states are matrices (gated delta nets, Mamba 2): token after token, with 32
// columns of a head's matrix in the first level of the caches. Columns do not need each other, and a token costs the same
// products alone or among many, so its bits are the same in any step.
#include <math.h>
#include <stddef.h>

#include "mix_walk.h"

using namespace pageloom;

namespace {

constexpr float kLengthEps = 1e-6f;
PAGELOOM_INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// The same of many vectors at once, stage by stage: a CPU looks ahead over few logarithms. What 1 + y has lost of a small y is
// put right by what it holds of it.
template <int64_t kMany>
PAGELOOM_INLINE void softplus_all(vf (&x)[kMany]) {
  vf y[kMany], s[kMany];
  vi exponent[kMany];
#pragma GCC unroll 8
  for (int64_t i = 0; i < kMany; ++i) y[i] = exp2_all(x[i] * 1.4426950408889634f);
#pragma GCC unroll 8
  for (int64_t i = 0; i < kMany; ++i) {
    const vf u = 1.0f + y[i];
    exponent[i] = ((vi)u - 0x3f3504f3) >> 23;  // of u / sqrt(1/2)
    const vf m = (vf)((vi)u - (exponent[i] << 23));
    s[i] = (m - 1.0f) / (m + 1.0f);
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < kMany; ++i) {
    const vf s2 = s[i] * s[i], held = (1.0f + y[i]) - 1.0f;
    const vf series = 2.0f * s[i] * (1.0f + s2 * (1.0f / 3 + s2 * (1.0f / 5 + s2 * (1.0f / 7 + s2 * (1.0f / 9)))));
    const vf log = series + __builtin_convertvector(exponent[i], vf) * 0.6931471805599453f;
    x[i] = x[i] > 20.0f ? x[i] : held == 0.0f ? y[i] : log * (y[i] / held);
  }
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

// How much is kept of `kMany` vectors of the numbers of a head's keys.
template <bool kBf16, int64_t kMany>
PAGELOOM_INLINE void decay_some(const MixProblem& p, const void* x, int64_t at, int64_t left, vf rate, float* decay) {
  vf given[kMany];
#pragma GCC unroll 8
  for (int64_t i = 0; i < kMany; ++i)
    given[i] = load_some<kBf16>(x, p.decay_at + at + i * VW, left) + load_some<false>(p.decay_bias, at + i * VW, left);
  softplus_all(given);
#pragma GCC unroll 8
  for (int64_t i = 0; i < kMany; ++i) store_some<false>(decay, i * VW, exp2_all(given[i] * rate), left);
}

// Of all of them.
template <bool kBf16>
void decay_keys(const MixProblem& p, int64_t t, const void* x) {
  constexpr int64_t kMany = 4;
  for (int64_t h = 0; h < p.heads; ++h) {
    const vf rate = splat(p.rate[h] * 1.4426950408889634f);
    const int64_t first = h * p.keys;
    float* const decay = p.decay_of(t) + first;
    int64_t i = 0;
    for (; i + kMany * VW <= p.keys; i += kMany * VW) decay_some<kBf16, kMany>(p, x, first + i, VW, rate, decay + i);
    for (; i < p.keys; i += VW) decay_some<kBf16, 1>(p, x, first + i, p.keys - i, rate, decay + i);
  }
}

template <bool kBf16>
void prepare_as(const MixProblem& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const void* const x = row_of<kBf16>(p.x, t, p.x_stride);
    float* const mixed = p.mixed_of(t);
    if (p.has_rule())
      for (int64_t g = 0; g < p.groups; ++g) {
        float *const q = mixed + p.q_at + g * p.keys, *const k = mixed + p.k_at + g * p.keys;
        scale(q, p.keys, 1.0f / sqrtf(squares(q, p.keys) + kLengthEps) / sqrtf((float)p.keys));
        scale(k, p.keys, 1.0f / sqrtf(squares(k, p.keys) + kLengthEps));
      }
    for (int64_t h = 0; h < p.heads; ++h) {
      float* const amount = p.amount_of(t) + h;
      if (p.has_rule()) *amount = 1.0f / (1.0f + expf(-scalar<kBf16>(x, p.amount_at + h)));
      if (p.decays != 1) continue;
      float step = softplus(scalar<kBf16>(x, p.decay_at + h) + p.decay_bias[h]);
      if (!p.has_rule()) *amount = step = fminf(fmaxf(step, p.lowest), p.highest);
      p.decay_of(t)[h] = expf(p.rate[h] * step);
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
    float* const made = p.made_of(t);
    if (p.kind == MixKind::kShort)
      finish_short<kBf16>(p, x, p.mixed_of(t), out);
    else if (p.has_rule())
      finish_delta<kBf16>(p, x, made, out);
    else
      finish_mamba<kBf16>(p, x, p.mixed_of(t) + p.v_at, made, out);
  }
}

void finish(const MixProblem& p, int64_t begin, int64_t end) {
  p.bf16 ? finish_as<true>(p, begin, end) : finish_as<false>(p, begin, end);
}

// -- the recurrence ----------------------------------------------------------------------------------------------------

constexpr int64_t kKeysAtOnce = 16;                  // rows of a matrix, all columns; of whatever is summed in turns a multiple
static_assert(kKeysAtOnce % kHeldRows == 0, "else sums of pieces are others than those of all keys");
constexpr int64_t kMostOnce = 16 * kMixColumns;      // columns of a head that `recur_once` takes

// All columns of a head for a sequence's one token, where its matrix lies: a walk over it for what it holds, in the order
// of memory, and another that changes it.
void recur_once(const MixProblem& p, int64_t sequence, int64_t head) {
  const StateSequence& s = p.sequences[sequence];
  const int64_t from = p.bytes_at(head, 0), blocks = p.values / kMixColumns;
  alignas(64) float kept_keys[kMostKeys];
  const HeadToken token(p, s.begin, head, kept_keys);
  alignas(64) float some[kKeysAtOnce * kMostOnce], more[kKeysAtOnce * kMostOnce];
  Held held[kMostOnce / kMixColumns];
  Read read[kMostOnce / kMixColumns];
  vf added[kMostOnce / kMixColumns][NV];
  const bool delta = p.has_rule(), has_state = s.read >= 0;
  for (int64_t b = 0; b < blocks; ++b) clear(held[b]), clear(read[b]);
  if (delta && has_state) {
    StateBytes bytes(p.place, s.read, from);
    for (int64_t i = 0; i < p.keys; i += kKeysAtOnce) {
      const int64_t keys = p.keys - i < kKeysAtOnce ? p.keys - i : kKeysAtOnce;
      bytes.read(some, keys * p.values * 4);
      for (int64_t b = 0; b < blocks; ++b) held_by(some + b * kMixColumns, p.values, token.asked + i, keys, held[b]);
    }
  }
  for (int64_t b = 0; b < blocks; ++b) token.add(b * kMixColumns, kMixColumns, delta ? &held[b] : nullptr, added[b]);
  const bool kept = s.first_write < p.writes_end(sequence);
  if (!has_state) memset(some, 0, sizeof(some));
  StateBytes old(p.place, has_state ? s.read : 0, from);
  StateBytes now(p.place, kept ? p.writes[s.first_write].written : 0, from);
  for (int64_t i = 0; i < p.keys; i += kKeysAtOnce) {
    const int64_t keys = p.keys - i < kKeysAtOnce ? p.keys - i : kKeysAtOnce, size = keys * p.values * 4;
    const float* rows = some;
    if (has_state) {
      const float* const here = delta ? (const float*)old.whole(size) : nullptr;
      if (here != nullptr) rows = here; else old.read(some, size);
    }
    float* const there = kept ? (float*)now.whole(size) : nullptr;
    float* const to = there != nullptr ? there : more;
    for (int64_t b = 0; b < blocks; ++b)
      token.take(rows + b * kMixColumns, to + b * kMixColumns, p.values, i, keys, added[b], read[b]);
    if (kept && there == nullptr) now.write(more, size);
  }
  for (int64_t b = 0; b < blocks; ++b) token.store(b * kMixColumns, kMixColumns, read[b]);
}

// What a token brings: tokens lie so far apart that no CPU guesses the next one. Some lines now, others on the way.
PAGELOOM_INLINE Later ask_for(const MixProblem& p, int64_t t, int64_t head, int64_t column) {
  const int64_t group = head / (p.heads / p.groups), value = head * p.values + column;
  const float *const mixed = p.mixed_of(t), *const made = p.made_of(t) + value;
  const float* const decay = p.decay_of(t) + head * p.decays;
  for (int64_t i = 0; i < kMixColumns; i += 64 / 4) {
    __builtin_prefetch(mixed + p.v_at + value + i);
    __builtin_prefetch(made + i, 1);
  }
  __builtin_prefetch(p.amount_of(t) + head);
  if (p.decays == 1) __builtin_prefetch(decay);
  return {mixed + p.k_at + group * p.keys, mixed + p.q_at + group * p.keys, decay};
}

// Columns of a head's matrix, rows kMixColumns apart, as the sequence's first token of the stretch finds them.
void find_state(const MixProblem& p, const StateSequence& s, int64_t head, int64_t column, int64_t count, float* state) {
  const size_t size = (size_t)(p.keys * kMixColumns) * 4;
  if (p.begin_of(s) > s.begin) {
    memcpy(state, p.carried[0] + p.carried_at(head, column), size);
    return;
  }
  memset(state, 0, size);
  if (s.read < 0) return;
  StateBytes bytes(p.place, s.read, p.bytes_at(head, column));
  for (int64_t i = 0; i < p.keys; ++i)
    bytes.read(state + i * kMixColumns, count * 4, i + 1 < p.keys ? (p.values - count) * 4 : 0);
}

void keep_state(const MixProblem& p, int64_t written, int64_t head, int64_t column, int64_t count, const float* state) {
  StateBytes bytes(p.place, written, p.bytes_at(head, column));
  for (int64_t i = 0; i < p.keys; ++i)
    bytes.write(state + i * kMixColumns, count * 4, i + 1 < p.keys ? (p.values - count) * 4 : 0);
}

void recur(const MixProblem& p, int64_t sequence, int64_t head, int64_t column) {
  const StateSequence& s = p.sequences[sequence];
  const int64_t begin = p.begin_of(s), end = p.end_of(s);
  if (begin == end) return;
  if (s.end - s.begin == 1 && p.values % kMixColumns == 0 && p.values <= kMostOnce) {
    if (column == 0) recur_once(p, sequence, head);
    return;
  }
  alignas(64) float state[kMostKeys * kMixColumns], kept[2][kMostKeys];
  const int64_t count = p.values - column < kMixColumns ? p.values - column : kMixColumns;
  find_state(p, s, head, column, count, state);
  int64_t write = p.next_write(sequence);
  const int64_t writes_end = p.writes_end(sequence);
  HeadToken token(p, begin, head, kept[0]);
  const bool delta = p.has_rule();
  Held held;
  Read read;
  clear(held);
  if (delta) held_by(state, kMixColumns, token.asked, p.keys, held);
  for (int64_t t = begin; t < end; ++t) {
    Later later;
    if (t + 2 < end) later = ask_for(p, t + 2, head, column);
    const bool last = t + 1 == end;
    const HeadToken next = last ? token : HeadToken(p, t + 1, head, kept[(t + 1 - begin) % 2]);
    vf added[NV];
    token.add(column, count, delta ? &held : nullptr, added);
    clear(read), clear(held);
    token.take(state, state, kMixColumns, 0, p.keys, added, read, delta && !last ? &next : nullptr, &held,
               t + 2 < end ? &later : nullptr);
    token.store(column, count, read);
    token = next;
    if (write < writes_end && p.writes[write].end == t + 1) keep_state(p, p.writes[write++].written, head, column, count, state);
  }
  if (end < s.end) memcpy(p.carried[1] + p.carried_at(head, column), state, (size_t)(p.keys * kMixColumns) * 4);
}

const MixKernels kKernels = {convolve, prepare, recur, finish};

}  // namespace

const MixKernels* pageloom::PAGELOOM_FOR_ISA(mix_states)() { return &kKernels; }
