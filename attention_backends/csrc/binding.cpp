// The only TU that sees torch: checks tensors, picks the ISA, and runs the stages. Native callers (native_call.h) have
// the same checks made once a layer and once a step.
#include <string.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "isa.h"
#include "layer_stages.h"
#include "lent_threads.h"
#include "plan.h"
#include "schedule.h"
#include "torch_abi.h"

namespace pageloom {
namespace {

Dtype dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return Dtype::kFloat32;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    case ScalarType::Half: return Dtype::kFloat16;
    case ScalarType::Char: return Dtype::kInt8;
    default: PAGELOOM_CHECK(false, "attention: the KV cache must be float32, bfloat16, float16 or int8");
  }
}

TokenView view_of(const Tensor& t, const CacheLayout& cache, int64_t num_tokens, const char* name, bool in_part = false) {
  const int64_t columns = cache.head_dim + in_part;
  PAGELOOM_CHECK(t.dim() == 3 && t.size(2) == columns && t.size(0) >= num_tokens, "attention: ", name,
                  " must be [tokens >= ", num_tokens, ", heads, ", columns, "]");
  PAGELOOM_CHECK(t.stride(2) == 1, "attention: the last dimension of ", name, " must be contiguous");
  const Dtype of_rows = cache.dtype == Dtype::kInt8 ? Dtype::kBFloat16 : cache.dtype;
  const Dtype wanted = in_part ? Dtype::kFloat32 : of_rows;
  PAGELOOM_CHECK(dtype_of(t) == wanted, "attention: ", name,
                  " must have the dtype of the KV cache (bfloat16 where that is int8; a part's out is float32)");
  return {t.data_ptr(), t.stride(0), t.stride(1)};
}

// kv_cache [num_blocks, 2, num_kv_heads, block_size, padded_dim], or padded_dim + 4 (bytes of a scale) where it is
// int8, with free strides between blocks; the shape states sizes, kernels.h the order inside a block.
CacheLayout layout_of(const Tensor& kv_cache, int64_t head_dim) {
  const bool latent = kv_cache.dim() == 5 && kv_cache.size(1) == 1 && kv_cache.size(2) == 1;
  PAGELOOM_CHECK(latent || (kv_cache.dim() == 5 && kv_cache.size(1) == 2),
                 "attention: kv_cache must be of kv_cache_shape() or latent_cache_shape()");
  int64_t elements = 1;  // of a block
  for (int64_t d = 4; d > 0; elements *= std::max<int64_t>(kv_cache.size(d--), 1))
    PAGELOOM_CHECK(kv_cache.size(d) <= 1 || kv_cache.stride(d) == elements,
                   "attention: kv_cache's blocks must be contiguous");
  CacheLayout cache{};
  cache.num_blocks = kv_cache.size(0);
  cache.num_kv_heads = kv_cache.size(2);
  cache.block_size = kv_cache.size(3);
  cache.dtype = dtype_of(kv_cache);
  cache.padded_dim = kv_cache.size(4) - (cache.dtype == Dtype::kInt8 ? 4 : 0);
  cache.head_dim = head_dim;
  cache.latent = latent;
  PAGELOOM_CHECK(!latent || cache.dtype != Dtype::kInt8, "attention: there are no int8 latents");
  cache.block_stride = kv_cache.stride(0) * kv_cache.element_size();
  cache.base = static_cast<char*>(kv_cache.data_ptr());
  PAGELOOM_CHECK(head_dim > 0 && head_dim % 8 == 0 && head_dim <= kMaxHeadDim && cache.padded_dim == (head_dim + 15) / 16 * 16,
                  "attention: head_dim ", head_dim, " does not fit this cache (multiples of 8 up to ", kMaxHeadDim, ")");
  PAGELOOM_CHECK(cache.block_size % 8 == 0, "attention: block size ", cache.block_size, " is not a multiple of 8");
  return cache;
}

