// Paged attention of one work item: FlashAttention's online softmax (Dao et al. 2022, algorithm 1) over key tiles
// that are read in place from pages. The file is compiled once per ISA; PAGELOOM_KERNELS names the table it exports.
//
// Tiles lie at fixed places of a sequence, each is computed as if it were alone, and all are joined one after the other by
// one function: so a row's bits are the same whether one item has all of its keys or several have a tile each.
#include "head_product.h"
#include "key_tile.h"
#include "softmax.h"

using namespace pageloom;

namespace {

#if defined(__clang__)
#define PAGELOOM_ONE_COPY __attribute__((noinline))
#else
#define PAGELOOM_ONE_COPY __attribute__((noinline, noclone))
#endif
// into = into * kept + found * taken, and the sums alike, which are returned. Never inlined: compilers choose which of two
// products to contract with the addition, and everybody who joins must have the same bits.
PAGELOOM_ONE_COPY float join(float* into, const float* found, int64_t dims, float kept, float taken, float sum,
                                     float found_sum) {
  for (int64_t d = 0; d < dims; d += VW) storef(into + d, loadf(into + d) * splat(kept) + loadf(found + d) * splat(taken));
  return sum * kept + found_sum * taken;
}

// What is multiplied with what was found under the maximum `of`, where `top` is the larger one.
template <class T>
PAGELOOM_INLINE vf weight_of(vf of, vf top, float factor) {
  return of == top ? splat(1.0f) : exp2_of<T::kPrecise>((of - top) * factor);
}

// Which tokens of a tile a row sees: [low, high), in the vectors [first, last).
struct Visible {
  int64_t low, high, first, last;
};

// Scores of one row in units of `factor`, -inf where it must not see; returns the largest.
template <class T>
PAGELOOM_INLINE float mask_and_reduce(const AttentionProblem& p, const Scratch& s, int64_t row, float* scores,
                                      const Visible& seen, bool plain) {
  if (!plain) {
    const float scale = T::kScaled ? p.scale * s.query_units[row] : p.scale;
    for (int64_t g = seen.first; g < seen.last; ++g) {
      vf t = loadf(scores + g * VW);
      if constexpr (T::kScaled) t = t * loadf(s.key_scales + g * VW);
      t = p.soft_cap > 0 ? tanh_all(t * (scale / p.soft_cap)) * (p.soft_cap * kLog2e) : t * (scale * kLog2e);
      storef(scores + g * VW, t);
    }
  }
  const auto mask = [&](int64_t g) {
    vi index;
    for (int i = 0; i < VW; ++i) index[i] = i;
    index += (int32_t)(g * VW);
    vf t = loadf(scores + g * VW);
    t = index >= (int32_t)seen.low ? t : splat(-__builtin_inff());
    storef(scores + g * VW, index < (int32_t)seen.high ? t : splat(-__builtin_inff()));
  };
  if (seen.low % VW != 0) mask(seen.first);
  if (seen.high % VW != 0) mask(seen.last - 1);
  vf top = splat(-__builtin_inff());
  for (int64_t g = seen.first; g < seen.last; ++g) top = vmax(top, loadf(scores + g * VW));
  return reduce_max(top);
}

// Scores of one row -> probabilities 2^((score - maximum) * factor), 0 where it sees nothing; returns their sum.
template <class T>
PAGELOOM_INLINE float exponentiate(const Scratch& s, int64_t in_pass, uint32_t* target, int64_t num_vectors,
                                   const Visible& seen, float maximum, float factor) {
  float* const scores = s.scores + in_pass * kKeyTile;
  for (int64_t g = 0; g < seen.first; ++g) store_nothing<T>(target, g * VW);
  vf total = {}, largest = {};
  const auto probability = [&](int64_t g) { return exp2_of<T::kPrecise>((loadf(scores + g * VW) - maximum) * factor); };
  int64_t g = seen.first;
  if constexpr (T::kPacked && !T::kScaled) {
    for (; g + 1 < seen.last; g += 2) {
      const vf low = probability(g), high = probability(g + 1);
      total = total + low + high;
      store_pairs(target, g * VW, low, high);
    }
  }
  for (; g < seen.last; ++g) {
    const vf e = probability(g);
    total += e;
    if constexpr (T::kScaled) {
      const vf weight = e * loadf(s.value_scales + g * VW);
      total += weight * 0.0f;  // a scale that is not finite makes the row NaN; integers could not
      largest = vmax(weight, largest);
      storef(scores + g * VW, weight);
    } else {
      store_operand<T>(target, g * VW, e);
    }
  }
  for (int64_t g = seen.last; g < num_vectors; ++g) store_nothing<T>(target, g * VW);
  if constexpr (T::kScaled) {
    const float most = reduce_max(largest), inverse = inverse_unit(most);
    s.probability_units[in_pass] = most * (1 / kInt16);
    for (int64_t g = seen.first; g < seen.last; ++g)
      store_int16((int16_t*)target + g * VW, loadf(scores + g * VW), inverse);
  }
  return reduce_add(total);
}

// One pass: rows [row, row + count) of an item against a tile.
template <class T>
void attend_pass(const AttentionProblem& p, const WorkItem& item, KeyTile<T>& tile, const Scratch& s, int64_t row,
                 int64_t count) {
  const int64_t window = item.window_of(p), dims = p.cache.padded_dim, cells = p.cache.head_dim / T::kPerLane;
  Visible seen[kPassRows];
  int64_t first = tile.num_vectors, last = 0;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t position = s.positions[row + r];
    Visible& v = seen[r];
    v.low = max64(tile.begin, p.keys_before(oldest_key(position, window))) - tile.base;
    v.high = min64(tile.end, p.keys_before(position + 1)) - tile.base;
    v.first = v.low < v.high ? v.low / VW : tile.num_vectors;
    v.last = v.low < v.high ? (v.high + VW - 1) / VW : tile.num_vectors;
    if (v.low < v.high) first = min64(first, v.first), last = max64(last, v.last);
  }
  if (first >= last) return;
  const uint32_t* const queries = s.queries + row * cells * T::kWords;
  const bool asks = item.row_end - item.row_begin <= kMaxRows;
  all_scores<T>(queries, cells * T::kWords, count, tile.keys + first, asks ? tile.value_starts + first : nullptr,
                last - first, tile.key_stride, cells, s.scores + first * VW, kKeyTile);
  if constexpr (T::kScaled)  // after the first scores: by then they are there
    if (!tile.has_scales) gather_scales<T>(p, item, tile, s), tile.has_scales = true;
  const bool plain = is_plain(p);
  const float factor = factor_of(p);
  alignas(64) float found[(kPassRows + VW - 1) / VW * VW], sums[kPassRows];
  for (int64_t r = 0; r < count; ++r) {
    const bool any = seen[r].low < seen[r].high;
    const float top = any ? mask_and_reduce<T>(p, s, row + r, s.scores + r * kKeyTile, seen[r], plain) : kFloor;
    found[r] = top < kFloor ? kFloor : top;  // keys that all score -inf count nothing; a NaN stays
  }
  for (int64_t r = count; r % VW != 0; ++r) found[r] = kFloor;
  constexpr int64_t kOperands = T::kPacked ? kKeyTile / 2 : kKeyTile;
  uint32_t* const probabilities = T::kPacked ? s.packed : (uint32_t*)s.scores;
  for (int64_t r = 0; r < count; ++r)
    sums[r] = exponentiate<T>(s, r, probabilities + r * kOperands, tile.num_vectors, seen[r], found[r], factor);
  int64_t segments = tile.num_segments;  // those behind the newest row's keys would count with probability 0
  while (tile.values[segments - 1].a_index * T::kPerLane >= last * VW) --segments;
  all_values<T>(probabilities, kOperands, count, tile.values, segments, dims, s.probability_units, s.found,
                asks ? tile.ahead : nullptr, p.cache.block_size);
  for (int64_t r = 0; r < count; r += VW) {
    const vf before = loadf(s.maximum + row + r), now = loadf(found + r), top = vmax(before, now);
    storef(s.maximum + row + r, top);
    storef(s.kept + r, weight_of<T>(before, top, factor));
    storef(s.taken + r, weight_of<T>(now, top, factor));
  }
  for (int64_t r = 0; r < count; ++r) {
    float& sum = s.sums[row + r];
    sum = join(s.accumulator + (row + r) * dims, s.found + r * dims, dims, s.kept[r], s.taken[r], sum, sums[r]);
  }
}

