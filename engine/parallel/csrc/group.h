// What ranks call together, whatever carries their numbers. Knows nothing of torch.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

#include "sums.h"

namespace pageloom {

inline constexpr int64_t kMostReason = 1024;

// Add: of a residual.
enum class Kind : uint8_t { kAllReduce = 1, kAllReduceAdd = 2, kAllGather = 3, kAllToAll = 4 };

// What a rank has called. Types are torch's numbers.
struct Tag {
  Kind kind;
  uint8_t type;
  uint8_t out_type;
  uint8_t unused;
  uint32_t rows;
  uint32_t columns;  // of the result
  uint32_t own_columns;
};

inline constexpr int64_t size_of(Float type) { return type == Float::k32 ? 4 : 2; }

struct ReduceCall {
  Tag tag;
  const char* x;         // [count] of `type`
  const char* residual;  // [count] of `out_type`, or null
  char* out;             // the same
  int64_t count;
  Float type, out_type;
};

// Of an all-gather a rank gives its own columns and has all; of an all-to-all it gives all ranks theirs, and has its own
// of each rank, in order.
struct ColumnsCall {
  Tag tag;
  const char* x;  // rows, `x_stride` bytes apart
  int64_t x_stride;
  char* out;  // rows, after one another
  int64_t rows;
  int64_t element_size;
  const std::vector<int64_t>& columns;
};

// A rank of a group. One thread of a process calls its collectives at a time; `stop` is for any.
class Group {
 public:
  virtual ~Group() = default;

  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;
  // In every rank; the first reason stays.
  virtual void stop(const std::string& reason) = 0;

  // Throw std::runtime_error where the group is stopped, before or meanwhile; another call of another rank stops it.
  virtual void all_reduce(const ReduceCall& call) = 0;
  virtual void all_gather(const ColumnsCall& call) = 0;
  virtual void all_to_all(const ColumnsCall& call) = 0;

  // Where the last one that failed in native code says why.
  std::string failure;
};

const SumKernels& kernels_of_this_cpu();

// That two ranks called something else.
std::string difference(int64_t other, const Tag& called, int64_t own, const Tag& tag);

// `reason`, of which as many whole characters are kept as fit.
std::string cut_reason(const std::string& reason);

// Of `count` elements that `size` ranks add up a share of each, where the share of `rank` begins: at a line of the caches.
int64_t share_start(int64_t rank, int64_t size, int64_t count);

// Copies bytes [begin, end) of rows that are thought of as following one another; either side may lie apart.
void copy_rows(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t row_bytes, int64_t begin,
               int64_t end);

}  // namespace pageloom
