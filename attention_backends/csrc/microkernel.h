// C[rows, lanes] (+)= A[rows, k] * B[k, lanes]: the one product behind both halves of attention. B is read in place
// from cache pages; a register block of kRows x kCols vectors stays in registers over the whole k loop.
#pragma once

#include "simd.h"

namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 6, kMaxCols = 4;  // 24 accumulators + 4 loads of 32 registers
#else
constexpr int kMaxRows = 4, kMaxCols = 2;  // 8 accumulators + 4 widened loads of 16 registers
#endif

// `count` rows of cells of one page; `a_index` is where in A's row they start (in rows of cells).
template <class T>
struct Segment {
  const typename T::Cell* base;
  int64_t count;
  int64_t a_index;
};

template <class T, int R, int C>
PAGELOOM_INLINE void multiply_accumulate(typename T::Sum (&acc)[R][C], const uint32_t* a, int64_t lda,
                                         const typename T::Cell* const (&b)[C], int64_t ldb, int64_t count) {
  for (int64_t d = 0; d < count; ++d) {
    vu lanes[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) lanes[j] = T::load(b[j] + d * ldb);
    if constexpr (T::kWords == 1) {
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < C; ++j) acc[i][j] = T::mac(acc[i][j], a[i * lda + d], lanes[j]);
      }
    } else {
      vf low[C], high[C];
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) low[j] = T::low(lanes[j]), high[j] = T::high(lanes[j]);
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) {
        const vf x = splat(bits_to_float(a[i * lda + 2 * d])), y = splat(bits_to_float(a[i * lda + 2 * d + 1]));
#pragma GCC unroll 8
        for (int j = 0; j < C; ++j) {
          acc[i][j] = acc[i][j] + x * low[j];
          acc[i][j] = acc[i][j] + y * high[j];
        }
      }
    }
  }
}

// With few rows attention is bound by memory, and pages are too short for the hardware to guess the next one. So while
// keys are multiplied their values are asked for, and while values are, the keys of the next tile: evenly, since no more
// than a few dozen lines can be under way. Into the second level: a prefetch to the first one waits for a place there
// (a Zen 4; a Zen 5 drops some of these, and loses 4 % by it).
PAGELOOM_INLINE void ask_for(const void* line) { __builtin_prefetch(line, 0, 2); }

// Scores of R rows against C vectors of tokens: b[j] points at lane row 0 of token vector j. `values` (or null): of
// these tokens, to be asked for.
template <class T, int R, int C>
void scores_block(const uint32_t* a, int64_t lda, const typename T::Cell* const* tokens,
                  const typename T::Cell* const* values, int64_t ldb, int64_t count, float* c, int64_t ldc) {
  constexpr int64_t kRowBytes = VW * sizeof(typename T::Cell), kLine = kRowBytes < 64 ? 64 / kRowBytes : 1;
  typename T::Sum acc[R][C] = {};
  const typename T::Cell* b[C];
  for (int j = 0; j < C; ++j) b[j] = tokens[j];
  if (values == nullptr) {
    multiply_accumulate<T, R, C>(acc, a, lda, b, ldb, count);
  } else {
    int64_t d = 0;
    for (; d + kLine <= count; d += kLine) {
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) ask_for(values[j] + d * VW);
      multiply_accumulate<T, R, C>(acc, a + d * T::kWords, lda, b, ldb, kLine);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) b[j] += kLine * ldb;
    }
    multiply_accumulate<T, R, C>(acc, a + d * T::kWords, lda, b, ldb, count - d);
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) storef(c + i * ldc + j * VW, T::as_float(acc[i][j]));
}

