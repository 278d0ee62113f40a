// How a call is cut depends on the sequences alone, never on the number of threads. Sequences of few rows (decodes,
// small chunks) have parts of kSplit keys at fixed positions; a part whose blocks several of them have in common is one
// item with the rows of all (cascade attention). Because it is cut at the same keys as for one sequence alone, and rows
// do not meet in the vector kernels, a sequence's result there is the same bit for bit alone and batched.
#include "plan.h"

#include <string.h>

#include <algorithm>
#include <array>
#include <memory>

namespace pageloom {
namespace {

constexpr int64_t kFewItems = 32;  // a sequence of fewer items is cut finer, so that all threads have some

// A sequence of few rows and more than one part.
struct Candidate {
  int32_t seq;
  int32_t rows;
  int32_t first_part, last_part;
  int32_t first_shareable, end_shareable;  // parts of which every key is seen by every query
  int32_t kv_begin, kv_end;
  int32_t first_group;  // of KV head 0
  int32_t next;         // within a bucket
  int32_t first_flag;   // of its parts' flags: 1 where another item holds the part
  bool live;            // may share the part that is looked at now
};

// Candidates with the same blocks in one part.
struct Bucket {
  uint64_t hash;
  int32_t first, last, count;
};

class Planner {
 public:
  Planner(Plan& plan, const AttentionProblem& p, int64_t row_tile) : plan_(plan), p_(p), row_tile_(row_tile) {
    row_stride_ = p.cache.padded_dim + kPartialExtra;
  }

  void run(std::vector<Candidate>& candidates, std::vector<char>& taken) {
    candidates.clear();
    taken.clear();
    for (int64_t i = 0; i < p_.num_seqs; ++i) {
      const int64_t queries = p_.query_start_loc[i + 1] - p_.query_start_loc[i], length = p_.seq_lens[i];
      if (queries < 0 || (queries > 0 && length < queries)) {
        plan_.error = "attention: a sequence has more queries than its length (query_start_loc, seq_lens)";
        return;
      }
      if (queries > 0 && queries * p_.group <= kFewRows) consider(i, queries, length, candidates, taken);
    }
    if (candidates.size() > 1) share(candidates, taken);
    size_t next = 0;
    for (int64_t i = 0; i < p_.num_seqs; ++i) {
      if (next < candidates.size() && candidates[next].seq == i) {
        add_own_parts(candidates[next++], taken);
      } else if (p_.query_start_loc[i + 1] > p_.query_start_loc[i]) {
        add_sequence(i, p_.query_start_loc[i + 1] - p_.query_start_loc[i], p_.seq_lens[i]);
      }
    }
  }

 private:
  int64_t first_key(int64_t position) const { return p_.keys_before(oldest_key(position, p_.window)); }

  WorkItem item_of(int64_t seq, int64_t rows, int64_t kv_begin, int64_t kv_end) const {
    WorkItem item{};
    item.seq = static_cast<int32_t>(seq);
    item.row_end = static_cast<int32_t>(rows);
    item.kv_begin = static_cast<int32_t>(kv_begin < kv_end ? kv_begin : 0);
    item.kv_end = static_cast<int32_t>(kv_begin < kv_end ? kv_end : 0);
    item.split_group = item.shared = -1;
    return item;
  }

  void push(const WorkItem& item) {
    plan_.items.push_back(item);
    const int64_t rows = item.row_end - item.row_begin;
    plan_.work += static_cast<int64_t>(item.kv_end - item.kv_begin) * p_.cache.padded_dim * (2 + rows) / 16;
  }

  // Groups of every KV head for the same rows, cut into parts [first_part, last_part]; returns the first.
  int32_t add_groups(WorkItem rows, int64_t parts) {
    const auto first = static_cast<int32_t>(plan_.groups.size());
    for (int64_t head = 0; head < p_.cache.num_kv_heads; ++head) {
      SplitGroup group{};
      rows.kv_head = static_cast<int32_t>(head);
      group.rows = rows;
      group.parts = group.pending = static_cast<int32_t>(parts);
      group.partial_stride = (rows.row_end - rows.row_begin) * row_stride_;
      group.first_partial = plan_.partial_floats;
      plan_.partial_floats += parts * group.partial_stride;
      plan_.groups.push_back(group);
    }
    return first;
  }

