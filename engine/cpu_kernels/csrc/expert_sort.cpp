// From ids to rows that lie together by expert, and who multiplies which of them.
#include <algorithm>

#include "expert_batch.h"

namespace pageloom {
namespace {

// Leaves each choice's expert of ours, or -1, in its position. False: an id is outside.
bool count_rows(Batch& b) {
  std::fill(b.begins, b.begins + b.p.experts + 1, 0);
  for (int64_t i = 0; i < b.choices; ++i) {
    const int64_t id = b.p.ids[i];
    if (id < 0 || id >= b.p.known) return false;
    const int32_t own = b.p.places == nullptr ? static_cast<int32_t>(id) : b.p.places[id];
    b.positions[i] = own;
    if (own >= 0) ++b.begins[own + 1];
  }
  for (int64_t e = 0; e < b.p.experts; ++e) b.begins[e + 1] += b.begins[e];
  return true;
}

void cut_segments(Batch& b) {
  int64_t used = 0, largest = 0;
  for (int64_t e = 0; e < b.p.experts; ++e) {
    const int64_t rows = b.begins[e + 1] - b.begins[e];
    used += rows > 0;
    largest = std::max(largest, rows);
  }
  b.segment_count = 0;
  b.first.problem.rows = b.second.problem.rows = largest;
  if (used == 0) return;
  const int64_t wanted = ceil_div(kUnitsPerThread * b.first.workers, used * std::min(b.first.panels, b.second.panels));
  for (int64_t e = 0; e < b.p.experts; ++e) {
    const int64_t begin = b.begins[e], rows = b.begins[e + 1] - begin;
    if (rows == 0) continue;
    const int64_t near = ceil_div(rows * b.p.gate_up.k, kChunkElements), most = std::max<int64_t>(rows / kMinChunkRows, 1);
    const int64_t chunks = std::min(b.first.workers == 1 ? near : std::max(near, wanted), most);
    for (int64_t c = 0; c < chunks; ++c)
      b.segments[b.segment_count++] = {e, begin + rows * c / chunks, begin + rows * (c + 1) / chunks};
  }
}

// Units, in ranges of equal cost.
void deal(const Batch& b, Product& product) {
  const auto unit_ns = [&](const Segment& s) {
    return std::max<int64_t>(estimated_ns(product.problem, s.row_end - s.row_begin, 1), 1);
  };
  product.units = b.segment_count * product.panels;
  if (b.segment_count == 0) return;
  product.scratch_bytes = aligned(static_cast<int64_t>(product.kernels->scratch_bytes(product.problem)));
  int64_t total = 0;
  for (int64_t s = 0; s < b.segment_count; ++s) total += product.panels * unit_ns(b.segments[s]);
  product.step = claim_step(ceil_div(b.rows, b.segment_count), product.problem.reading.streams);
  product.most = std::max<int64_t>(kClaimNs * product.units / total / product.step, 1) * product.step;
  int64_t before = 0, segment = 0, begin = 0;
  for (int64_t w = 0; w < product.workers; ++w) {
    const int64_t until = total / product.workers * (w + 1);
    for (; segment < b.segment_count; ++segment) {
      const int64_t ns = unit_ns(b.segments[segment]);
      if (before + product.panels * ns > until) break;
      before += product.panels * ns;
    }
    int64_t end = product.units;
    if (w + 1 < product.workers && segment < b.segment_count)
      end = segment * product.panels + (until - before) / unit_ns(b.segments[segment]);
    product.ranges[w].next.store(begin, std::memory_order_relaxed);
    product.ranges[w].end = end;
    begin = end;
  }
}

}  // namespace

bool sort_choices(Batch& b) {
  if (!count_rows(b)) return false;
  for (int64_t i = 0; i < b.choices; ++i)
    if (const int32_t own = b.positions[i]; own >= 0) b.positions[i] = static_cast<int32_t>(b.begins[own]++);
  for (int64_t e = b.p.experts; e > 0; --e) b.begins[e] = b.begins[e - 1];  // they have moved to the ends
  b.begins[0] = 0;
  b.quantise.units = b.rows = b.begins[b.p.experts];
  cut_segments(b);
  deal(b, b.first);
  deal(b, b.second);
  return true;
}

}  // namespace pageloom
