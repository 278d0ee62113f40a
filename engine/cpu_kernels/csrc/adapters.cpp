// What adapters add to a layer's product, row by row: a row's bits depend on that row, its adapter and the ISA alone.
#include "adapters.h"

#include "prologue.h"

using namespace pageloom;

namespace {

PAGELOOM_INLINE float widened(uint16_t x) { return bits_to_float((uint32_t)x << 16); }

// N rows of A, k elements apart, times x.
template <int N>
PAGELOOM_INLINE void dots(const uint16_t* a, const uint16_t* x, int64_t k, float* sums) {
  vf even[N], odd[N];
  for (int i = 0; i < N; ++i) even[i] = odd[i] = vf{};
  int64_t at = 0;
  for (; at + 2 * VW <= k; at += 2 * VW) {
    const vf first = load_bf16(x + at), second = load_bf16(x + at + VW);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      even[i] += load_bf16(a + i * k + at) * first;
      odd[i] += load_bf16(a + i * k + at + VW) * second;
    }
  }
  for (int i = 0; i < N; ++i) {
    float sum = reduce_add(even[i] + odd[i]);
    for (int64_t j = at; j < k; ++j) sum += widened(a[i * k + j]) * widened(x[j]);
    sums[i] = sum;
  }
}

void shrink(const AdapterProblem& p, int64_t row, int64_t part, int64_t rank_begin, int64_t rank_end,
            uint16_t* scratch) {
  const AdapterTables& t = p.tables;
  const int64_t slot = t.slots[row], k = p.layer.k;
  if (slot < 0) return;
  const int64_t rank = t.ranks[slot * t.parts + part], end = rank < rank_end ? rank : rank_end;
  if (rank_begin >= end) return;
  const uint16_t* x = p.layer.x + row * p.layer.x_stride;
  if (p.layer.norm_weight != nullptr) {
    normalise_row(p.layer, row, scratch);
    x = scratch;
  }
  const uint16_t* const a = t.a + (slot * t.parts + part) * t.max_rank * k;
  float* const low = p.low + (row * t.parts + part) * t.max_rank;
  int64_t r = rank_begin;
  for (; r + 4 <= end; r += 4) dots<4>(a + r * k, x, k, low + r);
  for (; r < end; ++r) dots<1>(a + r * k, x, k, low + r);
}

// N vectors of columns from `b` on, rows n elements apart, weighted and summed.
template <int N>
PAGELOOM_INLINE void expand(const uint16_t* b, int64_t n, const float* low, int64_t rank, float* sums) {
  vf sum[N];
  for (int i = 0; i < N; ++i) sum[i] = vf{};
  for (int64_t r = 0; r < rank; ++r) {
    const vf weight = splat(low[r]);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) sum[i] += weight * load_bf16(b + r * n + i * VW);
  }
  for (int i = 0; i < N; ++i) storef(sums + i * VW, sum[i]);
}

// What a row's adapter adds to outputs [begin, end) of the product, in plain order.
PAGELOOM_INLINE void delta_of(const AdapterProblem& p, int64_t row, int64_t begin, int64_t end, float* delta) {
  const AdapterTables& t = p.tables;
  const int64_t slot = t.slots[row], n = p.layer.n;
  memset(delta, 0, (end - begin) * sizeof(float));
  if (slot < 0) return;
  int64_t start = 0;
  for (int64_t part = 0; part < t.parts; start = t.ends[part++]) {
    const int64_t rank = t.ranks[slot * t.parts + part];
    const int64_t stop = t.ends[part] < end ? t.ends[part] : end;
    int64_t at = start > begin ? start : begin;
    if (rank == 0 || at >= stop) continue;
    const float* const low = p.low + (row * t.parts + part) * t.max_rank;
    const uint16_t* const b = t.b + slot * t.max_rank * n;
    for (; at + 4 * VW <= stop; at += 4 * VW) expand<4>(b + at, n, low, rank, delta + at - begin);
    for (; at + VW <= stop; at += VW) expand<1>(b + at, n, low, rank, delta + at - begin);
    for (; at < stop; ++at) {
      float sum = 0;
      for (int64_t r = 0; r < rank; ++r) sum += low[r] * widened(b[r * n + at]);
      delta[at - begin] = sum;
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

void finish(const AdapterProblem& p, int64_t row, int64_t begin, int64_t end) {
  const LinearProblem& l = p.layer;
  const uint16_t* const product = p.product + row * p.product_stride;
  const uint16_t* const residual = l.residual == nullptr ? nullptr : l.residual + row * l.residual_stride + begin;
  uint16_t* const out = (uint16_t*)l.out + row * l.out_stride + begin;
  alignas(64) float delta[kAdapterColumns], up_delta[kAdapterColumns];
  delta_of(p, row, begin, end, delta);
  if (l.gate == Gate::kNone) {
    finish_plain(product + begin, delta, residual, out, end - begin);
    return;
  }
  delta_of(p, row, l.n / 2 + begin, l.n / 2 + end, up_delta);
  const Gating gating = gating_of(l);
  for (int64_t at = begin; at < end; at += VW) {
    const uint16_t* const pair = product + at / 16 * kPanel + at % 16;
    const vf gate = round_bf16(load_bf16(pair) + loadf(delta + at - begin));
    const vf up = round_bf16(load_bf16(pair + kPanel / 2) + loadf(up_delta + at - begin));
    store_last(residual == nullptr ? nullptr : residual + at - begin, out + at - begin, gated(gate, up, gating));
  }
}

constexpr AdapterKernels kKernels = {shrink, finish};

}  // namespace

const AdapterKernels* pageloom::PAGELOOM_FOR_ISA(adapters)() { return &kKernels; }
