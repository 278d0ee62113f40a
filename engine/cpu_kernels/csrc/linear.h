// What crosses between the scheduler of a linear layer (linear_schedule.cpp) and its kernels, compiled once per ISA.
// Plain data only: a unit that is compiled for AVX-512 must not emit any shared inline function (std::vector,
// std::max), because the linker may keep that copy for every caller, and an older CPU would meet an illegal instruction.
//
// Weights are packed in panels of 32 outputs (the last one padded with zeros), one after another, each `panel_bytes`
// long (a multiple of 64) and holding everything that its outputs need, in the order in which a kernel streams it:
//
//   kBFloat16  bf16 [k / 2][32 outputs][2]: what `vdpbf16ps` and AMX (a tile of B: 16 rows, 128 bytes apart) multiply.
//   kInt8      int8 [k / 4][32][4], then float scale[32], then int32 sum_of_weights[32]. w = H scale * q, -127 <= q <= 127,
//              where H turns every whole 64 inputs of an output's row (hadamard.h).
//   the group formats, k in groups of 32 (or 256 for the K-quants), for each group, one after another:
//   kQ4_0      nibbles [4][32][4] (512 bytes): byte [i][o][j] = q[4 i + j] | q[16 + 4 i + j] << 4; then half d[32].
//              w = d * (q - 8)
//   kQ4_1      the same nibbles; half d[32]; half m[32].   w = d * q + m   (also what --quantization int4 makes)
//   kQ8_0      int8 [8][32][4]; half d[32].   w = d * q
//   kInt4Group as kQ4_1, with a zero point in the place of the minimum: half d[32]; half z[32], whole numbers from 0 to 16.
//              w = d * (q - z), exact in float32   (GPTQ, AWQ, compressed-tensors)
//   kQ4K       groups of 256: eight times nibbles [4][32][4]; uint8 sc[8][32]; uint8 mn[8][32]; half d[32]; half dmin[32].
//              w = d * sc * q - dmin * mn
//   kQ6K       groups of 256: low nibbles, eight times [4][32][4] as above; high bits, four times [4][32][4] for each two
//              of those eight (see group_formats.h); int8 sc[16][32]; half d[32].   w = d * sc * (q - 32)
//   kQ5_0      nibbles; the fifth bits [32][4] (128 bytes, see group_formats.h); half d[32].   w = d * (q - 16)
//   kQ5_1      nibbles; fifth bits; half d[32]; half m[32].   w = d * q + m
//   kQ5K       as kQ4K, with the fifth bits of all 256 inputs, eight times [32][4], behind the nibbles.
//   kQ3K       groups of 256: low bits, four times [4][32][4] as the high ones of kQ6K; third bits, eight times [32][4];
//              int8 sc[16][32]; half d[32].   w = d * sc * (q - 4)
//   kQ2K       groups of 256: bits, four times [4][32][4]; uint8 (sc | mn << 4)[16][32]; half d[32]; half dmin[32].
//              w = d * sc * q - dmin * mn
//   kIQ4NL     as kQ4_0, but w = d * table[q]
//   kIQ4XS     groups of 256: eight times nibbles; int8 sc[8][32]; half d[32].   w = d * sc * table[q]
//   kMxfp4     groups of 64: twice nibbles [4][32][4], of e2m1; uint8 e[2][32].   w = e2m1 * 2^(e - 127)
//   kNvfp4     nibbles [4][32][4], of e2m1; e4m3 s[2][32], of the first and the last 16 inputs; behind all groups
//              float g[32].   w = e2m1 * (s / g)
//   the 8-bit floats, which are decoded to bf16:
//   kFloat8    e4m3 [k / 4][32][4]; float scale[32], below 2^120.   w = e4m3 * scale (also what --quantization fp8 makes)
//   kFloat8Block  groups of 128: e4m3 [32][32][4]; float d[32], below 2^120.   w = e4m3 * d
//   kFloat32   float32 [k][32]. Rows are bf16, outputs float32 that nothing rounds; no norm, bias, gate or residual.
//
// Gated layers (gate and up of a SwiGLU) interleave rows before packing: panel p holds gate rows [16 p, 16 p + 16), then
// up rows [16 p, 16 p + 16), so that one panel makes 16 outputs activation(gate) * up.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace pageloom {

inline constexpr int64_t kPanel = 32;  // outputs of a panel
inline constexpr int64_t kGroup = 32;  // inputs that share an activation scale in the group formats

// kRotate is no matrix: x and the output are rows of n elements, heads side by side, and `rotation` says what happens.
enum class Format : int32_t {
  kBFloat16 = 0, kInt8 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 4, kQ4K = 5, kQ6K = 6, kInt4Group = 7,
  kMxfp4 = 8, kNvfp4 = 9, kFloat8 = 10, kFloat8Block = 11,
  kQ5_0 = 12, kQ5_1 = 13, kQ5K = 14, kQ3K = 15, kQ2K = 16, kIQ4NL = 17, kIQ4XS = 18, kFloat32 = 19, kRotate = 20
};

// What a gated layer makes of its gate: its activation, or the layer is not gated. kClampedSwiGLU is GPT-OSS': the gate at
// most `limit`, up within +-limit; gate * sigmoid(alpha * gate) * (up + 1).
enum class Gate : int32_t { kNone = 0, kSiLU = 1, kGeluTanh = 2, kClampedSwiGLU = 3 };

