// What the units that see torch share of adapters.
#pragma once

#include "adapters_schedule.h"
#include "binding.h"

namespace pageloom {

// Tensors of `AdapterTables`, as the operator takes them.
struct AdapterTensors {
  Tensor step, a, b, ranks, ends;
};

inline AdapterTables checked_adapters(const AdapterTensors& t, const LinearProblem& p, const char* op) {
  const auto whole = [&](const Tensor& each, ScalarType dtype) { return on_cpu_of(each, dtype) && each.is_contiguous(); };
  PAGELOOM_CHECK(!p.wide, op, ": adapters go with outputs of bfloat16");
  PAGELOOM_CHECK(whole(t.ranks, ScalarType::Int) && t.ranks.dim() == 2, op, ": ranks must be int32 [slots, parts]");
  const int64_t slots = t.ranks.size(0), parts = t.ranks.size(1);
  PAGELOOM_CHECK(whole(t.ends, ScalarType::Int) && t.ends.dim() == 1 && t.ends.size(0) == parts, op,
                 ": ends must be int32 [parts]");
  PAGELOOM_CHECK(whole(t.a, ScalarType::BFloat16) && t.a.dim() == 4 && t.a.size(0) == slots && t.a.size(1) == parts &&
                     t.a.size(3) == p.k,
                 op, ": a must be bfloat16 [slots, parts, max_rank, ", p.k, "]");
  const int64_t max_rank = t.a.size(2);
  const int64_t blocks = adapter_blocks(p.n);
  PAGELOOM_CHECK(whole(t.b, ScalarType::BFloat16) && t.b.dim() == 4 && t.b.size(0) == slots && t.b.size(1) == blocks &&
                     t.b.size(2) == max_rank && t.b.size(3) == kAdapterBlock,
                 op, ": b must be bfloat16 [slots, ", blocks, ", ", max_rank, ", ", kAdapterBlock, "]");
  PAGELOOM_CHECK(whole(t.step, ScalarType::Int) && t.step.dim() == 1 && t.step.numel() % 2 == 0, op,
                 ": step must be int32 [2 + 2 tokens]");
  const auto* const step = static_cast<const int32_t*>(t.step.data_ptr());
  const int64_t most = t.step.numel() / 2 - 1;
  return {step, step + 1, step + 1 + most, step + 1 + 2 * most, most,
          static_cast<const uint16_t*>(t.a.data_ptr()), static_cast<const uint16_t*>(t.b.data_ptr()),
          static_cast<const int32_t*>(t.ranks.data_ptr()), static_cast<const int32_t*>(t.ends.data_ptr()),
          parts, max_rank};
}

}  // namespace pageloom
