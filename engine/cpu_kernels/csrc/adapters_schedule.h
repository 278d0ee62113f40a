// A linear layer with adapters over threads: what the torch binding and a tape call.
#pragma once

#include <vector>

#include "adapters.h"
#include "linear_schedule.h"

namespace pageloom {

// Whether any row of the step has one.
inline bool has_adapters(const AdapterTables& tables) { return tables.count != nullptr && *tables.count > 0; }

const AdapterKernels* adapter_kernels_of(int64_t isa);

// Memory that a layer with adapters needs beside its own, for as many rows.
int64_t adapter_bytes(const LinearProblem& problem, const AdapterTables& tables);

// Layers with adapters as stages of a run: A x beside the product without what comes behind it, and the rest. They follow
// one another, and share their memory. One thread makes them, in memory that is its own until it makes others.
class AdapterStages {
 public:
  // `bytes`: the most that any of the layers needs.
  AdapterStages(int64_t layers, int64_t bytes, int64_t threads);
  AdapterStages(const AdapterStages&) = delete;
  // Appended; at most as many layers as were announced. Some row has an adapter.
  void add(const LinearLayer& layer, const AdapterTables& tables, LinearStages& linears, std::vector<Stage*>& stages);

 private:
  int64_t threads_;
  char* at_ = nullptr;
  char* memory_ = nullptr;
};

void run_adapted(const LinearLayer& layer, const AdapterTables& tables, const Threads& threads);

}  // namespace pageloom
