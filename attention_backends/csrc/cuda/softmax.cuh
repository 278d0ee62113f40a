// Attention of one warp: M x 16 query rows against a tile of keys and values in shared memory, with the running softmax
// of FlashAttention-2 (Dao 2023, algorithm 1) in exponents of 2. Decode and prefill differ in how tiles arrive, not in
// this.
#pragma once

#include <math.h>

#include "rows.cuh"

namespace pageloom::cuda {

constexpr float LOWEST = -1e30f;  // a running maximum is finite from the start: -inf - -inf is NaN

// Queries as operands: kept in registers where there is room, else read again for every tile.
template <class S, int M, bool KEPT>
struct Queries {
  uint32_t kept[KEPT ? M : 1][KEPT ? S::HEAD_DIM / 16 : 1][4];
  int lane_at;

  __device__ __forceinline__ void open(int from, int row) {
    lane_at = query_lane<S>(from, row);
    if constexpr (KEPT) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int step = 0; step < S::HEAD_DIM / 16; ++step) query_fragment<S>(kept[m][step], at(m), step);
      }
    }
  }
  __device__ __forceinline__ int at(int m) const { return lane_at + m * 16 * S::QueryRows::ROW_BYTES; }
  __device__ __forceinline__ void get(uint32_t (&a)[4], int m, int step) const {
    if constexpr (KEPT) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = kept[m][step][i];
    } else {
      query_fragment<S>(a, at(m), step);
    }
  }
};

// A lane's part: of rows 16 m + lane / 4 + 8 h, elements [.][2 h] and [.][2 h + 1] of each tile.
template <class S, int M>
struct Accumulator {
  float out[M][S::TILES][4];
  float top[M][2];  // largest score so far, before scaling; the same in the four lanes of a row
  float sum[M][2];  // of this lane's exponentials

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[m][h] = LOWEST;
        sum[m][h] = 0.0f;
      }
#pragma unroll
      for (int t = 0; t < S::TILES; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][t][i] = 0.0f;
      }
    }
  }
  __device__ __forceinline__ void add_up_lanes() {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[m][h] += shuffle_xor(sum[m][h], 1);
        sum[m][h] += shuffle_xor(sum[m][h], 2);
      }
    }
  }
};

template <class S, int M, int KEYS, bool KEPT>
__device__ __forceinline__ void multiply_keys(float (&s)[M][KEYS / 8][4], const Queries<S, M, KEPT>& queries,
                                              int keys_at) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][n][i] = 0.0f;
    }
  }
  constexpr int TOGETHER = S::BYTES && KEYS % 32 == 0 ? 32 : 16;
  const int lane_at = key_lane<S, TOGETHER>(keys_at);
#pragma unroll
  for (int step = 0; step < S::HEAD_DIM / 16; ++step) {
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) queries.get(a[m], m, step);
#pragma unroll
    for (int key = 0; key < KEYS; key += TOGETHER) {
      uint32_t b[TOGETHER / 8][2];
      key_fragments<S, TOGETHER>(b, lane_at, key, step);
#pragma unroll
      for (int n = 0; n < TOGETHER / 8; ++n) {
#pragma unroll
        for (int m = 0; m < M; ++m) mma_m16n8k16<typename S::Half>(s[m][key / 8 + n], a[m], b[n]);
      }
    }
  }
}

template <int M, int TILES>
__device__ __forceinline__ void soft_cap(float (&s)[M][TILES][4], const Scoring& scoring) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][n][i] = scoring.cap_out * tanh_precise(s[m][n][i] * scoring.cap_in);
    }
  }
}

// Scores of hidden keys are replaced, whatever they are: slots that hold no key may hold NaN.
template <bool VARIANT, int M, int TILES>
__device__ __forceinline__ void hide(float (&s)[M][TILES][4], const Sight& sight, int key) {
  const int lane = static_cast<int>(threadIdx.x) % WARP;
  key += lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int newest = sight.newest(m * 16 + h * 8 + lane / 4) - key;
      const int oldest = VARIANT ? oldest_key(newest + key, sight.window) - key : -TILES * 8;
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const bool hidden = n * 8 + i > newest || (VARIANT && n * 8 + i < oldest);
          if (hidden) s[m][n][h * 2 + i] = -INFINITY;
        }
      }
    }
  }
}

// Scores to weights, in place.
template <class S, int M, int TILES>
__device__ __forceinline__ void soften(Accumulator<S, M>& state, float (&s)[M][TILES][4], float scale) {
  float factor[M][2];
  bool grown = false;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = state.top[m][h];
#pragma unroll
      for (int n = 0; n < TILES; ++n) top = max_f(top, max_f(s[m][n][h * 2], s[m][n][h * 2 + 1]));
      top = max_f(top, shuffle_xor(top, 1));
      top = max_f(top, shuffle_xor(top, 2));
      factor[m][h] = exp2_fast((state.top[m][h] - top) * scale);
      grown = grown || top > state.top[m][h];
      state.top[m][h] = top;
      const float shift = top * scale;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          s[m][n][h * 2 + i] = exp2_fast(s[m][n][h * 2 + i] * scale - shift);
          sum += s[m][n][h * 2 + i];
        }
      }
      state.sum[m][h] = state.sum[m][h] * factor[m][h] + sum;
    }
  }
  if (!any_in_warp(grown)) return;  // usual, once some keys have been seen
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int t = 0; t < S::TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.out[m][t][i] *= factor[m][i / 2];
    }
  }
}

template <class S, int M, int TILES>
__device__ __forceinline__ void multiply_values(Accumulator<S, M>& state, const float (&s)[M][TILES][4],
                                                int values_at) {
  using Half = typename S::Half;
  const int lane_at = value_lane<S>(values_at);
#pragma unroll
  for (int keys = 0; keys < TILES / 2; ++keys) {
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &s[m][keys * 2 + i / 2][i % 2 * 2];
        a[m][i] = pack2<Half>(pair[0], pair[1]);
      }
    }
#pragma unroll
    for (int dims = 0; dims < S::HEAD_DIM / 32; ++dims) {
      uint32_t b[4][2];
      value_fragments<S>(b, lane_at, keys, dims);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
#pragma unroll
        for (int m = 0; m < M; ++m) mma_m16n8k16<Half>(state.out[m][dims * 4 + t], a[m], b[t]);
      }
    }
  }
}

// The tile's first key is `key`.
template <class S, int M, int KEYS, bool KEPT, bool VARIANT>
__device__ __forceinline__ void attend(Accumulator<S, M>& state, const Queries<S, M, KEPT>& queries, int keys_at,
                                       int values_at, const Sight& sight, int key, const Scoring& scoring) {
  float s[M][KEYS / 8][4];
  multiply_keys<S, M, KEYS, KEPT>(s, queries, keys_at);
  if (VARIANT && scoring.cap_out > 0) soft_cap(s, scoring);
  if (!sight.template all<M * 16>(key, KEYS)) hide<VARIANT>(s, sight, key);
  soften(state, s, scoring.scale);
  multiply_values(state, s, values_at);
}

// The weight of a sink relative to a row's maximum; it joins the sum once, and only where there are keys.
__device__ __forceinline__ float sink_weight(const Scoring& scoring, int head, float top_exponent) {
  return scoring.sinks == nullptr ? 0.0f : exp2_fast(scoring.sinks[head] * LOG2_E - top_exponent);
}

}  // namespace pageloom::cuda
