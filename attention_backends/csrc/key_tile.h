// Where an item's keys and values lie: tiles of keys in pages, and what a thread needs to attend to them. Compiled once per
// ISA, with attention_kernel.cpp.
#pragma once

#include <stddef.h>

#include "kernels.h"
#include "microkernel.h"

namespace {

using namespace pageloom;

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
  float* sums;         // [rows]
  float* found;        // [kPassRows][padded_dim], of one tile
  float* kept;         // [kPassRows]: what it takes of the row so far
  float* taken;        // and of the tile
  float* query_units;        // [rows], of int8 caches: what an integer of the row's query is worth
  float* probability_units;  // [kPassRows]: and of its probabilities
  uint32_t* edge_values;  // two rows of cells [padded_dim]: pairs of which one token must not be read
  float* key_scales;      // [kKeyTile], of int8 caches; 0 for tokens outside the item
  float* value_scales;
  uint32_t* keys;  // of latents: a tile's, by vectors of tokens, as those of other caches lie in a page
};

int64_t rows_bytes(int64_t per_row) { return (kRowTile * per_row * 4 + 63) / 64 * 64; }

int64_t keys_bytes(const AttentionProblem& p) { return p.cache.latent ? kKeyTile * p.cache.head_dim * 4 : 0; }

int64_t scratch_bytes(const AttentionProblem& p) {
  const int64_t scores = kPassRows * (kKeyTile + kKeyTile / 2) * 4;
  const int64_t vectors = rows_bytes(p.cache.head_dim) + rows_bytes(p.cache.padded_dim) + 8 * rows_bytes(1) + VW * 4;
  return scores + vectors + kPassRows * p.cache.padded_dim * 4 + 2 * p.cache.padded_dim * 4 + 2 * kKeyTile * 4 + keys_bytes(p) + 64;
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
  s.sums = (float*)take(rows_bytes(1));
  s.found = (float*)take(kPassRows * p.cache.padded_dim * 4);
  s.kept = (float*)take(rows_bytes(1));
  s.taken = (float*)take(rows_bytes(1));
  s.query_units = (float*)take(rows_bytes(1));
  s.probability_units = (float*)take(rows_bytes(1));
  s.edge_values = (uint32_t*)take(2 * p.cache.padded_dim * 4);
  s.key_scales = (float*)take(kKeyTile * 4);
  s.value_scales = (float*)take(kKeyTile * 4);
  s.keys = (uint32_t*)take(keys_bytes(p));
  return s;
}

// The key tile [begin, end) of one (sequence, KV head). `base` <= begin is where its vectors and lane pairs start.
template <class T>
struct KeyTile {
  using Cell = typename T::Cell;
  int64_t base, begin, end;
  int64_t num_vectors;
  const Cell* keys[kKeyTile / VW];
  int64_t key_stride;  // from one row of their cells to the next
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
  tile.key_stride = size;
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

constexpr int kPairs = VW >= 8 ? 4 : 2;

// Pairs of tokens and of dims change places: kPairs rows of twice as many cells, which pair two tokens of a dim, become as
// many rows that pair two dims of a token.
PAGELOOM_INLINE void transpose_pairs(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
  typedef uint64_t Words __attribute__((vector_size(8 * kPairs)));
  Words in[kPairs];
  for (int i = 0; i < kPairs; ++i) {
    const Words x = load_as<Words>(from + i * from_stride);  // of two tokens one dim, and the next
    in[i] = (x & 0xffff00000000ffffull) | (x & 0x00000000ffff0000ull) << 16 | (x & 0x0000ffff00000000ull) >> 16;
  }
#if PAGELOOM_VECTOR_BYTES >= 32
  const Words a = __builtin_shufflevector(in[0], in[1], 0, 4, 2, 6), b = __builtin_shufflevector(in[2], in[3], 0, 4, 2, 6);
  const Words c = __builtin_shufflevector(in[0], in[1], 1, 5, 3, 7), d = __builtin_shufflevector(in[2], in[3], 1, 5, 3, 7);
  const Words out[kPairs] = {__builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(c, d, 0, 1, 4, 5),
                             __builtin_shufflevector(a, b, 2, 3, 6, 7), __builtin_shufflevector(c, d, 2, 3, 6, 7)};
#else
  const Words out[kPairs] = {__builtin_shufflevector(in[0], in[1], 0, 2), __builtin_shufflevector(in[0], in[1], 1, 3)};
#endif
  for (int i = 0; i < kPairs; ++i) memcpy(to + i * to_stride, &out[i], sizeof out[i]);
}

// The keys of a located tile of latents, which has them as values: into scratch memory, where all rows find them.
template <class T>
void transpose_keys(const AttentionProblem& p, KeyTile<T>& tile, const Scratch& s) {
  const int64_t cells = p.cache.head_dim / T::kPerLane, dims = p.cache.padded_dim;
  for (int64_t g = 0; g < tile.num_vectors; ++g) {
    uint32_t* const to = s.keys + g * cells * VW;
    const auto* const from = tile.value_starts[g];
    if constexpr (T::kPerLane == 1) {
      for (int64_t d = 0; d < cells; ++d)
        for (int64_t t = 0; t < VW; ++t) to[d * VW + t] = from[t * dims + d];
    } else {
      for (int64_t t = 0; t < VW; t += 2 * kPairs)
        for (int64_t d = 0; d < cells; d += kPairs)
          transpose_pairs(from + t / 2 * dims + 2 * d, dims, to + d * VW + t, VW);
    }
    tile.keys[g] = to;
  }
  tile.key_stride = VW;
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

}  // namespace
