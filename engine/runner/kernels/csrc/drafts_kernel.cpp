// Searches for the end of a row's tokens in what is before it, from the latest place back. Most places are passed over
// many at a time: one counts only if it has the same last token, and the same token where the best match so far ended.
// Compiled once per ISA.
#include "drafts.h"

#include <string.h>

namespace pageloom {
namespace {

constexpr int64_t kBlock = 128;

// Which ends from `first` on have `last` there and `other` `back` tokens before: a byte each. Whether any has.
bool may_match(const int32_t* text, int64_t first, int64_t count, int32_t last, int32_t other, int64_t back,
               uint8_t* may) {
  const int32_t *const ends = text + first, *const befores = ends - back;
  int32_t found = 0;
  if (count == kBlock) {
    for (int64_t i = 0; i < kBlock; ++i) found |= (ends[i] == last) & (befores[i] == other);
    if (!found) return false;
    for (int64_t i = 0; i < kBlock; ++i) may[i] = (ends[i] == last) & (befores[i] == other);
    return true;
  }
  for (int64_t i = 0; i < count; ++i) found |= may[i] = (ends[i] == last) & (befores[i] == other);
  for (int64_t i = count; i < kBlock; ++i) may[i] = 0;
  return found;
}

// Calls at(end, length) with places in `text` before `behind`, the latest first, where at least `wanted()` tokens, and
// `longest` at most, are the last ones of `own`, whose last one is own[last]. Stops when `wanted()` exceeds `longest`.
template <class Wanted, class At>
inline __attribute__((always_inline)) void search(const int32_t* text, int64_t behind, const int32_t* own, int64_t last,
                                                  int64_t longest, const Wanted& wanted, const At& at) {
  for (int64_t back; (back = wanted() - 1) < longest && back < behind;) {
    const int64_t first = behind - kBlock > back ? behind - kBlock : back;
    alignas(8) uint8_t may[kBlock];
    if (may_match(text, first, behind - first, own[last], own[last - back], back, may)) {
      for (int64_t word = kBlock - 8; word >= 0; word -= 8) {
        uint64_t left;
        memcpy(&left, may + word, 8);
        while (left) {
          const int top = (63 - __builtin_clzll(left)) / 8;
          left &= ~(uint64_t{1} << 8 * top);
          const int64_t end = first + word + top;
          int64_t length = 1;
          while (length < longest && length <= end && text[end - length] == own[last - length]) ++length;
          if (length <= back) continue;
          at(end, length);
          if ((back = wanted() - 1) >= longest) return;
        }
      }
    }
    behind = first;
  }
}

int64_t ngram(int32_t* tokens, int64_t n, int64_t most, int64_t longest, int64_t shortest) {
  int64_t best = shortest - 1, match = -1;
  search(
      tokens, n - 1, tokens, n - 1, longest, [&] { return best + 1; },
      [&](int64_t end, int64_t length) {
        best = length;
        match = end;
      });
  if (match < 0) return 0;
  const int64_t period = n - 1 - match;
  for (int64_t i = n; i < n + most; ++i) tokens[i] = tokens[i - period];
  return most;
}

struct Places {
  int64_t at[kMostMatches];  // in `recent`, then in the row's own tokens, counted on
  int64_t count, length;
};

// Of `following[i]`, that which comes most often, of equals the smallest; how often.
int64_t most_often(const int32_t* following, int64_t count, int32_t& token) {
  int64_t best = 0;
  for (int64_t i = 0; i < count; ++i) {
    int64_t times = 0;
    for (int64_t j = 0; j < count; ++j) times += following[j] == following[i];
    if (times > best || (times == best && following[i] < token)) {
      best = times;
      token = following[i];
    }
  }
  return best;
}

int64_t suffix(int32_t* tokens, int64_t n, int64_t most, int64_t longest, const Recent& recent) {
  Places places = {{}, 0, 0};
  longest = longest < n ? longest : n;
  const auto wanted = [&] {
    const int64_t more = places.length + (places.count == kMostMatches);
    return more > 1 ? more : 1;
  };
  int64_t before = recent.size;
  const auto take = [&](int64_t end, int64_t length) {
    if (length > places.length) places.count = 0;
    places.length = length;
    places.at[places.count++] = before + end + 1;
  };
  search(tokens, n - 1, tokens, n - 1, longest, wanted, take);
  before = 0;
  search(recent.tokens, recent.size, tokens, n - 1, longest, wanted, take);
  const double limit = recent.factor * (double)places.length;
  double likely = 1.0;
  int64_t drafts = 0;
  while (drafts < most && drafts < (int64_t)limit && places.count > 0) {
    int32_t following[kMostMatches], token = 0;
    for (int64_t i = 0; i < places.count; ++i)
      following[i] = places.at[i] < recent.size ? recent.tokens[places.at[i]] : tokens[places.at[i] - recent.size];
    likely *= (double)most_often(following, places.count, token) / (double)places.count;
    if (token == kEnd || likely < recent.least) break;
    int64_t left = 0;
    for (int64_t i = 0; i < places.count; ++i)
      if (following[i] == token && places.at[i] + 1 < recent.size + n) places.at[left++] = places.at[i] + 1;
    places.count = left;
    tokens[n + drafts++] = token;
  }
  return drafts;
}

}  // namespace

const KernelTable* PAGELOOM_KERNELS() {
  static constexpr KernelTable table = {ngram, suffix};
  return &table;
}

}  // namespace pageloom
