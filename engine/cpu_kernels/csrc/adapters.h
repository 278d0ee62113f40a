// What adapters (LoRA) add to a linear layer: B (A x) of each row's own, between the product and what a layer does behind
// it. Crosses between the scheduler and kernels that are compiled once per ISA: plain data only.
#pragma once

#include "linear.h"

namespace pageloom {

// A layer's factors, of all adapters that are there, and which rows have which.
struct AdapterTables {
  const int32_t* count;  // how many rows have one
  const int32_t* slots;  // [most] of each row; -1: none
  const int32_t* order;  // [most] the rows that have one, by slot; then the step's others; then those beyond it
  const int32_t* rows;   // how many the step has
  int64_t most;
  const uint16_t* a;     // bf16 [slots][parts][max_rank][k]
  const uint16_t* b;     // bf16 [slots][blocks][max_rank][64]: of 64 outputs each; of a gated layer all gates, then all ups
  const int32_t* ranks;  // [slots][parts]; 0: the adapter leaves those outputs alone
  const int32_t* ends;   // [parts], ascending: where each part ends among the n outputs
  int64_t parts, max_rank;
};

struct AdapterProblem {
  LinearProblem layer;  // the whole of it, as it would be without adapters
  AdapterTables tables;
  const uint16_t* product;  // bf16 [rows][n], in the packed order of outputs, its bias added; may be the layer's out
  int64_t product_stride;
  float* low;  // [rows][parts][max_rank]: A x
};

inline constexpr int64_t kAdapterRows = 4;       // of a unit
inline constexpr int64_t kAdapterRanks = 16;     // of a unit of A x where there are few rows
inline constexpr int64_t kAdapterColumns = 512;  // outputs of a unit of B (A x), at most
inline constexpr int64_t kAdapterBlock = 64;     // outputs whose factors lie together
inline constexpr int64_t adapter_blocks(int64_t n) { return (n + kAdapterBlock - 1) / kAdapterBlock; }

// Some of A x: of entries [begin, end) of the order, at most kAdapterRows.
struct AdapterShare {
  int64_t begin, end, part_begin, part_end, rank_begin, rank_end;
};

struct AdapterKernels {
  // As far as adapters have those ranks. `scratch`: kAdapterRows + 1 rows of k floats.
  void (*shrink)(const AdapterProblem&, const AdapterShare&, float* scratch);
  // Outputs [begin, end), at most kAdapterColumns and of a gated layer multiples of 16, of entries [first, last) of the
  // order, at most kAdapterRows.
  void (*finish)(const AdapterProblem&, int64_t first, int64_t last, int64_t begin, int64_t end);
};

const AdapterKernels* adapters_portable();
const AdapterKernels* adapters_avx2();
const AdapterKernels* adapters_avx512();
const AdapterKernels* adapters_avx512bf16();

}  // namespace pageloom
