// Recurrences over sequences' tokens, whose states are matrices (gated delta nets, Mamba 2): token after token, with 32
// columns of a head's matrix in the first level of the caches. Columns do not need each other, and a token costs the same
// products alone or among many, so its bits are the same in any step.
#include <math.h>
#include <stddef.h>

#include "mix_rows.h"

using namespace pageloom;

namespace {

constexpr float kLengthEps = 1e-6f;
constexpr int64_t NV = kMixColumns / VW;

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

// Sums over a head's keys for kMixColumns columns: of rows in turns, so many at once that none waits for another.
constexpr int64_t kHeldRows = NV >= 8 ? 1 : 8 / NV, kReadRows = NV >= 8 ? 1 : 2;
struct Held {
  vf of[kHeldRows][NV];
};
struct Read {
  vf of[kReadRows][NV];
};

// Not by `= {}`, which is a slow instruction for so few bytes.
template <class Sums>
PAGELOOM_INLINE void clear(Sums& sums) {
#pragma GCC unroll 8
  for (int64_t r = 0; r < (int64_t)(sizeof sums.of / sizeof sums.of[0]); ++r)
#pragma GCC unroll 8
    for (int64_t v = 0; v < NV; ++v) sums.of[r][v] = vf{};
}

template <class Sums, int64_t kRows>
PAGELOOM_INLINE vf total(const Sums& sums, int64_t v) {
  vf sum = sums.of[0][v];
  for (int64_t r = 1; r < kRows; ++r) sum += sums.of[r][v];
  return sum;
}

// S'k, of some keys. A function of its own: what is summed stays in registers.
__attribute__((noinline)) void held_by(const float* state, int64_t stride, const float* key, int64_t keys, Held& held) {
  vf sums[kHeldRows][NV];
  memcpy(sums, held.of, sizeof sums);
  int64_t i = 0;
  for (; i + kHeldRows <= keys; i += kHeldRows)
#pragma GCC unroll 8
    for (int64_t r = 0; r < kHeldRows; ++r) {
      const vf weight = splat(key[i + r]);
#pragma GCC unroll 8
      for (int64_t v = 0; v < NV; ++v) sums[r][v] += weight * loadf(state + (i + r) * stride + v * VW);
    }
  memcpy(held.of, sums, sizeof sums);
  for (int64_t r = 0; i < keys; ++i, ++r)
    for (int64_t v = 0; v < NV; ++v) held.of[r][v] += splat(key[i]) * loadf(state + i * stride + v * VW);
}

// What a walk over a state changes and sums.
struct Walk {
  const float *key, *query, *decay;
  const float* next;  // what the token behind this one asks the state for
  const vf* added;    // [NV]
  Read* read;
  Held* held;  // by the state that is left, of the token behind this one
};

// S = decay S + k added', from where it is to where it is to be; read = S'q, and, `kAsk`, held = S'next. `kEach`: there is a
// decay of each number of a key. So many columns at once that all sums stay in registers.
template <bool kEach, bool kAsk>
__attribute__((noinline)) void take_over(const float* from, float* to, int64_t stride, int64_t keys, const Walk& walk) {
  constexpr int64_t kTile = NV < 2 ? NV : 2;
  const float *const key = walk.key, *const query = walk.query, *const decay = walk.decay, *const next = walk.next;
  const vf all = splat(*decay);
  for (int64_t first = 0; first < NV; first += kTile, from += kTile * VW, to += kTile * VW) {
    vf read[kReadRows][kTile], held[kHeldRows][kTile], added[kTile];
#pragma GCC unroll 8
    for (int64_t v = 0; v < kTile; ++v) {
      added[v] = walk.added[first + v];
#pragma GCC unroll 8
      for (int64_t r = 0; r < kReadRows; ++r) read[r][v] = walk.read->of[r][first + v];
#pragma GCC unroll 8
      for (int64_t r = 0; kAsk && r < kHeldRows; ++r) held[r][v] = walk.held->of[r][first + v];
    }
    int64_t i = 0;
    for (; i + kHeldRows <= keys; i += kHeldRows)
#pragma GCC unroll 8
      for (int64_t r = 0; r < kHeldRows; ++r) {
        const vf k = splat(key[i + r]), q = splat(query[i + r]), kept = kEach ? splat(decay[i + r]) : all;
        const vf asked = kAsk ? splat(next[i + r]) : vf{};
        const int64_t row = (i + r) * stride;
#pragma GCC unroll 8
        for (int64_t v = 0; v < kTile; ++v) {
          const vf cell = loadf(from + row + v * VW) * kept + k * added[v];
          storef(to + row + v * VW, cell);
          read[r % kReadRows][v] += q * cell;
          if (kAsk) held[r][v] += asked * cell;
        }
      }
#pragma GCC unroll 8
    for (int64_t v = 0; v < kTile; ++v) {
#pragma GCC unroll 8
      for (int64_t r = 0; r < kReadRows; ++r) walk.read->of[r][first + v] = read[r][v];
#pragma GCC unroll 8
      for (int64_t r = 0; kAsk && r < kHeldRows; ++r) walk.held->of[r][first + v] = held[r][v];
    }
    for (int64_t r = 0; i < keys; ++i, ++r)
      for (int64_t v = 0; v < kTile; ++v) {
        const int64_t at = i * stride + v * VW;
        const vf cell = loadf(from + at) * (kEach ? splat(decay[i]) : all) + splat(key[i]) * added[v];
        storef(to + at, cell);
        walk.read->of[r % kReadRows][first + v] += splat(query[i]) * cell;
        if (kAsk) walk.held->of[r][first + v] += splat(next[i]) * cell;
      }
  }
}

// What one token brings to a head.
struct HeadToken {
  // `kept`: room for as many numbers as a head has keys, rounded up to a vector.
  HeadToken(const MixProblem& p, int64_t t, int64_t head, float* kept)
      : key(p.mixed + t * p.channels + p.k_at + head / (p.heads / p.groups) * p.keys), query(key - p.k_at + p.q_at),
        value(p.mixed + t * p.channels + p.v_at + head * p.values), decay(p.decay + (t * p.heads + head) * p.decays),
        asked(key), made(p.made + t * p.inner() + head * p.values), amount(p.amount[t * p.heads + head]), decays(p.decays) {
    if (decays == 1) return;
    asked = kept;
    for (int64_t i = 0; i < p.keys; i += VW)
      storef(kept + i, load_some<false>(key, i, p.keys - i) * load_some<false>(decay, i, p.keys - i));
  }

