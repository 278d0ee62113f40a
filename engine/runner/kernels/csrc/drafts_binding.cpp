// The only TU that sees torch: checks tensors, picks the ISA, and shares rows out to threads.
#include <algorithm>
#include <atomic>

#include "drafts.h"
#include "lent_threads.h"

namespace pageloom {
namespace {

enum Isa : int64_t { kAuto = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3, kWidest = kAvx512 };

const KernelTable* table_of(int64_t isa) {
  switch (isa) {
    case kPortable: return kernels_portable();
#if defined(__x86_64__)
#if defined(PAGELOOM_HAVE_AVX2)
    case kAvx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? kernels_avx2() : nullptr;
#endif
#if defined(PAGELOOM_HAVE_AVX512)
    case kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
                 ? kernels_avx512()
                 : nullptr;
#endif
#endif
    default: return nullptr;
  }
}

const KernelTable& pick(int64_t isa) {
  for (int64_t i = isa == kAuto ? kWidest : isa; i >= kPortable; --i)
    if (const KernelTable* table = table_of(i)) return *table;
    else PAGELOOM_CHECK(isa == kAuto, "drafts: ISA ", isa, " is not available on this CPU");
  PAGELOOM_CHECK(false, "drafts: no kernels");
}

constexpr int64_t kWorthThreads = int64_t{1} << 17;  // tokens below which waking threads costs more than it saves

template <class T>
T* data_of(const Tensor& t, ScalarType type, int64_t dims, const char* name) {
  PAGELOOM_CHECK(t.scalar_type() == type && t.dim() == dims && t.is_contiguous(), "drafts: ", name,
                 " must be contiguous, of ", dims, " dimensions and of its documented type");
  return static_cast<T*>(t.data_ptr());
}

// Calls propose(tokens, n, most) for each row and keeps what it returns; `others`: tokens that are read for each row
// beside its own.
template <class Propose>
void for_each_row(const Tensor& tokens, const Tensor& rows, const Tensor& lengths, const Tensor& most,
                  const Tensor& counts, int64_t others, const Propose& propose) {
  auto* const table = data_of<int32_t>(tokens, ScalarType::Int, 2, "tokens");
  const auto* const row = data_of<const int64_t>(rows, ScalarType::Long, 1, "rows");
  const auto* const known = data_of<const int32_t>(lengths, ScalarType::Int, 1, "lengths");
  const auto* const wanted = data_of<const int32_t>(most, ScalarType::Int, 1, "most");
  auto* const found = data_of<int32_t>(counts, ScalarType::Int, 1, "counts");
  const int64_t m = rows.size(0), num_rows = tokens.size(0), columns = tokens.size(1);
  PAGELOOM_CHECK(most.size(0) == m && counts.size(0) == m && lengths.size(0) == num_rows,
                 "drafts: tokens and lengths must have the same rows, most and counts those asked for");
  int64_t work = m * others;
  for (int64_t i = 0; i < m; ++i) {
    PAGELOOM_CHECK(row[i] >= 0 && row[i] < num_rows, "drafts: row ", row[i], " of ", num_rows);
    const int64_t n = known[row[i]];
    PAGELOOM_CHECK(n >= 0 && n <= columns, "drafts: row ", row[i], " cannot have ", n, " tokens of ", columns);
    work += n;
  }
  const auto item = [&](int64_t i) {
    const int64_t n = known[row[i]], room = std::min<int64_t>(wanted[i], columns - n);
    found[i] = n > 0 && room > 0 ? static_cast<int32_t>(propose(table + row[i] * columns, n, room)) : 0;
  };
  struct Call {
    const decltype(item)& each;
    int64_t items;
    std::atomic<int64_t> next{0};
  } call{item, m};
  const auto body = [](void* opaque) {
    Call& c = *static_cast<Call*>(opaque);
    for (int64_t i; (i = c.next.fetch_add(1, std::memory_order_relaxed)) < c.items;) c.each(i);
  };
  lent_threads().run(work < kWorthThreads ? 1 : m, body, &call);
}

void propose_ngram(Tensor tokens, Tensor rows, Tensor lengths, Tensor most, int64_t longest, int64_t shortest,
                   Tensor counts, int64_t isa) {
  PAGELOOM_CHECK(shortest >= 1 && longest >= shortest, "drafts: matches of ", shortest, " to ", longest, " tokens");
  const KernelTable& kernels = pick(isa);
  for_each_row(tokens, rows, lengths, most, counts, 0, [&](int32_t* own, int64_t n, int64_t room) {
    return kernels.ngram(own, n, room, longest, shortest);
  });
}

void propose_suffix(Tensor tokens, Tensor rows, Tensor lengths, Tensor most, Tensor recent, int64_t longest,
                    double factor, double least, Tensor counts, int64_t isa) {
  const int64_t size = recent.size(0);
  const auto* const others = data_of<const int32_t>(recent, ScalarType::Int, 1, "recent");
  PAGELOOM_CHECK(longest >= 1, "drafts: matches of ", longest, " tokens");
  PAGELOOM_CHECK(size == 0 || others[size - 1] == kEnd, "drafts: the last recent text has no end");
  const KernelTable& kernels = pick(isa);
  for_each_row(tokens, rows, lengths, most, counts, size, [&](int32_t* own, int64_t n, int64_t room) {
    return kernels.suffix(own, n, room, longest, {others, size, factor, least});
  });
}

int64_t supported_isas() {
  int64_t mask = 0;
  for (int64_t isa = kPortable; isa <= kWidest; ++isa) mask |= table_of(isa) != nullptr ? int64_t{1} << isa : 0;
  return mask;
}

const Operators kDefined(PAGELOOM_NAMESPACE, [](Operators& m) {
  m.define(
      "propose_ngram(Tensor(a!) tokens, Tensor rows, Tensor lengths, Tensor most, int longest, int shortest, "
      "Tensor(b!) counts, int isa) -> ()");
  m.define(
      "propose_suffix(Tensor(a!) tokens, Tensor rows, Tensor lengths, Tensor most, Tensor recent, int longest, "
      "float factor, float least, Tensor(b!) counts, int isa) -> ()");
  m.define("supported_isas() -> int");
  m.define("lend_crew(int address) -> ()");
});

const Operators kOnCpu(PAGELOOM_NAMESPACE, "CPU", [](Operators& m) {
  m.implement<propose_ngram>("propose_ngram");
  m.implement<propose_suffix>("propose_suffix");
});

const Operators kAnywhere(PAGELOOM_NAMESPACE, "CompositeExplicitAutograd", [](Operators& m) {
  m.implement<supported_isas>("supported_isas");
  m.implement<lend_crew>("lend_crew");
});

}  // namespace
}  // namespace pageloom