const int32_t* int32_data(const Tensor& t, int64_t count, const char* name) {
  PAGELOOM_CHECK(t.scalar_type() == ScalarType::Int && t.numel() >= count && t.is_contiguous(), "attention: ", name,
                  " must be a contiguous int32 tensor of at least ", count, " elements");
  return static_cast<const int32_t*>(t.data_ptr());
}

const int64_t* slots_of(const Tensor& slots, int64_t num_tokens) {
  PAGELOOM_CHECK(slots.scalar_type() == ScalarType::Long && slots.numel() >= num_tokens && slots.is_contiguous(),
                  "attention: slot_mapping must be a contiguous int64 tensor of at least ", num_tokens, " elements");
  return static_cast<const int64_t*>(slots.data_ptr());
}

void check_kv_heads(const CacheLayout& cache, const Tensor& k, const Tensor& v) {
  PAGELOOM_CHECK(k.size(1) == cache.num_kv_heads && v.size(1) == cache.num_kv_heads,
                  "attention: k and v must have the cache's ", cache.num_kv_heads, " heads");
}

// The sizes and tables that decide how a call is cut.
void set_tables(AttentionProblem& p, const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& block_tables,
                int64_t num_seqs) {
  PAGELOOM_CHECK(num_seqs >= 0, "attention: num_seqs is negative");
  p.query_start_loc = int32_data(query_start_loc, num_seqs + 1, "query_start_loc");
  p.seq_lens = int32_data(seq_lens, num_seqs, "seq_lens");
  PAGELOOM_CHECK(block_tables.scalar_type() == ScalarType::Int && block_tables.dim() == 2 &&
                      block_tables.size(0) >= num_seqs && (block_tables.stride(1) == 1 || block_tables.size(1) <= 1),
                  "attention: block_tables must be int32 [num_seqs, blocks] with contiguous rows");
  p.block_tables = static_cast<const int32_t*>(block_tables.data_ptr());
  p.block_table_stride = block_tables.stride(0);
  p.max_blocks = block_tables.size(1);
  p.num_seqs = num_seqs;
}

const float* sinks_of(const std::optional<Tensor>& sinks, int64_t num_heads) {
  if (!sinks) return nullptr;
  PAGELOOM_CHECK(sinks->scalar_type() == ScalarType::Float && sinks->numel() == num_heads && sinks->is_contiguous(),
                 "attention: sinks must be a contiguous float32 tensor of ", num_heads, " elements, as heads");
  return static_cast<const float*>(sinks->data_ptr());
}

// Without sinks.
Layer layer_of(const Tensor& kv_cache, int64_t num_heads, int64_t head_dim, double scale, int64_t window,
               double soft_cap, int64_t isa) {
  const CacheLayout cache = layout_of(kv_cache, head_dim);
  PAGELOOM_CHECK(cache.num_kv_heads > 0 && num_heads > 0 && num_heads % cache.num_kv_heads == 0,
                  "attention: query heads must be a multiple of KV heads");
  return {&layer_tag, cache, num_heads / cache.num_kv_heads, &pick(isa, cache), window, static_cast<float>(scale),
          static_cast<float>(soft_cap), nullptr, {}};
}

