// Rows of each head times that head's matrix, read as a checkpoint has it: what latent attention multiplies queries and
// what they find with. Sums in float32. Compiled once per ISA, with attention_kernel.cpp.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using namespace pageloom;

constexpr int64_t kProductRows = 8;  // that are widened at once
#if defined(__AVX512F__)
constexpr int kProductStep = 8;  // rows that stay in registers
#else
constexpr int kProductStep = 4;
#endif
// Vectors of outputs, or outputs, of so many rows. One row's wait for memory: whole lines, and several of them.
template <int R>
constexpr int kProductCols = R == 1 ? 8 : 2;

template <class T>
PAGELOOM_INLINE vf widen(const typename T::Storage* p) {
  if constexpr (sizeof(*p) == 4) {
    return loadf(p);
  } else {
    typedef uint16_t Halves __attribute__((vector_size(PAGELOOM_VECTOR_BYTES / 2)));
    return T::low(__builtin_convertvector(load_as<Halves>(p), vu));
  }
}

// y[r][c] = sum over k of x[r][k] * w[k][c], for R rows and the C vectors of columns from `w` on.
template <class T, int R, int C>
void product_across(const float* x, const typename T::Storage* w, int64_t row, int64_t depth, float* y, int64_t ldy) {
  vf acc[R][C] = {};
  for (int64_t k = 0; k < depth; ++k) {
    vf lanes[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) lanes[j] = widen<T>(w + k * row + j * VW);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const vf value = splat(x[i * kMaxHeadDim + k]);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) acc[i][j] = acc[i][j] + value * lanes[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) storef(y + i * ldy + j * VW, acc[i][j]);
}

// y[r][c] = sum over k of x[r][k] * w[c][k], for R rows and C columns.
template <class T, int R, int C>
void product_along(const float* x, const typename T::Storage* w, int64_t row, int64_t depth, float* y, int64_t ldy) {
  vf acc[R][C] = {};
  int64_t k = 0;
  for (; k + VW <= depth; k += VW) {
    vf lanes[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) lanes[j] = widen<T>(w + j * row + k);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const vf values = loadf(x + i * kMaxHeadDim + k);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) acc[i][j] = acc[i][j] + values * lanes[j];
    }
  }
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < C; ++j) {
      float sum = reduce_add(acc[i][j]);
      for (int64_t rest = k; rest < depth; ++rest) sum += x[i * kMaxHeadDim + rest] * T::to_float(w[j * row + rest]);
      y[i * ldy + j] = sum;
    }
}

template <class T, int R>
void product_rows(const HeadProduct& p, const float* x, const typename T::Storage* w, float* y) {
  constexpr int C = kProductCols<R>;
  int64_t c = 0;
  if (p.transposed) {
    for (; c + C <= p.outs; c += C)
      product_along<T, R, C>(x, w + c * p.row_stride, p.row_stride, p.depth, y + c, kMaxHeadDim);
    for (; c < p.outs; ++c) product_along<T, R, 1>(x, w + c * p.row_stride, p.row_stride, p.depth, y + c, kMaxHeadDim);
    return;
  }
  for (; c + C * VW <= p.outs; c += C * VW)
    product_across<T, R, C>(x, w + c, p.row_stride, p.depth, y + c, kMaxHeadDim);
  for (; c + VW <= p.outs; c += VW) product_across<T, R, 1>(x, w + c, p.row_stride, p.depth, y + c, kMaxHeadDim);
  for (; c < p.outs; ++c)
    for (int i = 0; i < R; ++i) {
      float sum = 0;
      for (int64_t k = 0; k < p.depth; ++k) sum += x[i * kMaxHeadDim + k] * T::to_float(w[k * p.row_stride + c]);
      y[i * kMaxHeadDim + c] = sum;
    }
}

template <class T>
void product_typed(const HeadProduct& p, int64_t head, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  alignas(64) float x[kProductRows * kMaxHeadDim], y[kProductRows * kMaxHeadDim];
  const Storage* const w = (const Storage*)p.weight + head * p.head_stride;
  for (int64_t row = begin; row < end; row += kProductRows) {
    const int64_t rows = end - row < kProductRows ? end - row : kProductRows;
    for (int64_t i = 0; i < rows; ++i) {
      const Storage* const from = (const Storage*)p.x.data + (row + i) * p.x.token_stride + head * p.x.head_stride;
      for (int64_t k = 0; k < p.depth; ++k) x[i * kMaxHeadDim + k] = T::to_float(from[k]);
    }
    int64_t i = 0;
    for (; i + kProductStep <= rows; i += kProductStep)
      product_rows<T, kProductStep>(p, x + i * kMaxHeadDim, w, y + i * kMaxHeadDim);
    for (; i < rows; ++i) product_rows<T, 1>(p, x + i * kMaxHeadDim, w, y + i * kMaxHeadDim);
    for (i = 0; i < rows; ++i) {
      Storage* const to = (Storage*)p.out.data + (row + i) * p.out.token_stride + head * p.out.head_stride;
      for (int64_t c = 0; c < p.outs; ++c) to[c] = T::from_float(y[i * kMaxHeadDim + c]);
    }
  }
}

void product(const HeadProduct& p, int64_t head, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case Dtype::kFloat32: return product_typed<Float32>(p, head, begin, end);
    case Dtype::kBFloat16: return product_typed<BFloat16>(p, head, begin, end);
    default: return product_typed<Float16>(p, head, begin, end);
  }
}

}  // namespace
