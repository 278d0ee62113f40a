// What crosses between the binding, which sees torch, and the kernels, which are compiled once per ISA: plain data
// only, as in engine/sampling/csrc/sampling.h.
#pragma once

#include <stdint.h>

namespace pageloom {

inline constexpr int64_t kMostMatches = 64;  // places with the same tokens before them that are looked at
inline constexpr int32_t kEnd = -1;          // no token: the end of a text

// What came after the same tokens in other texts, each with kEnd behind it, and how far that is believed.
struct Recent {
  const int32_t* tokens;
  int64_t size;
  double factor;  // drafts for each token that is the same
  double least;   // the share of places that must go on with the same drafts
};

struct KernelTable {
  // Of a row whose first `n` tokens are known, drafts from there on, `most` or none: what follows the latest of the
  // longest matches of the row's end, `shortest` to `longest` tokens. Returns how many.
  int64_t (*ngram)(int32_t* tokens, int64_t n, int64_t most, int64_t longest, int64_t shortest);
  // Up to `most` drafts: at each place the token that came most often after the longest match, here and in `recent`.
  int64_t (*suffix)(int32_t* tokens, int64_t n, int64_t most, int64_t longest, const Recent& recent);
};

const KernelTable* kernels_portable();
const KernelTable* kernels_avx2();
const KernelTable* kernels_avx512();

}  // namespace pageloom
