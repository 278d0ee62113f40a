// Operators on one layer, and on embeddings.
#include "binding.h"

namespace pageloom {
namespace {

Tensor packed_linear(Tensor x, Tensor weight, int64_t n, int64_t format, std::optional<Tensor> bias,
                     std::optional<Tensor> norm_weight, double norm_eps, std::optional<Tensor> residual, int64_t gate,
                     bool wide, int64_t isa) {
  static constexpr const char* kOp = "packed_linear";
  PAGELOOM_CHECK(x.dim() == 2, kOp, ": x must have two dimensions, not ", x.dim());
  LinearLayer layer = checked_layer({weight, n, x.size(1), format, bias, norm_weight, norm_eps, gate, wide, residual.has_value()}, isa, kOp);
  LinearProblem& p = layer.problem;
  p.rows = x.size(0);
  p.x = rows_of(x, p.k, p.x_stride, kOp, "x");
  if (residual.has_value()) {
    p.residual = rows_of(*residual, p.out_stride, p.residual_stride, kOp, "residual");
    PAGELOOM_CHECK(residual->size(0) == p.rows, kOp, ": residual has ", residual->size(0), " rows, x ", p.rows);
  }
  Tensor out = new_output(p.rows, p.out_stride, wide);
  p.out = out.data_ptr();
  run_linear(layer, lent_threads());
  return out;
}

Tensor rotate_heads(Tensor x, std::optional<Tensor> rope, std::optional<Tensor> q_norm, std::optional<Tensor> k_norm, double norm_eps,
                    int64_t q_heads, int64_t k_heads, int64_t head_dim, std::optional<Tensor> residual) {
  static constexpr const char* kOp = "rotate_heads";
  PAGELOOM_CHECK(x.dim() == 2, kOp, ": x must have two dimensions, not ", x.dim());
  PAGELOOM_CHECK(!rope.has_value() || (rope->dim() == 2 && rope->size(1) > 0), kOp, ": rope must be bfloat16 [rows, rotary_dim]");
  const int64_t rotary_dim = rope.has_value() ? rope->size(1) : 0;
  const Heads heads{x.size(1), q_heads, k_heads, head_dim, rotary_dim, q_norm, k_norm, norm_eps, residual.has_value()};
  LinearLayer layer = checked_rotation(heads, kOp);
  LinearProblem& p = layer.problem;
  p.rows = x.size(0);
  p.x = rows_of(x, p.n, p.x_stride, kOp, "x");
  if (rope.has_value()) {
    p.rotation.rope = rows_of(*rope, rotary_dim, p.rotation.rope_stride, kOp, "rope");
    PAGELOOM_CHECK(rope->size(0) == p.rows, kOp, ": rope has ", rope->size(0), " rows, x ", p.rows);
  }
  if (residual.has_value()) {
    p.residual = rows_of(*residual, p.n, p.residual_stride, kOp, "residual");
    PAGELOOM_CHECK(residual->size(0) == p.rows, kOp, ": residual has ", residual->size(0), " rows, x ", p.rows);
  }
  Tensor out = new_output(p.rows, p.n, false);
  p.out = out.data_ptr();
  run_linear(layer, lent_threads());
  return out;
}

Tensor packed_embedding(Tensor ids, Tensor weight, int64_t n, int64_t k, int64_t format) {
  EmbeddingProblem p{};
  PAGELOOM_CHECK(on_cpu_of(ids, ScalarType::Long) && ids.dim() == 1 && ids.is_contiguous(),
                  "packed_embedding: ids must be contiguous int64 [tokens] on the CPU");
  p.ids = static_cast<const int64_t*>(ids.data_ptr());
  p.tokens = ids.size(0);
  p.n = n;
  p.k = k;
  p.panel_bytes = packed_panel_bytes(weight, n, "packed_embedding");
  const DecodeRow decode = row_decoder(checked_format(format, k, p.panel_bytes, "packed_embedding"));
  PAGELOOM_CHECK(decode != nullptr, "packed_embedding: no decoder for format ", format);
  p.weight = static_cast<const uint8_t*>(weight.data_ptr());
  Tensor out = new_output(p.tokens, k, false);
  p.out = static_cast<uint16_t*>(out.data_ptr());
  const int64_t bad = run_embedding(p, decode, lent_threads());
  PAGELOOM_CHECK(bad < 0, "packed_embedding: id ", p.ids[bad < 0 ? 0 : bad], " is outside [0, ", n, ")");
  return out;
}

int64_t supported_isas() {
  int64_t mask = 0;
  for (int64_t isa = kPortable; isa <= kWidest; ++isa) mask |= isa_available(isa) ? int64_t{1} << isa : 0;
  return mask;
}

void choose_reading(int64_t streams, bool past) {
  PAGELOOM_CHECK(streams >= 1 && streams <= kMostStreams, "choose_reading: streams is ", streams, ", not in [1, ",
                 kMostStreams, "]");
  set_reading({static_cast<int32_t>(streams), past});
}

// The namespace holds the build's key, so that two builds fit in one process.
const Operators kDefined(PAGELOOM_NAMESPACE, [](Operators& m) {
  m.define(
      "packed_linear(Tensor x, Tensor weight, int n, int format, Tensor? bias, Tensor? norm_weight, float norm_eps, "
      "Tensor? residual, int gate, bool wide, int isa) -> Tensor");
  m.define(
      "rotate_heads(Tensor x, Tensor? rope, Tensor? q_norm, Tensor? k_norm, float norm_eps, int q_heads, int k_heads, "
      "int head_dim, Tensor? residual) -> Tensor");
  m.define("packed_embedding(Tensor ids, Tensor weight, int n, int k, int format) -> Tensor");
  m.define("supported_isas() -> int");
  m.define("lend_crew(int address) -> ()");
  m.define("choose_reading(int streams, bool past) -> ()");
});

const Operators kOnCpu(PAGELOOM_NAMESPACE, "CPU", [](Operators& m) {
  m.implement<packed_linear>("packed_linear");
  m.implement<rotate_heads>("rotate_heads");
  m.implement<packed_embedding>("packed_embedding");
});

const Operators kAnywhere(PAGELOOM_NAMESPACE, "CompositeExplicitAutograd", [](Operators& m) {
  m.implement<supported_isas>("supported_isas");
  m.implement<lend_crew>("lend_crew");
  m.implement<choose_reading>("choose_reading");
});

}  // namespace
}  // namespace pageloom