// A query of an int8 cache: bfloat16 -> 16-bit integers; returns what one of them is worth, NaN or infinite where an
// element is. Writes whole vectors.
float quantize_query(const uint16_t* x, int64_t count, int16_t* out) {
  vf values[kMaxHeadDim / VW];
  vi largest = {};
  for (int64_t i = 0; i < count; i += VW) {
    uint16_t row[VW] = {};
    memcpy(row, x + i, min64(VW, count - i) * 2);
    for (int64_t j = 0; j < VW; ++j) values[i / VW][j] = bits_to_float((uint32_t)row[j] << 16);
    const vi magnitude = (vi)values[i / VW] & 0x7fffffff;  // orders like |x|, NaN last
    largest = magnitude > largest ? magnitude : largest;
  }
  int32_t top = 0;
  for (int64_t j = 0; j < VW; ++j) top = largest[j] > top ? largest[j] : top;
  const float most = bits_to_float((uint32_t)top), inverse = inverse_unit(most);
  for (int64_t i = 0; i < count; i += VW) store_int16(out + i, values[i / VW], inverse);  // the rest: the next row's
  return most * (1 / kInt16);
}

template <class T>
void gather_queries(const AttentionProblem& p, const WorkItem& item, uint32_t* queries, int64_t words,
                    float* units) {
  const int64_t dims = p.cache.head_dim;
  for (RowCursor at = item.first_row(p); at.row < item.row_end; at.next(), queries += words) {
    const auto* const row = (const typename T::Storage*)p.q.data + item.place_of(p, p.q, at);
    if constexpr (T::kScaled) {
      *units++ = quantize_query(row, dims, (int16_t*)queries);
    } else if (T::kPacked || sizeof(*row) == 4) {
      memcpy(queries, row, dims * sizeof(*row));
    } else {
      for (int64_t d = 0; d < dims; ++d) ((float*)queries)[d] = T::to_float(row[d]);
    }
  }
}

