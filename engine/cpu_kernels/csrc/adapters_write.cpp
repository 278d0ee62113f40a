#include "adapters_write.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "adapters.h"

#if defined(__clang__) || __GNUC__ >= 12
#define PAGELOOM_PICK(one, other, ...) __builtin_shufflevector(one, other, __VA_ARGS__)
#else
#define PAGELOOM_PICK(one, other, ...) __builtin_shuffle(one, other, Eight{__VA_ARGS__})
#endif

namespace pageloom {
namespace {

// To the nearest, ties to even; NaN stays NaN.
uint16_t times(uint16_t given, float scale) {
  const uint32_t wide = static_cast<uint32_t>(given) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  value *= scale;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(value != value ? 0x7FC0u : rounded);
}

// Eight rows of eight, `stride` apart, and `into` eight others, turned.
void turn_eight(const uint16_t* from, int64_t stride, uint16_t* into, int64_t into_stride) {
  typedef uint16_t Eight __attribute__((vector_size(16)));
  Eight rows[8], pairs[8];
  for (int i = 0; i < 8; ++i) std::memcpy(&rows[i], from + i * stride, sizeof rows[i]);
  for (int times = 0; times < 3; ++times) {  // row i with row i + 4, number by number: after three times all have met
    for (int i = 0; i < 4; ++i) {
      pairs[2 * i] = PAGELOOM_PICK(rows[i], rows[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      pairs[2 * i + 1] = PAGELOOM_PICK(rows[i], rows[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    std::copy(pairs, pairs + 8, rows);
  }
  for (int i = 0; i < 8; ++i) std::memcpy(into + i * into_stride, &rows[i], sizeof rows[i]);
}

// from [count][rank], to rows of a block.
void turn(const uint16_t* from, int64_t count, int64_t rank, uint16_t* into) {
  const int64_t even_count = count / 8 * 8, even_rank = rank / 8 * 8;
  for (int64_t j = 0; j < even_count; j += 8)
    for (int64_t r = 0; r < even_rank; r += 8) turn_eight(from + j * rank + r, rank, into + r * kAdapterBlock + j, kAdapterBlock);
  for (int64_t r = 0; r < rank; ++r)
    for (int64_t j = r < even_rank ? even_count : 0; j < count; ++j) into[r * kAdapterBlock + j] = from[j * rank + r];
}

// Rows as they lie, each behind the one before; copied to `room` where they do not lie so.
const uint16_t* together(const GivenFactor& g, int64_t first, int64_t count, uint16_t* room) {
  const uint16_t* const from = g.data + first * g.row_stride;
  if (g.column_stride == 1 && g.row_stride == g.columns) return from;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < g.columns; ++j) room[i * g.columns + j] = from[i * g.row_stride + j * g.column_stride];
  return room;
}

}  // namespace

void put_rows(uint16_t* into, const GivenFactor& a) {
  const uint16_t* const from = together(a, 0, a.rows, into);
  if (from != into) std::memcpy(into, from, static_cast<size_t>(a.rows * a.columns) * sizeof *into);
}

void put_blocks(uint16_t* blocks, int64_t max_rank, int64_t start, const GivenFactor& b, float scale) {
  const int64_t rank = b.columns;
  std::vector<uint16_t> copied(kAdapterBlock * rank), scaled(scale == 1.0f ? 0 : copied.size());
  for (int64_t done = 0; done < b.rows;) {
    const int64_t at = (start + done) % kAdapterBlock, count = std::min(kAdapterBlock - at, b.rows - done);
    const uint16_t* from = together(b, done, count, copied.data());
    if (scale != 1.0f) {
      for (int64_t i = 0; i < count * rank; ++i) scaled[i] = times(from[i], scale);
      from = scaled.data();
    }
    uint16_t* const into = blocks + (start + done) / kAdapterBlock * max_rank * kAdapterBlock + at;
    turn(from, count, rank, into);
    done += count;
  }
}

}  // namespace pageloom
