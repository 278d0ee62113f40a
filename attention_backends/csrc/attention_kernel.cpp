// Paged attention of one work item: FlashAttention's online softmax (Dao et al. 2022, algorithm 1) over key tiles
// that are read in place from pages. The file is compiled once per ISA; PAGELOOM_KERNELS names the table it exports.
#include "kernels.h"
#include "microkernel.h"

#include <stddef.h>

using namespace pageloom;

namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kFloor = -1e30f;  // the running maximum starts here, so that -inf - maximum is never NaN
constexpr int64_t kPassRows = 24;  // rows from scores to outputs at once: with half a tile of keys or all its values in L1
static_assert(kRowTile % kPassRows == 0 && kPassRows % kMaxRows == 0);

PAGELOOM_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
PAGELOOM_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

struct Scratch {
  uint32_t* queries;   // [rows][head_dim words]
  float* scores;       // [kPassRows][kKeyTile]; unpacked probabilities replace them in place
  uint32_t* packed;    // [kPassRows][kKeyTile / 2], where probabilities are pairs
  float* accumulator;  // [rows][padded_dim]
  int64_t* positions;  // [rows], of their queries
  float* maximum;      // [rows + VW]
  float* sums;         // [rows][VW], to be added up
  float* decay;              // [kPassRows]
  float* query_units;        // [rows], of int8 caches: what an integer of the row's query is worth
  float* probability_units;  // [kPassRows]: and of its probabilities
  uint32_t* edge_values;  // two rows of cells [padded_dim]: pairs of which one token must not be read
  float* key_scales;      // [kKeyTile], of int8 caches; 0 for tokens outside the item
  float* value_scales;
};

int64_t rows_bytes(int64_t per_row) { return (kRowTile * per_row * 4 + 63) / 64 * 64; }

int64_t scratch_bytes(const AttentionProblem& p) {
  const int64_t scores = kPassRows * (kKeyTile + kKeyTile / 2) * 4;
  const int64_t vectors = rows_bytes(p.cache.head_dim) + rows_bytes(p.cache.padded_dim) + 6 * rows_bytes(1) + rows_bytes(VW) + VW * 4;
  return scores + vectors + 2 * p.cache.padded_dim * 4 + 2 * kKeyTile * 4 + 64;
}

Scratch carve(const AttentionProblem& p, void* memory) {
  char* at = (char*)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
  auto take = [&](int64_t bytes) { char* here = at; at += bytes; return (void*)here; };
  Scratch s;
  s.queries = (uint32_t*)take(rows_bytes(p.cache.head_dim));
  s.scores = (float*)take(kPassRows * kKeyTile * 4);
  s.packed = (uint32_t*)take(kPassRows * kKeyTile / 2 * 4);
  s.accumulator = (float*)take(rows_bytes(p.cache.padded_dim));
  s.positions = (int64_t*)take(rows_bytes(2));
  s.maximum = (float*)take(rows_bytes(1) + VW * 4);
  s.sums = (float*)take(rows_bytes(VW));
  s.decay = (float*)take(rows_bytes(1));
  s.query_units = (float*)take(rows_bytes(1));
  s.probability_units = (float*)take(rows_bytes(1));
  s.edge_values = (uint32_t*)take(2 * p.cache.padded_dim * 4);
  s.key_scales = (float*)take(kKeyTile * 4);
  s.value_scales = (float*)take(kKeyTile * 4);
  return s;
}

// The key tile [begin, end) of one (sequence, KV head). `base` <= begin is where its vectors and lane pairs start.
template <class T>
struct KeyTile {
  using Cell = typename T::Cell;
  int64_t base, begin, end;
  int64_t num_vectors;
  const Cell* keys[kKeyTile / VW];
  const Cell* value_starts[kKeyTile / VW];
  const Cell* ahead[kKeyTile / VW];  // the next tile's keys
  int64_t num_segments;
  bool has_scales;  // gathered, or of no use
  Segment<T> values[kKeyTile / 8 + 3];
};