  void add_part(const SplitGroup& group, int32_t group_index, int64_t part, int64_t kv_begin, int64_t kv_end) {
    WorkItem item = group.rows;
    item.split_group = group_index;
    item.partial = group.first_partial + part * group.partial_stride;
    item.kv_begin = static_cast<int32_t>(kv_begin);
    item.kv_end = static_cast<int32_t>(kv_end);
    push(item);
  }

  // One tile of rows of every KV head, split where it has no fellows that keep threads busy.
  void add_tile(WorkItem item, bool may_split) {
    const int64_t rows = item.row_end - item.row_begin;
    // Tiles of AMX are joined otherwise than its parts, so those may be longer: adding one up costs as much as 30 keys.
    const int64_t keys = rows > kFewRows && row_tile_ > kRowTile ? 4 * kSplit : kSplit;
    const int64_t first_part = item.kv_begin / keys, last_part = (item.kv_end - 1) / keys;
    const bool split = may_split && last_part > first_part;
    const int32_t first_group = split ? add_groups(item, last_part - first_part + 1) : -1;
    for (int64_t head = 0; head < p_.cache.num_kv_heads; ++head) {
      item.kv_head = static_cast<int32_t>(head);
      if (!split) {
        push(item);
        continue;
      }
      const auto index = static_cast<int32_t>(first_group + head);
      for (int64_t i = first_part; i <= last_part; ++i)
        add_part(plan_.groups[index], index, i - first_part, std::max<int64_t>(item.kv_begin, i * keys),
                 std::min<int64_t>(item.kv_end, (i + 1) * keys));
    }
  }

  void add_sequence(int64_t seq, int64_t queries, int64_t length) {
    const int64_t rows = queries * p_.group;
    const bool few = rows > row_tile_ && (rows + row_tile_ - 1) / row_tile_ * p_.cache.num_kv_heads < kFewItems;
    const int64_t size = few ? std::max(kRowTile, row_tile_ / 2) : row_tile_;
    const int64_t tiles = (rows + size - 1) / size;
    for (int64_t tile = tiles - 1; tile >= 0; --tile) {  // the longest first
      const int64_t begin = tile * size, end = std::min(rows, begin + size);
      const int64_t oldest = length - queries + begin / p_.group, newest = length - queries + (end - 1) / p_.group;
      WorkItem item = item_of(seq, end, first_key(oldest), p_.keys_before(newest + 1));
      item.row_begin = static_cast<int32_t>(begin);
      add_tile(item, tiles == 1);
    }
  }

  void consider(int64_t seq, int64_t queries, int64_t length, std::vector<Candidate>& candidates,
                std::vector<char>& taken) {
    const int64_t first = length - queries, last = length - 1;  // positions of its queries
    Candidate c{};
    c.kv_begin = static_cast<int32_t>(first_key(first));
    c.kv_end = static_cast<int32_t>(p_.keys_before(length));
    c.first_part = static_cast<int32_t>(c.kv_begin / kSplit);
    c.last_part = static_cast<int32_t>((c.kv_end - 1) / kSplit);
    if (c.first_part >= c.last_part) return;
    const int64_t oldest = first_key(last);
    const int64_t in_table = p_.max_blocks * p_.cache.block_size / kSplit;
    c.seq = static_cast<int32_t>(seq);
    c.rows = static_cast<int32_t>(queries * p_.group);
    c.first_shareable = static_cast<int32_t>((oldest + kSplit - 1) / kSplit);
    c.end_shareable = static_cast<int32_t>(std::min(p_.keys_before(first + 1) / kSplit, in_table));
    c.first_group = add_groups(item_of(seq, c.rows, c.kv_begin, c.kv_end), c.last_part - c.first_part + 1);
    c.first_flag = static_cast<int32_t>(taken.size());
    c.live = true;
    taken.resize(taken.size() + (c.last_part - c.first_part + 1), 0);
    candidates.push_back(c);
  }

