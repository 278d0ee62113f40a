// The group formats for many rows on a CPU with AMX: a panel is decoded to bf16, in the layout of a bf16 panel, into
// memory that stays in this core's cache, and multiplied there by the bf16 tiles. Few rows go to the integer kernels,
// which read the weights once and need no decoded copy.
#include "group_formats.h"
#include "int_dot.h"
#include "linear.h"

using namespace pageloom;

namespace {

constexpr int64_t kMinRows = 24;  // measured: from here on decoding costs less than the tiles save
constexpr int32_t kLow = 0x0f, kBits45 = 0x30;

// Byte J of each lane, unsigned.
template <int J>
PAGELOOM_INLINE vi byte_of(vu x) {
  return (vi)(x >> (8 * J)) & 0xff;
}

// Values of two consecutive inputs of 16 outputs as a bf16 panel holds them: pairs, output by output.
PAGELOOM_INLINE void store_pairs(uint8_t* target, vf even, vf odd) {
  const __m512i order = (__m512i)_mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                                  22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  _mm512_storeu_si512(target, _mm512_permutexvar_epi16(order, both));
}

// Integers of four consecutive inputs, from `input` of the group, as w = d * q + m.
PAGELOOM_INLINE void store_four(uint8_t* target, int64_t input, const vi (&q)[4], vf d, vf m) {
  uint8_t* const to = target + input / 2 * 4 * kPanel;
  store_pairs(to, fused(to_float(q[0]), d, m), fused(to_float(q[1]), d, m));
  store_pairs(to + 4 * kPanel, fused(to_float(q[2]), d, m), fused(to_float(q[3]), d, m));
}

PAGELOOM_INLINE void decode_nibbles(const uint8_t* nibbles, uint8_t* target, vf d, vf m) {
  for (int i = 0; i < 4; ++i) {
    const vu both = load_as<vu>(nibbles + i * 4 * kPanel);
    const vi low[4] = {(vi)both & kLow, (vi)(both >> 8) & kLow, (vi)(both >> 16) & kLow, (vi)(both >> 24) & kLow};
    const vi high[4] = {(vi)(both >> 4) & kLow, (vi)(both >> 12) & kLow, (vi)(both >> 20) & kLow, (vi)(both >> 28)};
    store_four(target, 4 * i, low, d, m);
    store_four(target, 16 + 4 * i, high, d, m);
  }
}

// A group of inputs for 16 outputs from `o` on, to `target`, the bf16 panel from the group's first input on.
void decode(LayoutQ4_0, const uint8_t* group, int64_t o, uint8_t* target) {
  const vf d = load_halfs(group + LayoutQ4_0::kD + o * 2);
  decode_nibbles(group + o * 4, target, d, d * -8.0f);
}

void decode(LayoutQ4_1, const uint8_t* group, int64_t o, uint8_t* target) {
  const vf d = load_halfs(group + LayoutQ4_1::kD + o * 2), m = load_halfs(group + LayoutQ4_1::kM + o * 2);
  decode_nibbles(group + o * 4, target, d, m);
}

void decode(LayoutInt4Group, const uint8_t* group, int64_t o, uint8_t* target) {
  const vf d = load_halfs(group + LayoutInt4Group::kD + o * 2), z = load_halfs(group + LayoutInt4Group::kZ + o * 2);
  decode_nibbles(group + o * 4, target, d, d * -z);
}

void decode(LayoutQ8_0, const uint8_t* group, int64_t o, uint8_t* target) {
  const vf d = load_halfs(group + LayoutQ8_0::kD + o * 2);
  for (int i = 0; i < 8; ++i) {
    const vi w = load_as<vi>(group + o * 4 + i * 4 * kPanel);
    const vi q[4] = {(w << 24) >> 24, (w << 16) >> 24, (w << 8) >> 24, w >> 24};
    store_four(target, 4 * i, q, d, vf{});
  }
}

void decode(LayoutQ4K, const uint8_t* group, int64_t o, uint8_t* target) {
  const vf d = load_halfs(group + LayoutQ4K::kD + o * 2), dmin = load_halfs(group + LayoutQ4K::kDMin + o * 2);
  for (int64_t sub = 0; sub < kSubGroups; ++sub, target += 2 * kGroup * kPanel) {
    const vf scale = load_bytes(group + LayoutQ4K::kScales + sub * kPanel + o) * d;
    const vf minimum = load_bytes(group + LayoutQ4K::kMins + sub * kPanel + o) * -dmin;
    decode_nibbles(group + sub * kNibbleBytes + o * 4, target, scale, minimum);
  }
}

// Four inputs of Q6_K: bits 0 to 3 from the low or high nibbles, bits 4 and 5 from bit `shift` of each byte on.
PAGELOOM_INLINE void store_six(uint8_t* target, int64_t input, vu nibbles, vu bits, vf d) {
  const vi q[4] = {
      (byte_of<0>(nibbles) & kLow) | ((byte_of<0>(bits) << 4) & kBits45),
      (byte_of<1>(nibbles) & kLow) | ((byte_of<1>(bits) << 4) & kBits45),
      (byte_of<2>(nibbles) & kLow) | ((byte_of<2>(bits) << 4) & kBits45),
      (byte_of<3>(nibbles) & kLow) | ((byte_of<3>(bits) << 4) & kBits45),
  };
  store_four(target, input, q, d, d * -32.0f);
}

void decode(LayoutQ6K, const uint8_t* group, int64_t o, uint8_t* target) {
  const vf d = load_halfs(group + LayoutQ6K::kD + o * 2);
  for (int64_t sub = 0; sub < kSubGroups; ++sub, target += 2 * kGroup * kPanel) {
    const uint8_t* const scales = group + LayoutQ6K::kScales + 2 * sub * kPanel + o;
    const vf first = load_signed_bytes(scales) * d, last = load_signed_bytes(scales + kPanel) * d;
    const uint8_t* const low = group + sub * kNibbleBytes + o * 4;
    const uint8_t* const high = group + LayoutQ6K::kHigh + sub / 2 * kHighBytes + o * 4;
    for (int i = 0; i < 4; ++i) {
      const vu nibbles = load_as<vu>(low + i * 4 * kPanel);
      const vu bits = load_as<vu>(high + i * 4 * kPanel) >> (uint32_t)(4 * (sub % 2));
      store_six(target, 4 * i, nibbles, bits, first);
      store_six(target, 16 + 4 * i, nibbles >> 4, bits >> 2, last);
    }
  }
}

template <class F>
struct Kernels {
  static const LinearKernels* few_rows(const LinearProblem& p) { return linear_group_avx512vnni(p.format); }
  static int64_t dense_bytes(const LinearProblem& p) { return 2 * p.k * kPanel; }

