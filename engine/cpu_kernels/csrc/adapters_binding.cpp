// The operators of linear layers with adapters, and of writing adapters into them.
#include "adapters_binding.h"

#include <vector>

#include "adapters_write.h"

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

struct WrittenPlace {
  int64_t slot, part, start;
};

GivenFactor factor_of(const Tensor& t, const char* op, const char* name) {
  PAGELOOM_CHECK(on_cpu_of(t, ScalarType::BFloat16) && t.dim() == 2, op, ": ", name, " must be bfloat16 matrices");
  return {static_cast<const uint16_t*>(t.data_ptr()), t.size(0), t.size(1), t.stride(0), t.stride(1)};
}

// One part of a layer.
void write_part(const Tensor& a, const Tensor& b, const Tensor& ranks, const Tensor& given_a, const Tensor& given_b,
                const WrittenPlace& place, float scale) {
  static constexpr const char* kOp = "write_factors";
  const auto whole = [&](const Tensor& each, ScalarType dtype, int64_t dim) {
    return on_cpu_of(each, dtype) && each.dim() == dim && each.is_contiguous();
  };
  PAGELOOM_CHECK(whole(a, ScalarType::BFloat16, 4) && whole(b, ScalarType::BFloat16, 4) && whole(ranks, ScalarType::Int, 2), kOp,
                 ": a and b must be bfloat16 of four dimensions, ranks int32 of two");
  const int64_t slots = ranks.size(0), parts = ranks.size(1), max_rank = a.size(2), blocks = b.size(1);
  PAGELOOM_CHECK(a.size(0) == slots && a.size(1) == parts && b.size(0) == slots && b.size(2) == max_rank && b.size(3) == kAdapterBlock,
                 kOp, ": a, b and ranks are not of one layer");
  const GivenFactor low = factor_of(given_a, kOp, "given_a"), high = factor_of(given_b, kOp, "given_b");
  const int64_t rank = low.rows;
  PAGELOOM_CHECK(place.slot >= 0 && place.slot < slots && place.part >= 0 && place.part < parts, kOp, ": slot ", place.slot,
                 ", part ", place.part, " of ", slots, ", ", parts);
  PAGELOOM_CHECK(rank <= max_rank && high.columns == rank && low.columns == a.size(3) && place.start >= 0 && high.rows >= 0 &&
                     place.start + high.rows <= blocks * kAdapterBlock,
                 kOp, ": factors [", rank, ", ", low.columns, "] and [", high.rows, ", ", high.columns, "] from output ", place.start,
                 " on do not fit ranks up to ", max_rank, ", ", a.size(3), " inputs, ", blocks * kAdapterBlock, " outputs");
  put_blocks(static_cast<uint16_t*>(b.data_ptr()) + place.slot * blocks * max_rank * kAdapterBlock, max_rank, place.start, high, scale);
  put_rows(static_cast<uint16_t*>(a.data_ptr()) + (place.slot * parts + place.part) * max_rank * low.columns, low);
  static_cast<int32_t*>(ranks.data_ptr())[place.slot * parts + place.part] = static_cast<int32_t>(rank);
}

void write_factors(std::vector<Tensor> a, std::vector<Tensor> b, std::vector<Tensor> ranks, std::vector<Tensor> given_a,
                   std::vector<Tensor> given_b, Tensor places, Tensor scales) {
  static constexpr const char* kOp = "write_factors";
  const size_t count = a.size();
  PAGELOOM_CHECK(b.size() == count && ranks.size() == count && given_a.size() == count && given_b.size() == count, kOp,
                 ": lists are of different lengths");
  const int64_t rows = static_cast<int64_t>(count);
  PAGELOOM_CHECK(on_cpu_of(places, ScalarType::Long) && places.dim() == 2 && places.size(0) == rows && places.size(1) == 3 &&
                     places.is_contiguous() && on_cpu_of(scales, ScalarType::Float) && scales.dim() == 1 &&
                     scales.size(0) == rows && scales.is_contiguous(),
                 kOp, ": places must be int64 [", rows, ", 3], scales float32 [", rows, "]");
  const auto* const place = static_cast<const WrittenPlace*>(places.data_ptr());
  const auto* const scale = static_cast<const float*>(scales.data_ptr());
  for (size_t i = 0; i < count; ++i) write_part(a[i], b[i], ranks[i], given_a[i], given_b[i], place[i], scale[i]);
}

const Operators kDefined(PAGELOOM_NAMESPACE, [](Operators& m) {
  m.define(
      "adapted_linear(Tensor x, Tensor weight, int n, int format, Tensor? bias, Tensor? norm_weight, float norm_eps, "
      "Tensor? residual, int gate, Tensor step, Tensor a, Tensor b, Tensor ranks, Tensor ends) -> Tensor");
  m.define(
      "write_factors(Tensor(a!)[] a, Tensor(b!)[] b, Tensor(c!)[] ranks, Tensor[] given_a, Tensor[] given_b, Tensor places, "
      "Tensor scales) -> ()");
});

const Operators kOnCpu(PAGELOOM_NAMESPACE, "CPU", [](Operators& m) {
  m.implement<adapted_linear>("adapted_linear");
  m.implement<write_factors>("write_factors");
});

}  // namespace
}  // namespace pageloom
