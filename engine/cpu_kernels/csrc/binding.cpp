// The only unit that sees torch: checks tensors, picks kernels, allocates the output, and lends torch's own threads
// (at::parallel_for through the stable ABI), so that no second pool of threads lives in the process.
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 11) << 48))

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "linear_schedule.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace pageloom {
namespace {

void run_on_torch_threads(int64_t threads, void (*body)(void*), void* context) {
  struct Call {
    void (*body)(void*);
    void* context;
  } call{body, context};
  const auto trampoline = [](int64_t, int64_t, void* opaque) {
    auto* c = static_cast<Call*>(opaque);
    c->body(c->context);  // bodies share the work, so a range that covers several threads still does everything
  };
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, threads, 1, trampoline, &call));
}

Threads torch_threads() {
  uint32_t count = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&count));
  return {static_cast<int64_t>(count), run_on_torch_threads};
}

bool on_cpu_of(const Tensor& t, ScalarType dtype) {
  int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &device));
  return device == aoti_torch_device_type_cpu() && t.scalar_type() == dtype;
}

const uint16_t* vector_data(const std::optional<Tensor>& t, int64_t size, const char* name) {
  if (!t.has_value()) return nullptr;
  STD_TORCH_CHECK(on_cpu_of(*t, ScalarType::BFloat16) && t->dim() == 1 && t->size(0) == size && t->is_contiguous(),
                  "packed_linear: ", name, " must be contiguous bfloat16 [", size, "]");
  return static_cast<const uint16_t*>(t->data_ptr());
}

int64_t packed_panel_bytes(const Tensor& weight, int64_t n, const char* op) {
  STD_TORCH_CHECK(n >= 0 && on_cpu_of(weight, ScalarType::Byte) && weight.dim() == 2 && weight.is_contiguous() &&
                      weight.size(0) == (n + kPanel - 1) / kPanel,
                  op, ": weight must be contiguous uint8 [", (n + kPanel - 1) / kPanel,
                  " panels, panel_bytes] for n = ", n);
  STD_TORCH_CHECK(weight.size(1) % 64 == 0 && reinterpret_cast<uintptr_t>(weight.data_ptr()) % 64 == 0, op,
                  ": panels of the weight must start at multiples of 64 bytes");
  return weight.size(1);
}

// What a panel of the format takes; 0: k does not fit the format.
int64_t panel_bytes_of(Format format, int64_t k) {
  switch (format) {
    case Format::kBFloat16: return k % 2 == 0 ? k * 64 : 0;
    case Format::kInt8: return k % 4 == 0 ? k * 32 + 256 : 0;
    case Format::kQ4_0: return k % 32 == 0 ? k / 32 * (512 + 64) : 0;
    case Format::kQ4_1: return k % 32 == 0 ? k / 32 * (512 + 128) : 0;
    case Format::kQ8_0: return k % 32 == 0 ? k / 32 * (1024 + 64) : 0;
    case Format::kQ4K: return k % 256 == 0 ? k / 256 * (8 * 512 + 2 * 256 + 128) : 0;
    case Format::kQ6K: return k % 256 == 0 ? k / 256 * (12 * 512 + 512 + 64) : 0;
  }
  return 0;
}

Format checked_format(int64_t format, int64_t k, int64_t panel_bytes, const char* op) {
  STD_TORCH_CHECK(format >= 0 && format <= 6, op, ": unknown weight format ", format);
  const int64_t expected = panel_bytes_of(static_cast<Format>(format), k);
  STD_TORCH_CHECK(k > 0 && expected > 0 && expected == panel_bytes, op, ": panels of ", panel_bytes,
                  " bytes do not hold k = ", k, " inputs in format ", format, " (", expected, " bytes)");
  return static_cast<Format>(format);
}

