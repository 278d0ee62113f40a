// What the schedulers of layers and of experts share: scratch memory, prepared rows, work dealt out to threads. Seen by
// units that are compiled once only.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "linear.h"

namespace pageloom {

// Estimated nanoseconds of a core, only to decide whether another one is worth waking.
inline constexpr int64_t kSerialNs = 6000;
inline constexpr int64_t kBytesPerNs = 24, kProductsPerNs = 100;
inline constexpr int64_t kOwnRowsElements = 1 << 13;  // rows this small are prepared by each thread for itself
inline constexpr int64_t kPrepareRows = 8;            // rows that a thread prepares at once where they are shared
inline constexpr int64_t kMinChunkRows = 64;          // where rows are split as well as panels
inline constexpr int64_t kChunkElements = 3 << 17;  // inputs of a chunk of rows: they stay in the cache of their thread
inline constexpr int64_t kStreamedRows = 2;         // of so few, weights are all that counts:
inline constexpr int64_t kStreamedPanels = 8;       // claims are of about as many panels, in whole sets of streams
inline constexpr int64_t kUnitsPerThread = 6;       // what there should be at least, for a balance
inline constexpr int64_t kClaimNs = 100000;         // what a thread holds at most, where a unit is not more

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Of `rows` rows against `panels` panels.
inline int64_t estimated_ns(const LinearProblem& p, int64_t rows, int64_t panels) {
  return std::max(panels * p.panel_bytes / kBytesPerNs, rows * p.k * panels * kPanel / kProductsPerNs);
}

// Panels that are claimed together at least, where there are as many.
inline int64_t claim_step(int64_t rows, int64_t streams) {
  const int64_t set = std::max<int64_t>(streams, 1);
  return rows > kStreamedRows ? 2 : ceil_div(kStreamedPanels, set) * set;
}

// Grows, never shrinks: one per thread and use, so that a steady state allocates nothing.
class Arena {
 public:
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset(new char[bytes + bytes / 4 + 64]);
      size_ = bytes + bytes / 4;
    }
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) / 64 * 64);
  }

 private:
  std::unique_ptr<char[]> memory_;
  int64_t size_ = 0;
};

// Rows of `size` bytes, 64-byte aligned, that do not share few sets of a cache column by column.
inline int64_t row_bytes_of(int64_t size) { return aligned(size) + (aligned(size) % 1024 == 0 ? 64 : 0); }

// Prepared rows in one piece of memory: data, then scales, then sums, each 64-byte aligned.
struct OperandLayout {
  OperandKind kind;
  int64_t groups, stride = 0, data = 0, scales = 0, sums = 0;

  OperandLayout(OperandKind operand_kind, int64_t rows, int64_t k) : kind(operand_kind), groups(ceil_div(k, kGroup)) {
    const int64_t size = kind == OperandKind::kBFloat16 ? 2 : 1;
    stride = row_bytes_of(k * size);
    data = rows * stride;
    if (kind == OperandKind::kInt8PerToken) scales = aligned(rows * 4);
    if (kind == OperandKind::kInt8PerGroup) scales = sums = aligned(rows * groups * 4);
    stride /= size;
  }

  int64_t bytes() const { return data + scales + sums; }

  Operand at(char* memory) const {
    return {kind, memory, stride, reinterpret_cast<float*>(memory + data),
            reinterpret_cast<float*>(memory + data + scales)};
  }
};

// What is left of the units that one thread begins with; others take from it when theirs are done.
struct alignas(64) Range {
  std::atomic<int64_t> next;
  int64_t end;

  // A third of what is left and at most `most`, in multiples of `step` while there is more; false: nothing left.
  bool claim(int64_t step, int64_t most, int64_t& begin, int64_t& stop) {
    int64_t at = next.load(std::memory_order_relaxed);
    while (at < end) {
      const int64_t left = end - at;
      const int64_t take = std::min({left, most, left <= 2 ? 1 : ceil_div(left, 3 * step) * step});
      if (!next.compare_exchange_weak(at, at + take, std::memory_order_relaxed)) continue;
      begin = at;
      stop = at + take;
      return true;
    }
    return false;
  }
};

}  // namespace pageloom
