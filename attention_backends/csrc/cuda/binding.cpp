// The only unit of the CUDA library that sees torch: checks tensors, finds the stream, calls the launchers. Host C++.
// One library is one (head_dim, element type, cache type), see launch.h; another tensor is an error that says which.
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 11) << 48))

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>

#include "launch.h"

// The dispatch key can be CPU instead: with the kernels of the emulator this very file runs in tests.
#ifndef PAGELOOM_DISPATCH
#define PAGELOOM_DISPATCH CUDA
#endif

// Part of torch's stable ABI, but declared by a CUDA build's headers only, and absent from a CPU build's libraries.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace pageloom::cuda {
namespace {

constexpr int64_t kHeadDim = PAGELOOM_HEAD_DIM;
constexpr ScalarType kHalfType = PAGELOOM_HALF ? ScalarType::Half : ScalarType::BFloat16;
constexpr const char* kHalfName = PAGELOOM_HALF ? "float16" : "bfloat16";
constexpr ScalarType kCacheType = PAGELOOM_KV_FP8 ? ScalarType::Float8_e4m3fn : kHalfType;
constexpr const char* kCacheName = PAGELOOM_KV_FP8 ? "float8_e4m3fn" : kHalfName;
constexpr int64_t kMaxDecodeRows = 64;
constexpr int64_t kAlignment = 16;

// The device of the first tensor is made current while work is queued, on torch's current stream of it. A kernel that
// gets an address of another device or of the host ends the process, so every tensor is asked where it lies.
class Device {
 public:
  Device(const Tensor& t, const char* name) : name_(name), is_cuda_(t.is_cuda()), index_(t.get_device()) {
    if (!is_cuda_) return;
    if (torch::stable::accelerator::getCurrentDeviceIndex() != index_) guard_.emplace(index_);
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "attention: this torch was built without CUDA");
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream_));
  }
  Stream stream() const { return stream_; }
  void check(const Tensor& t, const char* name) const {
    STD_TORCH_CHECK(t.is_cuda() == is_cuda_ && t.get_device() == index_, "attention: ", name, " is not on ", name_,
                    "'s device");
  }

 private:
  const char* name_;
  bool is_cuda_;
  int32_t index_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  Stream stream_ = nullptr;
};

void raise_if(const char* error) { STD_TORCH_CHECK(error == nullptr, "attention: ", error); }

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAlignment == 0; }

int32_t narrow(int64_t value, const char* name) {
  STD_TORCH_CHECK(value >= 0 && value <= INT32_MAX, "attention: ", name, " ", value, " is not in [0, 2^31)");
  return static_cast<int32_t>(value);
}

int32_t signed_window(int64_t window) {
  STD_TORCH_CHECK(window >= -INT32_MAX && window <= INT32_MAX, "attention: window ", window, " is not within ± 2^31");
  return static_cast<int32_t>(window);
}

Tokens tokens_of(const Device& device, const Tensor& t, int64_t heads, int64_t num_tokens, const char* name) {
  device.check(t, name);
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) >= num_tokens && t.size(1) == heads && t.size(2) == kHeadDim, "attention: ",
                  name, " must be [tokens >= ", num_tokens, ", ", heads, ", ", kHeadDim, "]");
  STD_TORCH_CHECK(t.scalar_type() == kHalfType, "attention: these kernels are for ", kHalfName, "; ", name,
                  " has another dtype");
  const Tokens tokens{t.data_ptr(), t.stride(0), t.stride(1)};
  STD_TORCH_CHECK(t.stride(2) == 1, "attention: the last dimension of ", name, " must be contiguous");
  constexpr int64_t kElements = kAlignment / 2;
  STD_TORCH_CHECK(aligned(tokens.data) && (t.size(0) <= 1 || tokens.token_stride % kElements == 0) &&
                      (heads <= 1 || tokens.head_stride % kElements == 0),
                  "attention: rows of ", name, " must start at 16-byte boundaries");
  return tokens;
}

