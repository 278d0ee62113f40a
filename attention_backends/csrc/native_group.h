// How C++ code of another library calls the collectives of a group of ranks: `native_all_reduce` and `native_exchange`
// give the functions' addresses and the group's. Plain C++17, nothing of torch.
#pragma once

#include <stdint.h>

namespace pageloom {

// All of them wait for the other ranks. Null, or why it failed, which stands as long as the group.

// bfloat16 [rows, columns] each, rows one behind the other: out = x of all ranks, + residual where it is not null.
struct NativeSumRows {
  const uint16_t* x;
  const uint16_t* residual;
  uint16_t* out;
  int64_t rows, columns;
};

// As the operator `all_reduce`.
using NativeAllReduce = const char* (*)(void* group, const NativeSumRows& rows);

// Rows of `columns[rank]` elements of each rank, in all ranks alike; rows lie one behind the other.
struct NativeColumns {
  const void* x;
  void* out;
  int64_t rows;
  const int64_t* columns;
  bool is_float;  // elements: float32, or bfloat16
};

// As the operators `all_gather` and `all_to_all`.
using NativeExchange = const char* (*)(void* group, const NativeColumns& rows);

}  // namespace pageloom
