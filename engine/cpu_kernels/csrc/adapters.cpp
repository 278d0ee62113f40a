// What adapters add to a layer's product, row by row: a row's bits depend on that row, its adapter and the ISA alone.
#include "adapters.h"

#include "prologue.h"

using namespace pageloom;

namespace {

constexpr int64_t kLine = 32;  // elements of a cache line

PAGELOOM_INLINE float widened(uint16_t x) { return bits_to_float((uint32_t)x << 16); }

// Some entries of the order, read once: who tries a piece while a step runs sees that step's tables change.
struct Entries {
  int64_t rows[kAdapterRows], slots[kAdapterRows], count = 0;

  Entries(const AdapterProblem& p, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      if (const int64_t row = p.tables.order[i]; row < p.layer.rows)
        rows[count] = row, slots[count++] = p.tables.slots[row];
  }

  // Where those end that have the adapter of entry i.
  int64_t alike(int64_t i) const {
    int64_t end = i + 1;
    while (end < count && slots[end] == slots[i]) ++end;
    return end;
  }
};

// R rows of A, k elements apart, times C rows of x, that lie together; asks for rows of A that come next. An output is the same
// sum in any of them.
template <int R, int C>
PAGELOOM_INLINE void dots(const uint16_t* a, const float* x, int64_t k, float* const* sums) {
  vf even[R][C], odd[R][C];
  for (int i = 0; i < R; ++i)
    for (int c = 0; c < C; ++c) even[i][c] = odd[i][c] = vf{};
  int64_t at = 0;
  for (; at + 2 * VW <= k; at += 2 * VW)
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
      const uint16_t* const from = a + i * k + at;
      if (at % kLine == 0) __builtin_prefetch(from + 4 * k, 0, 2);
      const vf first = load_bf16(from), second = load_bf16(from + VW);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        even[i][c] += first * loadf(x + c * k + at);
        odd[i][c] += second * loadf(x + c * k + at + VW);
      }
    }
  for (int i = 0; i < R; ++i)
    for (int c = 0; c < C; ++c) {
      float sum = reduce_add(even[i][c] + odd[i][c]);
      for (int64_t j = at; j < k; ++j) sum += widened(a[i * k + j]) * x[c * k + j];
      sums[c][i] = sum;
    }
}

// Rows of x that have one adapter, as floats [count][k]; where their A x goes.
struct Alike {
  const float* x;
  float* low[kAdapterRows];
  int64_t count;
};

PAGELOOM_INLINE void dots_of(const uint16_t* a, const Alike& rows, int64_t k, int64_t rank_begin, int64_t rank_end) {
  float* to[kAdapterRows];
  int64_t r = rank_begin;
  for (const int64_t step = rows.count > 1 ? 1 : 4; r < rank_end; r += r + step <= rank_end ? step : 1) {
    for (int64_t i = 0; i < rows.count; ++i) to[i] = rows.low[i] + r;
    if (rows.count == 1 && r + 4 <= rank_end)
      dots<4, 1>(a + r * k, rows.x, k, to);
    else if (rows.count == 1)
      dots<1, 1>(a + r * k, rows.x, k, to);
    else if (rows.count == 2)
      dots<1, 2>(a + r * k, rows.x, k, to);
    else if (rows.count == 3)
      dots<1, 3>(a + r * k, rows.x, k, to);
    else
      dots<1, 4>(a + r * k, rows.x, k, to);
  }
}

// Row `row` as the product sees it. `some`: bf16 [k].
PAGELOOM_INLINE void widen_row(const LinearProblem& p, int64_t row, uint16_t* some, float* target) {
  const uint16_t* x = p.x + row * p.x_stride;
  if (p.norm_weight != nullptr) normalise_row(p, row, some), x = some;
  int64_t i = 0;
  for (; i + VW <= p.k; i += VW) storef(target + i, load_bf16(x + i));
  for (; i < p.k; ++i) target[i] = widened(x[i]);
}