// Numbers as `ContextHeads` of attention_backends/interface.py has them: the group's three addresses, this rank, then of
// each rank its heads of q, and those of k and v that it gives.
ContextRanks ranks_of(const std::vector<int64_t>& numbers, const CacheLayout& cache, int64_t num_heads, int64_t isa) {
  ContextRanks ranks{};
  if (numbers.empty()) return ranks;
  ranks.size = (static_cast<int64_t>(numbers.size()) - 4) / 2;
  PAGELOOM_CHECK(numbers.size() % 2 == 0 && ranks.size > 1 && ranks.size <= kMostRanks && numbers[3] >= 0 &&
                     numbers[3] < ranks.size,
                 "attention: a context is of 2 to ", kMostRanks, " ranks, and this is one of them");
  ranks.gather = reinterpret_cast<NativeExchange>(numbers[0]);
  ranks.deal = reinterpret_cast<NativeExchange>(numbers[1]);
  ranks.group = reinterpret_cast<void*>(numbers[2]);
  ranks.rank = numbers[3];
  ranks.merge = widest(isa).merge;
  int64_t queries = 0, keys = 0;
  for (int64_t rank = 0; rank < ranks.size; ++rank) {
    queries += ranks.queries[rank] = numbers[4 + rank];
    keys += ranks.keys[rank] = numbers[4 + ranks.size + rank];
    PAGELOOM_CHECK(ranks.queries[rank] >= 0 && ranks.keys[rank] >= 0, "attention: a rank has no less than no heads");
  }
  PAGELOOM_CHECK(queries == num_heads && keys == cache.num_kv_heads, "attention: ranks have ", queries, " heads and give ",
                 keys, " of keys, of ", num_heads, " and ", cache.num_kv_heads);
  return ranks;
}

Step step_of(const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& block_tables,
             const Tensor& slot_mapping, int64_t num_seqs, int64_t num_tokens, int64_t step, int64_t parts,
             int64_t part) {
  PAGELOOM_CHECK(num_tokens >= 0, "attention: num_tokens is negative");
  Step made{&step_tag, {}, slots_of(slot_mapping, num_tokens), num_tokens};
  set_tables(made.tables, query_start_loc, seq_lens, block_tables, num_seqs);
  PAGELOOM_CHECK(num_seqs == 0 || made.tables.query_start_loc[num_seqs] <= num_tokens,
                  "attention: query_start_loc goes beyond num_tokens");
  made.tables.step = step;
  PAGELOOM_CHECK(parts >= 1 && part >= 0 && part < parts, "attention: there is no part ", part, " of ", parts);
  made.tables.parts = parts;
  made.tables.part = part;
  return made;
}

void paged_attention(Tensor q, Tensor k, Tensor v, Tensor out, Tensor kv_cache, Tensor query_start_loc, Tensor seq_lens,
                     Tensor block_tables, Tensor slot_mapping, int64_t num_seqs, int64_t num_tokens, double scale,
                     int64_t window, double soft_cap, std::optional<Tensor> sinks, bool writes, int64_t isa, int64_t step,
                     int64_t parts, int64_t part) {
  Layer layer = layer_of(kv_cache, q.size(1), q.size(2), scale, window, soft_cap, isa);
  layer.sinks = sinks_of(sinks, q.size(1));
  const Step tables =
      step_of(query_start_loc, seq_lens, block_tables, slot_mapping, num_seqs, num_tokens, step, parts, part);
  PAGELOOM_CHECK(parts == 1 || !sinks, "attention: sinks join all parts of a context, and this is one of ", parts);
  if (writes) check_kv_heads(layer.cache, k, v);
  PAGELOOM_CHECK(out.size(1) == q.size(1), "attention: out must have as many heads as q");
  const auto view = [&](const Tensor& t, const char* name) { return view_of(t, layer.cache, num_tokens, name); };
  const TokenView to = view_of(out, layer.cache, num_tokens, "out", parts > 1);
  const Threads threads = lent_threads();
  const TokenView keys = writes ? view(k, "k") : TokenView{}, values = writes ? view(v, "v") : TokenView{};
  LayerStages made = stages_of(layer, tables, view(q, "q"), keys, values, to, threads.count, 0);
  Stage* const stages[] = {&made.write, &made.attend};
  const char* error = StageRun(writes ? stages : stages + 1, writes ? 2 : 1).run(threads);
  PAGELOOM_CHECK(error == nullptr, error);
}

int64_t native_attention() {
  static const NativeAttention functions{sizeof(NativeCall), prepare_natively};
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(&functions));
}

