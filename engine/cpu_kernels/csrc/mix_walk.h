// Walks over a head's matrix: what a token asks it for, and what a token changes of it.
#pragma once

#include "mix_rows.h"

namespace pageloom {
namespace {

constexpr int64_t NV = kMixColumns / VW;

// Sums over a head's keys for kMixColumns columns: of rows in turns, so many at once that none waits for another.
constexpr int64_t kHeldRows = NV >= 8 ? 1 : 8 / NV, kReadRows = NV >= 8 ? 1 : 2;
static_assert(kHeldRows % kReadRows == 0, "walks take kHeldRows rows at once");
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

// What a token further on brings, which is asked for on the way.
struct Later {
  const float *key, *query, *decay;
};

// What a walk over a state changes and sums.
struct Walk {
  const float *key, *query, *decay;
  const float* next;  // what the token behind this one asks the state for
  const vf* added;    // [NV]
  Read* read;
  Held* held;  // by the new state, of what the token behind this one asks for
  const Later* later;  // or null
};

// All at once they would wait for each other: a CPU has a score of misses under way.
template <bool kEach>
PAGELOOM_INLINE void ask_for_later(const Walk& walk, int64_t i) {
  if (walk.later == nullptr || i % (64 / 4) != 0) return;
  __builtin_prefetch(walk.later->key + i);
  __builtin_prefetch(walk.later->query + i);
  if (kEach) __builtin_prefetch(walk.later->decay + i);
}

// S = decay S + k added', from where it is to where it is to be; read = S'q, and, `kAsk`, held = S'next. `kEach`: there is a
// decay of each number of a key. So many columns at once that all sums stay in registers.
template <bool kEach, bool kAsk>
__attribute__((noinline)) void take_over(const float* from, float* to, int64_t stride, int64_t keys, const Walk& walk) {
  constexpr int64_t kTile = NV < 2 ? NV : 2;
  static_assert(NV % kTile == 0, "");
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
    for (; i + kHeldRows <= keys; i += kHeldRows) {
      if (first == 0) ask_for_later<kEach>(walk, i);
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
      : key(p.mixed_of(t) + p.k_at + head / (p.heads / p.groups) * p.keys), query(key - p.k_at + p.q_at),
        value(p.mixed_of(t) + p.v_at + head * p.values), decay(p.decay_of(t) + head * p.decays),
        asked(key), made(p.made_of(t) + head * p.values), amount(p.amount_of(t)[head]), decays(p.decays) {
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
            const HeadToken* next = nullptr, Held* held = nullptr, const Later* later = nullptr) const {
    const Walk walk = {key + first, query + first, decay + (decays == 1 ? 0 : first),
                       next == nullptr ? nullptr : next->asked + first, added, &read, held, later};
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

}  // namespace
}  // namespace pageloom
