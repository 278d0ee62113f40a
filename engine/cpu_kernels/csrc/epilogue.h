// From a row's sums over a panel to what the layer returns: bias, gate, rounding, residual, store. Internal linkage.
#pragma once

#include "linear.h"
#include "simd.h"

namespace {

// `sums`: float32 [32], 64-byte aligned, of row `row` and the outputs of panel `panel`. Rounding points are those of
// separate layers: the product (with its bias) to bf16, then what is added or multiplied, to bf16 again.
// wide: float32 values that were rounded to bf16. Never writes outputs that the matrix does not have.
PAGELOOM_INLINE void store_panel_row(const pageloom::LinearProblem& p, int64_t row, int64_t panel, const float* sums);

}  // namespace
