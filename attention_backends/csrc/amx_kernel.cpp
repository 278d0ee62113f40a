// Paged attention with AMX: the same online softmax as attention_kernel.cpp for items with enough rows to fill tiles,
// of a bfloat16 or int8 cache; everything else goes to the AVX-512-BF16 kernels. A pass takes 32 rows against up to
// kKeys keys: one product into `scores`, one softmax over them, one product onto the accumulator.
#include "amx_pages.h"

namespace {

int64_t scratch_bytes(const AttentionProblem& p) {
  Scratch s;
  return max64(carve(p, nullptr, s), kernels_avx512bf16()->scratch_bytes(p));
}

// scores = queries * keys for R tiles of rows and the token vectors [first, last), both even.
template <int R>
void multiply_keys(const Scratch& s, int64_t row, int64_t first, int64_t last) {
  const int64_t key_lanes = s.depth / 2 * kTile, stride = s.depth * 2;
  const uint16_t* const q = s.queries + row * s.depth;
  tiles_read_memory();
  for (int64_t g = first; g < last; g += 2) {
    const uint32_t* const k = s.keys + g * key_lanes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < s.depth; d += 32) {
      _tile_loadd(4, q + d, stride);
      _tile_loadd(6, k + d / 2 * kTile, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, k + key_lanes + d / 2 * kTile, 64);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (R == 2) {
        _tile_loadd(5, q + kTile * s.depth + d, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    float* const c = s.scores + g * kTile;
    _tile_stored(0, c, kKeys * 4);
    _tile_stored(1, c + kTile, kKeys * 4);
    if constexpr (R == 2) {
      _tile_stored(2, c + kTile * kKeys, kKeys * 4);
      _tile_stored(3, c + kTile * kKeys + kTile, kKeys * 4);
    }
  }
}

// accumulator += probabilities * values for R tiles of rows, C tiles of dims from `dim`.
template <int R, int C>
void multiply_values(const Scratch& s, int64_t row, int64_t dim, int64_t first, int64_t last) {
  float* const c = s.accumulator + row * s.dims + dim;
  const int64_t stride = s.dims * 4;
  const uint32_t* const v = s.values + dim * (kKeys / 2);
  tiles_read_memory();
  _tile_loadd(0, c, stride);
  if constexpr (C == 2) _tile_loadd(1, c + kTile, stride);
  if constexpr (R == 2) _tile_loadd(2, c + kTile * s.dims, stride);
  if constexpr (R == 2 && C == 2) _tile_loadd(3, c + kTile * s.dims + kTile, stride);
  for (int64_t t = first * kTile; t < last * kTile; t += 32) {
    _tile_loadd(4, s.probabilities + t, kKeys * 2);
    _tile_loadd(6, v + t / 2 * kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (C == 2) {
      _tile_loadd(7, v + kTile * (kKeys / 2) + t / 2 * kTile, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (R == 2) {
      _tile_loadd(5, s.probabilities + kTile * kKeys + t, kKeys * 2);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (C == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, stride);
  if constexpr (C == 2) _tile_stored(1, c + kTile, stride);
  if constexpr (R == 2) _tile_stored(2, c + kTile * s.dims, stride);
  if constexpr (R == 2 && C == 2) _tile_stored(3, c + kTile * s.dims + kTile, stride);
}

// Which keys of the gathered ones a row sees: [low, high), and the even token vectors [first, last) around them.
struct Visible {
  int64_t low, high, first, last;
};

// Replaces the scores of one row that it must not see, and returns the largest other one, in units of `factor`.
PAGELOOM_INLINE float mask_and_reduce(const AttentionProblem& p, const Scratch& s, float* scores, const Visible& seen,
                                      bool plain) {
  if (!plain) {
    const bool capped = p.soft_cap > 0, scaled = p.cache.dtype == Dtype::kInt8;
    for (int64_t g = seen.first; g < seen.last; ++g) {
      vf t = loadf(scores + g * kTile);
      if (scaled) t = t * loadf(s.key_scales + g * kTile);
      t = capped ? tanh_all(t * (p.scale / p.soft_cap)) * (p.soft_cap * kLog2e) : t * (p.scale * kLog2e);
      storef(scores + g * kTile, t);
    }
  }
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i low = _mm512_set1_epi32((int)seen.low), high = _mm512_set1_epi32((int)seen.high);
  const auto mask = [&](int64_t g) {
    const __m512i index = _mm512_add_epi32(lane, _mm512_set1_epi32((int)(g * kTile)));
    const __mmask16 hidden = _mm512_cmplt_epi32_mask(index, low) | _mm512_cmpge_epi32_mask(index, high);
    _mm512_mask_storeu_ps(scores + g * kTile, hidden, _mm512_set1_ps(-__builtin_inff()));
  };
  if (seen.low % 32 != 0) mask(seen.first), mask(seen.first + 1);
  if (seen.high % 32 != 0) mask(seen.last - 2), mask(seen.last - 1);
  __m512 even = _mm512_set1_ps(-__builtin_inff()), odd = even;
  for (int64_t g = seen.first; g < seen.last; g += 2) {
    even = _mm512_max_ps(even, _mm512_loadu_ps(scores + g * kTile));
    odd = _mm512_max_ps(odd, _mm512_loadu_ps(scores + (g + 1) * kTile));
  }
  return _mm512_reduce_max_ps(_mm512_max_ps(even, odd));
}

// probabilities = 2^(score * factor - maximum), exactly 0 in [first, last) where the row sees nothing; returns sums.
// kScaled: stored times `scales`, the sums without.
template <bool kScaled>
PAGELOOM_INLINE __m512 exponentiate(const float* scores, const float* scales, uint16_t* target, const Visible& seen,
                                    int64_t first, int64_t last, float factor, float maximum) {
  const __m512 scale = _mm512_set1_ps(factor), top = _mm512_set1_ps(maximum);
  __m512 even = _mm512_setzero_ps(), odd = even;
  for (int64_t g = first; g < seen.first; g += 2) _mm512_storeu_si512(target + g * kTile, _mm512_setzero_si512());
  for (int64_t g = seen.first; g < seen.last; g += 2) {
    __m512 x = exp2_short(_mm512_fmsub_ps(_mm512_loadu_ps(scores + g * kTile), scale, top));
    __m512 y = exp2_short(_mm512_fmsub_ps(_mm512_loadu_ps(scores + (g + 1) * kTile), scale, top));
    even = _mm512_add_ps(even, x);
    odd = _mm512_add_ps(odd, y);
    if constexpr (kScaled) {
      x = _mm512_mul_ps(x, _mm512_loadu_ps(scales + g * kTile));
      y = _mm512_mul_ps(y, _mm512_loadu_ps(scales + (g + 1) * kTile));
    }
    const __m512bh both = _mm512_cvtne2ps_pbh(y, x);
    memcpy(target + g * kTile, &both, 64);
  }
  for (int64_t g = seen.last; g < last; g += 2) _mm512_storeu_si512(target + g * kTile, _mm512_setzero_si512());
  return _mm512_add_ps(even, odd);
}

// Scores -> probabilities of rows [row, row + count), with the accumulator rescaled where a maximum has grown. kScaled:
// of an int8 cache.
template <bool kScaled>
void softmax_pass(const AttentionProblem& p, const Scratch& s, int64_t row, int64_t count, int64_t base, int64_t begin,
                  int64_t end, int64_t first, int64_t last) {
  const bool plain = is_plain(p);
  const float factor = factor_of(p);
  Visible seen[kPassRows];
  alignas(64) float found[kPassRows], decay[kPassRows];
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = s.positions[row + i];
    Visible& v = seen[i];
    v.low = max64(begin, p.keys_before(oldest_key(position, s.window))) - base;
    v.high = min64(end, p.keys_before(position + 1)) - base;
    v.first = v.low < v.high ? v.low / 32 * 2 : last;
    v.last = v.low < v.high ? (v.high + 31) / 32 * 2 : last;
    found[i] = v.low < v.high ? mask_and_reduce(p, s, s.scores + i * kKeys, v, plain) * factor : kFloor;
  }
  for (int64_t i = count; i < kPassRows; ++i) found[i] = kFloor;
  for (int64_t i = 0; i < count; i += kTile) {
    const __m512 before = _mm512_loadu_ps(s.maximum + row + i), top = _mm512_max_ps(before, _mm512_load_ps(found + i));
    _mm512_storeu_ps(s.maximum + row + i, top);
    _mm512_store_ps(decay + i, exp2_short(_mm512_sub_ps(before, top)));
  }
  for (int64_t i = 0; i < count; ++i) {
    const __m512 total = exponentiate<kScaled>(s.scores + i * kKeys, s.value_scales, s.probabilities + i * kKeys,
                                               seen[i], first, last, factor, s.maximum[row + i]);
    float* const sums = s.sums + (row + i) * kTile;
    _mm512_storeu_ps(sums, _mm512_fmadd_ps(_mm512_loadu_ps(sums), _mm512_set1_ps(decay[i]), total));
    if (decay[i] == 1.0f) continue;
    float* const c = s.accumulator + (row + i) * s.dims;
    for (int64_t d = 0; d < s.dims; d += kTile) storef(c + d, loadf(c + d) * decay[i]);
  }
}

template <int R>
void attend_pass(const AttentionProblem& p, const Scratch& s, int64_t row, int64_t count, int64_t base, int64_t begin,
                 int64_t end) {
  // Positions grow with rows: the first row sees the oldest key, the last one the newest.
  const int64_t oldest = max64(begin, p.keys_before(oldest_key(s.positions[row], s.window)));
  const int64_t newest = min64(end, p.keys_before(s.positions[row + count - 1] + 1));
  if (oldest >= newest) return;
  const int64_t first = (oldest - base) / 32 * 2, last = (newest - base + 31) / 32 * 2;
  multiply_keys<R>(s, row, first, last);
  const auto softmax = p.cache.dtype == Dtype::kInt8 ? softmax_pass<true> : softmax_pass<false>;
  softmax(p, s, row, count, base, begin, end, first, last);
  int64_t dim = 0;
  for (; dim + 2 * kTile <= s.dims; dim += 2 * kTile) multiply_values<R, 2>(s, row, dim, first, last);
  if (dim < s.dims) multiply_values<R, 1>(s, row, dim, first, last);
}

void write_rows(const AttentionProblem& p, const WorkItem& item, const Scratch& s, int64_t rows, float* partials) {
  for (RowCursor at = item.first_row(p); at.row < item.row_begin + rows; at.next()) {
    const int64_t r = at.row - item.row_begin;
    const float* const row = s.accumulator + r * s.dims;
    const float sum = _mm512_reduce_add_ps(_mm512_loadu_ps(s.sums + r * kTile));
    float* const target = item.partial_of(p, partials, at, s.dims + kPartialExtra);
    if (target != nullptr) {
      memcpy(target, row, s.dims * sizeof(float));
      target[s.dims] = s.maximum[r] / factor_of(p);
      target[s.dims + 1] = sum;
      continue;
    }
    if (p.is_part()) {
      write_part(p, item, at, row, s.maximum[r], sum);
      continue;
    }
    auto* const out = (uint16_t*)p.out.data + item.place_of(p, p.out, at);
    const float inverse = inverse_sum<false>(p, item.kv_head * p.group + at.head, s.maximum[r], sum);
    for (int64_t d = 0; d < p.cache.head_dim; d += kTile) {
      store_bfloat16(out + d, loadf(row + d) * inverse, p.cache.head_dim - d);
    }
  }
}

bool attend(const AttentionProblem& p, const WorkItem& item, const WorkItem* next, void* memory, float* partials) {
  const int64_t rows = item.row_end - item.row_begin;
  if (rows < kMinRows) return kernels_avx512bf16()->attend(p, item, next, memory, partials);
  Scratch s;
  carve(p, memory, s);
  s.window = item.window_of(p);
  const TileSession session;
  gather_queries(p, item, s, rows);
  for (int64_t base = item.kv_begin / kTile * kTile; base < item.kv_end; base += kKeys) {
    const int64_t begin = max64(base, item.kv_begin), end = min64(base + kKeys, item.kv_end);
    if (!gather_pages(p, item, s, base, begin, end)) return false;
    for (int64_t row = 0; row < rows; row += kPassRows) {
      const int64_t count = min64(kPassRows, rows - row);
      const auto pass = count > kTile ? attend_pass<2> : attend_pass<1>;
      pass(p, s, row, count, base, begin, end);
    }
  }
  write_rows(p, item, s, rows, partials);
  return true;
}

void combine(const AttentionProblem& p, const WorkItem& rows, const float* partials, int64_t parts, int64_t stride) {
  kernels_avx512bf16()->combine(p, rows, partials, parts, stride);
}

void merge(const MergeProblem& m, int64_t begin, int64_t end) { kernels_avx512bf16()->merge(m, begin, end); }
void product(const HeadProduct& p, int64_t head, int64_t begin, int64_t end) {
  kernels_avx512bf16()->product(p, head, begin, end);
}

const KernelTable kTable = {kTile, kRows, scratch_bytes, attend, combine, merge, product};

}  // namespace

const pageloom::KernelTable* pageloom::PAGELOOM_KERNELS() { return &kTable; }