// uint8 [sizeof(T)] on the CPU
template <class T>
Tensor bytes_of(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  Tensor bytes = Tensor::empty({sizeof(T)}, ScalarType::Byte);
  memcpy(bytes.data_ptr(), &value, sizeof(T));
  return bytes;
}

// And the bytes of scratch memory that a call needs for each row.
std::tuple<Tensor, int64_t> native_layer(Tensor kv_cache, int64_t num_heads, int64_t head_dim, double scale,
                                         int64_t window, double soft_cap, std::optional<Tensor> sinks, int64_t isa,
                                         std::vector<int64_t> ranks) {
  Layer layer = layer_of(kv_cache, num_heads, head_dim, scale, window, soft_cap, isa);
  layer.ranks = ranks_of(ranks, layer.cache, num_heads, isa);
  layer.sinks = sinks_of(sinks, layer.own_heads());
  PAGELOOM_CHECK(layer.cache.dtype == Dtype::kBFloat16 || layer.cache.dtype == Dtype::kInt8,
                  "attention: native calls have bfloat16 rows, so the KV cache must be bfloat16 or int8");
  return {bytes_of(layer), ContextScratch::bytes(layer)};
}

Tensor native_step(Tensor query_start_loc, Tensor seq_lens, Tensor block_tables, Tensor slot_mapping, int64_t num_seqs,
                   int64_t num_tokens, int64_t step, int64_t parts, int64_t part) {
  PAGELOOM_CHECK(step != 0, "attention: native calls need a number for their step, as new_step gives");
  return bytes_of(
      step_of(query_start_loc, seq_lens, block_tables, slot_mapping, num_seqs, num_tokens, step, parts, part));
}

void merge_parts(Tensor found, std::optional<Tensor> sinks, Tensor out, int64_t isa) {
  PAGELOOM_CHECK(found.dim() == 4 && found.scalar_type() == ScalarType::Float && found.is_contiguous(),
                 "attention: what parts found must be contiguous float32 [tokens, parts, heads, head_dim + 1]");
  const int64_t tokens = found.size(0), heads = found.size(2), dim = found.size(3) - 1;
  PAGELOOM_CHECK(out.dim() == 3 && out.size(0) == tokens && out.size(1) == heads && out.size(2) == dim &&
                     out.stride(2) == 1 && dim > 0 && dim <= kMaxHeadDim,
                 "attention: out must be [", tokens, ", ", heads, ", ", dim, "], its last dimension contiguous");
  const MergeProblem problem{static_cast<const float*>(found.data_ptr()), found.size(1), heads, dim,
                             sinks_of(sinks, heads), {out.data_ptr(), out.stride(0), out.stride(1)}, dtype_of(out)};
  PAGELOOM_CHECK(problem.dtype != Dtype::kInt8, "attention: out must be float32, bfloat16 or float16");
  const Threads threads = lent_threads();
  MergeStage merge(problem, widest(isa).merge, tokens, threads.count);
  Stage* const stage = &merge;
  const char* error = StageRun(&stage, 1).run(threads);
  PAGELOOM_CHECK(error == nullptr, error);
}