  // Part by part, the candidates that have the same blocks there become one item. Who shares no part of a prefix shares
  // nothing behind it, so a batch without common prefixes costs one look at each sequence's first part.
  void share(std::vector<Candidate>& candidates, std::vector<char>& taken) {
    static thread_local std::vector<int32_t> table;
    static thread_local std::vector<Bucket> buckets;
    int32_t end = 0;
    for (const Candidate& c : candidates) end = std::max(end, c.end_shareable);
    size_t slots = 4;
    while (slots < 2 * candidates.size()) slots *= 2;
    for (int32_t part = 0, live = 2; part < end && live > 1; ++part) {
      table.assign(slots, -1);
      buckets.clear();
      for (size_t i = 0; i < candidates.size(); ++i) {
        const Candidate& c = candidates[i];
        if (c.live && part >= c.first_shareable && part < c.end_shareable)
          put(candidates, static_cast<int32_t>(i), part, table, buckets);
      }
      live = p_.window != 0 ? 2 : 0;
      for (const Bucket& b : buckets) {
        if (b.count > 1) {
          add_shared(candidates, b, part, taken);
          live += b.count;
        } else if (p_.window == 0) {
          candidates[b.first].live = false;
        }
      }
    }
  }

  const int32_t* columns_of(const Candidate& c, int32_t part) const {
    return p_.block_tables + c.seq * p_.block_table_stride + part * kSplit / p_.cache.block_size;
  }

  void put(std::vector<Candidate>& candidates, int32_t index, int32_t part, std::vector<int32_t>& table,
           std::vector<Bucket>& buckets) const {
    const int64_t size = p_.cache.block_size, begin = part * kSplit / size;
    const int64_t count = ((part + 1) * kSplit + size - 1) / size - begin;  // blocks need not begin where parts do
    const int32_t* const columns = columns_of(candidates[index], part);
    uint64_t hash = 0;
    for (int64_t i = 0; i < count; ++i)
      hash = (hash ^ static_cast<uint32_t>(columns[i])) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
    candidates[index].next = -1;
    for (size_t slot = hash;; ++slot) {
      int32_t& at = table[slot & (table.size() - 1)];
      if (at < 0) {
        at = static_cast<int32_t>(buckets.size());
        buckets.push_back({hash, index, index, 1});
        return;
      }
      Bucket& bucket = buckets[at];
      if (bucket.hash != hash || memcmp(columns, columns_of(candidates[bucket.first], part), count * 4) != 0) continue;
      candidates[bucket.last].next = index;
      bucket.last = index;
      ++bucket.count;
      return;
    }
  }

  void add_shared(const std::vector<Candidate>& candidates, const Bucket& bucket, int32_t part,
                  std::vector<char>& taken) {
    const int64_t begin = part * kSplit;
    int64_t rows = 0;
    const auto flush = [&](const Candidate& of_blocks) {
      WorkItem item = item_of(of_blocks.seq, rows, begin, begin + kSplit);
      item.shared = static_cast<int32_t>(plan_.shared.size() - rows / p_.group);
      for (int64_t head = 0; head < p_.cache.num_kv_heads; ++head) {
        item.kv_head = static_cast<int32_t>(head);
        push(item);
      }
      rows = 0;
    };
    for (int32_t i = bucket.first; i >= 0; i = candidates[i].next) {
      const Candidate& c = candidates[i];
      if (rows + c.rows > row_tile_) flush(candidates[bucket.first]);
      const SplitGroup& group = plan_.groups[c.first_group];
      const int64_t at = part - c.first_part, token = p_.query_start_loc[c.seq];
      for (int64_t t = 0; t < c.rows / p_.group; ++t) {
        plan_.shared.push_back({group.first_partial + at * group.partial_stride + t * p_.group * row_stride_,
                                group.parts * group.partial_stride, static_cast<int32_t>(token + t),
                                t == 0 ? c.first_group : -1});
      }
      rows += c.rows;
      taken[c.first_flag + at] = 1;
    }
    flush(candidates[bucket.first]);
  }

