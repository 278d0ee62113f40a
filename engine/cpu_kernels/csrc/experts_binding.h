// What the units that see torch share of experts: tensors checked and taken apart.
#pragma once

#include <cmath>

#include "binding.h"
#include "experts_schedule.h"

namespace pageloom {

// One of the two matrices of all experts.
struct Stack {
  const Tensor& weight;
  const std::optional<Tensor>& bias;
  int64_t n, k, format;
  const char* name;
};

inline LinearProblem checked_stack(const Stack& s, int64_t experts, const char* op) {
  const int64_t panels = (s.n + kPanel - 1) / kPanel;
  PAGELOOM_CHECK(on_cpu_of(s.weight, ScalarType::Byte) && s.weight.dim() == 3 && s.weight.is_contiguous() &&
                     s.weight.size(0) == experts && s.weight.size(1) == panels,
                 op, ": ", s.name, " must be contiguous uint8 [", experts, " experts, ", panels,
                 " panels, panel_bytes] for n = ", s.n);
  const int64_t panel_bytes = s.weight.size(2);
  PAGELOOM_CHECK(panel_bytes % 64 == 0 && reinterpret_cast<uintptr_t>(s.weight.data_ptr()) % 64 == 0, op, ": panels of ",
                 s.name, " must start at multiples of 64 bytes");
  LinearProblem p{};
  p.n = s.n;
  p.k = s.k;
  p.panel_bytes = panel_bytes;
  p.format = checked_format(s.format, s.k, panel_bytes, op);
  PAGELOOM_CHECK(p.format != Format::kFloat32, op, ": ", s.name, " cannot be float32");
  p.weight = static_cast<const uint8_t*>(s.weight.data_ptr());
  p.reading = reading();
  if (!s.bias.has_value()) return p;
  PAGELOOM_CHECK(on_cpu_of(*s.bias, ScalarType::BFloat16) && s.bias->dim() == 2 && s.bias->is_contiguous() &&
                     s.bias->size(0) == experts && s.bias->size(1) == s.n,
                 op, ": the bias of ", s.name, " must be contiguous bfloat16 [", experts, ", ", s.n, "]");
  p.bias = static_cast<const uint16_t*>(s.bias->data_ptr());
  return p;
}

inline void check_gate(int64_t gate, double limit, double alpha, const char* op) {
  PAGELOOM_CHECK(gate >= 1 && gate <= 3, op, ": unknown gate ", gate);
  PAGELOOM_CHECK(gate != 3 || (limit > 0 && std::isfinite(alpha)), op, ": a clamped gate needs a limit above 0 and a finite alpha, not ",
                 limit, " and ", alpha);
}

inline const LinearKernels* checked_expert_kernels(const LinearProblem& p, int64_t isa, const char* op) {
  PAGELOOM_CHECK(isa == kAuto || isa_available(isa), op, ": ISA ", isa, " is not available on this CPU");
  const LinearKernels* const kernels = expert_kernels_of(p.format, isa);
  PAGELOOM_CHECK(kernels != nullptr, op, ": no kernel for format ", static_cast<int64_t>(p.format), " on ISA ", isa);
  return kernels;
}

// The experts of a layer, and what is done with them.
struct ExpertMatrices {
  Tensor gate_up, down;
  int64_t n_inner, gate_up_format, down_format;
  std::optional<Tensor> gate_up_bias, down_bias, places;
  int64_t gate;
  double limit, alpha;
};

inline void check_places(const std::optional<Tensor>& places, ExpertsProblem& p, const char* op) {
  p.known = p.experts;
  if (!places.has_value()) return;
  PAGELOOM_CHECK(on_cpu_of(*places, ScalarType::Int) && places->dim() == 1 && places->is_contiguous(), op,
                 ": places must be contiguous int32 [experts that a router knows]");
  p.places = static_cast<const int32_t*>(places->data_ptr());
  p.known = places->numel();
  for (int64_t id = 0; id < p.known; ++id)
    PAGELOOM_CHECK(p.places[id] >= -1 && p.places[id] < p.experts, op, ": place ", p.places[id], " of expert ", id,
                   " is outside [-1, ", p.experts, ")");
}

// The problem without its tokens: those, ids, weights, x, residual and out are the caller's to fill in.
inline ExpertsProblem checked_experts(const ExpertMatrices& m, int64_t hidden, int64_t top_k, int64_t isa, const char* op) {
  PAGELOOM_CHECK(m.gate_up.dim() == 3 && m.gate_up.size(0) >= 1, op, ": gate_up must be [experts, panels, panel_bytes]");
  PAGELOOM_CHECK(m.n_inner > 0 && m.n_inner % (kPanel / 2) == 0, op, ": n_inner = ", m.n_inner, " must be a multiple of 16");
  PAGELOOM_CHECK(top_k >= 1, op, ": ids must hold a choice for each token");
  check_gate(m.gate, m.limit, m.alpha, op);
  ExpertsProblem p{};
  p.experts = m.gate_up.size(0);
  p.top_k = top_k;
  check_places(m.places, p, op);
  p.gate_up = checked_stack({m.gate_up, m.gate_up_bias, 2 * m.n_inner, hidden, m.gate_up_format, "gate_up"}, p.experts, op);
  p.gate_up.gate = static_cast<Gate>(m.gate);
  p.gate_up.gate_limit = static_cast<float>(m.limit);
  p.gate_up.gate_alpha = static_cast<float>(m.alpha);
  p.down = checked_stack({m.down, m.down_bias, hidden, m.n_inner, m.down_format, "down"}, p.experts, op);
  p.gate_up_kernels = checked_expert_kernels(p.gate_up, isa, op);
  p.down_kernels = checked_expert_kernels(p.down, isa, op);
  p.combine = combine_rows_of(isa);
  return p;
}

// How logits become choices.
struct Routing {
  int64_t kind, top_k;
  bool normalise;
  std::optional<Tensor> bias;
  int64_t groups, top_groups;
  double scale;
};

// The problem without its tokens: those, logits, ids and weights are the caller's to fill in.
inline RouteProblem checked_route(const Routing& r, int64_t experts, const char* op) {
  RouteProblem p{};
  p.experts = experts;
  PAGELOOM_CHECK(p.experts < INT32_MAX, op, ": too many experts: ", p.experts);
  PAGELOOM_CHECK(r.kind >= 0 && r.kind <= 2, op, ": unknown kind ", r.kind);
  p.kind = static_cast<RouteKind>(r.kind);
  PAGELOOM_CHECK(r.groups >= 1 && p.experts % r.groups == 0 && r.top_groups >= 1 && r.top_groups <= r.groups, op, ": ", p.experts,
                 " experts do not fall into ", r.groups, " groups of which ", r.top_groups, " are chosen");
  PAGELOOM_CHECK(r.top_k >= 1 && r.top_k <= p.experts / r.groups * r.top_groups, op, ": top_k = ", r.top_k, " of ",
                 p.experts / r.groups * r.top_groups, " experts");
  PAGELOOM_CHECK(p.kind == RouteKind::kSigmoid || r.groups == 1, op, ": groups go with sigmoid scores only");
  PAGELOOM_CHECK(p.kind != RouteKind::kChosenSoftmax || !r.bias.has_value(), op, ": a bias goes with scores of all experts");
  if (r.bias.has_value()) {
    PAGELOOM_CHECK(on_cpu_of(*r.bias, ScalarType::Float) && r.bias->dim() == 1 && r.bias->size(0) == p.experts && r.bias->is_contiguous(),
                   op, ": bias must be contiguous float32 [", p.experts, "]");
    p.bias = static_cast<const float*>(r.bias->data_ptr());
  }
  p.top_k = r.top_k;
  p.normalise = r.normalise;
  p.groups = r.groups, p.top_groups = r.top_groups;
  p.scale = static_cast<float>(r.scale);
  return p;
}

}  // namespace pageloom