  // The same problem over one decoded panel, number `panel`: kernels find it where a whole matrix would have it.
  static LinearProblem dense(const LinearProblem& p, const void* memory, int64_t panel) {
    LinearProblem q = p;
    q.format = Format::kBFloat16;
    q.panel_bytes = dense_bytes(p);
    q.weight = (const uint8_t*)((uintptr_t)memory - (uintptr_t)(panel * q.panel_bytes));
    return q;
  }

  static OperandKind operand_kind(const LinearProblem& p) {
    return p.rows < kMinRows ? few_rows(p)->operand_kind(p) : linear_bf16_amx()->operand_kind(dense(p, nullptr, 0));
  }

  static void prepare(const LinearProblem& p, const Operand& target, int64_t row_begin, int64_t row_end) {
    if (p.rows < kMinRows) return few_rows(p)->prepare(p, target, row_begin, row_end);
    linear_bf16_amx()->prepare(dense(p, nullptr, 0), target, row_begin, row_end);
  }

  static size_t scratch_bytes(const LinearProblem& p) {
    if (p.rows < kMinRows) return few_rows(p)->scratch_bytes(p);
    return dense_bytes(p) + linear_bf16_amx()->scratch_bytes(dense(p, nullptr, 0));
  }

  static void compute(const LinearProblem& p, const Operand& x, int64_t row_begin, int64_t row_end,
                      int64_t panel_begin, int64_t panel_end, void* scratch) {
    if (p.rows < kMinRows) return few_rows(p)->compute(p, x, row_begin, row_end, panel_begin, panel_end, scratch);
    auto* const decoded = (uint8_t*)scratch;
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      const uint8_t* const weight = p.weight + panel * p.panel_bytes;
      for (int64_t i = 0; i < p.k / F::kInputs; ++i) {
        const uint8_t* const group = weight + i * F::kBytes;
        uint8_t* const target = decoded + 2 * i * F::kInputs * kPanel;
        for (int64_t o = 0; o < kPanel; o += VW) decode(F{}, group, o, target + o * 4);
      }
      linear_bf16_amx()->compute(dense(p, decoded, panel), x, row_begin, row_end, panel, panel + 1,
                                 decoded + dense_bytes(p));
    }
  }

  static constexpr LinearKernels kTable = {operand_kind, prepare, scratch_bytes, compute};
};

}  // namespace

const LinearKernels* pageloom::linear_group_amx(Format format) {
  switch (format) {
    case Format::kQ4_0: return &Kernels<LayoutQ4_0>::kTable;
    case Format::kQ4_1: return &Kernels<LayoutQ4_1>::kTable;
    case Format::kQ8_0: return &Kernels<LayoutQ8_0>::kTable;
    case Format::kQ4K: return &Kernels<LayoutQ4K>::kTable;
    case Format::kQ6K: return &Kernels<LayoutQ6K>::kTable;
    case Format::kInt4Group: return &Kernels<LayoutInt4Group>::kTable;
    default: return nullptr;
  }
}