template <class T>
void write_row(const AttentionProblem& p, const WorkItem& item, const RowCursor& at, const float* accumulator,
               float maximum, float sum) {
  if (p.is_part()) return write_part(p, item, at, accumulator, maximum, sum);
  auto* const out = (typename T::Storage*)p.out.data + item.place_of(p, p.out, at);
  const float inverse = inverse_sum<T::kPrecise>(p, item.kv_head * p.group + at.head, maximum, sum);
#if PAGELOOM_NATIVE_BF16
  if constexpr (T::kBFloat16Out) {
    for (int64_t d = 0; d < p.cache.head_dim; d += VW) {
      store_bfloat16(out + d, loadf(accumulator + d) * inverse, p.cache.head_dim - d);
    }
    return;
  }
#endif
  for (int64_t d = 0; d < p.cache.head_dim; ++d) out[d] = T::from_float(accumulator[d] * inverse);
}

template <class T>
bool attend_typed(const AttentionProblem& p, const WorkItem& item, const WorkItem* next, void* memory,
                  float* partials) {
  const Scratch s = carve(p, memory);
  const int64_t rows = item.row_end - item.row_begin, dims = p.cache.padded_dim;
  gather_queries<T>(p, item, s.queries, p.cache.head_dim / T::kPerLane * T::kWords, s.query_units);
  memset(s.accumulator, 0, rows * dims * sizeof(float));
  memset(s.sums, 0, rows * sizeof(float));
  for (int64_t r = 0; r < rows + VW; ++r) s.maximum[r] = kFloor;
  for (RowCursor at = item.first_row(p); at.row < item.row_end; at.next())
    s.positions[at.row - item.row_begin] = item.position_of(p, at);

  KeyTile<T> tile;
  for (tile.base = item.kv_begin / VW * VW; tile.base < item.kv_end; tile.base = tile.end) {
    tile.begin = max64(tile.base, item.kv_begin);
    tile.end = min64((tile.base / kKeyTile + 1) * kKeyTile, item.kv_end);
    if (!locate_tile<T>(p, item, tile, s)) return false;
    if constexpr (!T::kScaled)
      if (p.cache.latent) transpose_keys<T>(p, tile, s);
    if (rows <= kMaxRows) look_ahead<T>(p, item, next, tile);
    tile.has_scales = !T::kScaled;
    for (int64_t row = 0; row < rows; row += kPassRows)
      attend_pass<T>(p, item, tile, s, row, min64(kPassRows, rows - row));
  }
  for (RowCursor at = item.first_row(p); at.row < item.row_end; at.next()) {
    const int64_t r = at.row - item.row_begin;
    const float* row = s.accumulator + r * dims;
    float* const target = item.partial_of(p, partials, at, dims + kPartialExtra);
    if (target == nullptr) {
      write_row<T>(p, item, at, row, s.maximum[r] * factor_of(p), s.sums[r]);
    } else {
      memcpy(target, row, dims * sizeof(float));
      target[dims] = s.maximum[r];
      target[dims + 1] = s.sums[r];
    }
  }
  return true;
}