  void add_own_parts(const Candidate& c, const std::vector<char>& taken) {
    for (int64_t head = 0; head < p_.cache.num_kv_heads; ++head) {
      const auto index = static_cast<int32_t>(c.first_group + head);
      for (int64_t i = c.first_part; i <= c.last_part; ++i) {
        if (taken[c.first_flag + (i - c.first_part)]) continue;
        add_part(plan_.groups[index], index, i - c.first_part, std::max<int64_t>(c.kv_begin, i * kSplit),
                 std::min<int64_t>(c.kv_end, (i + 1) * kSplit));
      }
    }
  }

  Plan& plan_;
  const AttentionProblem& p_;
  int64_t row_tile_;
  int64_t row_stride_;
};

constexpr size_t kFacts = 12;  // numbers that a plan is made from

// A plan that is kept for the other layers of its step, with all that it was made from.
struct Kept {
  Plan plan;
  std::array<int64_t, kFacts> key{};
  std::vector<int32_t> lengths;  // query_start_loc, then seq_lens
  int64_t run = 0;               // the last that asked for it

  bool serves(const AttentionProblem& p, const std::array<int64_t, kFacts>& wanted) const {
    const size_t bytes = p.num_seqs * 4;
    return key == wanted && plan.error == nullptr &&
           memcmp(lengths.data(), p.query_start_loc, bytes + 4) == 0 &&
           memcmp(lengths.data() + p.num_seqs + 1, p.seq_lens, bytes) == 0;
  }
};

}  // namespace

void make_plan(Plan& plan, const AttentionProblem& p, int64_t row_tile) {
  static thread_local std::vector<Candidate> candidates;
  static thread_local std::vector<char> taken;
  plan.items.clear();
  plan.groups.clear();
  plan.shared.clear();
  plan.partial_floats = plan.work = 0;
  plan.error = p.num_seqs > 0 && p.query_start_loc[0] < 0 ? "attention: query_start_loc is negative" : nullptr;
  if (plan.error == nullptr) Planner(plan, p, row_tile).run(candidates, taken);
}

void Plan::reserve_partials() {
  if (partial_floats <= reserved_) return;
  memory_.reset(new float[partial_floats + partial_floats / 4]);
  reserved_ = partial_floats + partial_floats / 4;
}

Kept& room_for_plan(std::vector<std::unique_ptr<Kept>>& kept, int64_t run) {
  constexpr size_t kDistinct = 16;  // as many are kept, or all of a run
  static thread_local size_t last = 0;
  for (size_t i = 0; kept.size() >= kDistinct && i < kept.size(); ++i) {
    last = (last + 1) % kept.size();
    if (run == 0 || kept[last]->run != run) return *kept[last];
  }
  kept.push_back(std::make_unique<Kept>());
  return *kept.back();
}

Plan& plan_of(const AttentionProblem& p, int64_t row_tile, int64_t run) {
  static thread_local std::vector<std::unique_ptr<Kept>> kept;
  const std::array<int64_t, kFacts> key = {p.step,
                                       p.num_seqs,
                                       p.window,
                                       p.group,
                                       p.cache.num_kv_heads,
                                       p.cache.padded_dim,
                                       p.cache.block_size,
                                       p.max_blocks,
                                       p.parts,
                                       p.part,
                                       row_tile,
                                       static_cast<int64_t>(reinterpret_cast<intptr_t>(p.block_tables))};
  for (const auto& each : kept) {
    if (p.step == 0 || !each->serves(p, key)) continue;
    each->run = run;
    return each->plan;
  }
  Kept& made = room_for_plan(kept, run);
  made.run = run;
  made.key = {};  // nobody's, should what follows fail
  make_plan(made.plan, p, row_tile);
  made.plan.reserve_partials();
  made.key = key;
  made.lengths.assign(p.query_start_loc, p.query_start_loc + p.num_seqs + 1);
  made.lengths.insert(made.lengths.end(), p.seq_lens, p.seq_lens + p.num_seqs);
  return made.plan;
}

}  // namespace pageloom
