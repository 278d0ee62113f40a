// A layer's states in one step, over threads: stretches of its tokens, one after the other, each in four phases, which are cut into
// pieces that whoever is free takes.
#include "states.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "crew.h"

namespace pageloom {
namespace {

constexpr int64_t kSerialWork = 1 << 15;  // numbers; below, waking a thread costs more than it saves
constexpr int64_t kTokens = 4;            // that a thread takes at once

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
  k.convolve(p, p.first_sequence + i / parts, begin, std::min(begin + kMixChannels, p.channels));
}

void prepare(const MixProblem& p, const MixKernels& k, int64_t i) {
  k.prepare(p, p.first + i * kTokens, std::min(p.first + (i + 1) * kTokens, p.last));
}

void recur(const MixProblem& p, const MixKernels& k, int64_t i) {
  const int64_t columns = p.columns();
  k.recur(p, p.first_sequence + i / columns / p.heads, i / columns % p.heads, i % columns * kMixColumns);
}

void finish(const MixProblem& p, const MixKernels& k, int64_t i) {
  k.finish(p, p.first + i * kTokens, std::min(p.first + (i + 1) * kTokens, p.last));
}

void run_stretch(const MixProblem& p, const MixKernels& kernels, const Threads& threads) {
  const auto run = [&](void (*piece)(const MixProblem&, const MixKernels&, int64_t), int64_t pieces, int64_t work) {
    Phase phase{p, piece, kernels, pieces};
    threads.run(work < kSerialWork ? 1 : pieces, worker, &phase);
  };
  const int64_t tokens = p.last - p.first, values = tokens * p.channels, sequences = p.last_sequence - p.first_sequence;
  run(convolve, sequences * cut(p.channels, kMixChannels), values * p.taps);
  if (p.kind != MixKind::kShort) run(prepare, cut(tokens, kTokens), values);
  if (p.kind != MixKind::kShort) run(recur, sequences * p.heads * p.columns(), sequences * p.inner() * p.keys);
  run(finish, cut(tokens, kTokens), values);
}

}  // namespace

void run_mix(MixProblem p, const MixKernels& kernels, const Threads& threads) {
  for (p.first = p.first_sequence = p.last_sequence = 0; p.first < p.tokens; p.first = p.last) {
    p.last = std::min(p.first + kMixTokens, p.tokens);
    while (p.sequences[p.first_sequence].end <= p.first) ++p.first_sequence;
    while (p.last_sequence < p.num_sequences && p.sequences[p.last_sequence].begin < p.last) ++p.last_sequence;
    run_stretch(p, kernels, threads);
    std::swap(p.carried[0], p.carried[1]);
  }
}

}  // namespace pageloom