Cache cache_of(const Device& device, const Tensor& t) {
  device.check(t, "kv_cache");
  STD_TORCH_CHECK(t.dim() == 5 && t.size(1) == 2 && t.size(4) == kHeadDim,
                  "attention: kv_cache must be [blocks, 2, kv_heads, block_size, ", kHeadDim, "]");
  int64_t elements = 1;  // of a block
  for (int64_t d = 4; d > 0; elements *= std::max<int64_t>(t.size(d--), 1))
    STD_TORCH_CHECK(t.size(d) <= 1 || t.stride(d) == elements, "attention: kv_cache's blocks must be contiguous");
  STD_TORCH_CHECK(t.scalar_type() == kCacheType, "attention: these kernels are for a ", kCacheName, " KV cache");
  const int64_t block_size = t.size(3);
  STD_TORCH_CHECK(block_size >= 16 && (block_size & (block_size - 1)) == 0, "attention: block size ", block_size,
                  " is not a power of two of at least 16");
  constexpr int64_t kBytes = PAGELOOM_KV_FP8 ? 1 : 2;  // of an element
  const int64_t block_bytes = t.stride(0) * kBytes;
  STD_TORCH_CHECK(aligned(t.data_ptr()) && block_bytes % kAlignment == 0,
                  "attention: kv_cache's blocks must start at 16-byte boundaries");
  return {t.data_ptr(), block_bytes, narrow(t.size(2), "kv heads"), static_cast<int32_t>(block_size)};
}

template <class T>
T* data_of(const Device& device, const Tensor& t, ScalarType type, int64_t count, const char* name,
           const char* must_be) {
  device.check(t, name);
  STD_TORCH_CHECK(t.scalar_type() == type && t.is_contiguous() && t.numel() >= count, "attention: ", name, must_be,
                  " of at least ", count, " elements, contiguous");
  return static_cast<T*>(t.data_ptr());
}

Batch batch_of(const Device& device, const Tensor& query_start_loc, const Tensor& seq_lens, int64_t first_seq,
               int64_t num_seqs) {
  Batch batch{};
  batch.first_seq = narrow(first_seq, "first sequence");
  batch.num_seqs = narrow(num_seqs, "number of sequences");
  const int64_t end = first_seq + num_seqs;
  batch.query_start_loc =
      data_of<int32_t>(device, query_start_loc, ScalarType::Int, end + 1, "query_start_loc", " must be int32");
  batch.seq_lens = data_of<int32_t>(device, seq_lens, ScalarType::Int, end, "seq_lens", " must be int32");
  return batch;
}

void set_block_tables(const Device& device, Batch& batch, const Tensor& block_tables) {
  device.check(block_tables, "block_tables");
  STD_TORCH_CHECK(block_tables.scalar_type() == ScalarType::Int && block_tables.dim() == 2 &&
                      block_tables.size(0) >= batch.first_seq + batch.num_seqs &&
                      (block_tables.size(1) <= 1 || block_tables.stride(1) == 1),
                  "attention: block_tables must be int32 [>= ", batch.first_seq + batch.num_seqs,
                  " sequences, blocks] with contiguous rows");
  batch.block_tables = static_cast<const int32_t*>(block_tables.data_ptr());
  batch.block_table_stride = block_tables.stride(0);
}

// One buffer: header [2], items [max_items, 2], item_start [num_seqs + 1].
DecodeSchedule schedule_of(const Device& device, const Tensor& t, int64_t max_items, int64_t num_seqs) {
  STD_TORCH_CHECK(max_items > num_seqs, "attention: max_items ", max_items, " must exceed the ", num_seqs,
                  " sequences");
  auto* words = data_of<int32_t>(device, t, ScalarType::Int, 3 + 2 * max_items + num_seqs, "the decode schedule",
                                 " must be int32");
  return {words, words + 2, words + 2 + 2 * max_items, narrow(max_items, "max_items")};
}

void write(const Device& device, const Tensor& k, const Tensor& v, const Cache& cache, const Tensor& slots,
           int64_t num_tokens, double k_scale, double v_scale) {
  const Tokens keys = tokens_of(device, k, cache.num_kv_heads, num_tokens, "k");
  const Tokens values = tokens_of(device, v, cache.num_kv_heads, num_tokens, "v");
  const auto* at = data_of<int64_t>(device, slots, ScalarType::Long, num_tokens, "slot_mapping", " must be int64");
  raise_if(pageloom_write_kv(&keys, &values, &cache, at, narrow(num_tokens, "number of tokens"),
                             static_cast<float>(k_scale), static_cast<float>(v_scale), device.stream()));
}

void schedule_decode(Tensor query_start_loc, Tensor seq_lens, Tensor schedule, int64_t first_seq, int64_t num_seqs,
                     int64_t max_query_len, int64_t max_items, int64_t window) {
  const Device device(seq_lens, "seq_lens");
  const Batch batch = batch_of(device, query_start_loc, seq_lens, first_seq, num_seqs);
  const DecodeSchedule target = schedule_of(device, schedule, max_items, num_seqs);
  raise_if(pageloom_schedule_decode(&batch, signed_window(window), narrow(max_query_len, "max_query_len"), &target,
                                    device.stream()));
}

