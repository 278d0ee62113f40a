#include "shared_memory.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <stdexcept>

namespace pageloom {
namespace {

struct Shape {
  uint64_t magic, size, slot_bytes;
};

int64_t checked_bytes(int fd) {
  Shape shape;
  struct stat file;
  if (pread(fd, &shape, sizeof shape, 0) != sizeof shape || fstat(fd, &file) != 0 || shape.magic != kMagic)
    throw std::runtime_error("descriptor " + std::to_string(fd) + " is not the memory of a group");
  const int64_t size = static_cast<int64_t>(shape.size), slot = static_cast<int64_t>(shape.slot_bytes);
  if (size < 1 || size > kMostRanks || slot < kPage || slot % kPage != 0 || slot > file.st_size ||
      file.st_size != kPage + size * (kPage + 2 * slot))
    throw std::runtime_error("the memory of a group says that it has " + std::to_string(size) + " ranks with slots of " +
                             std::to_string(slot) + " bytes, but has " + std::to_string(file.st_size) + " bytes");
  return file.st_size;
}

}  // namespace

SharedMemory::SharedMemory(int fd) : bytes_(checked_bytes(fd)) {
  void* const mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED)
    throw std::runtime_error(std::string("the memory of a group cannot be mapped: ") + strerror(errno));
  base_ = static_cast<char*>(mapped);
}

SharedMemory::~SharedMemory() { munmap(base_, bytes_); }

void SharedMemory::stop(const std::string& reason) const {
  uint32_t expected = kRunning;
  if (!header().stopped.compare_exchange_strong(expected, kReasonComes, std::memory_order_acq_rel)) return;
  const std::string kept = cut_reason(reason);
  memcpy(header().reason, kept.c_str(), kept.size() + 1);
  header().stopped.store(kReasonIsThere, std::memory_order_release);
}

void SharedMemory::throw_reason() const {
  constexpr timespec kMillisecond = {0, 1000000};
  for (int looks = 0; looks < 1000; ++looks) {  // who writes it may have been killed
    if (header().stopped.load(std::memory_order_acquire) == kReasonIsThere) throw std::runtime_error(header().reason);
    nanosleep(&kMillisecond, nullptr);
  }
  throw std::runtime_error("the group was stopped by a process that ended before it said why");
}

}  // namespace pageloom
