// Rows of a packed matrix as vectors: the embedding that shares its weights with the unembedding.
#include <string.h>

#include <algorithm>
#include <atomic>

#include "linear_schedule.h"

namespace pageloom {

extern DecodeRow quantised_row_decoder(Format format) __attribute__((weak));

namespace {

constexpr int64_t kChunk = 16;               // tokens that a thread takes at once
constexpr int64_t kSerialElements = 1 << 15;  // below, waking a thread costs more than it saves

void decode_bf16(const uint8_t* panel, int64_t output, int64_t k, uint16_t* target) {
  const uint8_t* from = panel + output * 4;
  for (int64_t i = 0; i < k; i += 2, from += kPanel * 4) memcpy(target + i, from, 4);
}

struct Run {
  const EmbeddingProblem& problem;
  DecodeRow decode;
  std::atomic<int64_t> next{0};
};

void worker(void* context) {
  auto& run = *static_cast<Run*>(context);
  const EmbeddingProblem& p = run.problem;
  for (int64_t begin; (begin = run.next.fetch_add(kChunk, std::memory_order_relaxed)) < p.tokens;)
    for (int64_t t = begin, end = std::min(p.tokens, begin + kChunk); t < end; ++t)
      run.decode(p.weight + p.ids[t] / kPanel * p.panel_bytes, p.ids[t] % kPanel, p.k, p.out + t * p.k);
}

}  // namespace

DecodeRow row_decoder(Format format) {
  if (format == Format::kBFloat16) return decode_bf16;
  return quantised_row_decoder != nullptr ? quantised_row_decoder(format) : nullptr;
}

int64_t run_embedding(const EmbeddingProblem& problem, DecodeRow decode, const Threads& threads) {
  for (int64_t t = 0; t < problem.tokens; ++t)
    if (problem.ids[t] < 0 || problem.ids[t] >= problem.n) return t;
  Run run{problem, decode};
  const bool serial = problem.tokens * problem.k < kSerialElements;
  threads.run(serial ? 1 : (problem.tokens + kChunk - 1) / kChunk, worker, &run);
  return -1;
}

}  // namespace pageloom
