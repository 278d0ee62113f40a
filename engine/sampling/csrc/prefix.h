// Where min-p, top-k and top-p end: each keeps a prefix of one order (larger logit first, lower id among equals).
//
// Masses are the torch path's: floor(e^scaled * unit) in 64-bit integers, whose sums no order can change. A row's total
// need not be known exactly: an estimate with a bound on its error decides nearly every row, and the others are summed.
#pragma once

#include "candidates.h"

namespace {

constexpr int32_t kLowestKey = -2147483647 - 1;

struct Filter {
  float top;
  float temperature;
  float log_min_p;
  float unit;  // the mass of the largest probability: a power of two with which a row's total fits 63 bits
};

PAGELOOM_INLINE float mass_unit(int64_t vocab) {
  int bits = 0;
  while (vocab >> bits) ++bits;
  return (float)((int64_t)1 << (62 - bits));
}

PAGELOOM_INLINE int64_t target_of(double total, double top_p) {
  const double target = __builtin_ceil(total * top_p);
  return target < 1.0 ? 1 : (int64_t)target;
}

// Scaled logits, keys and masses of n <= 64 tokens; mass 0 for what min-p removes.
PAGELOOM_INLINE void scale_piece(const float* x, int64_t n, const Filter& by, float* scaled, float* weights) {
  for (int64_t i = 0; i < n; i += VW) {
    const vf s = scaled_logit(load_some(x + i, n - i, -kInfinity), by.top, by.temperature);
    const vf e = exp_precise(s) * by.unit;
    storef(scaled + i, s);
    storef(weights + i, s >= by.log_min_p ? e : splat(0.0f));
  }
}

void prepare(List& list, const Filter& by) {
  for (int64_t i = 0; i < list.n; i += VW) {
    const vf x = load_some(list.logits + i, list.n - i, -kInfinity);
    storef(list.scaled + i, scaled_logit(x, by.top, by.temperature));
  }
  for (int64_t i = 0; i < list.n; ++i) list.keys[i] = order_key(list.logits[i]);
}

PAGELOOM_INLINE void move(List& list, int64_t from, int64_t to) {
  list.logits[to] = list.logits[from];
  list.ids[to] = list.ids[from];
  list.scaled[to] = list.scaled[from];
  list.keys[to] = list.keys[from];
  list.mass[to] = list.mass[from];
}

void apply_min_p(List& list, float log_min_p) {
  int64_t n = 0;
  for (int64_t i = 0; i < list.n; ++i)
    if (list.scaled[i] >= log_min_p) move(list, i, n++);
  list.n = n;
}

// Keeps what is above `key`, and the first `ties` of those that equal it.
void cut(List& list, int32_t key, int64_t ties) {
  int64_t n = 0;
  for (int64_t i = 0; i < list.n; ++i)
    if (list.keys[i] > key || (list.keys[i] == key && ties-- > 0)) move(list, i, n++);
  list.n = n;
}

void apply_top_k(List& list, int64_t k) {
  if (list.n <= k) return;
  int64_t low = list.keys[0], high = low;
  for (int64_t i = 1; i < list.n; ++i) {
    low = list.keys[i] < low ? list.keys[i] : low;
    high = list.keys[i] > high ? list.keys[i] : high;
  }
  ++high;
  while (high - low > 1) {  // as many as k reach low, fewer reach high
    const int64_t middle = low + (high - low) / 2;
    int32_t count = 0;
    for (int64_t i = 0; i < list.n; ++i) count += list.keys[i] >= (int32_t)middle;
    (count >= k ? low : high) = middle;
  }
  int64_t above = 0;
  for (int64_t i = 0; i < list.n; ++i) above += list.keys[i] > low;
  cut(list, (int32_t)low, k - above);
}

int64_t weigh(List& list, float unit) {
  alignas(64) float masses[64];
  int64_t total = 0;
  for (int64_t i = 0; i < list.n; i += 64) {
    const int64_t n = list.n - i < 64 ? list.n - i : 64;
    for (int64_t j = 0; j < n; j += VW) storef(masses + j, exp_precise(loadf(list.scaled + i + j)) * unit);
    for (int64_t j = 0; j < n; ++j) total += list.mass[i + j] = (int64_t)masses[j];
  }
  return total;
}

struct MassBorder {
  int32_t key;
  int64_t ties;
  int64_t reached;  // the mass of what is kept
};

// The shortest prefix with mass >= target, which is at most the list's.
MassBorder mass_border(const List& list, int64_t target) {
  int64_t low = list.keys[0], high = low;
  for (int64_t i = 1; i < list.n; ++i) {
    low = list.keys[i] < low ? list.keys[i] : low;
    high = list.keys[i] > high ? list.keys[i] : high;
  }
  ++high;
  int64_t above = 0;  // the mass that reaches high
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    int64_t mass = 0;
    for (int64_t i = 0; i < list.n; ++i) mass += list.keys[i] >= (int32_t)middle ? list.mass[i] : 0;
    if (mass >= target) {
      low = middle;
    } else {
      high = middle;
      above = mass;
    }
  }
  int64_t each = 1;
  for (int64_t i = 0; i < list.n; ++i)
    if (list.keys[i] == low) each = list.mass[i];
  const int64_t ties = (target - above + each - 1) / each;
  return {(int32_t)low, ties, above + ties * each};
}

// The sum of e^((x - top) / temperature) over the row. Blocks are left out that add less than e^-margin altogether; else
// the relative error is below 2e-5.
double rough_total(const Row& row, float top, float temperature, float margin) {
  const float all = 0.6931472f * (float)(32 - __builtin_clz((uint32_t)row.vocab));
  const float negligible = top - temperature * (margin + all), rate = 1.44269504088896341f / temperature;
  double total = 0.0;
  for (int64_t b = 0; b < row.num_blocks;) {
    vf sum = splat(0.0f), other = sum;
    for (const int64_t stop = b + (row.block < 2048 ? 2048 / row.block : 1); b < row.num_blocks && b < stop; ++b) {
      if (row.maxima[b] < negligible) continue;
      const float* x = row.logits + b * row.block;
      const int64_t n = tokens_in(row, b);
      int64_t i = 0;
      for (; i + 2 * VW <= n; i += 2 * VW) {
        sum += exp2_rough((loadf(x + i) - top) * rate);
        other += exp2_rough((loadf(x + i + VW) - top) * rate);
      }
      for (; i < n; i += VW) sum += exp2_rough((load_some(x + i, n - i, -kInfinity) - top) * rate);
    }
    total += (double)reduce_add(sum + other);
  }
  return total;
}

int64_t exact_total(const Row& row, const Filter& by) {
  alignas(64) float scaled[64], weights[64];
  int64_t total = 0;
  for (int64_t at = 0; at < row.vocab; at += 64) {
    const int64_t n = row.vocab - at < 64 ? row.vocab - at : 64;
    scale_piece(row.logits + at, n, by, scaled, weights);
    for (int64_t i = 0; i < n; ++i) total += (int64_t)weights[i];
  }
  return total;
}

}  // namespace