// Finds what comes after a located tile: keys of its item, or else of the next one. What does not exist is something else
// that may be asked for.
template <class T>
void look_ahead(const AttentionProblem& p, const WorkItem& item, const WorkItem* next, KeyTile<T>& tile) {
  for (auto& keys : tile.ahead) keys = tile.keys[0];
  const bool within = tile.end < item.kv_end;
  if (!within && next == nullptr) return;
  const WorkItem& then = within ? item : *next;
  const int32_t* const table = p.block_tables + then.seq * p.block_table_stride;
  const int64_t size = p.cache.block_size, first = within ? tile.end : then.kv_begin / VW * VW;
  const int64_t vectors = min64(kKeyTile / VW, (then.kv_end - first + VW - 1) / VW);
  for (int64_t i = 0, column = first / size, slot = first % size; i < vectors; ++i, slot += VW) {
    if (slot >= size) slot = 0, ++column;
    const int64_t block = column < p.max_blocks ? table[column] : -1;
    if (block < 0 || block >= p.cache.num_blocks) return;
    tile.ahead[i] = (const typename T::Cell*)p.cache.k_of(block, then.kv_head) + slot;
  }
}

template <class T>
bool locate_tile(const AttentionProblem& p, const WorkItem& item, KeyTile<T>& tile, const Scratch& scratch) {
  using Cell = typename T::Cell;
  const int32_t* const table = p.block_tables + item.seq * p.block_table_stride;
  const int64_t size = p.cache.block_size, dims = p.cache.padded_dim;
  tile.num_vectors = (tile.end - tile.base + VW - 1) / VW;
  tile.num_segments = 0;
  int edges = 0;
  for (int64_t column = tile.base / size; column * size < tile.end; ++column) {
    const int64_t block = column < p.max_blocks ? table[column] : -1;
    if (block < 0 || block >= p.cache.num_blocks) return false;
    const Cell* keys = (const Cell*)p.cache.k_of(block, item.kv_head);
    const int64_t first = max64(tile.base, column * size), last = min64(tile.end, column * size + size);
    const Cell* values = (const Cell*)p.cache.v_of(block, item.kv_head);
    if constexpr (T::kScaled) {  // behind the block's cells, where no prefetcher looks; read once scores are there
      __builtin_prefetch(p.cache.k_scales(block, item.kv_head));
      __builtin_prefetch(p.cache.v_scales(block, item.kv_head));
    }
    for (int64_t t = first; t < last; t += VW) {
      tile.keys[(t - tile.base) / VW] = keys + (t - column * size);
      tile.value_starts[(t - tile.base) / VW] = values + (t - column * size) / T::kPerLane * dims;
    }
    int64_t t = max64(first, tile.begin);
    if constexpr (T::kScaled) {  // integers are never NaN: a pair's other token counts with probability 0
      t = t / 2 * 2;
      tile.values[tile.num_segments++] = {values + (t - column * size) / 2 * dims, (last - t + 1) / 2, (t - tile.base) / 2};
      continue;
    }
    const auto row = [&](int64_t token) { return values + (token - column * size) / T::kPerLane * dims; };
    const auto edge = [&](int64_t token, uint32_t mask) {
      // A slot outside [begin, end) may hold anything, and 0 * NaN is NaN: zero it in a copy.
      uint32_t* copy = scratch.edge_values + edges++ * dims;
      for (int64_t d = 0; d < dims; ++d) copy[d] = row(token)[d] & mask;
      tile.values[tile.num_segments++] = {(const Cell*)copy, 1, (token - tile.base) / 2};
    };
    if (T::kPerLane == 2 && t < last && (t & 1)) edge(t++, 0xffff0000u);
    const int64_t pairs = (last - t) / T::kPerLane;
    if (pairs > 0) tile.values[tile.num_segments++] = {row(t), pairs, (t - tile.base) / T::kPerLane};
    t += pairs * T::kPerLane;
    if (t < last) edge(t, 0x0000ffffu);
  }
  return true;
}

