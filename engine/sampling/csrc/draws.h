// Gumbel-max over a list, or over a row of which most tokens never need a logarithm.
#pragma once

#include "selection.h"

namespace {

struct Best {
  float score;
  int64_t token;
};

PAGELOOM_INLINE vf scores_of(vf scaled, vi ids, DrawKeys keys) {
  return scaled - log_exponential(random_bits((vu)ids * kTokenStep, keys));
}

// The largest score, the lowest id among equals; the list ends with room for a vector.
Best draw_list(const float* scaled, const int32_t* ids, int64_t n, DrawKeys keys, Best best) {
  for (int64_t i = 0; i < n; i += VW) {
    float scores[VW];
    storef(scores, scores_of(loadf(scaled + i), load_as<vi>(ids + i), keys));
    const int64_t count = n - i < VW ? n - i : VW;
    for (int64_t j = 0; j < count; ++j)
      if (scores[j] > best.score || (scores[j] == best.score && ids[i + j] < best.token))
        best = {scores[j], ids[i + j]};
  }
  return best;
}

constexpr float kHopeless = -22.5f;  // -log(E) <= 22.2

// A token beats `score` only if E < e^(scaled - score), and E is at least the uniform number it comes from: so the bits
// of a token that does are at most this, for every token of a block whose largest logit scales to `scaled`.
PAGELOOM_INLINE vi most_bits(vf scaled, float score) {
  const vf t = (scaled - score) * 1.44269504f + 0.001f;  // 2^0.001: rounding of scores, of E and of this
  const vf below = exp2_rough(t < 0.0f ? t : splat(0.0f)) * 2147483520.0f;
  return t < 0.0f ? __builtin_convertvector(below, vi) + 1 : vi{} + 0x7fffffff;
}

struct Hits {
  int64_t n = 0;
  alignas(64) float scaled[64 + 16];
  alignas(64) int32_t ids[64 + 16];
};

// Which of the 64 tokens from `first` on have bits up to `most`.
PAGELOOM_INLINE uint64_t few_bits(int64_t first, DrawKeys keys, int32_t most) {
  uint64_t found = 0;
  static constexpr uint32_t kSteps[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vu words = (load_as<vu>(kSteps) + (uint32_t)first) * kTokenStep;
  for (int64_t i = 0; i < 64; i += VW) {
    const vu bits = random_bits(words + (uint32_t)i * kTokenStep, keys);
#if defined(__AVX512F__)
    found |= (uint64_t)_mm512_cmple_epi32_mask((__m512i)bits, _mm512_set1_epi32(most)) << i;
#else
    const vi small = (vi)bits <= most;
#if defined(__AVX2__)
    found |= (uint64_t)(uint32_t)_mm256_movemask_ps((__m256)small) << i;
#else
    for (int64_t j = 0; j < VW; ++j) found |= (uint64_t)(small[j] & 1) << (i + j);
#endif
#endif
  }
  return found;
}

// The best of `best` and those of the 64 tokens from `at` on that are `found` and kept.
Best draw_found(const Row& row, const Filter& by, const Border& border, DrawKeys keys, int64_t at, uint64_t found,
                Best best) {
  Hits hits;
  for (; found != 0; found &= found - 1) {
    const int64_t id = at + __builtin_ctzll(found);
    const float x = row.logits[id], s = scaled_one(x, by.top, by.temperature);
    if (s < by.log_min_p || !within(border, order_key(x), id)) continue;
    hits.scaled[hits.n] = s;
    hits.ids[hits.n++] = (int32_t)id;
  }
  return hits.n > 0 ? draw_list(hits.scaled, hits.ids, hits.n, keys, best) : best;
}

int64_t draw_row(const Row& row, const Filter& by, const Border& border, DrawKeys keys) {
  const int64_t first = first_token(row, by.top);
  Best best = draw_found(row, by, border, keys, first / 64 * 64, (uint64_t)1 << first % 64, {-kInfinity, 0});
  const float lowest = border.key == kLowestKey ? -kInfinity : key_value(border.key);
  for (int64_t group = 0; group < row.num_blocks; group += VW) {
    const vf most = loadf(row.maxima + group), scaled = scaled_logit(most, by.top, by.temperature);
    const vi open = (vi)(most >= lowest) & (vi)(scaled >= by.log_min_p) & (vi)(scaled - best.score >= kHopeless);
    const vi limits = most_bits(scaled, best.score);
    for (int64_t b = group; b < row.num_blocks && b < group + VW; ++b) {
      if (!open[b - group]) continue;
      const int64_t stop = b * row.block + tokens_in(row, b);
      for (int64_t at = b * row.block; at < stop; at += 64) {
        uint64_t found = few_bits(at, keys, limits[b - group]);
        if (stop - at < 64) found &= ((uint64_t)1 << (stop - at)) - 1;
        if (found != 0) best = draw_found(row, by, border, keys, at, found, best);
      }
    }
  }
  return best.token;
}

}  // namespace
