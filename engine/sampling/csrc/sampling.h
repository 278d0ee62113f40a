// What crosses between the binding, which sees torch, and the kernels, which are compiled once per ISA. Plain data
// only: a TU that is compiled for AVX-512 must not emit any shared inline function (std::vector, std::max), because
// the linker may keep that copy for every caller, and an older CPU would then meet an illegal instruction.
#pragma once

#include <stdint.h>

namespace pageloom {

inline constexpr int64_t kMaxBlocks = 4096;
inline constexpr int64_t kMaxVocab = int64_t{1} << 22;
inline constexpr int64_t kListed = 2048;  // tokens that a list holds; more are treated by passes over the row

// One row of logits and the maxima of its blocks of neighbouring tokens: what tells where not to look.
struct Row {
  const float* logits;
  int64_t vocab;
  int64_t block;        // tokens of a block, a multiple of 64
  int64_t num_blocks;   // <= kMaxBlocks
  const float* maxima;  // one for each block; up to a multiple of 16, -inf follows
  bool has_nan;
};

inline __attribute__((always_inline)) int64_t block_size(int64_t vocab) {
  int64_t block = 64;
  while ((vocab + block - 1) / block > kMaxBlocks) block *= 2;
  return block;
}

// One row's parameters, as engine/sampling/columns.py orders them.
struct Parameters {
  float temperature;  // 0: the first token
  float top_p;
  float log_min_p;  // -inf: none
  int64_t top_k;    // 0: none
  int64_t seed_words;
  int64_t position;
};

// One row's list of seen tokens; see engine/sampling/penalties.py.
struct Seen {
  int32_t* ids;
  int32_t* counts;
  int64_t capacity;
  int64_t* size;
  int64_t* counted;
};

struct Penalties {
  float repetition;
  float presence;
  float frequency;
};

struct KernelTable {
  // Maxima of blocks [begin, end) and whether one of their logits is NaN.
  bool (*scan)(const float* logits, int64_t vocab, int64_t block, int64_t begin, int64_t end, float* maxima);
  // The token drawn, or -1 for a fault.
  int64_t (*draw)(const Row& row, const Parameters& parameters);
  // `target` and then the first `columns` tokens (<= kListed, <= vocab), their log-probabilities, the target's rank.
  void (*score)(const Row& row, int64_t target, int64_t columns, int64_t* ids, float* logprobs, int64_t* rank);
  // Logits whose bits, 32 to a word from the lowest one on, are 0 become -inf.
  void (*restrict_to)(float* logits, int64_t vocab, const int32_t* bits);
  // Counts the row's `tokens` before `position` that are new, then lowers the list's logits there and at the following
  // positions, `positions` of them in all, with the tokens between (drafts) counted meanwhile.
  void (*penalise)(float* logits, int64_t vocab, const Seen& seen, const int32_t* tokens, int64_t position,
                   int64_t positions, const Penalties& by);
};

const KernelTable* kernels_portable();
const KernelTable* kernels_avx2();
const KernelTable* kernels_avx512();

}  // namespace pageloom