// Scratch: out [max_items, kv_heads, max_rows, head_dim], then lse [max_items, kv_heads, max_rows]; and the arrivals.
Partials partials_of(const Device& device, const Tensor& t, const Tensor& arrivals, int64_t max_items, int64_t num_seqs,
                     int64_t kv_heads, int64_t max_rows) {
  const int64_t rows = max_items * kv_heads * max_rows;
  auto* floats =
      data_of<float>(device, t, ScalarType::Float, rows * (kHeadDim + 1), "decode partials", " must be float32");
  auto* counters = data_of<int32_t>(device, arrivals, ScalarType::Int, num_seqs * kv_heads * ((max_rows + 15) / 16),
                                    "decode arrivals", " must be int32");
  return {floats, floats + rows * kHeadDim, counters};
}

// Writes tokens [0, num_tokens), then decodes and prefills the two ranges of sequences.
void attend(Tensor q, Tensor k, Tensor v, Tensor out, Tensor kv_cache, Tensor slot_mapping, Tensor query_start_loc,
            Tensor seq_lens, Tensor block_tables, std::optional<Tensor> schedule, std::optional<Tensor> partials,
            std::optional<Tensor> arrivals, std::optional<Tensor> sinks, int64_t num_tokens, int64_t first_decode,
            int64_t num_decodes, int64_t max_query_len, int64_t max_items, int64_t first_prefill, int64_t num_prefills,
            int64_t prefill_tokens, int64_t window, double scale, double soft_cap, double k_scale, double v_scale) {
  const Device device(q, "q");
  const Cache cache = cache_of(device, kv_cache);
  const int64_t heads = q.size(1);
  STD_TORCH_CHECK(cache.num_kv_heads > 0 && heads % cache.num_kv_heads == 0, "attention: ", heads,
                  " query heads are not a multiple of ", cache.num_kv_heads, " KV heads");
  const Tokens queries = tokens_of(device, q, heads, num_tokens, "q");
  const Tokens results = tokens_of(device, out, heads, num_tokens, "out");
  if (num_tokens > 0) write(device, k, v, cache, slot_mapping, num_tokens, k_scale, v_scale);
  Layer layer{};
  layer.num_heads = narrow(heads, "query heads");
  layer.window = signed_window(window);
  layer.scale = static_cast<float>(scale);
  layer.soft_cap = static_cast<float>(soft_cap);
  layer.k_scale = static_cast<float>(k_scale);
  layer.v_scale = static_cast<float>(v_scale);
  if (sinks.has_value()) {
    layer.sinks = data_of<float>(device, *sinks, ScalarType::Float, heads, "sinks", " must be float32");
  }
  if (num_decodes > 0) {
    STD_TORCH_CHECK(schedule.has_value() && partials.has_value() && arrivals.has_value(),
                    "attention: a decode needs a schedule, partials and arrivals");
    Batch batch = batch_of(device, query_start_loc, seq_lens, first_decode, num_decodes);
    set_block_tables(device, batch, block_tables);
    const int64_t rows = max_query_len * (heads / cache.num_kv_heads);
    STD_TORCH_CHECK(rows > 0 && rows <= kMaxDecodeRows, "attention: ", rows, " rows (queries x heads per KV head) are ",
                    "not in [1, ", kMaxDecodeRows, "], which decode takes");
    const DecodeSchedule items = schedule_of(device, *schedule, max_items, num_decodes);
    const Partials scratch =
        partials_of(device, *partials, *arrivals, max_items, num_decodes, cache.num_kv_heads, rows);
    raise_if(pageloom_decode(&queries, &results, &cache, &batch, &layer, &items, &scratch, static_cast<int32_t>(rows),
                             device.stream()));
  }
  if (num_prefills > 0) {
    Batch batch = batch_of(device, query_start_loc, seq_lens, first_prefill, num_prefills);
    set_block_tables(device, batch, block_tables);
    raise_if(pageloom_prefill(&queries, &results, &cache, &batch, &layer, narrow(prefill_tokens, "prefill tokens"),
                              device.stream()));
  }
}

void write_kv(Tensor k, Tensor v, Tensor kv_cache, Tensor slot_mapping, int64_t num_tokens, double k_scale,
              double v_scale) {
  const Device device(k, "k");
  write(device, k, v, cache_of(device, kv_cache), slot_mapping, num_tokens, k_scale, v_scale);
}