// Parts are joined in order, so the result does not depend on which thread finished first.
template <class T>
void combine_typed(const AttentionProblem& p, const WorkItem& item, const float* partials, int64_t parts,
                   int64_t stride) {
  const int64_t dims = p.cache.padded_dim, row_stride = dims + kPartialExtra;
  const float factor = factor_of(p);
  for (RowCursor at = item.first_row(p); at.row < item.row_end; at.next()) {
    const float* part = partials + (at.row - item.row_begin) * row_stride;
    float maximum = kFloor, sum = 0;
    alignas(64) float total[kMaxHeadDim];
    memset(total, 0, dims * sizeof(float));
    for (int64_t i = 0; i < parts; ++i, part += stride) {
      const float now = part[dims], top = now > maximum ? now : maximum;
      const float less = weight_of<T>(splat(now < maximum ? now : maximum), splat(top), factor)[0];
      sum = join(total, part, dims, maximum == top ? 1 : less, now == top ? 1 : less, sum, part[dims + 1]);
      maximum = top;
    }
    write_row<T>(p, item, at, total, maximum * factor, sum);
  }
}

bool attend(const AttentionProblem& p, const WorkItem& item, const WorkItem* next, void* scratch, float* partials) {
  switch (p.cache.dtype) {
    case Dtype::kFloat32: return attend_typed<Float32>(p, item, next, scratch, partials);
    case Dtype::kBFloat16: return attend_typed<BFloat16>(p, item, next, scratch, partials);
    case Dtype::kInt8: return attend_typed<Int8>(p, item, next, scratch, partials);
    default: return attend_typed<Float16>(p, item, next, scratch, partials);
  }
}

void combine(const AttentionProblem& p, const WorkItem& item, const float* partials, int64_t parts, int64_t stride) {
  switch (p.cache.dtype) {
    case Dtype::kFloat32: return combine_typed<Float32>(p, item, partials, parts, stride);
    case Dtype::kBFloat16:
    case Dtype::kInt8: return combine_typed<BFloat16>(p, item, partials, parts, stride);
    default: return combine_typed<Float16>(p, item, partials, parts, stride);
  }
}

// Parts are added in order, sinks at the end; where no part has a key the result is 0.
template <class T>
void merge_typed(const MergeProblem& m, int64_t begin, int64_t end) {
  const int64_t dims = m.head_dim, head_floats = dims + 1, part_floats = m.heads * head_floats;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t head = 0; head < m.heads; ++head) {
      const float* const found = m.found + row * m.parts * part_floats + head * head_floats;
      float top = m.sinks == nullptr ? -__builtin_inff() : m.sinks[head];
      for (int64_t i = 0; i < m.parts; ++i) {
        const float lse = found[i * part_floats + dims];
        top = lse > top ? lse : top;
      }
      if (top == -__builtin_inff()) top = 0;
      float total = m.sinks == nullptr ? 0 : __builtin_expf(m.sinks[head] - top);
      float sums[kMaxHeadDim];
      memset(sums, 0, dims * sizeof(float));
      for (int64_t i = 0; i < m.parts; ++i) {
        const float* const part = found + i * part_floats;
        const float weight = __builtin_expf(part[dims] - top);
        total += weight;
        for (int64_t d = 0; d < dims; ++d) sums[d] += weight * part[d];
      }
      if (total == 0) total = 1;
      auto* const out = (typename T::Storage*)m.out.data + row * m.out.token_stride + head * m.out.head_stride;
      for (int64_t d = 0; d < dims; ++d) out[d] = T::from_float(sums[d] / total);
    }
  }
}

void merge(const MergeProblem& m, int64_t begin, int64_t end) {
  switch (m.dtype) {
    case Dtype::kFloat32: return merge_typed<Float32>(m, begin, end);
    case Dtype::kBFloat16: return merge_typed<BFloat16>(m, begin, end);
    default: return merge_typed<Float16>(m, begin, end);
  }
}

const KernelTable kTable = {VW, kRowTile, scratch_bytes, attend, combine, merge, product};

}  // namespace

const pageloom::KernelTable* pageloom::PAGELOOM_KERNELS() { return &kTable; }