// The scales of a located tile's tokens; 0 for those that do not count.
template <class T>
void gather_scales(const AttentionProblem& p, const WorkItem& item, const KeyTile<T>& tile, const Scratch& s) {
  const int32_t* const table = p.block_tables + item.seq * p.block_table_stride;
  const int64_t size = p.cache.block_size;
  for (int64_t column = tile.base / size; column * size < tile.end; ++column) {
    const int64_t first = max64(tile.begin, column * size), last = min64(tile.end, column * size + size);
    const float* const of_keys = p.cache.k_scales(table[column], item.kv_head) - column * size;
    const float* const of_values = p.cache.v_scales(table[column], item.kv_head) - column * size;
    int64_t t = first;
    for (; t + VW <= last; t += VW) {
      storef(s.key_scales + (t - tile.base), loadf(of_keys + t));
      storef(s.value_scales + (t - tile.base), loadf(of_values + t));
    }
    for (; t < last; ++t) s.key_scales[t - tile.base] = of_keys[t], s.value_scales[t - tile.base] = of_values[t];
  }
  for (int64_t t = tile.base; t < tile.begin; ++t) s.key_scales[t - tile.base] = s.value_scales[t - tile.base] = 0;
  for (int64_t t = tile.end; t < tile.base + tile.num_vectors * VW; ++t)
    s.key_scales[t - tile.base] = s.value_scales[t - tile.base] = 0;
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

// Scores of one row -> probabilities 2^(score * factor - maximum), 0 where it sees nothing; `sums` decay and grow.
template <class T>
PAGELOOM_INLINE void exponentiate(const Scratch& s, int64_t row, int64_t in_pass, uint32_t* target,
                                  int64_t num_vectors, const Visible& seen, float factor) {
  float* const scores = s.scores + in_pass * kKeyTile;
  const float maximum = s.maximum[row];
  for (int64_t g = 0; g < seen.first; ++g) store_nothing<T>(target, g * VW);
  vf total = {}, largest = {};
  const auto probability = [&](int64_t g) { return exp2_of<T::kPrecise>(loadf(scores + g * VW) * factor - maximum); };
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
  storef(s.sums + row * VW, loadf(s.sums + row * VW) * s.decay[in_pass] + total);
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
    v.low = max64(tile.begin, window > 0 ? position - window + 1 : 0) - tile.base;
    v.high = min64(tile.end, position + 1) - tile.base;
    v.first = v.low < v.high ? v.low / VW : tile.num_vectors;
    v.last = v.low < v.high ? (v.high + VW - 1) / VW : tile.num_vectors;
    if (v.low < v.high) first = min64(first, v.first), last = max64(last, v.last);
  }
  if (first >= last) return;
  const uint32_t* const queries = s.queries + row * cells * T::kWords;
  const bool asks = item.row_end - item.row_begin <= kMaxRows;
  all_scores<T>(queries, cells * T::kWords, count, tile.keys + first, asks ? tile.value_starts + first : nullptr,
                last - first, p.cache.block_size, cells, s.scores + first * VW, kKeyTile);
  if constexpr (T::kScaled)  // after the first scores: by then they are there
    if (!tile.has_scales) gather_scales<T>(p, item, tile, s), tile.has_scales = true;
  const bool plain = p.soft_cap == 0 && p.scale > 0 && !T::kScaled;
  const float factor = plain ? p.scale * kLog2e : 1.0f;
  alignas(64) float found[(kPassRows + VW - 1) / VW * VW];
  for (int64_t r = 0; r < count; ++r) {
    const bool any = seen[r].low < seen[r].high;
    found[r] = any ? mask_and_reduce<T>(p, s, row + r, s.scores + r * kKeyTile, seen[r], plain) * factor : kFloor;
  }
  for (int64_t r = count; r % VW != 0; ++r) found[r] = kFloor;
  for (int64_t r = 0; r < count; r += VW) {
    const vf before = loadf(s.maximum + row + r), top = vmax(before, loadf(found + r));
    storef(s.maximum + row + r, top);
    storef(s.decay + r, before == top ? splat(1.0f) : exp2_of<T::kPrecise>(before - top));
  }
  constexpr int64_t kOperands = T::kPacked ? kKeyTile / 2 : kKeyTile;
  uint32_t* const probabilities = T::kPacked ? s.packed : (uint32_t*)s.scores;
  for (int64_t r = 0; r < count; ++r)
    exponentiate<T>(s, row + r, r, probabilities + r * kOperands, tile.num_vectors, seen[r], factor);
  int64_t segments = tile.num_segments;  // those behind the newest row's keys would count with probability 0
  while (tile.values[segments - 1].a_index * T::kPerLane >= last * VW) --segments;
  all_values<T>(probabilities, kOperands, count, tile.values, segments, dims, s.decay, s.probability_units,
                s.accumulator + row * dims, asks ? tile.ahead : nullptr, p.cache.block_size);
}