Tensor new_output(int64_t rows, int64_t columns, bool wide) {
  const int64_t sizes[2] = {rows, columns}, strides[2] = {columns, 1};
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, sizes, strides,
                                                  wide ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16(),
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor packed_linear(Tensor x, Tensor weight, int64_t n, int64_t format, std::optional<Tensor> bias,
                     std::optional<Tensor> norm_weight, double norm_eps, std::optional<Tensor> residual, bool gated,
                     bool wide, int64_t isa) {
  LinearProblem p{};
  STD_TORCH_CHECK(on_cpu_of(x, ScalarType::BFloat16) && x.dim() == 2 && (x.stride(1) == 1 || x.size(1) == 1),
                  "packed_linear: x must be bfloat16 [rows, k] on the CPU, contiguous in its last dimension");
  p.rows = x.size(0);
  p.n = n;
  p.k = x.size(1);
  p.panel_bytes = packed_panel_bytes(weight, n, "packed_linear");
  p.format = checked_format(format, p.k, p.panel_bytes, "packed_linear");
  p.weight = static_cast<const uint8_t*>(weight.data_ptr());
  p.x = static_cast<const uint16_t*>(x.data_ptr());
  p.x_stride = x.stride(0);
  p.norm_weight = vector_data(norm_weight, p.k, "norm_weight");
  p.norm_eps = static_cast<float>(norm_eps);
  p.bias = vector_data(bias, n, "bias");
  p.gated = gated;
  p.wide = wide;
  STD_TORCH_CHECK(!gated || n % kPanel == 0, "packed_linear: a gated layer needs n = ", n, " to be a multiple of 32");
  p.out_stride = gated ? n / 2 : n;
  if (residual.has_value()) {
    STD_TORCH_CHECK(on_cpu_of(*residual, ScalarType::BFloat16) && residual->dim() == 2 &&
                        residual->size(0) == p.rows && residual->size(1) == p.out_stride &&
                        (residual->stride(1) == 1 || p.out_stride <= 1),
                    "packed_linear: residual must be bfloat16 [", p.rows, ", ", p.out_stride,
                    "], contiguous in its last dimension");
    p.residual = static_cast<const uint16_t*>(residual->data_ptr());
    p.residual_stride = residual->stride(0);
  }
  STD_TORCH_CHECK(isa == kAuto || isa_available(isa), "packed_linear: ISA ", isa, " is not available on this CPU");
  const LinearKernels* kernels = kernels_of(p.format, isa);
  STD_TORCH_CHECK(kernels != nullptr, "packed_linear: no kernel for format ", format, " on ISA ", isa);
  Tensor out = new_output(p.rows, p.out_stride, wide);
  p.out = out.data_ptr();
  run_linear(p, *kernels, torch_threads());
  return out;
}

Tensor packed_embedding(Tensor ids, Tensor weight, int64_t n, int64_t k, int64_t format) {
  EmbeddingProblem p{};
  STD_TORCH_CHECK(on_cpu_of(ids, ScalarType::Long) && ids.dim() == 1 && ids.is_contiguous(),
                  "packed_embedding: ids must be contiguous int64 [tokens] on the CPU");
  p.ids = static_cast<const int64_t*>(ids.data_ptr());
  p.tokens = ids.size(0);
  p.n = n;
  p.k = k;
  p.panel_bytes = packed_panel_bytes(weight, n, "packed_embedding");
  const DecodeRow decode = row_decoder(checked_format(format, k, p.panel_bytes, "packed_embedding"));
  STD_TORCH_CHECK(decode != nullptr, "packed_embedding: no decoder for format ", format);
  p.weight = static_cast<const uint8_t*>(weight.data_ptr());
  Tensor out = new_output(p.tokens, k, false);
  p.out = static_cast<uint16_t*>(out.data_ptr());
  const int64_t bad = run_embedding(p, decode, torch_threads());
  STD_TORCH_CHECK(bad < 0, "packed_embedding: id ", p.ids[bad < 0 ? 0 : bad], " is outside [0, ", n, ")");
  return out;
}

int64_t supported_isas() {
  int64_t mask = 0;
  for (int64_t isa = kPortable; isa <= kWidest; ++isa) mask |= isa_available(isa) ? int64_t{1} << isa : 0;
  return mask;
}

}  // namespace
}  // namespace pageloom

// The namespace holds the build's key, so that two builds fit in one process.
STABLE_TORCH_LIBRARY_FRAGMENT(PAGELOOM_OPS, m) {
  m.def(
      "packed_linear(Tensor x, Tensor weight, int n, int format, Tensor? bias, Tensor? norm_weight, float norm_eps, "
      "Tensor? residual, bool gated, bool wide, int isa) -> Tensor");
  m.def("packed_embedding(Tensor ids, Tensor weight, int n, int k, int format) -> Tensor");
  m.def("supported_isas() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(PAGELOOM_OPS, CPU, m) {
  m.impl("packed_linear", TORCH_BOX(&pageloom::packed_linear));
  m.impl("packed_embedding", TORCH_BOX(&pageloom::packed_embedding));
}

STABLE_TORCH_LIBRARY_IMPL(PAGELOOM_OPS, CompositeExplicitAutograd, m) {
  m.impl("supported_isas", TORCH_BOX(&pageloom::supported_isas));
}