// RoPE of the first q_heads + k_heads heads of a row: pairs (i, i + rotary_dim / 2) of a head's first rotary_dim
// elements, the others pass through. Before it an RMSNorm of each head
// where there are weights (with the problem's norm_eps, rounded as engine.models.layers.RMSNorm). Sums in float32.
struct HeadRotation {
  const uint16_t* rope;  // bf16 [rows][rotary_dim]: cosines, then sines; rows rope_stride elements apart. Null: norm only
  int64_t rope_stride, q_heads, k_heads, head_dim, rotary_dim;
  const void* q_norm;  // [head_dim] as LinearProblem::norm_weight, or null: both or none
  const void* k_norm;
};

// How a weight that is used once comes from memory: the machine's choice (reading.py), no bit depends on it.
struct Reading {
  int32_t streams;  // panels that one row meets at once
  int32_t past;     // the caches, or not
};

struct LinearProblem {
  int64_t rows, n, k;  // n: rows of the weight matrix (gated: gate and up together)
  Format format;
  const uint8_t* weight;
  int64_t panel_bytes;
  const uint16_t* x;  // bf16 [rows][k], rows x_stride elements apart
  int64_t x_stride;
  // RMSNorm of x first, or null; the root mean square in float32. bf16 [k]: bf16(norm_weight * bf16(x / rms(x))), as
  // engine.models.layers.RMSNorm; norm_wide: float32 [k], bf16(norm_weight * x / rms(x)), as WideRMSNorm there.
  const void* norm_weight;
  bool norm_wide;
  float norm_eps;
  const uint16_t* bias;         // bf16 [n] in the packed order of outputs, or null
  const uint16_t* residual;     // bf16 [rows][outputs], added to the rounded product, or null
  int64_t residual_stride;
  Gate gate;   // not kNone: outputs are activation(gate) * up, n / 2 of them
  float gate_limit, gate_alpha;  // of kClampedSwiGLU
  bool wide;   // out is float32, holding the values rounded to bf16 (kFloat32: as they are)
  void* out;   // [rows][outputs] contiguous rows, out_stride elements apart
  int64_t out_stride;
  Reading reading;
  HeadRotation rotation;  // of Format::kRotate; the output may be x itself, and a residual goes with no rope
};

// Rows as a kernel multiplies them, made once per call by `prepare`.
enum class OperandKind : int32_t {
  kBFloat16 = 0,      // bf16 [rows][k]: x itself where there is no norm
  kInt8PerToken = 1,  // int8 [rows][k] with one scale a row: scales[row]; offset to unsigned where VNNI wants that
  kInt8PerGroup = 2,  // int8 [rows][k] with a scale for 32 inputs: scales[row * groups + g], and in
                      // sums[row * groups + g] four bytes that its format adds: where it has minima, float32 scale *
                      // sum of the group's int8, else integers that take a constant offset off (prepare_rows.h)
};

struct Operand {
  OperandKind kind;
  const void* data;
  int64_t stride;  // elements between rows
  const float* scales;
  const float* sums;
};

// Scratch of one thread and of one prepared operand; sizes in bytes, addresses 64-byte aligned.
struct LinearKernels {
  // How `compute` wants rows of this problem (it may depend on format and the number of rows).
  OperandKind (*operand_kind)(const LinearProblem&);
  // Norm and quantisation of rows [row_begin, row_end) into memory that the caller laid out for all rows.
  void (*prepare)(const LinearProblem&, const Operand& target, int64_t row_begin, int64_t row_end);
  size_t (*scratch_bytes)(const LinearProblem&);  // per thread, for compute
  // All outputs of panels [panel_begin, panel_end) for rows [row_begin, row_end), bias, gate, residual and store
  // included. A row's result depends on that row alone: not on row_begin, on other rows, nor on how panels are cut.
  void (*compute)(const LinearProblem&, const Operand&, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                  int64_t panel_end, void* scratch);
};

// Per ISA; null where a format has no kernel in that unit (the scheduler then takes the next narrower ISA's).
#define PAGELOOM_PASTE2(a, b) a##_##b
#define PAGELOOM_PASTE(a, b) PAGELOOM_PASTE2(a, b)
#define PAGELOOM_FOR_ISA(name) PAGELOOM_PASTE(name, PAGELOOM_ISA)
#define PAGELOOM_DECLARE_LINEAR(isa)                   \
  const LinearKernels* linear_bf16_##isa();            \
  const LinearKernels* linear_int8_##isa();            \
  const LinearKernels* linear_group_##isa(Format format); \
  const LinearKernels* linear_float8_##isa(Format format); \
  const LinearKernels* linear_float_##isa();             \
  const LinearKernels* rotate_heads_##isa();
PAGELOOM_DECLARE_LINEAR(portable)
PAGELOOM_DECLARE_LINEAR(avx2)
PAGELOOM_DECLARE_LINEAR(avx512)
PAGELOOM_DECLARE_LINEAR(avx512vnni)
PAGELOOM_DECLARE_LINEAR(avx512bf16)
PAGELOOM_DECLARE_LINEAR(amx)

}  // namespace pageloom
