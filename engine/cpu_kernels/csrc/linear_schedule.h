// What the torch binding calls: choice of kernels, a layer on several threads, rows of a packed table.
#pragma once

#include "linear.h"
#include "stages.h"

namespace pageloom {

// As attention_backends.native_build.ISAS numbers them, from 1.
enum Isa : int64_t {
  kAuto = 0,
  kPortable = 1,
  kAvx2 = 2,
  kAvx512 = 3,
  kAvx512Vnni = 4,
  kAvx512Bf16 = 5,
  kAmx = 6,
  kWidest = kAmx
};

// Whether this CPU (and, for AMX, this kernel) runs code compiled for `isa`, and the build has it.
bool isa_available(int64_t isa);

// The kernels of the widest available ISA at or below `isa` (kAuto: any) that have the format; null: there are none.
const LinearKernels* kernels_of(Format format, int64_t isa);

struct LinearLayer {
  LinearProblem problem;  // its inputs may be what layers before it put out; all have the same rows, n > 0
  const LinearKernels* kernels;
};

// LinearProblem::reading of problems that are made from now on.
inline constexpr int64_t kMostStreams = 8;
void set_reading(Reading chosen);
Reading reading();

// Layers as stages of a run by up to `threads` threads. One thread makes them, in memory that is its own until it makes
// others; the layers must stay where they are as long.
class LinearStages {
 public:
  LinearStages(int64_t layers, int64_t threads);
  LinearStages(const LinearStages&) = delete;
  Stage* add(const LinearLayer& layer);  // at most as many as were announced; of at least one row

 private:
  int64_t threads_;
  char* at_;
  char* rows_ = nullptr;  // prepared for all threads, of one stage at a time
};

void run_linear(const LinearLayer& layer, const Threads& threads);

// One output's weights, decoded exactly and rounded to bf16 [k]. `panel` is the panel that holds the output, `output`
// its place there, 0 to 31. Null where this build cannot decode the format.
using DecodeRow = void (*)(const uint8_t* panel, int64_t output, int64_t k, uint16_t* target);
DecodeRow row_decoder(Format format);

// Those of the quantised formats (linear_decode.cpp).
DecodeRow quantised_row_decoder(Format format);

struct EmbeddingProblem {
  const int64_t* ids;
  int64_t tokens, n, k;
  const uint8_t* weight;
  int64_t panel_bytes;
  uint16_t* out;  // [tokens][k]
};

// The index of the first id outside [0, n), or -1: all is well. Nothing is written where an id is bad.
int64_t run_embedding(const EmbeddingProblem& problem, DecodeRow decode, const Threads& threads);

}  // namespace pageloom
