// What the AMX kernels work on: tile configuration, scratch memory, and queries and pages copied into tile order.
#pragma once

#include <stddef.h>

#include "kernels.h"
#include "simd.h"
#include "softmax.h"

using namespace pageloom;

namespace {

constexpr int64_t kTile = 16;      // rows of a tile, and 32-bit lanes of its rows
constexpr int64_t kPassRows = 32;  // two tiles of rows meet two tiles of keys: every loaded tile is used twice
constexpr int64_t kKeys = 256;     // keys between two rescalings of the accumulator
constexpr int64_t kRows = 384;     // rows of an item: they share one copy of its pages into tile order
constexpr int64_t kMinRows = 12;   // fewer leave most of a tile empty

PAGELOOM_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
PAGELOOM_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
// GCC's tile loads do not tell the compiler that they read memory.
PAGELOOM_INLINE void tiles_read_memory() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig kConfig;

// A thread's tiles for the life of one item; afterwards they are as empty as everybody else expects them. Results
// below 2^-126 are flushed to 0 meanwhile: exact zeros are what they stand for, and they would cost a microcode assist.
class TileSession {
 public:
  TileSession() : control_(_mm_getcsr()) {
    _tile_loadconfig(&kConfig);
    _mm_setcsr(control_ | 0x8040);
  }
  ~TileSession() {
    _tile_release();
    _mm_setcsr(control_);
  }
  TileSession(const TileSession&) = delete;

