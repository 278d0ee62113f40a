#include "memory.h"

#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace pageloom::emulator {

namespace {

constexpr int POISON = 0xff;  // NaN in float, bfloat16, float16 and e4m3
constexpr size_t FAULTING_BYTES = 64 * 1024;
constexpr size_t AREA_BYTES = 256 * 1024;
constexpr size_t REGION_BYTES = AREA_BYTES + 2 * FAULTING_BYTES;
constexpr int GUARD_BYTES = 1024;
constexpr int ALIGNMENT = 128;

bool is_poison(const char* from, const char* to) {
  return std::all_of(from, to, [](char x) { return x == static_cast<char>(POISON); });
}

}  // namespace

void AsyncCopies::issue(void* shared, const void* global, bool valid) {
  memset(shared, POISON, 16);
  copies_.push_back({shared, global, valid, groups_, false});
}

void AsyncCopies::commit() { ++groups_; }

void AsyncCopies::wait(int at_most_pending) {
  for (Copy& copy : copies_) copy.waited_for |= copy.group < groups_ - at_most_pending;
}

void AsyncCopies::publish() {
  size_t kept = 0;
  for (const Copy& copy : copies_) {
    if (!copy.waited_for) {
      copies_[kept++] = copy;
    } else if (copy.valid) {
      memcpy(copy.shared, copy.global, 16);
    } else {
      memset(copy.shared, 0, 16);
    }
  }
  copies_.resize(kept);
}

bool AsyncCopies::all_waited_for() const {
  return std::all_of(copies_.begin(), copies_.end(), [](const Copy& copy) { return copy.waited_for; });
}

void AsyncCopies::clear() {
  copies_.clear();
  groups_ = 0;
}

SharedMemory::SharedMemory() {
  void* region = mmap(nullptr, REGION_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (region == MAP_FAILED) throw std::bad_alloc();
  region_ = static_cast<char*>(region);
  if (mprotect(region_ + FAULTING_BYTES, AREA_BYTES, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  begin_ = region_ + FAULTING_BYTES + AREA_BYTES;
}

SharedMemory::~SharedMemory() { munmap(region_, REGION_BYTES); }

void SharedMemory::reset(int bytes) {
  bytes_ = bytes;
  char* end = region_ + FAULTING_BYTES + AREA_BYTES;
  begin_ = end - (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  memset(begin_ - GUARD_BYTES, POISON, static_cast<size_t>(end - begin_) + GUARD_BYTES);
}

bool SharedMemory::owns(const void* at) const {
  return at >= region_ && at < region_ + REGION_BYTES;
}

bool SharedMemory::holds(const void* at, size_t bytes) const {
  const auto* first = static_cast<const char*>(at);
  return first >= begin_ && first + bytes <= begin_ + bytes_;
}

bool SharedMemory::guards_intact() const {
  return is_poison(begin_ - GUARD_BYTES, begin_) &&
         is_poison(begin_ + bytes_, region_ + FAULTING_BYTES + AREA_BYTES);
}

void GlobalRanges::add(const void* begin, int64_t bytes) {
  const auto* first = static_cast<const char*>(begin);
  const Range range{first, first + bytes};
  const auto before = [](const Range& a, const Range& b) { return a.begin < b.begin; };
  ranges_.insert(std::upper_bound(ranges_.begin(), ranges_.end(), range, before), range);
}

bool GlobalRanges::allow(const void* at, size_t bytes) const {
  if (ranges_.empty()) return true;
  const auto* first = static_cast<const char*>(at);
  const auto inside = [&](const Range& range) { return first >= range.begin && first + bytes <= range.end; };
  return std::any_of(ranges_.begin(), ranges_.end(), inside);  // few, and views may overlap
}

}  // namespace pageloom::emulator