// A query of an int8 cache: bfloat16 -> 16-bit integers; returns what one of them is worth, NaN or infinite where an
// element is. Writes whole vectors.
float quantize_query(const uint16_t* x, int64_t count, int16_t* out) {
  vf values[256 / VW];
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
               float sum) {
  auto* const out = (typename T::Storage*)p.out.data + item.place_of(p, p.out, at);
  const float inverse = sum == 0 ? 0 : 1 / sum;  // a row that sees no key gives 0; a NaN stays in its row
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
  memset(s.sums, 0, rows * VW * sizeof(float));
  for (int64_t r = 0; r < rows + VW; ++r) s.maximum[r] = kFloor;
  for (RowCursor at = item.first_row(p); at.row < item.row_end; at.next())
    s.positions[at.row - item.row_begin] = item.position_of(p, at);

  KeyTile<T> tile;
  for (tile.base = item.kv_begin / VW * VW; tile.base < item.kv_end; tile.base += kKeyTile) {
    tile.begin = max64(tile.base, item.kv_begin);
    tile.end = min64(tile.base + kKeyTile, item.kv_end);
    if (!locate_tile<T>(p, item, tile, s)) return false;
    if (rows <= kMaxRows) look_ahead<T>(p, item, next, tile);
    tile.has_scales = !T::kScaled;
    for (int64_t row = 0; row < rows; row += kPassRows)
      attend_pass<T>(p, item, tile, s, row, min64(kPassRows, rows - row));
  }
  for (RowCursor at = item.first_row(p); at.row < item.row_end; at.next()) {
    const int64_t r = at.row - item.row_begin;
    const float* row = s.accumulator + r * dims;
    const float sum = reduce_add(loadf(s.sums + r * VW));
    float* const target = item.partial_of(p, partials, at, dims + kPartialExtra);
    if (target == nullptr) {
      write_row<T>(p, item, at, row, sum);
    } else {
      memcpy(target, row, dims * sizeof(float));
      target[dims] = s.maximum[r];
      target[dims + 1] = sum;
    }
  }
  return true;
}

// Parts are added in order, so the result does not depend on which thread finished first.
template <class T>
void combine_typed(const AttentionProblem& p, const WorkItem& item, const float* partials, int64_t parts,
                   int64_t stride) {
  const int64_t dims = p.cache.padded_dim, row_stride = dims + kPartialExtra;
  for (RowCursor at = item.first_row(p); at.row < item.row_end; at.next()) {
    const float* rows = partials + (at.row - item.row_begin) * row_stride;
    float maximum = kFloor, sum = 0;
    for (int64_t i = 0; i < parts; ++i) maximum = rows[i * stride + dims] > maximum ? rows[i * stride + dims] : maximum;
    alignas(64) float total[256 + 16] = {};
    for (int64_t i = 0; i < parts; ++i) {
      const float* part = rows + i * stride;
      const vf weight = exp2_of<T::kPrecise>(splat(part[dims] - maximum));
      sum += part[dims + 1] * weight[0];
      for (int64_t d = 0; d < dims; d += VW) storef(total + d, loadf(total + d) + loadf(part + d) * weight);
    }
    write_row<T>(p, item, at, total, sum);
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

const KernelTable kTable = {VW, kRowTile, scratch_bytes, attend, combine};

}  // namespace

const pageloom::KernelTable* pageloom::PAGELOOM_KERNELS() { return &kTable; }