 private:
  unsigned control_;
};

struct Scratch {
  int64_t depth;            // head_dim rounded up to 32: what a tile of queries multiplies at once
  int64_t dims;             // padded_dim
  uint16_t* queries;        // [kRows][depth], zero beyond head_dim
  uint32_t* keys;           // [kKeys / 16][depth / 2][16 tokens], zero beyond head_dim
  uint32_t* values;         // [dims / 16][kKeys / 2][16 dims], zero for tokens outside the item
  float* scores;            // [kPassRows][kKeys]
  uint16_t* probabilities;  // [kPassRows][kKeys]
  float* accumulator;       // [kRows][dims]
  float* sums;              // [kRows][16]: lanes are added up at the end
  float* maximum;           // [kRows]
  int32_t* positions;       // [kRows]
  float* key_scales;        // [kKeys], of int8 caches; 0 for tokens outside the item
  float* value_scales;
  int64_t window;           // of these rows
};

int64_t carve(const AttentionProblem& p, void* memory, Scratch& s) {
  char* const start = (char*)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
  char* at = start;
  const auto take = [&](auto*& target, int64_t bytes) {
    target = (decltype(+target))at;
    at += (bytes + 63) / 64 * 64;
  };
  s.depth = (p.cache.head_dim + 31) / 32 * 32;
  s.dims = p.cache.padded_dim;
  take(s.queries, kRows * s.depth * 2);
  take(s.keys, kKeys * s.depth * 2);
  take(s.values, kKeys * s.dims * 2);
  take(s.scores, kPassRows * kKeys * 4);
  take(s.probabilities, kPassRows * kKeys * 2);
  take(s.accumulator, kRows * s.dims * 4);
  take(s.sums, kRows * kTile * 4);
  take(s.maximum, kRows * 4);
  take(s.positions, kRows * 4);
  take(s.key_scales, kKeys * 4);
  take(s.value_scales, kKeys * 4);
  return at - start + 64;
}

void gather_queries(const AttentionProblem& p, const WorkItem& item, const Scratch& s, int64_t rows) {
  const int64_t bytes = p.cache.head_dim * 2;
  for (RowCursor at = item.first_row(p); at.row < item.row_begin + rows; at.next()) {
    const int64_t r = at.row - item.row_begin;
    memcpy(s.queries + r * s.depth, (const uint16_t*)p.q.data + item.place_of(p, p.q, at), bytes);
    memset((char*)(s.queries + r * s.depth) + bytes, 0, s.depth * 2 - bytes);
    s.positions[r] = (int32_t)item.position_of(p, at);
  }
  const int64_t padded = (rows + kTile - 1) / kTile * kTile;
  memset(s.queries + rows * s.depth, 0, (padded - rows) * s.depth * 2);
  memset(s.accumulator, 0, padded * s.dims * 4);
  memset(s.sums, 0, rows * kTile * 4);
  for (int64_t r = 0; r < kRows; ++r) s.maximum[r] = kFloor;
}

// Cells of two int8 as bfloat16 pairs: exact, because 8 bits of mantissa hold them.
PAGELOOM_INLINE vu bf16_pairs(const Int8::Cell* cells) {
  const vi both = (vi)Int8::load(cells);
  return ((vu)Int8::as_float(both << 16 >> 16) >> 16) | (vu)Int8::as_float(both >> 16);
}

// 16 keys from `from` on, pages of `size` tokens, in tile order.
PAGELOOM_INLINE void gather_keys(const AttentionProblem& p, const void* from, uint32_t* to, int64_t depth) {
  const int64_t size = p.cache.block_size, pairs = p.cache.head_dim / 2;
  if (p.cache.dtype == Dtype::kInt8) {
    const auto* key = (const Int8::Cell*)from;
    for (int64_t d = 0; d < pairs; ++d, key += size, to += kTile) {
      const vu both = bf16_pairs(key);
      memcpy(to, &both, 64);
    }
  } else {
    const uint32_t* key = (const uint32_t*)from;
    for (int64_t d = 0; d < pairs; ++d, key += size, to += kTile) memcpy(to, key, 64);
  }
  memset(to, 0, (depth / 2 - pairs) * 64);
}

// The values of 16 tokens, of which those of [low, high) count, in tile order; the others become 0: 0 * NaN is NaN.
PAGELOOM_INLINE void gather_values(const AttentionProblem& p, const void* from, uint32_t* to, int64_t low,
                                   int64_t high) {
  const int64_t dims = p.cache.padded_dim;
  const bool whole = low <= 0 && high >= kTile;
  for (int64_t i = 0; i < kTile / 2; ++i) {
    const uint32_t mask =
        (2 * i >= low && 2 * i < high ? 0xffffu : 0) | (2 * i + 1 >= low && 2 * i + 1 < high ? 0xffff0000u : 0);
    for (int64_t d = 0; d < dims; d += kTile) {
      vu cells;
      if (p.cache.dtype == Dtype::kInt8) {
        cells = bf16_pairs((const Int8::Cell*)from + i * dims + d);
      } else {
        cells = load_as<vu>((const uint32_t*)from + i * dims + d);
      }
      if (!whole) cells &= mask;
      memcpy(to + d * (kKeys / 2) + i * kTile, &cells, 64);
    }
  }
}

// Keys [begin, end) in tile order, from `base` <= begin, a multiple of 16. Keys outside the range are copied as they
// are: their scores are replaced.
bool gather_pages(const AttentionProblem& p, const WorkItem& item, const Scratch& s, int64_t base, int64_t begin,
                  int64_t end) {
  const int32_t* const table = p.block_tables + item.seq * p.block_table_stride;
  const int64_t size = p.cache.block_size, bytes = p.cache.cell_bytes();
  const int64_t vectors = (end - base + kTile - 1) / kTile;
  for (int64_t g = 0; g < vectors; ++g) {
    const int64_t token = base + g * kTile, column = token / size, offset = token - column * size;
    const int64_t block = column < p.max_blocks ? table[column] : -1;
    if (block < 0 || block >= p.cache.num_blocks) return false;
    const char* const keys = (const char*)p.cache.k_of(block, item.kv_head);
    const char* const values = (const char*)p.cache.v_of(block, item.kv_head);
    gather_keys(p, keys + offset * bytes, s.keys + g * s.depth / 2 * kTile, s.depth);
    gather_values(p, values + offset / 2 * s.dims * bytes, s.values + g * kTile / 2 * kTile, begin - token, end - token);
    if (p.cache.dtype == Dtype::kInt8) {
      const float* const of_keys = p.cache.k_scales(block, item.kv_head) + offset;
      const float* const of_values = p.cache.v_scales(block, item.kv_head) + offset;
      for (int64_t i = 0; i < kTile; ++i) {
        const bool counts = token + i >= begin && token + i < end;
        s.key_scales[g * kTile + i] = counts ? of_keys[i] : 0.0f;
        s.value_scales[g * kTile + i] = counts ? of_values[i] : 0.0f;
      }
    }
  }
  if (vectors % 2 == 1) {  // products take tokens by 32
    memset(s.key_scales + vectors * kTile, 0, kTile * 4);
    memset(s.value_scales + vectors * kTile, 0, kTile * 4);
    for (int64_t d = 0; d < s.dims; d += kTile)
      memset(s.values + d * (kKeys / 2) + vectors * kTile / 2 * kTile, 0, kTile / 2 * 64);
  }
  return true;
}

}  // namespace
