// What the units that see torch share: tensors checked and taken apart.
#pragma once

#include <optional>
#include <vector>

#include "lent_threads.h"
#include "linear_schedule.h"

namespace pageloom {

inline bool on_cpu_of(const Tensor& t, ScalarType dtype) { return t.on_cpu() && t.scalar_type() == dtype; }

inline const uint16_t* vector_data(const std::optional<Tensor>& t, int64_t size, const char* op, const char* name) {
  if (!t.has_value()) return nullptr;
  PAGELOOM_CHECK(on_cpu_of(*t, ScalarType::BFloat16) && t->dim() == 1 && t->size(0) == size && t->is_contiguous(),
                  op, ": ", name, " must be contiguous bfloat16 [", size, "]");
  return static_cast<const uint16_t*>(t->data_ptr());
}

// A norm's weights, bfloat16 or float32 (`wide`).
inline const void* norm_data(const std::optional<Tensor>& t, int64_t size, bool& wide, const char* op,
                             const char* name) {
  wide = t.has_value() && on_cpu_of(*t, ScalarType::Float);
  if (!wide) return vector_data(t, size, op, name);
  PAGELOOM_CHECK(t->dim() == 1 && t->size(0) == size && t->is_contiguous(), op, ": ", name,
                  " must be contiguous [", size, "]");
  return t->data_ptr();
}

inline int64_t packed_panel_bytes(const Tensor& weight, int64_t n, const char* op) {
  PAGELOOM_CHECK(n >= 0 && on_cpu_of(weight, ScalarType::Byte) && weight.dim() == 2 && weight.is_contiguous() &&
                      weight.size(0) == (n + kPanel - 1) / kPanel,
                  op, ": weight must be contiguous uint8 [", (n + kPanel - 1) / kPanel,
                  " panels, panel_bytes] for n = ", n);
  PAGELOOM_CHECK(weight.size(1) % 64 == 0 && reinterpret_cast<uintptr_t>(weight.data_ptr()) % 64 == 0, op,
                  ": panels of the weight must start at multiples of 64 bytes");
  return weight.size(1);
}

// What a panel of the format takes; 0: k does not fit the format; -1: there is no such format.
inline int64_t panel_bytes_of(Format format, int64_t k) {
  switch (format) {
    case Format::kBFloat16: return k % 2 == 0 ? k * 64 : 0;
    case Format::kInt8: return k % 4 == 0 ? k * 32 + 256 : 0;
    case Format::kQ4_0: return k % 32 == 0 ? k / 32 * (512 + 64) : 0;
    case Format::kQ4_1: return k % 32 == 0 ? k / 32 * (512 + 128) : 0;
    case Format::kQ8_0: return k % 32 == 0 ? k / 32 * (1024 + 64) : 0;
    case Format::kQ4K: return k % 256 == 0 ? k / 256 * (8 * 512 + 2 * 256 + 128) : 0;
    case Format::kQ6K: return k % 256 == 0 ? k / 256 * (12 * 512 + 512 + 64) : 0;
    case Format::kInt4Group: return k % 32 == 0 ? k / 32 * (512 + 128) : 0;
    case Format::kQ5_0: return k % 32 == 0 ? k / 32 * (512 + 128 + 64) : 0;
    case Format::kQ5_1: return k % 32 == 0 ? k / 32 * (512 + 128 + 128) : 0;
    case Format::kQ5K: return k % 256 == 0 ? k / 256 * (10 * 512 + 2 * 256 + 128) : 0;
    case Format::kQ3K: return k % 256 == 0 ? k / 256 * (6 * 512 + 512 + 64) : 0;
    case Format::kQ2K: return k % 256 == 0 ? k / 256 * (4 * 512 + 512 + 128) : 0;
    case Format::kIQ4NL: return k % 32 == 0 ? k / 32 * (512 + 64) : 0;
    case Format::kIQ4XS: return k % 256 == 0 ? k / 256 * (8 * 512 + 256 + 64) : 0;
    case Format::kFloat32: return k * 128;
    case Format::kMxfp4: return k % 64 == 0 ? k / 64 * (2 * 512 + 64) : 0;
    case Format::kNvfp4: return k % 32 == 0 ? k / 32 * (512 + 64) + 128 : 0;
    case Format::kFloat8: return k % 4 == 0 ? k * 32 + 128 : 0;
    case Format::kFloat8Block: return k % 128 == 0 ? k / 128 * (128 * 32 + 128) : 0;
    case Format::kRotate: break;
  }
  return -1;
}

inline Format checked_format(int64_t format, int64_t k, int64_t panel_bytes, const char* op) {
  const int64_t expected = panel_bytes_of(static_cast<Format>(format), k);
  PAGELOOM_CHECK(format == static_cast<int32_t>(format) && expected >= 0, op, ": unknown weight format ", format);
  PAGELOOM_CHECK(k > 0 && expected > 0 && expected == panel_bytes, op, ": panels of ", panel_bytes,
                  " bytes do not hold k = ", k, " inputs in format ", format, " (", expected, " bytes)");
  return static_cast<Format>(format);
}

inline Tensor new_output(int64_t rows, int64_t columns, bool wide) {
  return Tensor::empty({rows, columns}, wide ? ScalarType::Float : ScalarType::BFloat16);
}

// A layer's weights and what goes with them; `op`: who asks, for messages.
struct Matrix {
  Tensor weight;
  int64_t n, k, format;
  std::optional<Tensor> bias, norm_weight;
  double norm_eps;
  int64_t gate;
  bool wide, adds;
};

// The layer without its rows: those, x, residual and out are the caller's to fill in.
inline LinearLayer checked_layer(const Matrix& m, int64_t isa, const char* op) {
  LinearProblem p{};
  p.n = m.n;
  p.k = m.k;
  p.panel_bytes = packed_panel_bytes(m.weight, m.n, op);
  p.format = checked_format(m.format, m.k, p.panel_bytes, op);
  p.weight = static_cast<const uint8_t*>(m.weight.data_ptr());
  p.norm_weight = norm_data(m.norm_weight, m.k, p.norm_wide, op, "norm_weight");
  p.norm_eps = static_cast<float>(m.norm_eps);
  p.bias = vector_data(m.bias, m.n, op, "bias");
  PAGELOOM_CHECK(m.gate >= 0 && m.gate <= 2, op, ": unknown gate ", m.gate);
  p.gate = static_cast<Gate>(m.gate);
  p.wide = m.wide;
  p.reading = reading();
  PAGELOOM_CHECK(p.format != Format::kFloat32 || (m.wide && !m.adds && m.gate == 0 && !m.bias.has_value() && !m.norm_weight.has_value()),
                  op, ": float32 weights make wide outputs, without norm, bias, gate or residual");
  PAGELOOM_CHECK(m.gate == 0 || m.n % kPanel == 0, op, ": a gated layer needs n = ", m.n, " to be a multiple of 32");
  p.out_stride = m.gate != 0 ? m.n / 2 : m.n;
  PAGELOOM_CHECK(isa == kAuto || isa_available(isa), op, ": ISA ", isa, " is not available on this CPU");
  const LinearKernels* kernels = kernels_of(p.format, isa);
  PAGELOOM_CHECK(kernels != nullptr, op, ": no kernel for format ", m.format, " on ISA ", isa);
  return {p, kernels};
}

// Rotation of the heads of rows of n elements, without its rows.
struct Heads {
  int64_t n, q_heads, k_heads, head_dim, rotary_dim;  // rotary_dim: columns of the rope; 0: there is none
  std::optional<Tensor> q_norm, k_norm;
  double norm_eps;
  bool adds;
};

inline LinearLayer checked_rotation(const Heads& h, const char* op) {
  LinearProblem p{};
  p.format = Format::kRotate;
  p.n = p.k = p.out_stride = h.n;
  p.norm_eps = static_cast<float>(h.norm_eps);
  const int64_t room = h.head_dim > 0 ? h.n / h.head_dim : -1;
  PAGELOOM_CHECK(h.q_heads >= 0 && h.q_heads <= room && h.k_heads >= 0 && h.k_heads <= room - h.q_heads, op, ": ",
                  h.q_heads, " + ", h.k_heads, " heads of ", h.head_dim, " do not fit rows of ", h.n);
  PAGELOOM_CHECK(h.rotary_dim >= 0 && h.rotary_dim % 2 == 0 && h.rotary_dim <= h.head_dim, op, ": ", h.rotary_dim,
                  " elements of heads of ", h.head_dim, " cannot be rotated in pairs");
  PAGELOOM_CHECK(h.q_norm.has_value() == h.k_norm.has_value(), op, ": q_norm and k_norm must both be there, or none");
  p.rotation.q_heads = h.q_heads;
  p.rotation.k_heads = h.k_heads;
  p.rotation.head_dim = h.head_dim;
  p.rotation.rotary_dim = h.rotary_dim;
  PAGELOOM_CHECK(!h.adds || (h.rotary_dim == 0 && (h.q_heads + h.k_heads) * h.head_dim == h.n), op,
                  ": a residual is added to rows that are normed as a whole, and not rotated");
  bool k_wide = false;
  p.rotation.q_norm = norm_data(h.q_norm, h.head_dim, p.norm_wide, op, "q_norm");
  p.rotation.k_norm = norm_data(h.k_norm, h.head_dim, k_wide, op, "k_norm");
  PAGELOOM_CHECK(p.norm_wide == k_wide, op, ": q_norm and k_norm differ in dtype");
  return {p, kernels_of(Format::kRotate, kAuto)};
}

// bf16 rows [rows][columns] of a tensor; `stride` becomes the elements between two of them.
inline const uint16_t* rows_of(const Tensor& t, int64_t columns, int64_t& stride, const char* op, const char* name) {
  PAGELOOM_CHECK(on_cpu_of(t, ScalarType::BFloat16) && t.dim() == 2 && t.size(1) == columns &&
                      (t.stride(1) == 1 || columns <= 1),
                  op, ": ", name, " must be bfloat16 [rows, ", columns,
                  "] on the CPU, contiguous in its last dimension");
  stride = t.stride(0);
  return static_cast<const uint16_t*>(t.data_ptr());
}

}  // namespace pageloom
