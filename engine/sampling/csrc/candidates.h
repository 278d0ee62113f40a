// The likely tokens of a row, found without a second look at most of it: maxima of blocks tell which blocks matter.
#pragma once

#include "lanes.h"
#include "sampling.h"

namespace {

using pageloom::kListed;
using pageloom::kMaxBlocks;
using pageloom::Row;

// Accumulates whether any lane is NaN: maxima of vectors forget it.
struct NanWatch {
#if defined(__AVX512F__)
  __mmask16 seen = 0;
  PAGELOOM_INLINE void see(NanWatch& w, vf a, vf b) {
    w.seen |= _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q);
  }
  PAGELOOM_INLINE bool any(const NanWatch& w) { return w.seen != 0; }
#else
  vi seen = {};
  PAGELOOM_INLINE void see(NanWatch& w, vf a, vf b) { w.seen |= (vi)(a != a) | (vi)(b != b); }
  PAGELOOM_INLINE bool any(const NanWatch& w) {
    int32_t bits = 0;
    for (int64_t i = 0; i < VW; ++i) bits |= w.seen[i];
    return bits != 0;
  }
#endif
};

constexpr int64_t kAhead = 2048;  // logits between what is read and what is fetched: one stream outruns the hardware's

bool scan_blocks(const float* logits, int64_t vocab, int64_t block, int64_t begin, int64_t end, float* maxima) {
  NanWatch watch;
  for (int64_t b = begin; b < end; ++b) {
    const float* x = logits + b * block;
    const int64_t n = vocab - b * block < block ? vocab - b * block : block;
    vf most = splat(-kInfinity), other = most;
    int64_t i = 0;
    for (; i + 2 * VW <= n; i += 2 * VW) {
      __builtin_prefetch(x + i + kAhead);
      if constexpr (VW == 16) __builtin_prefetch(x + i + VW + kAhead);
      const vf left = loadf(x + i), right = loadf(x + i + VW);
      NanWatch::see(watch, left, right);
      most = vmax(most, left);
      other = vmax(other, right);
    }
    for (; i < n; i += VW) {
      const vf left = load_some(x + i, n - i, -kInfinity);
      NanWatch::see(watch, left, left);
      most = vmax(most, left);
    }
    maxima[b] = reduce_max(vmax(most, other));
  }
  return NanWatch::any(watch);
}

float largest(const Row& row) {
  vf most = splat(-kInfinity);
  for (int64_t b = 0; b < row.num_blocks; b += VW) most = vmax(most, loadf(row.maxima + b));
  return reduce_max(most);
}

PAGELOOM_INLINE int64_t tokens_in(const Row& row, int64_t b) {
  const int64_t left = row.vocab - b * row.block;
  return left < row.block ? left : row.block;
}

int64_t first_token(const Row& row, float top) {
  int64_t b = 0;
  while (row.maxima[b] != top) ++b;
  int64_t token = b * row.block;
  while (row.logits[token] != top) ++token;
  return token;
}

int32_t count_at_least(const float* x, int64_t n, float limit) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += x[i] >= limit;
  return count;
}

// A logit that at least `k` (<= blocks) tokens reach and, ties aside, not many more: that many blocks have one.
float reached_by(const Row& row, float top, int64_t k) {
  const int64_t padded = (row.num_blocks + 15) / 16 * 16;  // what is behind the last block is -inf
  const int64_t enough = k + k / 4;
  float step = 2.0f, low = top - step;
  int64_t high = (int64_t)order_key(top) + 1;
  int32_t count = count_at_least(row.maxima, padded, low);
  for (; count < k; count = count_at_least(row.maxima, padded, low)) {
    high = order_key(low);
    step *= 2.0f;
    low = top - step;
  }
  while (count > enough && high - order_key(low) > 1) {
    const int64_t bottom = order_key(low);
    int64_t middle = order_key(0.5f * low + 0.5f * key_value((int32_t)high));
    if (middle <= bottom || middle >= high) middle = bottom + (high - bottom) / 2;
    const float limit = key_value((int32_t)middle);
    const int32_t reached = count_at_least(row.maxima, padded, limit);
    if (reached >= k) {
      low = limit;
      count = reached;
    } else {
      high = middle;
    }
  }
  return low;
}

// Tokens in the order of their ids.
struct List {
  int64_t n;
  alignas(64) float logits[kListed + 16];
  alignas(64) int32_t ids[kListed + 16];
  alignas(64) float scaled[kListed + 16];
  alignas(64) int32_t keys[kListed + 16];
  alignas(64) int64_t mass[kListed + 16];
};

// Appends the tokens of x[0, n) that reach `limit`; the list has room for n + 16.
PAGELOOM_INLINE void append(List& list, const float* x, int64_t first_id, int64_t n, float limit) {
  int64_t size = list.n;
#if defined(__AVX512F__)
  const __m512i steps = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 valid = n - i >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << (n - i)) - 1);
    const __m512 values = _mm512_maskz_loadu_ps(valid, x + i);
    const __mmask16 kept = _mm512_mask_cmp_ps_mask(valid, values, _mm512_set1_ps(limit), _CMP_GE_OQ);
    if (kept == 0) continue;
    const __m512i ids = _mm512_add_epi32(_mm512_set1_epi32((int)(first_id + i)), steps);
    _mm512_storeu_ps(list.logits + size, _mm512_maskz_compress_ps(kept, values));  // to memory it is slow on Zen 4
    _mm512_storeu_si512(list.ids + size, _mm512_maskz_compress_epi32(kept, ids));
    size += __builtin_popcount(kept);
  }
#else
  for (int64_t i = 0; i < n; ++i) {
    list.logits[size] = x[i];
    list.ids[size] = (int32_t)(first_id + i);
    size += x[i] >= limit;
  }
#endif
  list.n = size;
}

// All tokens whose logit is at least `limit`; false if the list cannot hold them.
bool gather(const Row& row, float limit, List& list) {
  list.n = 0;
  for (int64_t b = 0; b < row.num_blocks; ++b) {
    if (!(row.maxima[b] >= limit)) continue;
    const float* x = row.logits + b * row.block;
    const int64_t n = tokens_in(row, b);
    for (int64_t i = 0; i < n; i += 64) {
      const int64_t piece = n - i < 64 ? n - i : 64;
      if (list.n + piece > kListed) {
        if (list.n + count_at_least(x + i, piece, limit) > kListed) return false;
        for (int64_t j = 0; j < piece; ++j)
          if (x[i + j] >= limit) {
            list.logits[list.n] = x[i + j];
            list.ids[list.n++] = (int32_t)(b * row.block + i + j);
          }
      } else {
        append(list, x + i, b * row.block + i, piece, limit);
      }
    }
  }
  return true;
}

}  // namespace
