// How C++ code of another library calls a layer's attention: `AttentionBackend.native_layer` gives the function's
// address and the layer, `native_step` the step. Plain C++17, nothing of torch and nothing of the kernels.
#pragma once

#include <stdint.h>

namespace pageloom {

// Rows of all tokens of a step, bfloat16; strides in elements between tokens, the heads of a token side by side.
// `out` shares no memory with the others.
struct NativeRows {
  const uint16_t* q;
  int64_t q_stride;
  const uint16_t* k;
  int64_t k_stride;
  const uint16_t* v;
  int64_t v_stride;
  uint16_t* out;
  int64_t out_stride;
  int64_t rows;  // of q, k, v and out: the step's tokens or more; what is beyond becomes zero in out
};

// Writes k and v to the layer's cache, then attends; on torch's threads, done when it returns. `layer` and `step`: what
// the ops native_layer and native_step described, read in place; the cache and the step's tensors must still exist.
// Null, or why it was refused or failed (a static string). Throws nothing.
using NativeAttention = const char* (*)(const void* layer, const void* step, const NativeRows& rows);

}  // namespace pageloom