// C = P * V for R rows and C vectors of dims, over all segments of a key tile. `unit`: of a row of P, where it is
// integers. `ahead` (or null): the next tile's keys by vectors of tokens, to be asked for, whose rows are `ldk` apart.
template <class T, int R, int C>
void values_block(const uint32_t* a, int64_t lda, const Segment<T>* segments, int64_t num_segments, int64_t dim,
                  int64_t ldb, const float* unit, float* c, int64_t ldc, const typename T::Cell* const* ahead,
                  int64_t ldk) {
  typename T::Sum acc[R][C] = {};
  for (int64_t s = 0; s < num_segments; ++s) {
    const typename T::Cell* b[C];
    for (int j = 0; j < C; ++j) b[j] = segments[s].base + dim + j * VW;
    const int64_t index = segments[s].a_index, count = segments[s].count;
    if (ahead == nullptr) {
      multiply_accumulate<T, R, C>(acc, a + index * T::kWords, lda, b, ldb, count);
      continue;
    }
    constexpr int64_t kSteps = VW / T::kPerLane;  // of a vector of tokens; C rows of its successor's keys in each
    for (int64_t d = index; d < index + count; ++d) {
      const typename T::Cell* const keys = ahead[d / kSteps] + (dim / T::kPerLane + d % kSteps * C) * ldk;
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) ask_for(keys + j * ldk);
      multiply_accumulate<T, R, C>(acc, a + d * T::kWords, lda, b, ldb, 1);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) b[j] += ldb;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) {
      vf sum = T::as_float(acc[i][j]);
      if constexpr (T::kScaled) sum = sum * splat(unit[i]);
      storef(c + i * ldc + j * VW, sum);
    }
}

// Calls f with the compile-time row count R == n, 1 <= n <= kMaxRows.
template <int R>
struct Rows {
  static constexpr int value = R;
};
template <class F>
PAGELOOM_INLINE void with_rows(int64_t n, F f) {
  switch (n) {
    case 1: return f(Rows<1>{});
    case 2: return f(Rows<2>{});
    case 3: return f(Rows<3>{});
#if defined(__AVX512F__)
    case 4: return f(Rows<4>{});
    case 5: return f(Rows<5>{});
    default: return f(Rows<6>{});
#else
    default: return f(Rows<4>{});
#endif
  }
}

// values[j] (or null): where the values of token vector j start.
template <class T>
void all_scores(const uint32_t* a, int64_t lda, int64_t rows, const typename T::Cell* const* tokens,
                const typename T::Cell* const* values, int64_t num_vectors, int64_t ldb, int64_t count, float* c,
                int64_t ldc) {
  for (int64_t g = 0; g < num_vectors;) {
    const int64_t cols = g + kMaxCols <= num_vectors ? kMaxCols : 1;
    const typename T::Cell* const* const of_these = values != nullptr ? values + g : nullptr;
    for (int64_t r = 0; r < rows; r += kMaxRows) {
      const int64_t n = rows - r < kMaxRows ? rows - r : kMaxRows;
      with_rows(n, [&](auto tag) {
        constexpr int R = decltype(tag)::value;
        const auto block = cols == kMaxCols ? scores_block<T, R, kMaxCols> : scores_block<T, R, 1>;
        block(a + r * lda, lda, tokens + g, of_these, ldb, count, c + r * ldc + g * VW, ldc);
      });
    }
    g += cols;
  }
}

template <class T>
void all_values(const uint32_t* a, int64_t lda, int64_t rows, const Segment<T>* segments, int64_t num_segments,
                int64_t dims, const float* unit, float* c, const typename T::Cell* const* ahead, int64_t ldk) {
  for (int64_t d = 0; d < dims;) {
    const bool wide = d + kMaxCols * VW <= dims;
    for (int64_t r = 0; r < rows; r += kMaxRows) {
      const int64_t n = rows - r < kMaxRows ? rows - r : kMaxRows;
      with_rows(n, [&](auto tag) {
        constexpr int R = decltype(tag)::value;
        const auto block = wide ? values_block<T, R, kMaxCols> : values_block<T, R, 1>;
        block(a + r * lda, lda, segments, num_segments, d, dims, unit + r, c + r * dims + d, dims, ahead, ldk);
      });
    }
    d += wide ? kMaxCols * VW : VW;
  }
}

}  // namespace
