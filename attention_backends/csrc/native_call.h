// How C++ code of another library calls a layer's attention: `AttentionBackend.native_layer` gives the function's
// address and the layer, `native_step` the step. Plain C++17, nothing of torch and nothing of the kernels.
#pragma once

#include <stdint.h>

#include "stages.h"

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
  void* scratch;  // 64-byte aligned: rows times what native_layer asked for
};

// A call's stages, in order, nulls left out: rows beyond the step's tokens; where ranks divide a context, heads from all of
// them; k and v written to the layer's cache; attention; what parts found goes to whose heads they are, and is merged.
inline constexpr int64_t kNativeStages = 6;

struct NativeAttention {
  int64_t bytes;  // of a call's memory, which begins at a multiple of 64
  // Makes the stages of one call in `memory`, for up to `threads` threads. `run`: a number that all calls have whose
  // stages run together, and no others of the calling thread; not 0. `layer` and `step`: what the ops native_layer
  // and native_step described, read in place; until the stages have run, they, the cache, the step's tensors and the
  // rows must exist, and no other thread may prepare stages of the same layer and step.
  // Null, or why it was refused (a static string). Throws nothing.
  const char* (*prepare)(const void* layer, const void* step, const NativeRows& rows, int64_t threads, int64_t run,
                         void* memory, Stage** stages);
};

}  // namespace pageloom
