// The operator of a linear layer with adapters.
#include "adapters_binding.h"

namespace pageloom {
namespace {

Tensor adapted_linear(Tensor x, Tensor weight, int64_t n, int64_t format, std::optional<Tensor> bias,
                      std::optional<Tensor> norm_weight, double norm_eps, std::optional<Tensor> residual, int64_t gate,
                      Tensor step, Tensor a, Tensor b, Tensor ranks, Tensor ends) {
  static constexpr const char* kOp = "adapted_linear";
  PAGELOOM_CHECK(x.dim() == 2, kOp, ": x must have two dimensions, not ", x.dim());
  LinearLayer layer = checked_layer({weight, n, x.size(1), format, bias, norm_weight, norm_eps, gate, false, residual.has_value()}, kAuto, kOp);
  LinearProblem& p = layer.problem;
  p.rows = x.size(0);
  p.x = rows_of(x, p.k, p.x_stride, kOp, "x");
  if (residual.has_value()) {
    p.residual = rows_of(*residual, p.out_stride, p.residual_stride, kOp, "residual");
    PAGELOOM_CHECK(residual->size(0) == p.rows, kOp, ": residual has ", residual->size(0), " rows, x ", p.rows);
  }
  const AdapterTables tables = checked_adapters({step, a, b, ranks, ends}, p, kOp);
  PAGELOOM_CHECK(p.rows <= tables.most, kOp, ": ", p.rows, " rows, and step is of at most ", tables.most);
  Tensor out = new_output(p.rows, p.out_stride, false);
  p.out = out.data_ptr();
  run_adapted(layer, tables, lent_threads());
  return out;
}

const Operators kDefined(PAGELOOM_NAMESPACE, [](Operators& m) {
  m.define(
      "adapted_linear(Tensor x, Tensor weight, int n, int format, Tensor? bias, Tensor? norm_weight, float norm_eps, "
      "Tensor? residual, int gate, Tensor step, Tensor a, Tensor b, Tensor ranks, Tensor ends) -> Tensor");
});

const Operators kOnCpu(PAGELOOM_NAMESPACE, "CPU", [](Operators& m) { m.implement<adapted_linear>("adapted_linear"); });

}  // namespace
}  // namespace pageloom
