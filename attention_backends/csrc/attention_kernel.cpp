// Paged attention of one work item: FlashAttention's online softmax (Dao et al. 2022, algorithm 1) over key tiles
// that are read in place from pages. The file is compiled once per ISA; PAGELOOM_KERNELS names the table it exports.
#include "kernels.h"
#include "microkernel.h"

#include <stddef.h>

using namespace pageloom;

namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kFloor = -1e30f;  // the running maximum starts here, so that -inf - maximum is never NaN

PAGELOOM_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
PAGELOOM_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

struct Scratch {
  uint32_t* queries;   // [rows][head_dim words]
  float* scores;       // [rows][kKeyTile]; unpacked probabilities replace them in place
  uint32_t* packed;    // [rows][kKeyTile / 2], where probabilities are pairs
  float* accumulator;  // [rows][padded_dim]
  float* maximum;
  float* sum;
  float* decay;
  float* query_units;        // [rows], of int8 caches: what an integer of the row's query is worth
  float* probability_units;  // and of its probabilities
  uint32_t* edge_values;  // two rows of cells [padded_dim]: pairs of which one token must not be read
  float* key_scales;      // [kKeyTile], of int8 caches; 0 for tokens outside the item
  float* value_scales;
};

int64_t rows_bytes(int64_t per_row) { return (kRowTile * per_row * 4 + 63) / 64 * 64; }

int64_t scratch_bytes(const AttentionProblem& p) {
  const int64_t scores = rows_bytes(kKeyTile) + rows_bytes(kKeyTile / 2);
  const int64_t vectors = rows_bytes(p.cache.head_dim) + rows_bytes(p.cache.padded_dim) + 5 * rows_bytes(1);
  return scores + vectors + 2 * p.cache.padded_dim * 4 + 2 * kKeyTile * 4 + 64;
}

