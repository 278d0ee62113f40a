// Operators of a mixture of experts.
#include "experts_binding.h"

namespace pageloom {
namespace {

constexpr const char* kExperts = "packed_experts";
constexpr const char* kCombine = "combine_experts";
constexpr const char* kRoute = "route";

// Contiguous [tokens, columns] of a dtype on the CPU; columns < 0: any.
void check_rows(const Tensor& t, ScalarType dtype, int64_t tokens, int64_t columns, const char* op, const char* what) {
  PAGELOOM_CHECK(on_cpu_of(t, dtype) && t.dim() == 2 && t.is_contiguous() && t.size(0) == tokens &&
                     (columns < 0 || t.size(1) == columns),
                 op, ": ", what, " on the CPU, for ", tokens, " tokens");
}

[[noreturn]] void refuse_ids(const ExpertsProblem& p) {
  for (int64_t i = 0; i < p.tokens * p.top_k; ++i)
    PAGELOOM_CHECK(p.ids[i] >= 0 && p.ids[i] < p.known, kExperts, ": id ", p.ids[i], " of token ", i / p.top_k,
                   " is outside [0, ", p.known, ")");
  refuse(kExperts, ": ids changed during the call");
}

Tensor packed_experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, int64_t n_inner,
                      int64_t gate_up_format, int64_t down_format, std::optional<Tensor> gate_up_bias,
                      std::optional<Tensor> down_bias, std::optional<Tensor> places, std::optional<Tensor> residual,
                      int64_t gate, double limit, double alpha, int64_t isa) {
  PAGELOOM_CHECK(x.dim() == 2, kExperts, ": x must have two dimensions, not ", x.dim());
  const int64_t tokens = x.size(0), hidden = x.size(1);
  check_rows(ids, ScalarType::Int, tokens, -1, kExperts, "ids must be contiguous int32 [tokens, top_k]");
  const int64_t top_k = ids.size(1);
  check_rows(weights, ScalarType::Float, tokens, top_k, kExperts, "weights must be contiguous float32 [tokens, top_k], as ids");
  const ExpertMatrices matrices{gate_up, down, n_inner, gate_up_format, down_format, gate_up_bias, down_bias, places, gate, limit, alpha};
  ExpertsProblem p = checked_experts(matrices, hidden, top_k, isa, kExperts);
  p.tokens = tokens;
  p.ids = static_cast<const int32_t*>(ids.data_ptr());
  p.weights = static_cast<const float*>(weights.data_ptr());
  p.gate_up.x = rows_of(x, hidden, p.gate_up.x_stride, kExperts, "x");
  if (residual.has_value()) {
    p.residual = rows_of(*residual, hidden, p.residual_stride, kExperts, "residual");
    PAGELOOM_CHECK(residual->size(0) == p.tokens, kExperts, ": residual has ", residual->size(0), " rows, x ", p.tokens);
  }
  Tensor out = new_output(p.tokens, hidden, false);
  p.out = static_cast<uint16_t*>(out.data_ptr());
  p.out_stride = hidden;
  if (run_experts(p, lent_threads()) != nullptr) refuse_ids(p);
  return out;
}

Tensor combine_experts(Tensor rows, Tensor positions, Tensor weights, std::optional<Tensor> residual, int64_t isa) {
  PAGELOOM_CHECK(rows.dim() == 2, kCombine, ": rows must have two dimensions, not ", rows.dim());
  const int64_t count = rows.size(0), hidden = rows.size(1), tokens = positions.size(0);
  check_rows(rows, ScalarType::BFloat16, count, -1, kCombine, "rows must be contiguous bfloat16");
  check_rows(positions, ScalarType::Int, tokens, -1, kCombine, "positions must be contiguous int32 [tokens, top_k]");
  CombineProblem p{};
  p.top_k = positions.size(1);
  check_rows(weights, ScalarType::Float, tokens, p.top_k, kCombine, "weights must be contiguous float32 [tokens, top_k]");
  p.columns = p.row_stride = p.out_stride = hidden;
  p.positions = static_cast<const int32_t*>(positions.data_ptr());
  for (int64_t i = 0; i < tokens * p.top_k; ++i)
    PAGELOOM_CHECK(p.positions[i] >= -1 && p.positions[i] < count, kCombine, ": position ", p.positions[i],
                   " is outside [-1, ", count, ")");
  p.weights = static_cast<const float*>(weights.data_ptr());
  p.rows = static_cast<const uint16_t*>(rows.data_ptr());
  if (residual.has_value()) {
    p.residual = rows_of(*residual, hidden, p.residual_stride, kCombine, "residual");
    PAGELOOM_CHECK(residual->size(0) == tokens, kCombine, ": residual has ", residual->size(0), " rows, positions ", tokens);
  }
  Tensor out = new_output(tokens, hidden, false);
  p.out = static_cast<uint16_t*>(out.data_ptr());
  if (tokens > 0) run_combine(p, tokens, combine_rows_of(isa), lent_threads());
  return out;
}

std::tuple<Tensor, Tensor> route(Tensor logits, int64_t kind, int64_t top_k, bool normalise, std::optional<Tensor> bias,
                                 int64_t groups, int64_t top_groups, double scale) {
  PAGELOOM_CHECK(on_cpu_of(logits, ScalarType::Float) && logits.dim() == 2 && (logits.stride(1) == 1 || logits.size(1) <= 1),
                 kRoute, ": logits must be float32 [tokens, experts] on the CPU, contiguous in its last dimension");
  RouteProblem p = checked_route({kind, top_k, normalise, bias, groups, top_groups, scale}, logits.size(1), kRoute);
  p.tokens = logits.size(0);
  p.logits = static_cast<const float*>(logits.data_ptr());
  p.logits_stride = logits.stride(0);
  Tensor ids = Tensor::empty({p.tokens, top_k}, ScalarType::Int), weights = Tensor::empty({p.tokens, top_k}, ScalarType::Float);
  p.ids = static_cast<int32_t*>(ids.data_ptr());
  p.weights = static_cast<float*>(weights.data_ptr());
  run_route(p, lent_threads());
  return {ids, weights};
}

const Operators kDefined(PAGELOOM_NAMESPACE, [](Operators& m) {
  m.define(
      "packed_experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, int n_inner, "
      "int gate_up_format, int down_format, Tensor? gate_up_bias, Tensor? down_bias, Tensor? places, Tensor? residual, "
      "int gate, float limit, float alpha, int isa) -> Tensor");
  m.define("combine_experts(Tensor rows, Tensor positions, Tensor weights, Tensor? residual, int isa) -> Tensor");
  m.define(
      "route(Tensor logits, int kind, int top_k, bool normalise, Tensor? bias, int groups, int top_groups, float scale) "
      "-> (Tensor, Tensor)");
});

const Operators kOnCpu(PAGELOOM_NAMESPACE, "CPU", [](Operators& m) {
  m.implement<packed_experts>("packed_experts");
  m.implement<combine_experts>("combine_experts");
  m.implement<route>("route");
});

}  // namespace
}  // namespace pageloom
