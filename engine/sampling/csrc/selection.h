// The same borders for rows that no list of candidates serves: radix selection by passes over the row.
//
// The first digit is linear in the logit, because float bits crowd around 0: 2048 bins between the largest logit and
// where masses vanish. The next ones divide the order keys of the bin that holds the border, at most three times.
#pragma once

#include "prefix.h"

namespace {

// Kept: keys above `key`, and of those that equal it, ids up to `last_id`.
struct Border {
  int32_t key;
  int32_t last_id;
};

constexpr Border kEverything = {kLowestKey, 0x7fffffff};

PAGELOOM_INLINE bool within(const Border& border, int32_t key, int64_t id) {
  return key > border.key || (key == border.key && id <= border.last_id);
}

constexpr int64_t kBins = 2048;

// What tokens weigh (1 each, or their mass), and the first digit of each.
class Weights {
 public:
  Weights(const Row& row, const Filter& by, const Border& outer, bool by_mass)
      : row_(row), by_(by), outer_(outer), by_mass_(by_mass) {
    vf least = splat(by.top);
    for (int64_t i = 0; i < row.vocab; i += VW) {
      const vf x = load_some(row.logits + i, row.vocab - i, by.top);
      least = x < least && x > -kInfinity ? x : least;
    }
    float low = by.top;
    for (int64_t i = 0; i < VW; ++i) low = least[i] < low ? least[i] : low;
    const float span = by.top - low, vanished = 43.0f * by.temperature;
    const float used = span < vanished ? span : vanished;
    scale_ = used > 1e-30f ? (kBins - 1) / used : 1e30f;
  }

  // Loads the piece of <= 64 tokens at `at`.
  void load(int64_t at) {
    n_ = row_.vocab - at < 64 ? row_.vocab - at : 64;
    at_ = at;
  }
  // The same, unless none of its logits lies in [low, high].
  bool load_if_any(int64_t at, float low, float high) {
    load(at);
    const float* x = row_.logits + at;
    int32_t found = 0;
    for (int64_t i = 0; i < n_; ++i) found |= (x[i] >= low) & (x[i] <= high);
    return found != 0;
  }
  int64_t size() const { return n_; }
  void find_keys() {
    for (int64_t i = 0; i < n_; ++i) keys_[i] = order_key(row_.logits[at_ + i]);
  }
  int32_t key(int64_t i) const { return keys_[i]; }  // after find_keys()

  void weigh() {  // after find_keys(), where there is an outer border
    alignas(64) float scaled[64], masses[64];
    scale_piece(row_.logits + at_, n_, by_, scaled, masses);
    if (by_mass_) {
      for (int64_t i = 0; i < n_; ++i) weights_[i] = (int64_t)masses[i];
    } else {
      for (int64_t i = 0; i < n_; ++i) weights_[i] = scaled[i] >= by_.log_min_p;
    }
    if (has_outer())
      for (int64_t i = 0; i < n_; ++i) weights_[i] = within(outer_, keys_[i], at_ + i) ? weights_[i] : 0;
  }
  int64_t weight(int64_t i) const { return weights_[i]; }  // after weigh()

  void find_bins() {
    for (int64_t i = 0; i < n_; i += VW) {
      const vf digit = (by_.top - load_some(row_.logits + at_ + i, n_ - i, -kInfinity)) * scale_;
      const vf last = splat((float)(kBins - 1));
      const vi bin = __builtin_convertvector(digit < last ? digit : last, vi);
      memcpy(bins_ + i, &bin, sizeof bin);
    }
  }
  int32_t bin(int64_t i) const { return bins_[i]; }  // after find_bins()
  bool has_outer() const { return outer_.key != kLowestKey; }
  // A logit not in `bin` lies outside these two, and some beyond the bin's own ends within.
  float bin_low(int64_t bin) const { return bin == kBins - 1 ? -kInfinity : edge(bin + 2); }
  float bin_high(int64_t bin) const { return bin == 0 ? by_.top : edge(bin - 1); }

 private:
  float edge(int64_t bin) const {
    const double x = by_.top - (double)bin / scale_;
    return x < -3.4e38 ? -kInfinity : (float)x;
  }