void* const* bases_of(const Device& device, const Tensor& bases) {
  static_assert(sizeof(void*) == sizeof(int64_t));
  return reinterpret_cast<void* const*>(
      data_of<int64_t>(device, bases, ScalarType::Long, 1, "cache addresses", " must be int64"));
}

void check_block_bytes(int64_t block_bytes) {
  STD_TORCH_CHECK(block_bytes > 0 && block_bytes % kAlignment == 0, "attention: blocks of ", block_bytes,
                  " bytes are not a multiple of 16");
}

void copy_blocks(Tensor bases, Tensor pairs, int64_t block_bytes) {
  const Device device(pairs, "pairs");
  check_block_bytes(block_bytes);
  STD_TORCH_CHECK(pairs.dim() == 2 && pairs.size(1) == 2, "attention: block pairs must be [pairs, 2]");
  const auto* ids = data_of<int64_t>(device, pairs, ScalarType::Long, 0, "block pairs", " must be int64");
  raise_if(pageloom_copy_blocks(bases_of(device, bases), narrow(bases.numel(), "layers"), block_bytes, ids,
                                narrow(pairs.size(0), "block pairs"), device.stream()));
}

// Both directions take (bases, layers, block bytes, ids, count, staging, stream); the constness of staging differs.
template <class Launch>
void move_blocks(Launch launch, const Tensor& bases, const Tensor& ids, const Tensor& staging, int64_t block_bytes) {
  const Device device(ids, "ids");
  check_block_bytes(block_bytes);
  const int64_t bytes = ids.numel() * bases.numel() * block_bytes;
  auto* buffer = data_of<uint8_t>(device, staging, ScalarType::Byte, bytes, "the staging buffer", " must be uint8");
  STD_TORCH_CHECK(aligned(buffer), "attention: the staging buffer must start at a 16-byte boundary");
  raise_if(launch(bases_of(device, bases), narrow(bases.numel(), "layers"), block_bytes,
                  data_of<int64_t>(device, ids, ScalarType::Long, 0, "block ids", " must be int64"),
                  narrow(ids.numel(), "block ids"), buffer, device.stream()));
}

void gather_blocks(Tensor bases, Tensor ids, Tensor staging, int64_t block_bytes) {
  move_blocks(pageloom_gather_blocks, bases, ids, staging, block_bytes);
}

void scatter_blocks(Tensor bases, Tensor ids, Tensor staging, int64_t block_bytes) {
  move_blocks(pageloom_scatter_blocks, bases, ids, staging, block_bytes);
}

}  // namespace
}  // namespace pageloom::cuda

// The namespace holds the build's key, so that two builds fit in one process.
STABLE_TORCH_LIBRARY_FRAGMENT(PAGELOOM_OPS, m) {
  m.def(
      "schedule_decode(Tensor query_start_loc, Tensor seq_lens, Tensor(a!) schedule, int first_seq, int num_seqs, "
      "int max_query_len, int max_items, int window) -> ()");
  m.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) kv_cache, Tensor slot_mapping, "
      "Tensor query_start_loc, Tensor seq_lens, Tensor block_tables, Tensor? schedule, Tensor(c!)? partials, "
      "Tensor(d!)? arrivals, Tensor? sinks, int num_tokens, int first_decode, int num_decodes, int max_query_len, "
      "int max_items, int first_prefill, int num_prefills, int prefill_tokens, int window, float scale, "
      "float soft_cap, float k_scale, float v_scale) -> ()");
  m.def(
      "write_kv(Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor slot_mapping, int num_tokens, float k_scale, "
      "float v_scale) -> ()");
  m.def("copy_blocks(Tensor bases, Tensor pairs, int block_bytes) -> ()");
  m.def("gather_blocks(Tensor bases, Tensor ids, Tensor(a!) staging, int block_bytes) -> ()");
  m.def("scatter_blocks(Tensor bases, Tensor ids, Tensor staging, int block_bytes) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(PAGELOOM_OPS, PAGELOOM_DISPATCH, m) {
  m.impl("schedule_decode", TORCH_BOX(&pageloom::cuda::schedule_decode));
  m.impl("attend", TORCH_BOX(&pageloom::cuda::attend));
  m.impl("write_kv", TORCH_BOX(&pageloom::cuda::write_kv));
  m.impl("copy_blocks", TORCH_BOX(&pageloom::cuda::copy_blocks));
  m.impl("gather_blocks", TORCH_BOX(&pageloom::cuda::gather_blocks));
  m.impl("scatter_blocks", TORCH_BOX(&pageloom::cuda::scatter_blocks));
}