void shrink(const AdapterProblem& p, const AdapterShare& share, float* scratch) {
  const AdapterTables& t = p.tables;
  const Entries entries(p, share.begin, share.end);
  const int64_t k = p.layer.k;
  auto* const some = reinterpret_cast<uint16_t*>(scratch + kAdapterRows * k);
  for (int64_t i = 0, end; i < entries.count; i = end) {
    end = entries.alike(i);
    const int64_t slot = entries.slots[i];
    if (slot < 0) continue;
    Alike rows{scratch, {}, end - i};
    for (int64_t c = 0; c < rows.count; ++c) {
      widen_row(p.layer, entries.rows[i + c], some, scratch + c * k);
      rows.low[c] = p.low + (entries.rows[i + c] * t.parts + share.part_begin) * t.max_rank;
    }
    for (int64_t part = share.part_begin; part < share.part_end; ++part) {
      const int64_t rank = t.ranks[slot * t.parts + part], last = rank < share.rank_end ? rank : share.rank_end;
      dots_of(t.a + (slot * t.parts + part) * t.max_rank * k, rows, k, share.rank_begin, last);
      for (int64_t c = 0; c < rows.count; ++c) rows.low[c] += t.max_rank;
    }
  }
}

// N vectors of columns from `b` on, in a block, weighted by each of C rows and summed; asks for the next block's. An output
// is the same sum in any of them.
template <int N, int C>
PAGELOOM_INLINE void expand(const uint16_t* b, const float* const* low, int64_t rank, int64_t to_next, float* sums) {
  vf sum[C][N];
  for (int c = 0; c < C; ++c)
    for (int i = 0; i < N; ++i) sum[c][i] = vf{};
  for (int64_t r = 0; r < rank; ++r, b += kAdapterBlock) {
    vf column[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) column[i] = load_bf16(b + i * VW);
    for (int i = 0; i < N * VW; i += kLine) __builtin_prefetch(b + to_next + i, 0, 2);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const vf weight = splat(low[c][r]);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) sum[c][i] += weight * column[i];
    }
  }
  for (int c = 0; c < C; ++c)
    for (int i = 0; i < N; ++i) storef(sums + c * kAdapterColumns + i * VW, sum[c][i]);
}

// Some columns of a block for C rows.
template <int C>
PAGELOOM_INLINE void expand_some(const uint16_t* b, const float* const* low, int64_t rank, int64_t to_next,
                                 int64_t count, float* sums) {
  constexpr int kWide = C > 1 && VW < 16 ? 2 : 4;  // vectors at once, as registers go
  int64_t i = 0;
  for (; i + kWide * VW <= count; i += kWide * VW) expand<kWide, C>(b + i, low, rank, to_next, sums + i);
  for (; i + VW <= count; i += VW) expand<1, C>(b + i, low, rank, to_next, sums + i);
  for (int c = 0; c < C; ++c)
    for (int64_t j = i; j < count; ++j) {
      float sum = 0;
      for (int64_t r = 0; r < rank; ++r) sum += low[c][r] * widened(b[r * kAdapterBlock + j]);
      sums[c * kAdapterColumns + j] = sum;
    }
}

// What the adapter of C rows adds to outputs [begin, end) of the product, in plain order: [C][kAdapterColumns].
template <int C>
PAGELOOM_INLINE void delta_of(const AdapterProblem& p, const int64_t* rows, int64_t slot, int64_t begin, int64_t end,
                              float* delta) {
  const AdapterTables& t = p.tables;
  const int64_t size = t.max_rank * kAdapterBlock;
  for (int c = 0; c < C; ++c) memset(delta + c * kAdapterColumns, 0, (end - begin) * sizeof(float));
  if (slot < 0) return;
  const uint16_t* const blocks = t.b + slot * adapter_blocks(p.layer.n) * size;
  int64_t start = 0;
  for (int64_t part = 0; part < t.parts; start = t.ends[part++]) {
    const int64_t rank = t.ranks[slot * t.parts + part];
    const int64_t stop = t.ends[part] < end ? t.ends[part] : end;
    if (rank == 0) continue;
    const float* low[C];
    for (int c = 0; c < C; ++c) low[c] = p.low + (rows[c] * t.parts + part) * t.max_rank;
    for (int64_t at = start > begin ? start : begin, count; at < stop; at += count) {
      const int64_t left = kAdapterBlock - at % kAdapterBlock;
      count = stop - at < left ? stop - at : left;
      const uint16_t* const b = blocks + at / kAdapterBlock * size + at % kAdapterBlock;
      expand_some<C>(b, low, rank, size, count, delta + at - begin);
    }
  }
}

