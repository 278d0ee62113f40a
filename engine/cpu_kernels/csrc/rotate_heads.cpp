// RoPE on rows of heads, with the norm of each head that some models have before it; or the norm alone, and a residual
// added to it.
#include <stddef.h>

#include "prologue.h"

using namespace pageloom;

namespace {

// `dim` elements; `x` may be `out`.
PAGELOOM_INLINE void rotate(const uint16_t* x, const uint16_t* rope, int64_t dim, uint16_t* out) {
  const int64_t half = dim / 2;
  int64_t i = 0;
  for (; i + VW <= half; i += VW) {
    const vf first = load_bf16(x + i), second = load_bf16(x + half + i);
    const vf cos = load_bf16(rope + i), sin = load_bf16(rope + half + i);
    store_rounded(out + i, first * cos - second * sin);
    store_rounded(out + half + i, second * cos + first * sin);
  }
  for (; i < half; ++i) {
    const float first = bits_to_float((uint32_t)x[i] << 16), second = bits_to_float((uint32_t)x[half + i] << 16);
    const float cos = bits_to_float((uint32_t)rope[i] << 16), sin = bits_to_float((uint32_t)rope[half + i] << 16);
    out[i] = float_to_bf16(first * cos - second * sin);
    out[half + i] = float_to_bf16(second * cos + first * sin);
  }
}

PAGELOOM_INLINE void rotate_head(const HeadRotation& r, const uint16_t* x, const uint16_t* rope, uint16_t* out) {
  rotate(x, rope, r.rotary_dim, out);
  if (r.rotary_dim < r.head_dim && x != out)
    memcpy(out + r.rotary_dim, x + r.rotary_dim, (r.head_dim - r.rotary_dim) * 2);
}

PAGELOOM_INLINE void add(const uint16_t* x, const uint16_t* residual, int64_t count, uint16_t* out) {
  int64_t i = 0;
  for (; i + VW <= count; i += VW) store_rounded(out + i, load_bf16(residual + i) + load_bf16(x + i));
  for (; i < count; ++i)
    out[i] = float_to_bf16(bits_to_float((uint32_t)residual[i] << 16) + bits_to_float((uint32_t)x[i] << 16));
}

void compute(const LinearProblem& p, const Operand&, int64_t row_begin, int64_t row_end, int64_t, int64_t,
             void* scratch) {
  const HeadRotation& r = p.rotation;
  const int64_t heads = r.q_heads + r.k_heads, rotated = heads * r.head_dim;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const uint16_t* const x = p.x + row * p.x_stride;
    uint16_t* const out = (uint16_t*)p.out + row * p.out_stride;
    for (int64_t head = 0; head < heads; ++head) {
      const uint16_t* from = x + head * r.head_dim;
      if (r.q_norm != nullptr) {
        LinearProblem norm = {};
        norm.x = from, norm.k = r.head_dim, norm.norm_eps = p.norm_eps;
        norm.norm_weight = head < r.q_heads ? r.q_norm : r.k_norm, norm.norm_wide = p.norm_wide;
        normalise_row(norm, 0, (uint16_t*)scratch);
        from = (const uint16_t*)scratch;
      }
      if (p.residual != nullptr)
        add(from, p.residual + row * p.residual_stride + head * r.head_dim, r.head_dim, out + head * r.head_dim);
      else if (r.rope == nullptr)
        memcpy(out + head * r.head_dim, from, r.head_dim * 2);
      else
        rotate_head(r, from, r.rope + row * r.rope_stride, out + head * r.head_dim);
    }
    if (out != x) memcpy(out + rotated, x + rotated, (p.n - rotated) * 2);
  }
}

OperandKind operand_kind(const LinearProblem&) { return OperandKind::kBFloat16; }
void prepare(const LinearProblem&, const Operand&, int64_t, int64_t) {}
size_t scratch_bytes(const LinearProblem& p) { return (size_t)p.rotation.head_dim * 2; }

const LinearKernels kKernels = {operand_kind, prepare, scratch_bytes, compute};

}  // namespace

const LinearKernels* pageloom::PAGELOOM_FOR_ISA(rotate_heads)() { return &kKernels; }
