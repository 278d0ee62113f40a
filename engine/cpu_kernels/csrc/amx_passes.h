// What the AMX kernels share: asking for the weights that come next. Internal linkage.
#pragma once

#include "epilogue.h"

namespace {

PAGELOOM_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
// GCC's tile loads do not tell the compiler that they read memory.
PAGELOOM_INLINE void tiles_read_memory() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};

  // GCC's `_tile_loadconfig` does not tell either how much it reads.
  void load() const {
    __asm__ volatile("" : : "r"(this) : "memory");
    _tile_loadconfig(this);
  }
};

// Weights to ask for while others are multiplied: `lines` cache lines with each step, in turn from `kParts` parts that
// lie `part` bytes apart, so that the memory sees as many streams.
struct Prefetch {
  const uint8_t* ahead;
  int64_t lines, part;
};

constexpr int64_t kParts = 4;

PAGELOOM_INLINE void ask(Prefetch& p) {
  for (int64_t line = 0; line < p.lines; ++line, p.ahead += 64)
    for (int64_t i = 0; i < kParts; ++i) __builtin_prefetch(p.ahead + i * p.part, 0, 2);
}

// The block of as many bytes after this one, over all passes of `steps` steps of this one.
PAGELOOM_INLINE Prefetch next_block(const uint8_t* block, int64_t bytes, int64_t steps, int64_t pass, int64_t passes) {
  const int64_t part = bytes / kParts, lines = (part / 64 + steps * passes - 1) / (steps * passes);
  const int64_t done = pass * steps * lines * 64;
  return {block + bytes + done, done < part ? lines : 0, part};
}

}  // namespace
