#include "group.h"

#include <string.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace pageloom {
namespace {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kAllReduce: return "all_reduce";
    case Kind::kAllReduceAdd: return "all_reduce with a residual";
    case Kind::kAllGather: return "all_gather";
    case Kind::kAllToAll: return "all_to_all";
  }
  return "nothing that is known";
}

std::string name_of(uint8_t type) {
  switch (type) {
    case 0: return "uint8";
    case 1: return "int8";
    case 2: return "int16";
    case 3: return "int32";
    case 4: return "int64";
    case 5: return "float16";
    case 6: return "float32";
    case 7: return "float64";
    case 11: return "bool";
    case 15: return "bfloat16";
    default: return "type " + std::to_string(type);
  }
}

std::string describe(const Tag& tag) {
  std::ostringstream text;
  text << name_of(tag.kind) << " of [" << tag.rows << ", " << tag.own_columns << "] " << name_of(tag.type);
  if (tag.out_type != tag.type) text << " to " << name_of(tag.out_type);
  if (tag.kind == Kind::kAllGather || tag.kind == Kind::kAllToAll) text << " to " << tag.columns << " columns";
  return text.str();
}

}  // namespace

const SumKernels& kernels_of_this_cpu() {
#if defined(__x86_64__)
#if defined(PAGELOOM_HAVE_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return kernels_avx512::kSums;
#endif
#if defined(PAGELOOM_HAVE_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kernels_avx2::kSums;
#endif
#endif
  return kernels_portable::kSums;
}

std::string difference(int64_t other, const Tag& called, int64_t own, const Tag& tag) {
  std::ostringstream text;
  text << "rank " << other << " called " << describe(called) << " where rank " << own << " called " << describe(tag);
  return text.str();
}

std::string cut_reason(const std::string& reason) {
  size_t length = std::min<size_t>(reason.size(), kMostReason - 1);
  if (length < reason.size())
    while (length > 0 && (reason[length] & 0xc0) == 0x80) --length;
  return reason.substr(0, length);
}

int64_t share_start(int64_t rank, int64_t size, int64_t count) {
  constexpr int64_t kUnit = 64;  // elements
  const int64_t lines = (count + kUnit - 1) / kUnit, share = (lines + size - 1) / size * kUnit;
  return std::min(rank * share, count);
}

void copy_rows(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t row_bytes, int64_t begin,
               int64_t end) {
  for (int64_t at = begin; at < end;) {
    const int64_t row = at / row_bytes, within = at % row_bytes, n = std::min(row_bytes - within, end - at);
    memcpy(to + row * to_stride + within, from + row * from_stride + within, n);
    at += n;
  }
}

}  // namespace pageloom
