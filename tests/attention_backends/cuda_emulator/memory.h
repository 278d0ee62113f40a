// Shared memory, registered global memory, and copies that land only when they are waited for.
#pragma once

#include "emulator.h"

#include <vector>

namespace pageloom::emulator {

// The copies a thread has issued. A destination holds NaN in every format until the thread has waited for the copy and
// has come to a barrier since: then the source is read. (A device shows a thread its own copies at the wait already, but
// matrix instructions read those of other lanes, and here they would hide that a barrier is missing.)
class AsyncCopies {
 public:
  void issue(void* shared, const void* global, bool valid);
  void commit();
  void wait(int at_most_pending);
  void publish();
  bool all_waited_for() const;
  void clear();

 private:
  struct Copy {
    void* shared;
    const void* global;
    bool valid;
    int group;
    bool waited_for;
  };
  std::vector<Copy> copies_;
  int groups_ = 0;
};

// A block's dynamic shared memory, filled with NaN. Its end meets a page that faults; near its start lie guard bytes.
class SharedMemory {
 public:
  static constexpr int MOST_BYTES = 227 * 1024;  // of one block on sm_90; sm_80 has 163 KiB

  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void reset(int bytes);
  char* begin() const { return begin_; }
  bool owns(const void* at) const;  // anywhere in the region, guards included
  bool holds(const void* at, size_t bytes) const;
  bool guards_intact() const;

 private:
  char* region_;
  char* begin_;
  int bytes_ = 0;
};

class GlobalRanges {
 public:
  void add(const void* begin, int64_t bytes);
  void clear() { ranges_.clear(); }
  bool allow(const void* at, size_t bytes) const;

 private:
  struct Range {
    const char* begin;
    const char* end;
  };
  std::vector<Range> ranges_;
};

}  // namespace pageloom::emulator
