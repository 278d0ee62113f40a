// How C++ code of another library has the ranks of a group add up their rows: `native_all_reduce` gives the function's
// address and the group's. Plain C++17, nothing of torch.
#pragma once

#include <stdint.h>

namespace pageloom {

// bfloat16 [rows, columns] each, rows one behind the other: out = x of all ranks, + residual where it is not null.
struct NativeSumRows {
  const uint16_t* x;
  const uint16_t* residual;
  uint16_t* out;
  int64_t rows, columns;
};

// As the operator `all_reduce`: it waits for the other ranks. Null, or why it failed, which stands as long as the group.
using NativeAllReduce = const char* (*)(void* group, const NativeSumRows& rows);

}  // namespace pageloom
