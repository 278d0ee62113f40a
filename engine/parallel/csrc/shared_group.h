// Collectives of the processes of one host: see README.md beside this folder. Knows nothing of torch.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

#include "shared_memory.h"
#include "sums.h"

namespace pageloom {

inline constexpr int64_t size_of(Float type) { return type == Float::k32 ? 4 : 2; }

struct ReduceCall {
  Tag tag;
  const char* x;         // [count] of `type`
  const char* residual;  // [count] of `out_type`, or null
  char* out;             // the same
  int64_t count;
  Float type, out_type;
};

struct ReduceRowsCall {
  Tag tag;
  const char* x;         // [all rows, columns] of `type`
  const char* residual;  // [own rows, columns] of `out_type`, or null
  char* out;             // the same
  int64_t count;         // elements of x
  int64_t begin, end;    // of them this rank's
  Float type, out_type;
};

struct GatherCall {
  Tag tag;
  const char* x;  // rows of columns[rank] elements, `x_stride` bytes apart
  int64_t x_stride;
  char* out;  // rows of all columns, after one another
  int64_t rows;
  int64_t element_size;
  const std::vector<int64_t>& columns;
};

// One thread of a process calls its collectives at a time; `stop` is for any.
class SharedGroup {
 public:
  // Throws std::runtime_error: the memory is another's, or this rank of it has been taken before.
  SharedGroup(int fd, int64_t rank, int64_t size);

  int64_t rank() const { return rank_; }
  int64_t size() const { return memory_.size(); }
  void stop(const std::string& reason) const { memory_.stop(reason); }

  // Throw std::runtime_error where the group is stopped, before or meanwhile; another call of another rank stops it.
  void all_reduce(const ReduceCall& call);
  void all_gather(const GatherCall& call);
  void reduce_rows(const ReduceRowsCall& call);

  // Where the last one that failed in native code says why.
  std::string failure;

 private:
  // Tells the others that this rank's part of the next round lies in its slot.
  void publish(const Tag& tag);
  // Until every rank has published this round, of the same call; `columns`: of each rank, where they differ.
  void wait_for_all(const Tag& tag, const std::vector<int64_t>* columns = nullptr);
  void wait_for(int64_t rank);
  char* next_slot() const { return memory_.slot(rank_, round_ + 1); }
  const char* slot_of(int64_t rank) const { return memory_.slot(rank, round_); }

  void reduce_at_once(const ReduceCall& call, int64_t begin, int64_t count);
  void reduce_by_shares(const ReduceCall& call, int64_t begin, int64_t count);
  // Elements [at, at + count) of what lies in this round's slots; of this rank's they are at `own`.
  void sum_slots(const ReduceCall& call, const char* own, int64_t at, int64_t count, const char* residual, char* out);

  SharedMemory memory_;
  const int64_t rank_;
  const SumKernels& kernels_;
  std::vector<const void*> parts_;
  uint64_t round_ = 0;  // that this rank published last
};

}  // namespace pageloom
