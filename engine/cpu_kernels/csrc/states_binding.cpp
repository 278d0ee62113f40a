// The operator on layers that keep states.
#include "states.h"

#include <algorithm>

#include "binding.h"

namespace pageloom {
namespace {

constexpr const char* kOp = "mix_states";

const float* floats_of(const std::optional<Tensor>& t, int64_t count, const char* name) {
  if (!t.has_value()) return nullptr;
  PAGELOOM_CHECK(on_cpu_of(*t, ScalarType::Float) && t->numel() == count && t->is_contiguous(), kOp, ": ", name,
                 " must be contiguous float32 of ", count, " numbers");
  return static_cast<const float*>(t->data_ptr());
}

// [rows, columns] of the layer's dtype; `stride`: between rows.
void* rows_of_dtype(const Tensor& t, ScalarType dtype, int64_t rows, int64_t columns, int64_t& stride, const char* name) {
  PAGELOOM_CHECK(on_cpu_of(t, dtype) && t.dim() == 2 && t.size(0) == rows && t.size(1) == columns && t.stride(1) == 1, kOp,
                 ": ", name, " must be [", rows, ", ", columns, "], contiguous in its last dimension, of one dtype with x");
  stride = t.stride(0);
  return t.data_ptr();
}

struct Caches {
  std::vector<uint8_t*> data;
  std::vector<int64_t> widths, strides;
  int64_t num_blocks = 0;
};

Caches caches_of(const std::vector<Tensor>& caches, StatePlace& place) {
  Caches found;
  PAGELOOM_CHECK(!caches.empty(), kOp, ": there are no caches");
  for (const Tensor& cache : caches) {
    PAGELOOM_CHECK(on_cpu_of(cache, ScalarType::Byte) && cache.dim() == 2 && cache.stride(1) == 1 && cache.size(1) > 0, kOp,
                   ": caches must be uint8 [blocks, bytes]");
    PAGELOOM_CHECK(found.data.empty() || cache.size(0) == found.num_blocks, kOp, ": caches have different numbers of blocks");
    found.num_blocks = cache.size(0);
    found.data.push_back(static_cast<uint8_t*>(cache.data_ptr()));
    found.widths.push_back(cache.size(1));
    found.strides.push_back(cache.stride(0));
    place.page_bytes += cache.size(1);
  }
  place.num_caches = static_cast<int64_t>(caches.size());
  return found;
}

const int64_t* table_of(const Tensor& t, int64_t columns, const char* name) {
  PAGELOOM_CHECK(on_cpu_of(t, ScalarType::Long) && t.dim() == 2 && t.size(1) == columns && t.is_contiguous(), kOp, ": ", name,
                 " must be contiguous int64 [", name, ", ", columns, "]");
  return static_cast<const int64_t*>(t.data_ptr());
}

void check_sequences(const MixProblem& p, int64_t num_blocks) {
  int64_t token = 0, write = 0;
  for (int64_t s = 0; s < p.num_sequences; ++s) {
    const StateSequence& each = p.sequences[s];
    PAGELOOM_CHECK(each.begin == token && each.end >= token && each.read >= -1 && each.read < num_blocks &&
                       each.first_write == write,
                   kOp, ": sequence ", s, " does not follow the one before it, or reads block ", each.read, " of ", num_blocks);
    for (const int64_t end = p.writes_end(s); write < end; ++write) {
      PAGELOOM_CHECK(write < p.num_writes, kOp, ": sequence ", s, " writes more than there is");
      const StateWrite& w = p.writes[write];
      PAGELOOM_CHECK(w.end > token && w.end <= each.end && w.written >= 0 && w.written < num_blocks, kOp, ": write ", write,
                     " behind token ", w.end, " into block ", w.written, " does not fit sequence ", s);
      token = w.end;
    }
    token = each.end;
  }
  PAGELOOM_CHECK(token == p.tokens && write == p.num_writes, kOp, ": sequences have ", token, " tokens of ", p.tokens, " and ",
                 write, " writes of ", p.num_writes);
}

// kind, heads, groups, keys, values, taps.
void set_shape(MixProblem& p, const std::vector<int64_t>& shape) {
  PAGELOOM_CHECK(shape.size() == 6, kOp, ": shape has six numbers, not ", shape.size());
  PAGELOOM_CHECK(shape[0] >= 0 && shape[0] <= 3, kOp, ": unknown kind ", shape[0]);
  p.kind = static_cast<MixKind>(shape[0]);
  p.heads = shape[1], p.groups = shape[2], p.keys = shape[3], p.values = shape[4], p.taps = shape[5];
  PAGELOOM_CHECK(p.heads > 0 && p.groups > 0 && p.heads % p.groups == 0 && p.values > 0, kOp, ": ", p.heads, " heads of ",
                 p.values, " do not fall into ", p.groups, " groups");
  PAGELOOM_CHECK(p.keys > 0 && p.keys <= kMostKeys, kOp, ": ", p.keys, " keys are not in [1, ", kMostKeys, "]");
  PAGELOOM_CHECK(p.taps >= 2 && p.taps <= kMostTaps, kOp, ": ", p.taps, " taps are not in [2, ", kMostTaps, "]");
  const int64_t inner = p.inner(), shared = p.groups * p.keys;
  if (p.kind == MixKind::kShort) {  // gates of inputs | gates of what comes out | inputs
    p.channels = inner, p.amount_at = 0, p.gate_at = inner, p.mixed_at = 2 * inner;
    return;
  }
  p.channels = inner + 2 * shared;
  p.decays = p.kind == MixKind::kKimi ? p.keys : 1;
  if (p.has_rule()) {  // queries, keys, values | gate | amounts | decays
    p.mixed_at = 0, p.gate_at = p.channels, p.amount_at = p.gate_at + inner, p.decay_at = p.amount_at + p.heads;
    p.q_at = 0, p.k_at = shared, p.v_at = 2 * shared;
  } else {  // gate | values, keys, queries | decays
    p.gate_at = 0, p.mixed_at = inner, p.amount_at = -1, p.decay_at = inner + p.channels;
    p.v_at = 0, p.k_at = inner, p.q_at = inner + shared;
  }
}

void mix_states(Tensor x, Tensor out, std::vector<int64_t> shape, double norm_eps, double lowest, double highest, Tensor conv_weight,
                std::optional<Tensor> conv_bias, std::optional<Tensor> rate, std::optional<Tensor> decay_bias, std::optional<Tensor> passed_on,
                std::optional<Tensor> norm, std::vector<Tensor> caches, Tensor blocks, int64_t start, Tensor sequences,
                Tensor writes, int64_t isa) {
  MixProblem p{};
  set_shape(p, shape);
  p.norm_eps = static_cast<float>(norm_eps);
  p.lowest = static_cast<float>(lowest), p.highest = static_cast<float>(highest);
  const ScalarType dtype = x.scalar_type();
  PAGELOOM_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Float, kOp, ": x must be bfloat16 or float32");
  PAGELOOM_CHECK(x.dim() == 2, kOp, ": x must have two dimensions, not ", x.dim());
  p.bf16 = dtype == ScalarType::BFloat16;
  p.tokens = x.size(0);
  const bool is_short = p.kind == MixKind::kShort;
  p.x = rows_of_dtype(x, dtype, p.tokens, is_short ? 3 * p.channels : p.decay_at + p.heads * p.decays, p.x_stride, "x");
  p.out = rows_of_dtype(out, dtype, p.tokens, p.inner(), p.out_stride, "out");
  p.conv_weight = floats_of(conv_weight, p.taps * p.channels, "conv_weight");
  p.conv_bias = floats_of(conv_bias, p.channels, "conv_bias");
  p.rate = floats_of(rate, p.heads, "rate");
  p.decay_bias = floats_of(decay_bias, p.heads * p.decays, "decay_bias");
  PAGELOOM_CHECK(is_short || (p.rate != nullptr && p.decay_bias != nullptr), kOp, ": a recurrence has rates of its decay");
  p.passed_on = floats_of(passed_on, p.heads, "passed_on");
  p.norm = floats_of(norm, p.has_rule() ? p.values : p.inner(), "norm");
  PAGELOOM_CHECK(p.norm != nullptr || !p.has_rule(), kOp, ": a delta net has a norm");
  const Caches found = caches_of(caches, p.place);
  p.place.caches = found.data.data(), p.place.widths = found.widths.data(), p.place.strides = found.strides.data();
  PAGELOOM_CHECK(blocks.dim() == 2 && blocks.size(0) == found.num_blocks, kOp, ": blocks must be [blocks, pages]");
  p.place.pages = blocks.size(1);
  p.place.blocks = table_of(blocks, p.place.pages, "blocks");
  p.start = start;
  const int64_t inputs = (p.taps - 1) * p.channels * (p.bf16 ? 2 : 4);
  p.matrices_at = (inputs + 63) / 64 * 64;
  const int64_t bytes = is_short ? inputs : p.matrices_at + p.heads * p.keys * p.values * 4;
  PAGELOOM_CHECK(start >= 0 && start + bytes <= p.place.pages * p.place.page_bytes,
                 kOp, ": a state from byte ", start, " on does not fit ", p.place.pages, " pages of ", p.place.page_bytes, " bytes");
  p.sequences = reinterpret_cast<const StateSequence*>(table_of(sequences, 4, "sequences"));
  p.num_sequences = sequences.size(0);
  p.writes = reinterpret_cast<const StateWrite*>(table_of(writes, 2, "writes"));
  p.num_writes = writes.size(0);
  check_sequences(p, found.num_blocks);
  const MixKernels* const kernels = mix_kernels_of(isa);
  PAGELOOM_CHECK(kernels != nullptr, kOp, ": ISA ", isa, " is not available on this CPU, or not built");
  if (p.tokens == 0) return;
  const int64_t stretch = std::min(p.tokens, kMixTokens);
  const Tensor mixed = Tensor::empty({stretch, p.channels}, ScalarType::Float), made = Tensor::empty({stretch, p.inner()}, ScalarType::Float);
  const Tensor rates = Tensor::empty({stretch, p.heads * (p.decays + 1)}, ScalarType::Float);
  const Tensor carried = Tensor::empty({2, stretch < p.tokens && !is_short ? p.carried_size() : 0}, ScalarType::Float);
  p.mixed = static_cast<float*>(mixed.data_ptr());
  p.made = static_cast<float*>(made.data_ptr());
  p.decay = static_cast<float*>(rates.data_ptr());
  p.amount = p.decay + stretch * p.heads * p.decays;
  p.carried[0] = static_cast<float*>(carried.data_ptr());
  p.carried[1] = p.carried[0] + carried.numel() / 2;
  run_mix(p, *kernels, lent_threads());
}

const Operators kDefined(PAGELOOM_NAMESPACE, [](Operators& m) {
  m.define(
      "mix_states(Tensor x, Tensor(a!) out, int[] shape, float norm_eps, float lowest, float highest, Tensor conv_weight, Tensor? conv_bias, Tensor? rate, "
      "Tensor? decay_bias, Tensor? passed_on, Tensor? norm, Tensor(b!)[] caches, Tensor blocks, int start, Tensor sequences, "
      "Tensor writes, int isa) -> ()");
});

const Operators kOnCpu(PAGELOOM_NAMESPACE, "CPU", [](Operators& m) { m.implement<mix_states>("mix_states"); });

}  // namespace
}  // namespace pageloom