// x [tokens, heads, depth], out [tokens, heads, outs], weight [heads, depth, outs], or `transposed` [heads, outs, depth],
// whose rows are contiguous.
void head_product(Tensor x, Tensor weight, Tensor out, bool transposed, int64_t isa) {
  for (const Tensor* t : {&x, &weight, &out})
    PAGELOOM_CHECK(t->dim() == 3 && t->stride(2) == 1 && t->scalar_type() == x.scalar_type(),
                   "attention: x, weight and out must have three dimensions, the last contiguous, and one dtype");
  const int64_t depth = x.size(2), outs = out.size(2), tokens = x.size(0);
  PAGELOOM_CHECK(weight.size(0) == x.size(1) && out.size(1) == x.size(1) && out.size(0) == tokens &&
                     weight.size(transposed ? 2 : 1) == depth && weight.size(transposed ? 1 : 2) == outs,
                 "attention: weight is not of as many heads, inputs and outputs as x and out");
  PAGELOOM_CHECK(depth <= kMaxHeadDim && outs <= kMaxHeadDim, "attention: heads have no more than ", kMaxHeadDim,
                 " inputs and outputs");
  const HeadProduct problem{{x.data_ptr(), x.stride(0), x.stride(1)}, {out.data_ptr(), out.stride(0), out.stride(1)},
                            weight.data_ptr(), weight.stride(0), weight.stride(1), depth, outs, transposed, dtype_of(x)};
  PAGELOOM_CHECK(problem.dtype != Dtype::kInt8, "attention: x must be float32, bfloat16 or float16");
  const Threads threads = lent_threads();
  ProductStage product(problem, widest(isa).product, x.size(1), tokens, threads.count);
  Stage* const stage = &product;
  const char* error = StageRun(&stage, 1).run(threads);
  PAGELOOM_CHECK(error == nullptr, error);
}

