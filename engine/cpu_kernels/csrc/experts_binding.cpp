// Operators of a mixture of experts.
#include <cmath>

#include "binding.h"
#include "experts_schedule.h"

namespace pageloom {
namespace {

constexpr const char* kExperts = "packed_experts";
constexpr const char* kRoute = "route";

// One of the two matrices of all experts.
struct Stack {
  const Tensor& weight;
  const std::optional<Tensor>& bias;
  int64_t n, k, format;
  const char* name;
};

LinearProblem checked_stack(const Stack& s, int64_t experts) {
  const int64_t panels = (s.n + kPanel - 1) / kPanel;
  PAGELOOM_CHECK(on_cpu_of(s.weight, ScalarType::Byte) && s.weight.dim() == 3 && s.weight.is_contiguous() &&
                     s.weight.size(0) == experts && s.weight.size(1) == panels,
                 kExperts, ": ", s.name, " must be contiguous uint8 [", experts, " experts, ", panels,
                 " panels, panel_bytes] for n = ", s.n);
  const int64_t panel_bytes = s.weight.size(2);
  PAGELOOM_CHECK(panel_bytes % 64 == 0 && reinterpret_cast<uintptr_t>(s.weight.data_ptr()) % 64 == 0, kExperts, ": panels of ",
                 s.name, " must start at multiples of 64 bytes");
  LinearProblem p{};
  p.n = s.n;
  p.k = s.k;
  p.panel_bytes = panel_bytes;
  p.format = checked_format(s.format, s.k, panel_bytes, kExperts);
  p.weight = static_cast<const uint8_t*>(s.weight.data_ptr());
  p.streams = streams();
  if (!s.bias.has_value()) return p;
  PAGELOOM_CHECK(on_cpu_of(*s.bias, ScalarType::BFloat16) && s.bias->dim() == 2 && s.bias->is_contiguous() &&
                     s.bias->size(0) == experts && s.bias->size(1) == s.n,
                 kExperts, ": the bias of ", s.name, " must be contiguous bfloat16 [", experts, ", ", s.n, "]");
  p.bias = static_cast<const uint16_t*>(s.bias->data_ptr());
  return p;
}

// Contiguous [tokens, columns] of a dtype on the CPU; columns < 0: any.
void check_rows(const Tensor& t, ScalarType dtype, int64_t tokens, int64_t columns, const char* op, const char* what) {
  PAGELOOM_CHECK(on_cpu_of(t, dtype) && t.dim() == 2 && t.is_contiguous() && t.size(0) == tokens &&
                     (columns < 0 || t.size(1) == columns),
                 op, ": ", what, " on the CPU, for ", tokens, " tokens");
}

void check_gate(int64_t gate, double limit, double alpha) {
  PAGELOOM_CHECK(gate >= 1 && gate <= 3, kExperts, ": unknown gate ", gate);
  PAGELOOM_CHECK(gate != 3 || (limit > 0 && std::isfinite(alpha)), kExperts, ": a clamped gate needs a limit above 0 and a finite alpha, not ",
                 limit, " and ", alpha);
}

const LinearKernels* checked_kernels(const LinearProblem& p, int64_t isa) {
  PAGELOOM_CHECK(isa == kAuto || isa_available(isa), kExperts, ": ISA ", isa, " is not available on this CPU");
  const LinearKernels* const kernels = expert_kernels_of(p.format, isa);
  PAGELOOM_CHECK(kernels != nullptr, kExperts, ": no kernel for format ", static_cast<int64_t>(p.format), " on ISA ", isa);
  return kernels;
}

[[noreturn]] void refuse_ids(const ExpertsProblem& p) {
  for (int64_t i = 0; i < p.tokens * p.top_k; ++i)
    PAGELOOM_CHECK(p.ids[i] >= 0 && p.ids[i] < p.experts, kExperts, ": id ", p.ids[i], " of token ", i / p.top_k,
                   " is outside [0, ", p.experts, ")");
  refuse(kExperts, ": ids changed during the call");
}

Tensor packed_experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, int64_t n_inner,
                      int64_t gate_up_format, int64_t down_format, std::optional<Tensor> gate_up_bias,
                      std::optional<Tensor> down_bias, std::optional<Tensor> residual, int64_t gate, double limit,
                      double alpha, int64_t isa) {
  PAGELOOM_CHECK(x.dim() == 2, kExperts, ": x must have two dimensions, not ", x.dim());
  PAGELOOM_CHECK(gate_up.dim() == 3 && gate_up.size(0) >= 1, kExperts, ": gate_up must be [experts, panels, panel_bytes]");
  PAGELOOM_CHECK(n_inner > 0 && n_inner % (kPanel / 2) == 0, kExperts, ": n_inner = ", n_inner, " must be a multiple of 16");
  check_gate(gate, limit, alpha);
  ExpertsProblem p{};
  const int64_t hidden = x.size(1);
  p.tokens = x.size(0);
  p.experts = gate_up.size(0);
  check_rows(ids, ScalarType::Int, p.tokens, -1, kExperts, "ids must be contiguous int32 [tokens, top_k]");
  p.top_k = ids.size(1);
  PAGELOOM_CHECK(p.top_k >= 1, kExperts, ": ids must hold a choice for each token");
  check_rows(weights, ScalarType::Float, p.tokens, p.top_k, kExperts, "weights must be contiguous float32 [tokens, top_k], as ids");
  p.ids = static_cast<const int32_t*>(ids.data_ptr());
  p.weights = static_cast<const float*>(weights.data_ptr());
  p.gate_up = checked_stack({gate_up, gate_up_bias, 2 * n_inner, hidden, gate_up_format, "gate_up"}, p.experts);
  p.gate_up.gate = static_cast<Gate>(gate);
  p.gate_up.gate_limit = static_cast<float>(limit);
  p.gate_up.gate_alpha = static_cast<float>(alpha);
  p.gate_up.x = rows_of(x, hidden, p.gate_up.x_stride, kExperts, "x");
  p.down = checked_stack({down, down_bias, hidden, n_inner, down_format, "down"}, p.experts);
  p.gate_up_kernels = checked_kernels(p.gate_up, isa);
  p.down_kernels = checked_kernels(p.down, isa);
  p.combine = combine_rows_of(isa);
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

std::tuple<Tensor, Tensor> route(Tensor logits, int64_t kind, int64_t top_k, bool normalise, std::optional<Tensor> bias,
                                 int64_t groups, int64_t top_groups, double scale) {
  PAGELOOM_CHECK(on_cpu_of(logits, ScalarType::Float) && logits.dim() == 2 && (logits.stride(1) == 1 || logits.size(1) <= 1),
                 kRoute, ": logits must be float32 [tokens, experts] on the CPU, contiguous in its last dimension");
  RouteProblem p{};
  p.tokens = logits.size(0);
  p.experts = logits.size(1);
  PAGELOOM_CHECK(p.experts < INT32_MAX, kRoute, ": too many experts: ", p.experts);
  PAGELOOM_CHECK(kind >= 0 && kind <= 2, kRoute, ": unknown kind ", kind);
  p.kind = static_cast<RouteKind>(kind);
  PAGELOOM_CHECK(groups >= 1 && p.experts % groups == 0 && top_groups >= 1 && top_groups <= groups, kRoute, ": ", p.experts,
                 " experts do not fall into ", groups, " groups of which ", top_groups, " are chosen");
  PAGELOOM_CHECK(top_k >= 1 && top_k <= p.experts / groups * top_groups, kRoute, ": top_k = ", top_k, " of ",
                 p.experts / groups * top_groups, " experts");
  PAGELOOM_CHECK(p.kind == RouteKind::kSigmoid || (!bias.has_value() && groups == 1), kRoute,
                 ": a bias and groups go with sigmoid scores only");
  if (bias.has_value()) {
    PAGELOOM_CHECK(on_cpu_of(*bias, ScalarType::Float) && bias->dim() == 1 && bias->size(0) == p.experts && bias->is_contiguous(),
                   kRoute, ": bias must be contiguous float32 [", p.experts, "]");
    p.bias = static_cast<const float*>(bias->data_ptr());
  }
  p.top_k = top_k;
  p.normalise = normalise;
  p.groups = groups, p.top_groups = top_groups;
  p.scale = static_cast<float>(scale);
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
      "int gate_up_format, int down_format, Tensor? gate_up_bias, Tensor? down_bias, Tensor? residual, int gate, "
      "float limit, float alpha, int isa) -> Tensor");
  m.define(
      "route(Tensor logits, int kind, int top_k, bool normalise, Tensor? bias, int groups, int top_groups, float scale) "
      "-> (Tensor, Tensor)");
});

const Operators kOnCpu(PAGELOOM_NAMESPACE, "CPU", [](Operators& m) {
  m.implement<packed_experts>("packed_experts");
  m.implement<route>("route");
});

}  // namespace
}  // namespace pageloom
