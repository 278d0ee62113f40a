// Collectives of the processes of one host: see README.md beside this folder. Knows nothing of torch.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

#include "group.h"
#include "shared_memory.h"

namespace pageloom {

class SharedGroup final : public Group {
 public:
  // Throws std::runtime_error: the memory is another's, or this rank of it has been taken before.
  SharedGroup(int fd, int64_t rank, int64_t size);

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return memory_.size(); }
  void stop(const std::string& reason) override { memory_.stop(reason); }
  void all_reduce(const ReduceCall& call) override;
  void all_gather(const ColumnsCall& call) override;
  void all_to_all(const ColumnsCall& call) override;

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