// A number for a step that no other step in this process has.
int64_t new_step() {
  static std::atomic<int64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

// What a call would do, for one KV head: items, those of them with several sequences, and keys that all of them read.
std::tuple<int64_t, int64_t, int64_t> describe_plan(Tensor kv_cache, Tensor query_start_loc, Tensor seq_lens,
                                                    Tensor block_tables, int64_t num_seqs, int64_t group,
                                                    int64_t window, int64_t isa) {
  AttentionProblem p{};
  p.cache = layout_of(kv_cache, kv_cache.size(4) / 16 * 16);
  set_tables(p, query_start_loc, seq_lens, block_tables, num_seqs);
  p.group = group;
  p.window = window;
  Plan plan;
  make_plan(plan, p, pick(isa, p.cache).row_tile);
  PAGELOOM_CHECK(plan.error == nullptr, plan.error);
  int64_t shared = 0, keys = 0;
  for (const WorkItem& item : plan.items) shared += item.shared >= 0, keys += item.kv_end - item.kv_begin;
  const int64_t heads = p.cache.num_kv_heads;
  return {static_cast<int64_t>(plan.items.size()) / heads, shared / heads, keys / heads};
}

void write_kv(Tensor k, Tensor v, Tensor kv_cache, Tensor slot_mapping) {
  const CacheLayout cache = layout_of(kv_cache, k.size(2));
  const int64_t num_tokens = slot_mapping.numel();
  check_kv_heads(cache, k, v);
  const Threads threads = lent_threads();
  WriteStage write(cache, view_of(k, cache, num_tokens, "k"), view_of(v, cache, num_tokens, "v"),
                   slots_of(slot_mapping, num_tokens), num_tokens, threads.count);
  Stage* const stage = &write;
  const char* error = StageRun(&stage, 1).run(threads);
  PAGELOOM_CHECK(error == nullptr, error);
}

// pairs: (block of the source, block of the destination), for each of the caches.
void copy_blocks(std::vector<Tensor> sources, std::vector<Tensor> destinations, Tensor pairs) {
  const bool is_pairs = pairs.dim() == 2 && pairs.size(1) == 2 && pairs.is_contiguous();
  PAGELOOM_CHECK(is_pairs && pairs.scalar_type() == ScalarType::Long,
                  "attention: block pairs must be a contiguous int64 tensor [pairs, 2]");
  const auto* ids = static_cast<const int64_t*>(pairs.data_ptr());
  PAGELOOM_CHECK(sources.size() == destinations.size(), "attention: copy_blocks has ", sources.size(), " sources and ",
                  destinations.size(), " destinations");
  const auto block_bytes = [](const Tensor& cache) { return cache.numel() / cache.size(0) * cache.element_size(); };
  std::vector<const char*> from;
  std::vector<char*> to;
  std::vector<int64_t> bytes;
  for (size_t c = 0; c < sources.size(); ++c) {
    for (const Tensor* cache : {&sources[c], &destinations[c]})
      PAGELOOM_CHECK(cache->is_contiguous() && cache->size(0) > 0,
                      "attention: copy_blocks needs contiguous, non-empty caches");
    bytes.push_back(block_bytes(sources[c]));
    PAGELOOM_CHECK(bytes[c] == block_bytes(destinations[c]), "attention: copy_blocks between blocks of different sizes");
    for (int64_t i = 0; i < pairs.numel(); ++i) {
      const int64_t blocks = (i % 2 == 0 ? sources : destinations)[c].size(0);
      PAGELOOM_CHECK(ids[i] >= 0 && ids[i] < blocks, "attention: copy_blocks names block ", ids[i], " of ", blocks);
    }
    from.push_back(static_cast<const char*>(sources[c].data_ptr()));
    to.push_back(static_cast<char*>(destinations[c].data_ptr()));
  }
  run_copy_blocks(from.data(), to.data(), bytes.data(), static_cast<int64_t>(from.size()), ids, pairs.size(0),
                  lent_threads());
}

int64_t supported_isas() {
  int64_t mask = 0;
  for (int64_t isa = kPortable; isa <= kWidest; ++isa) mask |= table_of(isa) != nullptr ? int64_t{1} << isa : 0;
  return mask;
}

// The namespace holds the build's key, so that two builds fit in one process.
const Operators kDefined(PAGELOOM_NAMESPACE, [](Operators& m) {
  m.define(
      "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) kv_cache, Tensor query_start_loc, "
      "Tensor seq_lens, Tensor block_tables, Tensor slot_mapping, int num_seqs, int num_tokens, float scale, "
      "int window, float soft_cap, Tensor? sinks, bool writes, int isa, int step, int parts, int part) "
      "-> ()");
  m.define("merge_parts(Tensor found, Tensor? sinks, Tensor(a!) out, int isa) -> ()");
  m.define("head_product(Tensor x, Tensor weight, Tensor(a!) out, bool transposed, int isa) -> ()");
  m.define("write_kv(Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()");
  m.define("copy_blocks(Tensor[] sources, Tensor(a!)[] destinations, Tensor pairs) -> ()");
  m.define(
      "describe_plan(Tensor kv_cache, Tensor query_start_loc, Tensor seq_lens, Tensor block_tables, int num_seqs, "
      "int group, int window, int isa) -> (int, int, int)");
  m.define("native_attention() -> int");
  m.define(
      "native_layer(Tensor kv_cache, int num_heads, int head_dim, float scale, int window, float soft_cap, "
      "Tensor? sinks, int isa, int[] ranks) -> (Tensor, int)");
  m.define(
      "native_step(Tensor query_start_loc, Tensor seq_lens, Tensor block_tables, Tensor slot_mapping, int num_seqs, "
      "int num_tokens, int step, int parts, int part) -> Tensor");
  m.define("new_step() -> int");
  m.define("supported_isas() -> int");
  m.define("lend_crew(int address) -> ()");
});

const Operators kOnCpu(PAGELOOM_NAMESPACE, "CPU", [](Operators& m) {
  m.implement<paged_attention>("paged_attention");
  m.implement<merge_parts>("merge_parts");
  m.implement<head_product>("head_product");
  m.implement<write_kv>("write_kv");
  m.implement<copy_blocks>("copy_blocks");
  m.implement<describe_plan>("describe_plan");
  m.implement<native_layer>("native_layer");
  m.implement<native_step>("native_step");
});

const Operators kAnywhere(PAGELOOM_NAMESPACE, "CompositeExplicitAutograd", [](Operators& m) {
  m.implement<native_attention>("native_attention");
  m.implement<new_step>("new_step");
  m.implement<supported_isas>("supported_isas");
  m.implement<lend_crew>("lend_crew");
});

}  // namespace
}  // namespace pageloom
