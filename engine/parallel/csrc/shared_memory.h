// The memory that the ranks of a group share: one file of no name, mapped by each.
#pragma once

#include <stdint.h>

#include <atomic>
#include <string>

#include "group.h"

namespace pageloom {

inline constexpr int64_t kPage = 4096;
inline constexpr uint64_t kMagic = 0x31'70756f7267'6c70;  // "plgroup1": this layout, as `shared_memory.py` writes it
inline constexpr int64_t kMostRanks = 64;

struct Header {
  uint64_t magic;
  uint64_t size;
  uint64_t slot_bytes;  // a multiple of a page
  alignas(64) std::atomic<uint32_t> stopped;  // Stopped: every rank looks at it while it waits
  char reason[kMostReason];                   // ends with 0
};

enum Stopped : uint32_t { kRunning = 0, kReasonComes = 1, kReasonIsThere = 2 };

// One line of the caches, so that a rank's number and tag arrive together.
struct alignas(64) RankLine {
  std::atomic<uint64_t> published;  // rounds of which this rank's part lies in its slot, and its tag here
  Tag tags[2];                      // of odd and of even rounds, as the slots
  std::atomic<uint32_t> taken;      // by a process
};

static_assert(sizeof(Header) <= kPage && sizeof(RankLine) == 64 && sizeof(Tag) == 16);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// Header, then for each rank a page with its line and its two slots.
class SharedMemory {
 public:
  // Throws std::runtime_error: not such a file, or it cannot be mapped.
  explicit SharedMemory(int fd);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;

  int64_t size() const { return static_cast<int64_t>(header().size); }
  int64_t slot_bytes() const { return static_cast<int64_t>(header().slot_bytes); }
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  RankLine& line(int64_t rank) const { return *reinterpret_cast<RankLine*>(of_rank(rank)); }
  char* slot(int64_t rank, uint64_t round) const {
    return of_rank(rank) + kPage + static_cast<int64_t>(round % 2) * slot_bytes();
  }

  // The first reason stays.
  void stop(const std::string& reason) const;
  bool stopped() const { return header().stopped.load(std::memory_order_acquire) != kRunning; }
  [[noreturn]] void throw_reason() const;

 private:
  char* of_rank(int64_t rank) const { return base_ + kPage + rank * (kPage + 2 * slot_bytes()); }

  char* base_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace pageloom
