// The group formats for many rows on a CPU with AMX: a panel is decoded to bf16, in the layout of a bf16 panel, into
// memory that stays in this core's cache, and multiplied there by the bf16 tiles. Few rows go to the integer kernels,
// which read the weights once and need no decoded copy.
#include "group_floats.h"
#include "linear.h"

using namespace pageloom;

namespace {

constexpr int64_t kMinRows = 24;  // measured: from here on decoding costs less than the tiles save

// Values of two consecutive inputs of 16 outputs as a bf16 panel holds them: pairs, output by output.
PAGELOOM_INLINE void store_pairs(uint8_t* target, vf even, vf odd) {
  const __m512i order = (__m512i)_mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                                  22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  _mm512_storeu_si512(target, _mm512_permutexvar_epi16(order, both));
}

// Bytes of four consecutive inputs, from `input` of the group; `weight` makes a weight of a byte without sign.
template <class Weight>
PAGELOOM_INLINE void store_weights(uint8_t* target, int64_t input, vi bytes, const Weight& weight) {
  const auto value = [&](int j) __attribute__((always_inline)) { return weight((vi)((vu)bytes >> (8 * j)) & 0xff); };
  uint8_t* const to = target + input / 2 * 4 * kPanel;
  store_pairs(to, value(0), value(1));
  store_pairs(to + 4 * kPanel, value(2), value(3));
}

// As w = d * byte + m.
PAGELOOM_INLINE void store_four(uint8_t* target, int64_t input, vi bytes, vf d, vf m) {
  store_weights(target, input, bytes, [&](vi q) __attribute__((always_inline)) { return fused(to_float(q), d, m); });
}

// 32 inputs, number `sub` of a group, for 16 outputs from `o` on.
template <class Levels>
PAGELOOM_INLINE void decode_levels(const uint8_t* group, int64_t sub, int64_t o, uint8_t* target, vf d, vf m) {
  const Levels levels(group, sub, o);
  for (int i = 0; i < 4; ++i) {
    vi first, last;
    levels.load(i, 0, first, last);
    store_four(target, 4 * i, first, d, m);
    store_four(target, 16 + 4 * i, last, d, m);
  }
}

// A group of inputs for 16 outputs from `o` on, to `target`, the bf16 panel from the group's first input on. Always
// inlined: GCC 12 takes that of Q5_K for a function without effects otherwise, and leaves its calls out.
template <class Layout, class Levels>
PAGELOOM_INLINE void decode_offset(const uint8_t* group, int64_t o, uint8_t* target, float middle) {
  const vf d = load_halfs(group + Layout::kD + o * 2);
  decode_levels<Levels>(group, 0, o, target, d, d * -middle);
}

PAGELOOM_INLINE void decode(LayoutQ4_0, const uint8_t* group, int64_t o, uint8_t* target) {
  decode_offset<LayoutQ4_0, Nibbles>(group, o, target, 8.0f);
}

PAGELOOM_INLINE void decode(LayoutQ5_0, const uint8_t* group, int64_t o, uint8_t* target) {
  decode_offset<LayoutQ5_0, FiveBits<LayoutQ5_0>>(group, o, target, 16.0f);
}

PAGELOOM_INLINE void decode(LayoutIQ4NL, const uint8_t* group, int64_t o, uint8_t* target) {
  decode_offset<LayoutIQ4NL, UnevenLevels>(group, o, target, UnevenLevels::kOffset);
}

PAGELOOM_INLINE void decode(LayoutQ4_1, const uint8_t* group, int64_t o, uint8_t* target) {
  const vf d = load_halfs(group + LayoutQ4_1::kD + o * 2), m = load_halfs(group + LayoutQ4_1::kM + o * 2);
  decode_levels<Nibbles>(group, 0, o, target, d, m);
}

PAGELOOM_INLINE void decode(LayoutQ5_1, const uint8_t* group, int64_t o, uint8_t* target) {
  const vf d = load_halfs(group + LayoutQ5_1::kD + o * 2), m = load_halfs(group + LayoutQ5_1::kM + o * 2);
  decode_levels<FiveBits<LayoutQ5_1>>(group, 0, o, target, d, m);
}

PAGELOOM_INLINE void decode(LayoutInt4Group, const uint8_t* group, int64_t o, uint8_t* target) {
  const vf d = load_halfs(group + LayoutInt4Group::kD + o * 2), z = load_halfs(group + LayoutInt4Group::kZ + o * 2);
  decode_levels<Nibbles>(group, 0, o, target, d, d * -z);
}

PAGELOOM_INLINE void decode(LayoutQ8_0, const uint8_t* group, int64_t o, uint8_t* target) {
  const vf d = load_halfs(group + LayoutQ8_0::kD + o * 2), m = d * -128.0f;
  for (int i = 0; i < 8; ++i) {
    const vi w = load_as<vi>(group + o * 4 + i * 4 * kPanel);
    store_four(target, 4 * i, w ^ kSigns, d, m);
  }
}

template <class Layout, class Levels>
PAGELOOM_INLINE void decode_minima(const uint8_t* group, int64_t o, uint8_t* target) {
  const vf d = load_halfs(group + Layout::kD + o * 2), dmin = load_halfs(group + Layout::kDMin + o * 2);
  for (int64_t sub = 0; sub < kSubGroups; ++sub, target += 2 * kGroup * kPanel) {
    const vf scale = load_bytes(group + Layout::kScales + sub * kPanel + o) * d;
    const vf minimum = load_bytes(group + Layout::kMins + sub * kPanel + o) * -dmin;
    decode_levels<Levels>(group, sub, o, target, scale, minimum);
  }
}

PAGELOOM_INLINE void decode(LayoutQ4K, const uint8_t* group, int64_t o, uint8_t* target) {
  decode_minima<LayoutQ4K, Nibbles>(group, o, target);
}

PAGELOOM_INLINE void decode(LayoutQ5K, const uint8_t* group, int64_t o, uint8_t* target) {
  decode_minima<LayoutQ5K, FiveBits<LayoutQ5K>>(group, o, target);
}

PAGELOOM_INLINE void decode(LayoutIQ4XS, const uint8_t* group, int64_t o, uint8_t* target) {
  const vf d = load_halfs(group + LayoutIQ4XS::kD + o * 2);
  for (int64_t sub = 0; sub < kSubGroups; ++sub, target += 2 * kGroup * kPanel) {
    const vf scale = load_signed_bytes(group + LayoutIQ4XS::kScales + sub * kPanel + o) * d;
    decode_levels<UnevenLevels>(group, sub, o, target, scale, scale * -(float)UnevenLevels::kOffset);
  }
}

template <class F, int P, int H>
PAGELOOM_INLINE void decode_half(const uint8_t* group, int64_t sub, int64_t o, uint8_t* target, vf d, vf m) {
  for (int i = 0; i < 4; ++i)
    store_four(target, 16 * H + 4 * i, F::template word<P, H>(group, sub, i, o * 4 + i * 4 * kPanel), d, m);
}

// `scales(d, m, part)` says how levels of 16 inputs become weights.
template <class F, class Scales>
PAGELOOM_INLINE void decode_halves(const uint8_t* group, int64_t o, uint8_t* target, const Scales& scales) {
  constexpr int64_t kBytesOfGroup = 2 * kGroup * kPanel;
  for (int64_t sub = 0; sub < kSubGroups; sub += 2, target += 2 * kBytesOfGroup) {
    vf d[4], m[4];
    for (int part = 0; part < 4; ++part) scales(d[part], m[part], (2 * sub + part) * kPanel + o);
    decode_half<F, 0, 0>(group, sub, o, target, d[0], m[0]);
    decode_half<F, 0, 1>(group, sub, o, target, d[1], m[1]);
    decode_half<F, 1, 0>(group, sub + 1, o, target + kBytesOfGroup, d[2], m[2]);
    decode_half<F, 1, 1>(group, sub + 1, o, target + kBytesOfGroup, d[3], m[3]);
  }
}

template <class F>
PAGELOOM_INLINE void decode_signed_scales(const uint8_t* group, int64_t o, uint8_t* target, float middle) {
  const vf of_block = load_halfs(group + F::kD + o * 2);
  decode_halves<F>(group, o, target, [&](vf& d, vf& m, int64_t at) {
    d = load_signed_bytes(group + F::kScales + at) * of_block;
    m = d * -middle;
  });
}

PAGELOOM_INLINE void decode(LayoutQ6K, const uint8_t* group, int64_t o, uint8_t* target) {
  decode_signed_scales<Q6K>(group, o, target, 32.0f);
}

PAGELOOM_INLINE void decode(LayoutQ3K, const uint8_t* group, int64_t o, uint8_t* target) {
  decode_signed_scales<Q3K>(group, o, target, 4.0f);
}

PAGELOOM_INLINE void decode(LayoutQ2K, const uint8_t* group, int64_t o, uint8_t* target) {
  const vf of_block = load_halfs(group + LayoutQ2K::kD + o * 2), dmin = load_halfs(group + LayoutQ2K::kDMin + o * 2);
  decode_halves<Q2K>(group, o, target, [&](vf& d, vf& m, int64_t at) {
    const vi both = load_byte_lanes(group + LayoutQ2K::kScales + at);
    d = to_float(both & 15) * of_block;
    m = to_float(both >> 4) * -dmin;
  });
}

// 32 inputs of e2m1, the first 16 times `first_d`. Offsets are taken off first: times a factor they may be no float.
PAGELOOM_INLINE void decode_e2m1(const uint8_t* group, int64_t sub, int64_t o, uint8_t* target, vf first_d, vf last_d) {
  const E2M1 levels(group, sub, o);
  for (int i = 0; i < 4; ++i) {
    vi first, last;
    levels.load(i, 0, first, last);
    const auto weight = [&](vf d) {
      return [=](vi q) __attribute__((always_inline)) { return to_float(q - E2M1::kOffset) * (d * 0.5f); };
    };
    store_weights(target, 4 * i, first, weight(first_d));
    store_weights(target, 16 + 4 * i, last, weight(last_d));
  }
}

PAGELOOM_INLINE void decode(LayoutMxfp4, const uint8_t* group, int64_t o, uint8_t* target) {
  for (int64_t sub = 0; sub < 2; ++sub, target += 2 * kGroup * kPanel) {
    const vf d = load_e8m0(group + LayoutMxfp4::kScales + sub * kPanel + o);
    decode_e2m1(group, sub, o, target, d, d);
  }
}

template <class F>
PAGELOOM_INLINE void decode_panel(F, const uint8_t* panel, int64_t k, uint8_t* target) {
  for (int64_t begin = 0; begin < k; begin += F::kInputs, panel += F::kBytes, target += 2 * F::kInputs * kPanel)
    for (int64_t o = 0; o < kPanel; o += VW) decode(F{}, panel, o, target + o * 4);
}

PAGELOOM_INLINE void decode_panel(LayoutNvfp4, const uint8_t* panel, int64_t k, uint8_t* target) {
  const uint8_t* const totals = panel + k / LayoutNvfp4::kInputs * LayoutNvfp4::kBytes;
  for (; panel < totals; panel += LayoutNvfp4::kBytes, target += 2 * kGroup * kPanel)
    for (int64_t o = 0; o < kPanel; o += VW) {
      const uint8_t* const scales = panel + LayoutNvfp4::kScales + o;
      const vf total = load_as<vf>(totals + o * 4);
      decode_e2m1(panel, 0, o, target + o * 4, load_e4m3(scales) / total, load_e4m3(scales + kPanel) / total);
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
      decode_panel(F{}, p.weight + panel * p.panel_bytes, p.k, decoded);
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
    case Format::kQ5_0: return &Kernels<LayoutQ5_0>::kTable;
    case Format::kQ5_1: return &Kernels<LayoutQ5_1>::kTable;
    case Format::kQ5K: return &Kernels<LayoutQ5K>::kTable;
    case Format::kQ3K: return &Kernels<LayoutQ3K>::kTable;
    case Format::kQ2K: return &Kernels<LayoutQ2K>::kTable;
    case Format::kIQ4NL: return &Kernels<LayoutIQ4NL>::kTable;
    case Format::kIQ4XS: return &Kernels<LayoutIQ4XS>::kTable;
    case Format::kMxfp4: return &Kernels<LayoutMxfp4>::kTable;
    case Format::kNvfp4: return &Kernels<LayoutNvfp4>::kTable;
    default: return nullptr;
  }
}
