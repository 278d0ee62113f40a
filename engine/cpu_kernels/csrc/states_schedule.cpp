// A layer's states in one step, over threads: four phases, each cut into pieces that whoever is free takes.
#include "states.h"

#include <algorithm>
#include <atomic>

#include "crew.h"

namespace pageloom {
namespace {

constexpr int64_t kSerialWork = 1 << 15;  // numbers; below, waking a thread costs more than it saves
constexpr int64_t kTokens = 8;            // that a thread takes at once

struct Phase {
  const MixProblem& problem;
  void (*piece)(const MixProblem&, const MixKernels&, int64_t);
  const MixKernels& kernels;
  int64_t pieces;
  std::atomic<int64_t> next{0};
};

void worker(void* context) {
  auto& phase = *static_cast<Phase*>(context);
  for (int64_t i; (i = phase.next.fetch_add(1, std::memory_order_relaxed)) < phase.pieces;)
    phase.piece(phase.problem, phase.kernels, i);
}

int64_t cut(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

void convolve(const MixProblem& p, const MixKernels& k, int64_t i) {
  const int64_t parts = cut(p.channels, kMixChannels), begin = i % parts * kMixChannels;
  k.convolve(p, i / parts, begin, std::min(begin + kMixChannels, p.channels));
}

void prepare(const MixProblem& p, const MixKernels& k, int64_t i) {
  k.prepare(p, i * kTokens, std::min((i + 1) * kTokens, p.tokens));
}

void recur(const MixProblem& p, const MixKernels& k, int64_t i) {
  const int64_t columns = cut(p.values, kMixColumns);
  k.recur(p, i / columns / p.heads, i / columns % p.heads, i % columns * kMixColumns);
}

void finish(const MixProblem& p, const MixKernels& k, int64_t i) {
  k.finish(p, i * kTokens, std::min((i + 1) * kTokens, p.tokens));
}

}  // namespace

void run_mix(const MixProblem& p, const MixKernels& kernels, const Threads& threads) {
  const auto run = [&](void (*piece)(const MixProblem&, const MixKernels&, int64_t), int64_t pieces, int64_t work) {
    Phase phase{p, piece, kernels, pieces};
    threads.run(work < kSerialWork ? 1 : pieces, worker, &phase);
  };
  const int64_t values = p.tokens * p.channels;
  run(convolve, p.num_sequences * cut(p.channels, kMixChannels), values * p.taps);
  if (p.kind != MixKind::kShort) run(prepare, cut(p.tokens, kTokens), values);
  if (p.kind != MixKind::kShort)
    run(recur, p.num_sequences * p.heads * cut(p.values, kMixColumns), p.num_sequences * p.inner() * p.keys);
  run(finish, cut(p.tokens, kTokens), values);
}

}  // namespace pageloom
