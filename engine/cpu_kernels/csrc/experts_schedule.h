// A mixture of experts over threads: what the torch binding and a tape call.
#pragma once

#include <vector>

#include "experts.h"
#include "linear_schedule.h"

namespace pageloom {

// Which expert a token goes to, and with what factor. Of equal scores the one with the lower index wins; NaN is less than
// everything, and makes its token's factors NaN.
enum class RouteKind : int64_t {
  kSoftmax = 0,        // softmax over all experts, then the best of them; with a bias chosen by softmax + bias
  kChosenSoftmax = 1,  // the best, then softmax over those
  kSigmoid = 2,        // sigmoid of each; chosen by sigmoid + bias
};

struct RouteProblem {
  int64_t tokens, experts, top_k;
  RouteKind kind;
  bool normalise;         // divides a token's factors by their sum (kChosenSoftmax: it is one already)
  int64_t groups, top_groups;  // kSigmoid: only the best groups count, by the sum of their two best; 1, 1: all do
  float scale;            // what factors are multiplied by in the end
  const float* logits;    // [tokens][experts], rows logits_stride elements apart
  int64_t logits_stride;
  const float* bias;      // [experts], or null
  int32_t* ids;           // [tokens][top_k], the best first
  float* weights;         // [tokens][top_k]
};

// Routes as stages of a run by up to `threads` threads. One thread makes them, in memory that is its own until it makes
// others.
class RouteStages {
 public:
  RouteStages(int64_t routes, int64_t threads);
  RouteStages(const RouteStages&) = delete;
  Stage* add(const RouteProblem& problem);  // at most as many as were announced

 private:
  int64_t threads_;
  char* at_;
};

void run_route(const RouteProblem& problem, const Threads& threads);

struct ExpertsProblem {
  int64_t tokens, top_k, experts;
  const int32_t* places;  // [known], or null: which of the experts here an id is, or -1: elsewhere, and brings nothing
  int64_t known;          // ids lie below it
  const int32_t* ids;    // [tokens][top_k]
  const float* weights;  // [tokens][top_k]
  // Of expert 0, without rows, x (but gate_up's: the tokens' rows), residual and out. Others' weights follow, whole
  // panels each, and others' biases, n each.
  LinearProblem gate_up, down;
  const LinearKernels* gate_up_kernels;
  const LinearKernels* down_kernels;
  CombineRows combine;
  const uint16_t* residual;  // bf16 [tokens][down.n], or null
  int64_t residual_stride;
  uint16_t* out;  // bf16 [tokens][down.n]
  int64_t out_stride;
};

// The kernels of experts: as `kernels_of`, but never such that a row's bits depend on how many there are.
const LinearKernels* expert_kernels_of(Format format, int64_t isa);
CombineRows combine_rows_of(int64_t isa);

// Experts as stages of a run by up to `threads` threads: for as many tokens as scratch memory is meant for, sort, gather,
// first product, (quantise,) second product, combine; then for the next. One thread makes them, in memory that is its own
// until it makes others; all problems share what rows need, because their stages follow one another.
class ExpertStages {
 public:
  ExpertStages(const ExpertsProblem* problems, int64_t count, int64_t threads);
  ExpertStages(const ExpertStages&) = delete;
  // Of problem number `index`, appended; none of them where there are no tokens.
  void add(int64_t index, std::vector<Stage*>& stages);

 private:
  const ExpertsProblem* problems_;
  int64_t threads_;
  char* at_;
  char* rows_;
};

// The last stage alone, of rows that were made elsewhere, for `tokens` tokens.
void run_combine(const CombineProblem& problem, int64_t tokens, CombineRows rows, const Threads& threads);

// Null, or what is wrong with the ids: nothing that is read or written then depends on them.
const char* run_experts(const ExpertsProblem& problem, const Threads& threads);

}  // namespace pageloom
