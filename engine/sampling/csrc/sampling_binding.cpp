// The only TU that sees torch: checks tensors, picks the ISA, and shares rows out to threads.
#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "sampling.h"
#include "lent_threads.h"

namespace pageloom {
namespace {

enum Isa : int64_t { kAuto = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3, kWidest = kAvx512 };

const KernelTable* table_of(int64_t isa) {
  switch (isa) {
    case kPortable: return kernels_portable();
#if defined(__x86_64__)
#if defined(PAGELOOM_HAVE_AVX2)
    case kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? kernels_avx2() : nullptr;
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
    else PAGELOOM_CHECK(isa == kAuto, "sampling: ISA ", isa, " is not available on this CPU");
  PAGELOOM_CHECK(false, "sampling: no kernels");
}

constexpr int64_t kWorthThreads = int64_t{1} << 16;  // logits below which waking threads costs more than it saves
constexpr int64_t kWorthSplit = int64_t{1} << 18;    // logits of few rows, which then share rows
constexpr int64_t kSplitBlocks = 256;

// Calls item(i) for i < items on all threads, or on this one where the logits are few.
template <class Item>
void for_each(int64_t items, int64_t logits, const Item& item) {
  struct Call {
    const Item& item;
    int64_t items;
    std::atomic<int64_t> next{0};
  } call{item, items};
  const auto body = [](void* opaque) {
    Call& c = *static_cast<Call*>(opaque);
    for (int64_t i; (i = c.next.fetch_add(1, std::memory_order_relaxed)) < c.items;) c.item(i);
  };
  lent_threads().run(logits < kWorthThreads ? 1 : items, body, &call);
}

int64_t padded(int64_t blocks) { return (blocks + 15) / 16 * 16; }

// Calls finish(i, row) with every row and its maxima. What a row gives does not depend on how it was shared out.
template <class Finish>
void for_each_row(const KernelTable& kernels, const float* logits, int64_t rows, int64_t vocab, const Finish& finish) {
  const int64_t block = block_size(vocab), blocks = (vocab + block - 1) / block;
  const auto row_of = [=](int64_t i, float* maxima, bool has_nan) {
    std::fill(maxima + blocks, maxima + padded(blocks), -std::numeric_limits<float>::infinity());
    return Row{logits + i * vocab, vocab, block, blocks, maxima, has_nan};
  };
  if (rows >= lent_threads().count || rows * vocab < kWorthSplit) {
    for_each(rows, rows * vocab, [&](int64_t i) {
      float maxima[kMaxBlocks];
      const bool has_nan = kernels.scan(logits + i * vocab, vocab, block, 0, blocks, maxima);
      finish(i, row_of(i, maxima, has_nan));
    });
    return;
  }
  const int64_t parts = (blocks + kSplitBlocks - 1) / kSplitBlocks;
  std::vector<float> maxima(rows * padded(blocks));
  std::vector<char> has_nan(rows * parts);
  for_each(rows * parts, rows * vocab, [&](int64_t i) {
    const int64_t row = i / parts, begin = i % parts * kSplitBlocks, end = std::min(blocks, begin + kSplitBlocks);
    has_nan[i] = kernels.scan(logits + row * vocab, vocab, block, begin, end, &maxima[row * padded(blocks)]);
  });
  for_each(rows, rows * vocab, [&](int64_t i) {
    const char* seen = &has_nan[i * parts];
    finish(i, row_of(i, &maxima[i * padded(blocks)], std::count(seen, seen + parts, 0) != parts));
  });
}

template <class T>
T* data_of(const Tensor& t, ScalarType type, int64_t dims, const char* name) {
  PAGELOOM_CHECK(t.scalar_type() == type && t.dim() == dims && t.is_contiguous(), "sampling: ", name,
                  " must be contiguous, of ", dims, " dimensions and of its documented type");
  return static_cast<T*>(t.data_ptr());
}

const float* logits_of(const Tensor& logits) {
  const auto* data = data_of<const float>(logits, ScalarType::Float, 2, "logits");
  PAGELOOM_CHECK(logits.size(1) >= 1 && logits.size(1) <= kMaxVocab, "sampling: vocabularies of 1 to ", kMaxVocab);
  return data;
}

constexpr int64_t kNumFloats = 6, kNumInts = 4;  // engine/sampling/columns.py

struct Tables {
  const float* floats;
  const int64_t* ints;
  const int64_t* rows;
  const int64_t* positions;
};

Tables tables_of(const Tensor& rows, const Tensor& positions, const Tensor& floats, const Tensor& ints, int64_t m) {
  const Tables t = {data_of<const float>(floats, ScalarType::Float, 2, "floats"),
                    data_of<const int64_t>(ints, ScalarType::Long, 2, "ints"),
                    data_of<const int64_t>(rows, ScalarType::Long, 1, "rows"),
                    data_of<const int64_t>(positions, ScalarType::Long, 1, "positions")};
  PAGELOOM_CHECK(floats.size(1) == kNumFloats && ints.size(1) == kNumInts && ints.size(0) == floats.size(0),
                  "sampling: tables must be [rows, ", kNumFloats, "] and [rows, ", kNumInts, "]");
  PAGELOOM_CHECK(rows.size(0) == m && positions.size(0) == m, "sampling: rows and positions must be one a logits row");
  for (int64_t i = 0; i < m; ++i)
    PAGELOOM_CHECK(t.rows[i] >= 0 && t.rows[i] < floats.size(0), "sampling: row ", t.rows[i], " of ", floats.size(0));
  return t;
}

void draw(Tensor logits, Tensor rows, Tensor positions, Tensor floats, Tensor ints, Tensor token_ids, Tensor faults,
          int64_t isa) {
  const float* const x = logits_of(logits);
  const int64_t m = logits.size(0);
  const Tables t = tables_of(rows, positions, floats, ints, m);
  auto* const drawn = data_of<int64_t>(token_ids, ScalarType::Long, 1, "token_ids");
  auto* const faulty = data_of<bool>(faults, ScalarType::Bool, 1, "faults");
  PAGELOOM_CHECK(token_ids.size(0) == m && faults.size(0) == m, "sampling: one token and one fault a row");
  const KernelTable& kernels = pick(isa);
  for_each_row(kernels, x, m, logits.size(1), [&](int64_t i, const Row& row) {
    const float* const f = t.floats + t.rows[i] * kNumFloats;
    const int64_t* const n = t.ints + t.rows[i] * kNumInts;
    const int64_t token = kernels.draw(row, {f[0], f[1], f[2], n[1], n[0], t.positions[i]});
    drawn[i] = token < 0 ? 0 : token;
    faulty[i] = token < 0;
  });
}

void score(Tensor logits, Tensor targets, Tensor ids, Tensor logprobs, Tensor ranks, int64_t isa) {
  const float* const x = logits_of(logits);
  const int64_t n = logits.size(0), width = ids.size(1);
  const auto* const target = data_of<const int64_t>(targets, ScalarType::Long, 1, "targets");
  auto* const chosen = data_of<int64_t>(ids, ScalarType::Long, 2, "ids");
  auto* const values = data_of<float>(logprobs, ScalarType::Float, 2, "logprobs");
  auto* const rank = data_of<int64_t>(ranks, ScalarType::Long, 1, "ranks");
  PAGELOOM_CHECK(targets.size(0) == n && ids.size(0) == n && logprobs.size(0) == n && ranks.size(0) == n &&
                      logprobs.size(1) == width && width >= 1 && width - 1 <= std::min(kListed, logits.size(1)),
                  "sampling: scores must be [rows, 1 + alternatives], alternatives up to ", kListed);
  for (int64_t i = 0; i < n; ++i)
    PAGELOOM_CHECK(target[i] >= 0 && target[i] < logits.size(1), "sampling: target ", target[i], " is no token");
  const KernelTable& kernels = pick(isa);
  for_each_row(kernels, x, n, logits.size(1), [&](int64_t i, const Row& row) {
    kernels.score(row, target[i], width - 1, chosen + i * width, values + i * width, rank + i);
  });
}

void restrict_rows(Tensor logits, Tensor places, Tensor bits, int64_t isa) {
  auto* const x = const_cast<float*>(logits_of(logits));
  const int64_t m = logits.size(0), vocab = logits.size(1), n = places.size(0), words = (vocab + 31) / 32;
  const auto* const place = data_of<const int64_t>(places, ScalarType::Long, 1, "places");
  const auto* const allowed = data_of<const int32_t>(bits, ScalarType::Int, 2, "bits");
  PAGELOOM_CHECK(bits.size(0) == n && bits.size(1) == words, "sampling: bits must be [places, ", words, "]");
  for (int64_t i = 0; i < n; ++i)
    PAGELOOM_CHECK(place[i] >= 0 && place[i] < m, "sampling: place ", place[i], " of ", m);
  const KernelTable& kernels = pick(isa);
  for_each(n, n * vocab, [&](int64_t i) { kernels.restrict_to(x + place[i] * vocab, vocab, allowed + i * words); });
}

void penalise(Tensor logits, Tensor rows, Tensor positions, Tensor tokens, Tensor floats, Tensor ints, Tensor ids,
              Tensor counts, Tensor sizes, Tensor counted, int64_t isa) {
  auto* const x = const_cast<float*>(logits_of(logits));
  const int64_t m = logits.size(0), vocab = logits.size(1), capacity = ids.size(1);
  const Tables t = tables_of(rows, positions, floats, ints, m);
  auto* const listed = data_of<int32_t>(ids, ScalarType::Int, 2, "ids");
  auto* const numbers = data_of<int32_t>(counts, ScalarType::Int, 2, "counts");
  auto* const used = data_of<int64_t>(sizes, ScalarType::Long, 1, "sizes");
  auto* const until = data_of<int64_t>(counted, ScalarType::Long, 1, "counted");
  PAGELOOM_CHECK(tokens.scalar_type() == ScalarType::Int && tokens.dim() == 2 && tokens.stride(1) == 1,
                  "sampling: tokens must be int32 with contiguous rows");
  const auto* const table = static_cast<const int32_t*>(tokens.data_ptr());
  const int64_t num_slots = ids.size(0), stride = tokens.stride(0);
  PAGELOOM_CHECK(counts.size(0) == num_slots && counts.size(1) == capacity && sizes.size(0) == num_slots &&
                      counted.size(0) == num_slots,
                  "sampling: lists of seen tokens differ in shape");
  std::vector<int64_t> first;  // of each row with penalties
  for (int64_t i = 0; i < m; ++i) {
    const int64_t row = t.rows[i], position = t.positions[i], slot = t.ints[row * kNumInts + 3];
    if (slot < 0) continue;
    PAGELOOM_CHECK(slot < num_slots, "sampling: no such slot");
    PAGELOOM_CHECK(row < tokens.size(0) && position >= 0 && position <= tokens.size(1), "sampling: position ", position,
                    " is outside the table of tokens");
    const bool again = i > 0 && t.rows[i - 1] == row;
    PAGELOOM_CHECK(!again || position == t.positions[i - 1] + 1, "sampling: positions of a row must be consecutive");
    if (!again) first.push_back(i);
  }
  const KernelTable& kernels = pick(isa);
  const int64_t n = first.size();
  for_each(n, n * 128 * std::min<int64_t>(capacity, 512), [&](int64_t at) {
    const int64_t i = first[at], row = t.rows[i], slot = t.ints[row * kNumInts + 3];
    int64_t end = i + 1;
    while (end < m && t.rows[end] == row) ++end;
    const float* const f = t.floats + row * kNumFloats;
    const Seen seen = {listed + slot * capacity, numbers + slot * capacity, capacity, used + slot, until + slot};
    kernels.penalise(x + i * vocab, vocab, seen, table + row * stride, t.positions[i], end - i, {f[3], f[4], f[5]});
  });
}

int64_t supported_isas() {
  int64_t mask = 0;
  for (int64_t isa = kPortable; isa <= kWidest; ++isa) mask |= table_of(isa) != nullptr ? int64_t{1} << isa : 0;
  return mask;
}

// The namespace holds the build's key, so that two builds fit in one process.
const Operators kDefined(PAGELOOM_NAMESPACE, [](Operators& m) {
  m.define(
      "draw(Tensor logits, Tensor rows, Tensor positions, Tensor floats, Tensor ints, Tensor(a!) token_ids, "
      "Tensor(b!) faults, int isa) -> ()");
  m.define(
      "score(Tensor logits, Tensor targets, Tensor(a!) ids, Tensor(b!) logprobs, Tensor(c!) ranks, int isa) -> ()");
  m.define(
      "penalise(Tensor(a!) logits, Tensor rows, Tensor positions, Tensor tokens, Tensor floats, Tensor ints, "
      "Tensor(b!) ids, Tensor(c!) counts, Tensor(d!) sizes, Tensor(e!) counted, int isa) -> ()");
  m.define("restrict(Tensor(a!) logits, Tensor places, Tensor bits, int isa) -> ()");
  m.define("supported_isas() -> int");
  m.define("lend_crew(int address) -> ()");
});

const Operators kOnCpu(PAGELOOM_NAMESPACE, "CPU", [](Operators& m) {
  m.implement<draw>("draw");
  m.implement<score>("score");
  m.implement<penalise>("penalise");
  m.implement<restrict_rows>("restrict");
});

const Operators kAnywhere(PAGELOOM_NAMESPACE, "CompositeExplicitAutograd", [](Operators& m) {
  m.implement<supported_isas>("supported_isas");
  m.implement<lend_crew>("lend_crew");
});

}  // namespace
}  // namespace pageloom