  // `held`: what the state held, of the delta rule.
  void add(int64_t column, int64_t count, const Held* held, vf (&added)[NV]) const {
    const vf left_of_it = splat(decays == 1 ? *decay : 1.0f);
    for (int64_t v = 0; v < NV; ++v) {
      const int64_t left = count - v * VW;
      added[v] = left > 0 ? load_some<false>(value, column + v * VW, left) : vf{};
      if (held != nullptr) added[v] -= left_of_it * total<Held, kHeldRows>(*held, v);
      added[v] *= splat(amount);
    }
  }
  // Keys from `first` on. `next`: null, or the token behind this one, of which `held` is summed.
  void take(const float* from, float* to, int64_t stride, int64_t first, int64_t keys, const vf (&added)[NV], Read& read,
            const HeadToken* next = nullptr, Held* held = nullptr) const {
    const Walk walk = {key + first, query + first, decay + (decays == 1 ? 0 : first),
                       next == nullptr ? nullptr : next->asked + first, added, &read, held};
    const auto go = decays == 1 ? (next == nullptr ? take_over<false, false> : take_over<false, true>)
                                : (next == nullptr ? take_over<true, false> : take_over<true, true>);
    go(from, to, stride, keys, walk);
  }
  void store(int64_t column, int64_t count, const Read& read) const {
    for (int64_t v = 0; v < NV && v * VW < count; ++v)
      store_some<false>(made, column + v * VW, total<Read, kReadRows>(read, v), count - v * VW);
  }

  const float *key, *query, *value, *decay;
  const float* asked;  // what a state before its decay is asked for: what it holds for that, behind it
  float* made;
  float amount;
  int64_t decays;
};

constexpr int64_t kKeysAtOnce = 16;                  // rows of a matrix, all columns; of whatever is summed in turns a multiple
constexpr int64_t kMostOnce = 16 * kMixColumns;      // columns of a head that `recur_once` takes

// All columns of a head for a sequence's one token, where its matrix lies: a walk over it for what it holds, in the order
// of memory, and another that changes it.
void recur_once(const MixProblem& p, int64_t sequence, int64_t head) {
  const StateSequence& s = p.sequences[sequence];
  const int64_t from = p.start + p.matrices_at + head * p.keys * p.values * 4, blocks = p.values / kMixColumns;
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

// What a token brings: tokens lie so far apart that no CPU guesses the next one.
PAGELOOM_INLINE void ask_for(const MixProblem& p, int64_t t, int64_t head, int64_t column) {
  const float* const mixed = p.mixed + t * p.channels;
  const int64_t group = head / (p.heads / p.groups);
  for (int64_t i = 0; i < p.keys; i += 64 / 4) {
    __builtin_prefetch(mixed + p.k_at + group * p.keys + i);
    __builtin_prefetch(mixed + p.q_at + group * p.keys + i);
  }
  for (int64_t i = 0; i < kMixColumns; i += 64 / 4) {
    __builtin_prefetch(mixed + p.v_at + head * p.values + column + i);
    __builtin_prefetch(p.made + t * p.inner() + head * p.values + column + i, 1);
  }
  __builtin_prefetch(p.amount + t * p.heads + head);
  for (int64_t i = 0; i < p.decays; i += 64 / 4) __builtin_prefetch(p.decay + (t * p.heads + head) * p.decays + i);
}

void recur(const MixProblem& p, int64_t sequence, int64_t head, int64_t column) {
  const StateSequence& s = p.sequences[sequence];
  if (s.begin == s.end) return;
  if (s.end - s.begin == 1 && p.values % kMixColumns == 0 && p.values <= kMostOnce) {
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
  alignas(64) float kept[2][kMostKeys];
  HeadToken token(p, s.begin, head, kept[0]);
  const bool delta = p.has_rule();
  Held held;
  Read read;
  clear(held);
  if (delta) held_by(state, kMixColumns, token.asked, p.keys, held);
  for (int64_t t = s.begin; t < s.end; ++t) {
    if (t + 2 < s.end) ask_for(p, t + 2, head, column);
    const bool last = t + 1 == s.end;
    const HeadToken next = last ? token : HeadToken(p, t + 1, head, kept[(t + 1 - s.begin) % 2]);
    vf added[NV];
    token.add(column, count, delta ? &held : nullptr, added);
    clear(read), clear(held);
    token.take(state, state, kMixColumns, 0, p.keys, added, read, delta && !last ? &next : nullptr, &held);
    token.store(column, count, read);
    token = next;
    if (write < writes_end && p.writes[write].end == t + 1) {
      StateBytes bytes(p.place, p.writes[write++].written, from);
      for (int64_t i = 0; i < p.keys; ++i) bytes.write(state + i * kMixColumns, count * 4, i + 1 < p.keys ? rest : 0);
    }
  }
}

const MixKernels kKernels = {convolve, prepare, recur, finish};

}  // namespace

const MixKernels* pageloom::PAGELOOM_FOR_ISA(mix_states)() { return &kKernels; }
