// How one attention call is cut into work items. Torch-free.
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"

namespace pageloom {

// The parts of some rows of one (sequence, KV head): whoever delivers the last one adds them up.
struct SplitGroup {
  WorkItem rows;
  int64_t first_partial;  // in floats
  int64_t partial_stride;
  int32_t parts;
  int32_t pending;
};

struct Plan {
  std::vector<WorkItem> items;
  std::vector<SplitGroup> groups;
  std::vector<SharedToken> shared;
  int64_t partial_floats = 0;  // what its items deliver partial results into: `partials`
  int64_t work = 0;  // lane operations
  const char* error = nullptr;

  float* partials() const { return memory_.get(); }
  void reserve_partials();  // as many as it has; grows, never shrinks

 private:
  std::unique_ptr<float[]> memory_;
  int64_t reserved_ = 0;
};

// Cuts the call for kernels that take `row_tile` rows at once.
void make_plan(Plan& plan, const AttentionProblem& problem, int64_t row_tile);

// The plan of such a call: made now, or (problem.step not 0) the one made for an earlier layer of the same step. Every
// group is pending in full. It is the calling thread's, until that asks for one with another number of `run`, or 0: what
// is prepared for one run stays as it is, however many steps' numbers it has (each layer group has its own).
Plan& plan_of(const AttentionProblem& problem, int64_t row_tile, int64_t run);

}  // namespace pageloom
