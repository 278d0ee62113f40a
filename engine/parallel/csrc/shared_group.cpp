#include "shared_group.h"

#include <sched.h>
#include <string.h>
#include <time.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace pageloom {
namespace {

// Of x, up to which every rank sums everything. Two ranks always do: shares would make them read as much of each other,
// and wait twice. Measured (two cores, beside other work): as fast up to 128 KB, above that 1.2 to 3 times faster.
constexpr int64_t kAtOnceBytes = 64 << 10;

// A rank that waits: hot for some microseconds, then it lends its core to others, then it leaves it.
class Patience {
 public:
  void wait() {
    if (++looks_ <= kHotLooks) return pause();
    const int64_t now = now_ns();
    if (cold_at_ns_ == 0) cold_at_ns_ = now + kYieldNs;
    if (now < cold_at_ns_) {
      sched_yield();
    } else {
      nanosleep(&kNap, nullptr);
    }
  }

 private:
  static constexpr int kHotLooks = 200;
  static constexpr int64_t kYieldNs = 20'000'000;
  static constexpr timespec kNap = {0, 50'000};

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }
  static int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000 + now.tv_nsec;
  }

  int looks_ = 0;
  int64_t cold_at_ns_ = 0;
};

#if defined(__SSE2__)
// Past the caches: the lines are still in those of who read the slot last, and to take them back costs more than to read
// what was written to memory. Measured on a Zen 4, two ranks: an all-reduce of 8 KB takes 2/3 of the time, of 16 to 512 KB
// 1/3 to 1/2, of 4 MB as long. `to` is a line's begin.
void copy_to_slot(char* to, const char* from, int64_t bytes) {
  int64_t at = 0;
  for (; at + 64 <= bytes; at += 64)
    for (int64_t i = at; i < at + 64; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  _mm_sfence();
  memcpy(to + at, from + at, bytes - at);
}
#else
void copy_to_slot(char* to, const char* from, int64_t bytes) { memcpy(to, from, bytes); }
#endif

// Bytes [begin, end) of rows that lie `stride` apart, to a slot where they lie side by side.
void rows_to_slot(const char* from, int64_t stride, int64_t row_bytes, int64_t begin, int64_t end, char* slot) {
  if (begin >= end) return;
  if (stride == row_bytes || end <= row_bytes) return copy_to_slot(slot, from + begin, end - begin);
  copy_rows(from, stride, slot - begin, row_bytes, row_bytes, begin, end);
}

}  // namespace

SharedGroup::SharedGroup(int fd, int64_t rank, int64_t size)
    : memory_(fd), rank_(rank), kernels_(kernels_of_this_cpu()), parts_(memory_.size()) {
  if (size != memory_.size() || rank < 0 || rank >= size) {
    std::ostringstream text;
    text << "rank " << rank << " of " << size << " does not fit a memory of " << memory_.size() << " ranks";
    throw std::runtime_error(text.str());
  }
  if (memory_.line(rank).taken.exchange(1) != 0)
    throw std::runtime_error("rank " + std::to_string(rank) + " of this memory has been taken before");
}

void SharedGroup::publish(const Tag& tag) {
  if (memory_.stopped()) memory_.throw_reason();
  RankLine& own = memory_.line(rank_);
  own.tags[++round_ % 2] = tag;
  own.published.store(round_, std::memory_order_release);
}

// A slot, and a tag, of round r is written again in round r + 2: its rank has then seen the others publish r + 1, which
// they do after they have read what they wanted of r. So no rank waits at the end of a collective.
void SharedGroup::wait_for_all(const Tag& tag, const std::vector<int64_t>* columns) {
  for (int64_t rank = 0; rank < size(); ++rank) {
    if (rank == rank_) continue;
    wait_for(rank);
    Tag expected = tag;
    if (columns != nullptr) expected.own_columns = static_cast<uint32_t>((*columns)[rank]);
    const Tag& called = memory_.line(rank).tags[round_ % 2];
    if (memcmp(&called, &expected, sizeof called) == 0) continue;
    memory_.stop(difference(rank, called, rank_, tag));
    memory_.throw_reason();
  }
}

void SharedGroup::wait_for(int64_t rank) {
  const RankLine& other = memory_.line(rank);
  Patience patience;
  while (other.published.load(std::memory_order_acquire) < round_) {
    if (memory_.stopped()) memory_.throw_reason();
    patience.wait();
  }
}

void SharedGroup::all_reduce(const ReduceCall& call) {
  const int64_t most = memory_.slot_bytes() / size_of(call.type);
  const bool at_once = size() <= 2 || call.count * size_of(call.type) <= kAtOnceBytes;
  for (int64_t at = 0; at == 0 || at < call.count; at += most) {
    const int64_t count = std::min(most, call.count - at);
    at_once ? reduce_at_once(call, at, count) : reduce_by_shares(call, at, count);
  }
}

// Every rank sums everything.
void SharedGroup::reduce_at_once(const ReduceCall& call, int64_t begin, int64_t count) {
  const char* const x = call.x + begin * size_of(call.type);
  const int64_t to = begin * size_of(call.out_type);
  copy_to_slot(next_slot(), x, count * size_of(call.type));
  publish(call.tag);
  wait_for_all(call.tag);
  sum_slots(call, x, 0, count, call.residual == nullptr ? nullptr : call.residual + to, call.out + to);
}

