// One row: its token, its log-probabilities, its penalties. Compiled once per ISA.
#include "draws.h"

namespace pageloom {
namespace {

bool is_finite(float x) { return x - x == 0.0f; }

struct Asked {
  bool top_k, min_p, top_p;
};

// A limit below which min-p keeps nothing; which tokens it keeps is decided on scaled logits.
float min_p_limit(const Filter& by) {
  const double reach = (double)by.log_min_p * by.temperature;
  const double limit = by.top + reach - 1e-6 * (__builtin_fabs(by.top) + __builtin_fabs(reach));
  return limit < -3.4e38 ? -kInfinity : (float)limit;
}

int64_t draw_from(const List& list, DrawKeys keys) {
  return draw_list(list.scaled, list.ids, list.n, keys, {-kInfinity, 0}).token;
}

// Rows with top-k or min-p: whatever can be kept is in one list. -1: the list cannot hold it.
int64_t draw_kept(const Row& row, const Filter& by, const Parameters& p, const Asked& asked, DrawKeys keys) {
  float limit = asked.min_p ? min_p_limit(by) : -kInfinity;
  if (asked.top_k && row.vocab > kListed) {
    if (p.top_k > row.num_blocks || p.top_k > kListed) {
      if (!asked.min_p) return -1;
    } else {
      const float reached = reached_by(row, by.top, p.top_k);
      limit = reached > limit ? reached : limit;
    }
  }
  List list;
  if (!gather(row, limit, list)) return -1;
  prepare(list, by);
  if (asked.min_p) apply_min_p(list, by.log_min_p);
  if (asked.top_k) apply_top_k(list, p.top_k);
  if (asked.top_p) {
    const int64_t total = weigh(list, by.unit);
    const MassBorder border = mass_border(list, target_of((double)total, p.top_p));
    cut(list, border.key, border.ties);
  }
  return draw_from(list, keys);
}

// Rows with top-p alone: a short list and an estimate of the total decide nearly always.
constexpr double kTotalError = 1e-4;  // generous: a border this near to a token costs one exact sum

int64_t draw_nucleus(const Row& row, const Filter& by, float top_p, DrawKeys keys) {
  const bool whole = row.vocab <= kListed;
  const double total = whole ? 0.0 : rough_total(row, by.top, by.temperature, 12.0f) * by.unit;
  for (int64_t k = 64; k <= 512; k *= 8) {
    if (!whole && k > row.num_blocks) return -1;
    List list;
    if (!gather(row, whole ? -kInfinity : reached_by(row, by.top, k), list)) return -1;
    prepare(list, by);
    const int64_t listed = weigh(list, by.unit);
    const int64_t low = target_of(whole ? (double)listed : total * (1.0 - kTotalError), top_p);
    const int64_t high = whole ? low : target_of(total * (1.0 + kTotalError), top_p);
    if (listed < high / 32) return -1;  // eight times as many tokens would not do either
    if (listed < high) continue;
    MassBorder border = mass_border(list, low);
    if (border.reached < high) border = mass_border(list, target_of((double)exact_total(row, by), top_p));
    cut(list, border.key, border.ties);
    return draw_from(list, keys);
  }
  return -1;
}

int64_t draw(const Row& row, const Parameters& p) {
  const float top = largest(row);
  if (row.has_nan || !is_finite(top)) return -1;
  if (!(p.temperature > 0.0f)) return first_token(row, top);
  const Filter by = {top, p.temperature, p.log_min_p, mass_unit(row.vocab)};
  const DrawKeys keys = draw_keys(p.seed_words, p.position);
  const Asked asked = {p.top_k > 0 && p.top_k < row.vocab, p.log_min_p > -kInfinity, p.top_p < 1.0f};
  if (asked.top_k || asked.min_p) {
    const int64_t token = draw_kept(row, by, p, asked, keys);
    if (token >= 0) return token;
  } else if (asked.top_p) {
    const int64_t token = draw_nucleus(row, by, p.top_p, keys);
    if (token >= 0) return token;
  }
  Border border = kEverything;
  if (asked.top_k) border = select(row, by, border, p.top_k, 1.0f);
  if (asked.top_p) border = select(row, by, border, 0, p.top_p);
  return draw_row(row, by, border, keys);
}

int64_t rank_of(const Row& row, float x) {
  int64_t above = 0;
  for (int64_t b = 0; b < row.num_blocks; ++b) {
    if (!(row.maxima[b] > x)) continue;
    const float* logits = row.logits + b * row.block;
    const int64_t n = tokens_in(row, b);
    int32_t here = 0;
    for (int64_t i = 0; i < n; ++i) here += logits[i] > x;
    above += here;
  }
  return above + 1;
}

// Exactly the first `k` tokens, in the order of their ids.
void gather_first(const Row& row, float top, int64_t k, List& list) {
  const Filter by = {top, 1.0f, -kInfinity, mass_unit(row.vocab)};
  const bool whole = row.vocab <= kListed;
  if ((whole || k <= row.num_blocks) && gather(row, whole ? -kInfinity : reached_by(row, top, k), list)) {
    prepare(list, by);
    apply_top_k(list, k);
    return;
  }
  const Border border = select(row, by, kEverything, k, 1.0f);
  const float lowest = key_value(border.key);
  list.n = 0;
  for (int64_t id = 0; id < row.vocab; ++id) {
    const float x = row.logits[id];
    if (!(x >= lowest) || !within(border, order_key(x), id)) continue;
    list.logits[list.n] = x;
    list.ids[list.n] = (int32_t)id;
    list.keys[list.n++] = order_key(x);
  }
}

// Heap sort: most significant first.
void sort_descending(uint64_t* x, int64_t n) {
  const auto sink = [x](int64_t at, int64_t size) {
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
      if (child + 1 < size && x[child + 1] < x[child]) ++child;
      if (x[at] <= x[child]) return;
      const uint64_t swapped = x[at];
      x[at] = x[child];
      x[child] = swapped;
    }
  };
  for (int64_t at = n / 2 - 1; at >= 0; --at) sink(at, n);
  for (int64_t size = n - 1; size > 0; --size) {
    const uint64_t least = x[0];
    x[0] = x[size];
    x[size] = least;
    sink(0, size);
  }
}

void score(const Row& row, int64_t target, int64_t columns, int64_t* ids, float* logprobs, int64_t* rank) {
  const float top = largest(row), x = row.logits[target];
  const bool fault = row.has_nan || !is_finite(top);
  const float total = fault ? __builtin_nanf("") : top + (float)__builtin_log(rough_total(row, top, 1.0f, 16.0f));
  ids[0] = target;
  logprobs[0] = x - total;
  *rank = rank_of(row, x);
  if (fault) {
    for (int64_t i = 0; i < columns; ++i) {
      ids[1 + i] = i;
      logprobs[1 + i] = total;
    }
    return;
  }
  if (columns == 0) return;
  List list;
  gather_first(row, top, columns, list);
  uint64_t* const ranked = (uint64_t*)list.mass;
  for (int64_t i = 0; i < list.n; ++i)
    ranked[i] = (uint64_t)((uint32_t)list.keys[i] ^ 0x80000000u) << 32 | (0xffffffffu - (uint32_t)list.ids[i]);
  sort_descending(ranked, list.n);
  for (int64_t i = 0; i < columns; ++i) {
    const int64_t id = 0xffffffffu - (uint32_t)ranked[i];
    ids[1 + i] = id;
    logprobs[1 + i] = row.logits[id] - total;
  }
}

void restrict_to(float* logits, int64_t vocab, const int32_t* bits) {
  const float none = -__builtin_inff();
  for (int64_t i = 0; i < vocab; i += 32) {
    const uint32_t word = (uint32_t)bits[i / 32];
    if (word == 0xffffffffu) continue;
    float* const x = logits + i;
    if (i + 32 <= vocab) {
      for (int j = 0; j < 32; ++j) x[j] = word >> j & 1 ? x[j] : none;
    } else {
      for (int j = 0; i + j < vocab; ++j) x[j] = word >> j & 1 ? x[j] : none;
    }
  }
}

// Where `token` stands in the list, or -1.
int64_t find(const Seen& seen, int32_t token) {
  const int64_t size = *seen.size;
  for (int64_t i = 0; i < size; i += 64) {
    const int64_t n = size - i < 64 ? size - i : 64;
    int32_t found = 0;
    for (int64_t j = 0; j < n; ++j) found |= seen.ids[i + j] == token;
    if (!found) continue;
    int64_t place = i;
    while (seen.ids[place] != token) ++place;
    return place;
  }
  return -1;
}

void count(int64_t vocab, const Seen& seen, int32_t token) {
  if (token < 0 || token >= vocab) return;
  const int64_t place = find(seen, token);
  if (place >= 0) {
    ++seen.counts[place];
  } else if (*seen.size < seen.capacity) {
    seen.ids[*seen.size] = token;
    seen.counts[(*seen.size)++] = 1;
  }
}

void lower(float* logits, const Seen& seen, const Penalties& by) {
  constexpr int64_t kAhead = 16;
  const int64_t size = *seen.size;
  for (int64_t i = 0; i < size; ++i) {
    if (i + kAhead < size) __builtin_prefetch(logits + seen.ids[i + kAhead], 1);
    const float x = logits[seen.ids[i]], count = (float)seen.counts[i];
    const float repeated = x > 0.0f ? x / by.repetition : x * by.repetition;
    logits[seen.ids[i]] = repeated - by.frequency * count - (count > 0.0f ? by.presence : 0.0f);
  }
}

void penalise(float* logits, int64_t vocab, const Seen& seen, const int32_t* tokens, int64_t position,
              int64_t positions, const Penalties& by) {
  for (; *seen.counted < position; ++*seen.counted) count(vocab, seen, tokens[*seen.counted]);
  const int64_t size = *seen.size, end = position + positions;
  lower(logits, seen, by);
  for (int64_t at = position + 1; at < end; ++at) {
    if (at > *seen.counted) count(vocab, seen, tokens[at - 1]);
    lower(logits + (at - position) * vocab, seen, by);
  }
  *seen.size = size;
  for (int64_t at = *seen.counted; at < end - 1; ++at) {
    const int64_t place = find(seen, tokens[at]);
    if (place >= 0) --seen.counts[place];
  }
}

}  // namespace

const KernelTable* PAGELOOM_KERNELS() {
  static constexpr KernelTable table = {scan_blocks, draw, score, restrict_to, penalise};
  return &table;
}

}  // namespace pageloom