PAGELOOM_INLINE void store_last(const uint16_t* residual, uint16_t* out, vf last) {
  if (residual != nullptr) last = round_bf16(last) + load_bf16(residual);
  store_rounded(out, last);
}

PAGELOOM_INLINE void finish_plain(const uint16_t* product, const float* delta, const uint16_t* residual, uint16_t* out,
                                  int64_t count) {
  int64_t i = 0;
  for (; i + VW <= count; i += VW)
    store_last(residual == nullptr ? nullptr : residual + i, out + i, load_bf16(product + i) + loadf(delta + i));
  if (const int64_t left = count - i; left > 0) {
    uint16_t some[VW] = {}, more[VW] = {}, whole[VW];
    float rest[VW] = {};
    memcpy(some, product + i, left * 2);
    memcpy(rest, delta + i, left * 4);
    if (residual != nullptr) memcpy(more, residual + i, left * 2);
    store_last(residual == nullptr ? nullptr : more, whole, load_bf16(some) + loadf(rest));
    memcpy(out + i, whole, left * 2);
  }
}

template <int C>
void finish_rows(const AdapterProblem& p, const int64_t* rows, int64_t slot, int64_t begin, int64_t end) {
  const LinearProblem& l = p.layer;
  alignas(64) float deltas[C * kAdapterColumns], up_deltas[C * kAdapterColumns];
  delta_of<C>(p, rows, slot, begin, end, deltas);
  if (l.gate != Gate::kNone) delta_of<C>(p, rows, slot, l.n / 2 + begin, l.n / 2 + end, up_deltas);
  const Gating gating = gating_of(l);
  for (int c = 0; c < C; ++c) {
    const uint16_t* const product = p.product + rows[c] * p.product_stride;
    const uint16_t* const residual = l.residual == nullptr ? nullptr : l.residual + rows[c] * l.residual_stride + begin;
    uint16_t* const out = (uint16_t*)l.out + rows[c] * l.out_stride + begin;
    const float *const delta = deltas + c * kAdapterColumns, *const up_delta = up_deltas + c * kAdapterColumns;
    if (l.gate == Gate::kNone) {
      finish_plain(product + begin, delta, residual, out, end - begin);
      continue;
    }
    for (int64_t at = begin; at < end; at += VW) {
      const uint16_t* const pair = product + at / 16 * kPanel + at % 16;
      const vf gate = round_bf16(load_bf16(pair) + loadf(delta + at - begin));
      const vf up = round_bf16(load_bf16(pair + kPanel / 2) + loadf(up_delta + at - begin));
      store_last(residual == nullptr ? nullptr : residual + at - begin, out + at - begin, gated(gate, up, gating));
    }
  }
}

void finish(const AdapterProblem& p, int64_t first, int64_t last, int64_t begin, int64_t end) {
  const Entries entries(p, first, last);
  for (int64_t i = 0, stop; i < entries.count; i = stop) {
    stop = entries.alike(i);
    const int64_t* const rows = entries.rows + i;
    const int64_t slot = entries.slots[i];
    if (stop - i == 1)
      finish_rows<1>(p, rows, slot, begin, end);
    else if (stop - i == 2)
      finish_rows<2>(p, rows, slot, begin, end);
    else if (stop - i == 3)
      finish_rows<3>(p, rows, slot, begin, end);
    else
      finish_rows<4>(p, rows, slot, begin, end);
  }
}

constexpr AdapterKernels kKernels = {shrink, finish};

}  // namespace

const AdapterKernels* pageloom::PAGELOOM_FOR_ISA(adapters)() { return &kKernels; }