  const Row& row_;
  const Filter& by_;
  const Border outer_;
  const bool by_mass_;
  float scale_;
  int64_t at_ = 0, n_ = 0;
  alignas(64) int32_t keys_[64];
  alignas(64) int32_t bins_[64];
  alignas(64) int64_t weights_[64];
};

// The bin where the sum from the first one on reaches `target`, which becomes what is still missing before it.
int64_t find_bin(const int64_t* histogram, int64_t& target) {
  int64_t bin = 0;
  while (bin < kBins - 1 && histogram[bin] < target) target -= histogram[bin++];
  return bin;
}

// The mass or number of all tokens by the first digit; returns their sum.
int64_t count_bins(Weights& weights, int64_t vocab, int64_t* histogram) {
  for (int64_t at = 0; at < vocab; at += 64) {
    weights.load(at);
    if (weights.has_outer()) weights.find_keys();
    weights.weigh();
    weights.find_bins();
    for (int64_t i = 0; i < weights.size(); ++i) histogram[weights.bin(i)] += weights.weight(i);
  }
  int64_t total = 0;
  for (int64_t bin = 0; bin < kBins; ++bin) total += histogram[bin];
  return total;
}

struct Keys {
  int32_t low, high;
};

// The least and the greatest key of a bin of the first digit.
Keys keys_of(Weights& weights, int64_t vocab, int64_t bin) {
  Keys keys = {0x7fffffff, kLowestKey};
  const float low = weights.bin_low(bin), high = weights.bin_high(bin);
  for (int64_t at = 0; at < vocab; at += 64) {
    if (!weights.load_if_any(at, low, high)) continue;
    weights.find_keys();
    weights.find_bins();
    for (int64_t i = 0; i < weights.size(); ++i) {
      if (weights.bin(i) != bin) continue;
      keys.low = weights.key(i) < keys.low ? weights.key(i) : keys.low;
      keys.high = weights.key(i) > keys.high ? weights.key(i) : keys.high;
    }
  }
  return keys;
}

// Divides the keys until one is left; `target` becomes what the tokens that equal it must give.
int32_t border_key(Weights& weights, int64_t vocab, Keys keys, int64_t& target) {
  int64_t histogram[kBins];
  while (keys.low < keys.high) {
    int shift = 0;
    while (((int64_t)keys.high - keys.low) >> shift >= kBins) ++shift;
    for (int64_t& bin : histogram) bin = 0;
    for (int64_t at = 0; at < vocab; at += 64) {
      if (!weights.load_if_any(at, key_value(keys.low), key_value(keys.high))) continue;
      weights.find_keys();
      weights.weigh();
      for (int64_t i = 0; i < weights.size(); ++i)
        if (weights.key(i) >= keys.low && weights.key(i) <= keys.high)
          histogram[((int64_t)keys.high - weights.key(i)) >> shift] += weights.weight(i);
    }
    const int64_t first = keys.high - (find_bin(histogram, target) << shift);
    const int64_t last = first - (((int64_t)1 << shift) - 1);
    keys = {last > keys.low ? (int32_t)last : keys.low, (int32_t)first};
  }
  return keys.low;
}

// The shortest prefix, of what `outer` and min-p keep, that holds `k` tokens (k > 0), or `top_p` of the mass (k = 0).
// All of it where it holds less.
Border select(const Row& row, const Filter& by, const Border& outer, int64_t k, float top_p) {
  Weights weights(row, by, outer, k == 0);
  int64_t histogram[kBins] = {};
  const int64_t total = count_bins(weights, row.vocab, histogram);
  int64_t target = k > 0 ? k : target_of((double)total, top_p);
  if (target >= total) return outer;
  const int64_t bin = find_bin(histogram, target);
  const int32_t key = border_key(weights, row.vocab, keys_of(weights, row.vocab, bin), target);
  int64_t last_id = 0;
  for (int64_t at = 0; at < row.vocab && target > 0; at += 64) {
    if (!weights.load_if_any(at, key_value(key), key_value(key))) continue;
    weights.find_keys();
    weights.weigh();
    for (int64_t i = 0; i < weights.size() && target > 0; ++i) {
      if (weights.key(i) != key || weights.weight(i) == 0) continue;
      target -= weights.weight(i);
      last_id = at + i;
    }
  }
  return {key, (int32_t)last_id};
}

}  // namespace