// Every rank sums a share of the elements, rounds it, and reads the others'.
void SharedGroup::reduce_by_shares(const ReduceCall& call, int64_t begin, int64_t count) {
  const int64_t type_bytes = size_of(call.type), out_bytes = size_of(call.out_type);
  const auto start = [&](int64_t rank) { return share_start(rank, size(), count); };
  const char* const x = call.x + begin * type_bytes;
  const int64_t own = start(rank_), end = start(rank_ + 1);
  copy_to_slot(next_slot(), x, own * type_bytes);
  copy_to_slot(next_slot() + end * type_bytes, x + end * type_bytes, (count - end) * type_bytes);
  publish(call.tag);
  wait_for_all(call.tag);
  char* const out = call.out + begin * out_bytes;
  sum_slots(call, x + own * type_bytes, own, end - own, nullptr, out + own * out_bytes);
  copy_to_slot(next_slot() + own * out_bytes, out + own * out_bytes, (end - own) * out_bytes);
  publish(call.tag);
  for (int64_t i = 0; i < size(); ++i) {
    const int64_t rank = (rank_ + i) % size(), at = start(rank), n = start(rank + 1) - at;  // its own share first
    if (i == 1) wait_for_all(call.tag);
    const void* const sum = (rank == rank_ ? out : slot_of(rank)) + at * out_bytes;
    char* const to = out + at * out_bytes;
    if (call.residual != nullptr) {
      const char* const residual = call.residual + (begin + at) * out_bytes;
      kernels_.sum(&sum, 1, call.out_type, residual, to, call.out_type, n);
    } else if (rank != rank_) {
      memcpy(to, sum, n * out_bytes);
    }
  }
}

void SharedGroup::sum_slots(const ReduceCall& call, const char* own, int64_t at, int64_t count, const char* residual,
                            char* out) {
  for (int64_t rank = 0; rank < size(); ++rank)
    parts_[rank] = rank == rank_ ? own : slot_of(rank) + at * size_of(call.type);
  kernels_.sum(parts_.data(), size(), call.type, residual, out, call.out_type, count);
}

void SharedGroup::all_gather(const ColumnsCall& call) {
  int64_t total = 0, widest = 0;  // bytes of a row
  for (const int64_t columns : call.columns) {
    total += columns * call.element_size;
    widest = std::max(widest, columns * call.element_size);
  }
  for (int64_t begin = 0; begin == 0 || begin < call.rows * widest; begin += memory_.slot_bytes()) {
    const auto copy = [&](int64_t rank, const char* from, int64_t from_stride, char* to, int64_t to_stride) {
      const int64_t row = call.columns[rank] * call.element_size;
      const int64_t end = std::min(begin + memory_.slot_bytes(), call.rows * row);
      copy_rows(from, from_stride, to, to_stride, row, begin, end);
    };
    const int64_t own = call.columns[rank_] * call.element_size;
    rows_to_slot(call.x, call.x_stride, own, begin, std::min(begin + memory_.slot_bytes(), call.rows * own), next_slot());
    publish(call.tag);
    wait_for_all(call.tag, &call.columns);
    char* to = call.out;
    for (int64_t rank = 0; rank < size(); ++rank) {
      const int64_t row = call.columns[rank] * call.element_size;
      const bool here = rank == rank_;
      copy(rank, here ? call.x : slot_of(rank) - begin, here ? call.x_stride : row, to, total);
      to += row;
    }
  }
}

// A slot has a part for each rank, which alone reads it.
void SharedGroup::all_to_all(const ColumnsCall& call) {
  constexpr int64_t kLine = 64;
  const int64_t part_bytes = memory_.slot_bytes() / size() / kLine * kLine;
  const int64_t own = call.columns[rank_] * call.element_size, out_stride = size() * own;
  const int64_t widest = *std::max_element(call.columns.begin(), call.columns.end()) * call.element_size;
  for (int64_t begin = 0; begin == 0 || begin < call.rows * widest; begin += part_bytes) {
    const char* own_x = call.x;
    int64_t before = 0;
    for (int64_t rank = 0; rank < size(); ++rank) {
      const int64_t row = call.columns[rank] * call.element_size, end = std::min(begin + part_bytes, call.rows * row);
      if (rank == rank_) own_x += before;
      else rows_to_slot(call.x + before, call.x_stride, row, begin, end, next_slot() + rank * part_bytes);
      before += row;
    }
    publish(call.tag);
    wait_for_all(call.tag, &call.columns);
    const int64_t end = std::min(begin + part_bytes, call.rows * own);
    for (int64_t rank = 0; begin < end && rank < size(); ++rank) {
      const char* const from = rank == rank_ ? own_x : slot_of(rank) + rank_ * part_bytes - begin;
      copy_rows(from, rank == rank_ ? call.x_stride : own, call.out + rank * own, out_stride, own, begin, end);
    }
  }
}

}  // namespace pageloom