Scratch carve(const AttentionProblem& p, void* memory) {
  char* at = (char*)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
  auto take = [&](int64_t bytes) { char* here = at; at += bytes; return (void*)here; };
  Scratch s;
  s.queries = (uint32_t*)take(rows_bytes(p.cache.head_dim));
  s.scores = (float*)take(rows_bytes(kKeyTile));
  s.packed = (uint32_t*)take(rows_bytes(kKeyTile / 2));
  s.accumulator = (float*)take(rows_bytes(p.cache.padded_dim));
  s.maximum = (float*)take(rows_bytes(1));
  s.sum = (float*)take(rows_bytes(1));
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
  const Cell* keys[kKeyTile / VW + kMaxCols];  // the last kMaxCols, after num_vectors: the next tile's, to prefetch
  const Cell* value_starts[kKeyTile / VW];
  int64_t num_segments;
  Segment<T> values[kKeyTile / 8 + 3];
};

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
  for (int64_t i = 0; i < kMaxCols; ++i) {
    const int64_t t = tile.base + (tile.num_vectors + i) * VW, column = t / size;
    const int64_t block = t < item.kv_end && column < p.max_blocks ? table[column] : -1;
    const bool exists = block >= 0 && block < p.cache.num_blocks;
    const Cell* const next = exists ? (const Cell*)p.cache.k_of(block, item.kv_head) + (t - column * size) : nullptr;
    tile.keys[tile.num_vectors + i] = exists ? next : tile.keys[0];
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

// Scores of one row -> probabilities 2^(t - maximum), where t = log2(e) * (scaled, capped score). Only lanes [low,
// high) count; the others become 0, whatever they hold.
template <class T>
void softmax_row(const AttentionProblem& p, const Scratch& s, int64_t row, int64_t num_vectors, int64_t low,
                 int64_t high) {
  float* scores = s.scores + row * kKeyTile;
  uint32_t* target = T::kPacked ? s.packed + row * (kKeyTile / 2) : (uint32_t*)scores;
  const float scale = T::kScaled ? p.scale * s.query_units[row] : p.scale;
  const bool full = low <= 0 && high >= num_vectors * VW;
  const float factor = scale * kLog2e;
  vf top = splat(kFloor);
  vi lane;
  for (int i = 0; i < VW; ++i) lane[i] = i;
  for (int64_t g = 0; g < num_vectors; ++g) {
    vf t = loadf(scores + g * VW);
    if constexpr (T::kScaled) t = t * loadf(s.key_scales + g * VW);
    t = p.soft_cap > 0 ? tanh_all(t * (scale / p.soft_cap)) * (p.soft_cap * kLog2e) : t * factor;
    if (!full) {
      const vi index = lane + (int32_t)(g * VW);
      t = index >= (int32_t)low ? t : splat(-__builtin_inff());
      t = index < (int32_t)high ? t : splat(-__builtin_inff());
    }
    storef(scores + g * VW, t);
    top = vmax(top, t);
  }
  const float before = s.maximum[row], found = reduce_max(top);
  const float maximum = found > before ? found : before;
  vf total = {}, largest = {};
  for (int64_t g = 0; g < num_vectors; ++g) {
    const vf e = exp2_neg<T::kPrecise>(loadf(scores + g * VW) - maximum);
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
  if constexpr (T::kScaled) {
    const float most = reduce_max(largest), inverse = inverse_unit(most);
    s.probability_units[row] = most * (1 / kInt16);
    for (int64_t g = 0; g < num_vectors; ++g)
      store_int16((int16_t*)target + g * VW, loadf(scores + g * VW), inverse);
  }
  const vf decay = exp2_neg<T::kPrecise>(splat(before - maximum));
  s.decay[row] = before == maximum ? 1.0f : decay[0];
  s.sum[row] = s.sum[row] * s.decay[row] + reduce_add(total);
  s.maximum[row] = maximum;
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
  for (int64_t r = item.row_begin; r < item.row_end; ++r, queries += words) {
    const int64_t token = item.token_of(p, r), head = item.kv_head * p.group + r % p.group;
    const auto* row = (const typename T::Storage*)p.q.data + token * p.q.token_stride + head * p.q.head_stride;
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
void write_row(const AttentionProblem& p, const WorkItem& item, int64_t row, const float* accumulator, float sum) {
  const int64_t token = item.token_of(p, row), head = item.kv_head * p.group + row % p.group;
  auto* out = (typename T::Storage*)p.out.data + token * p.out.token_stride + head * p.out.head_stride;
  const float inverse = sum == 0 ? 0 : 1 / sum;  // a row that sees no key gives 0; a NaN stays in its row
#if PAGELOOM_NATIVE_BF16
  if constexpr (T::kBFloat16Out) {
    for (int64_t d = 0; d < p.cache.head_dim; d += VW) {
      const __m256bh packed = _mm512_cvtneps_pbh((__m512)(loadf(accumulator + d) * inverse));
      memcpy(out + d, &packed, min64(VW, p.cache.head_dim - d) * 2);
    }
    return;
  }
#endif
  for (int64_t d = 0; d < p.cache.head_dim; ++d) out[d] = T::from_float(accumulator[d] * inverse);
}

template <class T>
bool attend_typed(const AttentionProblem& p, const WorkItem& item, void* memory, float* partials) {
  const Scratch s = carve(p, memory);
  const int64_t rows = item.row_end - item.row_begin, dims = p.cache.padded_dim, window = item.window_of(p);
  const int64_t cell_rows = p.cache.head_dim / T::kPerLane, words = cell_rows * T::kWords;
  gather_queries<T>(p, item, s.queries, words, s.query_units);
  memset(s.accumulator, 0, rows * dims * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) s.maximum[r] = kFloor, s.sum[r] = 0;

  KeyTile<T> tile;
  for (tile.base = item.kv_begin / VW * VW; tile.base < item.kv_end; tile.base += kKeyTile) {
    tile.begin = max64(tile.base, item.kv_begin);
    tile.end = min64(tile.base + kKeyTile, item.kv_end);
    if (!locate_tile<T>(p, item, tile, s)) return false;
    all_scores<T>(s.queries, words, rows, tile.keys, tile.value_starts, tile.num_vectors, p.cache.block_size, cell_rows,
                  s.scores, kKeyTile);
    if constexpr (T::kScaled) gather_scales<T>(p, item, tile, s);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = item.position_of(p, item.row_begin + r);
      const int64_t oldest = max64(tile.begin, window > 0 ? position - window + 1 : 0);
      softmax_row<T>(p, s, r, tile.num_vectors, oldest - tile.base, min64(tile.end, position + 1) - tile.base);
    }
    const uint32_t* probabilities = T::kPacked ? s.packed : (const uint32_t*)s.scores;
    all_values<T>(probabilities, T::kPacked ? kKeyTile / 2 : kKeyTile, rows, tile.values, tile.num_segments, dims,
                  s.decay, s.probability_units, s.accumulator);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = s.accumulator + r * dims;
    float* const target = item.partial_of(p, partials, item.row_begin + r, dims + kPartialExtra);
    if (target == nullptr) {
      write_row<T>(p, item, item.row_begin + r, row, s.sum[r]);
    } else {
      memcpy(target, row, dims * sizeof(float));
      target[dims] = s.maximum[r];
      target[dims + 1] = s.sum[r];
    }
  }
  return true;
}

// Parts are added in order, so the result does not depend on which thread finished first.
template <class T>
void combine_typed(const AttentionProblem& p, const WorkItem& item, const float* partials, int64_t parts,
                   int64_t stride) {
  const int64_t dims = p.cache.padded_dim, row_stride = dims + kPartialExtra;
  for (int64_t r = 0; r < item.row_end - item.row_begin; ++r) {
    const float* rows = partials + r * row_stride;
    float maximum = kFloor, sum = 0;
    for (int64_t i = 0; i < parts; ++i) maximum = rows[i * stride + dims] > maximum ? rows[i * stride + dims] : maximum;
    alignas(64) float total[256 + 16] = {};
    for (int64_t i = 0; i < parts; ++i) {
      const float* part = rows + i * stride;
      const vf weight = exp2_neg<T::kPrecise>(splat(part[dims] - maximum));
      sum += part[dims + 1] * weight[0];
      for (int64_t d = 0; d < dims; d += VW) storef(total + d, loadf(total + d) + loadf(part + d) * weight);
    }
    write_row<T>(p, item, item.row_begin + r, total, sum);
  }
}

bool attend(const AttentionProblem& p, const WorkItem& item, void* scratch, float* partials) {
  switch (p.cache.dtype) {
    case Dtype::kFloat32: return attend_typed<Float32>(p, item, scratch, partials);
    case Dtype::kBFloat16: return attend_typed<BFloat16>(p, item, scratch, partials);
    case Dtype::kInt8: return attend_typed<Int8>(p, item, scratch, partials);
    default: return attend_typed<Float16>(p, item, scratch, partials);
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
