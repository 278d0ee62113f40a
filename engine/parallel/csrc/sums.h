// Sums of what ranks hold, compiled once per instruction set. Plain data only: a unit that is compiled for AVX-512 must
// not emit a shared inline function.
#pragma once

#include <stdint.h>

namespace pageloom {

enum class Float : int32_t { k32 = 0, kBrain16 = 1, kHalf16 = 2 };

struct SumKernels {
  // out[i] = parts[0][i] + parts[1][i] + ..., in float32 and in this order, rounded once to out_type; with a residual of
  // out_type, that plus residual[i], rounded again. Parts are float32 or of out_type.
  void (*sum)(const void* const* parts, int64_t num_parts, Float part_type, const void* residual, void* out,
              Float out_type, int64_t count);
};

#define PAGELOOM_SUMS(isa)                    \
  namespace kernels_##isa {                   \
  extern const SumKernels kSums;              \
  }
PAGELOOM_SUMS(portable)
PAGELOOM_SUMS(avx2)
PAGELOOM_SUMS(avx512)

}  // namespace pageloom
