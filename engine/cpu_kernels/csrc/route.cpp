// Which experts a token goes to. Plain code: a token's scores are a few hundred numbers, whose order is all that counts.
#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <type_traits>

#include "experts_schedule.h"
#include "linear_work.h"

namespace pageloom {
namespace {

constexpr int64_t kTokens = 16;              // that a thread takes at once
constexpr int64_t kSerialElements = 1 << 13;  // fewer scores are one thread's
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// A thread's scratch, [experts] each but for the last.
struct Scores {
  float* of;         // what an expert's factor is made of
  float* chosen_by;  // no NaN
  float* groups;     // [groups], and room for as many ids
};

// The best `count` of `scores`, best first, equal ones by index.
void choose(const float* scores, int64_t size, int64_t count, int32_t* chosen) {
  const auto insert = [&](int64_t i, int64_t at) {
    for (; at > 0 && scores[i] > scores[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
    chosen[at] = static_cast<int32_t>(i);
  };
  for (int64_t i = 0; i < count; ++i) insert(i, i);
  float least = scores[chosen[count - 1]];
  for (int64_t i = count; i < size; ++i) {
    if (!(scores[i] > least)) continue;
    insert(i, count - 1);
    least = scores[chosen[count - 1]];
  }
}

// NaN becomes -infinity. Whether there was none.
bool without_nan(const float* from, int64_t count, float* to) {
  bool all = true;
  for (int64_t i = 0; i < count; ++i) {
    const bool number = from[i] == from[i];
    to[i] = number ? from[i] : kNothing;
    all &= number;
  }
  return all;
}

// Groups of experts that are not among the best get -infinity.
void drop_groups(const RouteProblem& p, const Scores& s, int32_t* chosen) {
  const int64_t size = p.experts / p.groups;
  for (int64_t g = 0; g < p.groups; ++g) {
    const float* const scores = s.chosen_by + g * size;
    int32_t best[2];
    choose(scores, size, std::min<int64_t>(size, 2), best);
    s.groups[g] = size == 1 ? scores[0] : scores[best[0]] + scores[best[1]];
  }
  choose(s.groups, p.groups, p.top_groups, chosen);
  for (int64_t g = 0; g < p.groups; ++g)
    if (std::find(chosen, chosen + p.top_groups, g) == chosen + p.top_groups)
      std::fill(s.chosen_by + g * size, s.chosen_by + (g + 1) * size, kNothing);
}

// e^(x - the largest), of x of all experts or of those at `ids`. Where all are -infinity they are equal.
void exponentials(const float* logits, int64_t count, float largest, float* result) {
  for (int64_t i = 0; i < count; ++i) result[i] = logits[i] == largest ? 1.0f : std::exp(logits[i] - largest);
}

float sum_of(const float* values, int64_t count) {
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}

// NaN in one is NaN in all.
void softmax(const float* logits, int64_t count, float* result) {
  exponentials(logits, count, *std::max_element(logits, logits + count), result);
  const float total = sum_of(result, count);
  for (int64_t i = 0; i < count; ++i) result[i] /= total;
}

void softmax_factors(const RouteProblem& p, const float* logits, const Scores& s, const int32_t* ids, float* weights) {
  const float largest = logits[ids[0]];
  const bool of_all = p.kind == RouteKind::kSoftmax && !p.normalise;
  for (int64_t j = 0; j < p.top_k; ++j) weights[j] = logits[ids[j]];
  exponentials(weights, p.top_k, largest, weights);
  float total = 0.0f;
  if (of_all) {
    exponentials(logits, p.experts, largest, s.of);
    total = sum_of(s.of, p.experts);
  } else {
    total = sum_of(weights, p.top_k);
  }
  for (int64_t j = 0; j < p.top_k; ++j) weights[j] = weights[j] / total * p.scale;
}

void scored_factors(const RouteProblem& p, const Scores& s, const int32_t* ids, float* weights) {
  constexpr float kTiny = 1e-20f;  // as DeepSeek-V3: all may be 0
  for (int64_t j = 0; j < p.top_k; ++j) weights[j] = s.of[ids[j]];
  const float total = p.normalise ? sum_of(weights, p.top_k) + kTiny : 1.0f;
  for (int64_t j = 0; j < p.top_k; ++j) weights[j] = weights[j] / total * p.scale;
}

void route_token(const RouteProblem& p, int64_t token, const Scores& s) {
  const float* const logits = p.logits + token * p.logits_stride;
  int32_t* const ids = p.ids + token * p.top_k;
  float* const weights = p.weights + token * p.top_k;
  bool numbers;
  if (p.kind == RouteKind::kSigmoid || p.bias != nullptr) {
    if (p.kind == RouteKind::kSigmoid)
      for (int64_t e = 0; e < p.experts; ++e) s.of[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    else
      softmax(logits, p.experts, s.of);
    for (int64_t e = 0; e < p.experts; ++e) s.chosen_by[e] = p.bias == nullptr ? s.of[e] : s.of[e] + p.bias[e];
    numbers = without_nan(s.chosen_by, p.experts, s.chosen_by);
    if (p.top_groups < p.groups) drop_groups(p, s, reinterpret_cast<int32_t*>(s.groups + p.groups));
    choose(s.chosen_by, p.experts, p.top_k, ids);
    scored_factors(p, s, ids, weights);
  } else {
    numbers = without_nan(logits, p.experts, s.chosen_by);
    choose(s.chosen_by, p.experts, p.top_k, ids);
    softmax_factors(p, s.chosen_by, s, ids, weights);
  }
  if (!numbers) std::fill(weights, weights + p.top_k, std::numeric_limits<float>::quiet_NaN());
}

struct Route : Stage {
  RouteProblem problem;
};

bool route_tokens(Stage& stage, int64_t, Turn& turn) {
  static thread_local Arena arena;
  const RouteProblem& p = static_cast<Route&>(stage).problem;
  const int64_t size = aligned(p.experts * 4) / 4;
  auto* const memory = reinterpret_cast<float*>(arena.reserve((2 * size + 2 * p.groups) * 4));
  const Scores s{memory, memory + size, memory + 2 * size};
  for (int64_t begin; (begin = stage.next.fetch_add(kTokens, std::memory_order_relaxed)) < p.tokens;) {
    const int64_t end = std::min(p.tokens, begin + kTokens);
    for (int64_t t = begin; t < end; ++t) route_token(p, t, s);
    stage.finish(end - begin);
    if (!turn.pass()) return false;
  }
  return true;
}

}  // namespace

RouteStages::RouteStages(int64_t routes, int64_t threads) : threads_(threads) {
  static thread_local Arena arena;
  at_ = arena.reserve(routes * aligned(sizeof(Route)));
}

Stage* RouteStages::add(const RouteProblem& problem) {
  static_assert(std::is_trivially_destructible_v<Route>);
  Route& route = *new (at_) Route{};
  at_ += aligned(sizeof(Route));
  route.problem = problem;
  route.units = problem.tokens;
  route.workers = problem.tokens * problem.experts < kSerialElements ? 1 : std::min(threads_, ceil_div(problem.tokens, kTokens));
  route.work = route_tokens;
  return &route;
}

void run_route(const RouteProblem& problem, const Threads& threads) {
  RouteStages routes(1, threads.count);
  Stage* const stage = routes.add(problem);
  StageRun(&stage, 1).run(threads);
}

}  // namespace pageloom
