// Linear layers with int8 weights (one scale an output) and int8 activations (one scale a row). Integer sums are exact,
// and what follows them is the same sequence of roundings on every ISA: so are the results, but where something that is
// rounded to bf16 is subnormal: the instruction that rounds, where there is one, makes it 0.
//
// With VNNI activations are offset to unsigned, x + 128, and the panel's sums of weights take 128 * sum(w) back.
#include "epilogue.h"
#include "int_dot.h"
#include "linear.h"
#include "prepare_rows.h"

using namespace pageloom;

namespace {

constexpr int64_t kVectors = 2;                        // of outputs: what a tile holds of a panel for each of its rows
constexpr int64_t kTileOutputs = kVectors * VW;        // 32 with AVX-512
constexpr int64_t kPasses = kPanel / kTileOutputs;     // that it takes over a panel
constexpr int64_t kOnlyRows = VW == 16 ? 12 : 4;       // of a tile that meets a panel alone: 24 of 32 registers, or 8 of 16
constexpr int64_t kTogether = VW == 16 ? 2 : 1;        // panels that each of several tiles meets
constexpr int64_t kTileRows = kOnlyRows / kTogether;   // of each of them
constexpr int64_t kUnroll = 4;                         // steps of four inputs between two looks at what to prefetch
constexpr int64_t kLines = kUnroll * kPanel * 4 / 64;  // of a panel that they read
constexpr int64_t kAhead = 4096;                       // bytes: how far ahead the only tile of rows asks for weights
constexpr uint8_t kFlip = kVnni ? 0x80 : 0;

// Lines of each of a tile's panels to ask for in every kUnroll steps.
struct Prefetch {
  const uint8_t* ahead;
  int64_t lines;
  bool past;  // around the caches: nothing of it is read twice
  int64_t turn;  // bytes farther with each pass over a panel; 0: only the first one asks
};

PAGELOOM_INLINE vi dot(vi acc, vi w, vi x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)x, (__m512i)w);
#else
  return dot_signed(acc, w, x);
#endif
}

// Sums of R rows over outputs [0, kTileOutputs) of P panels, the first at `weight`, starting at `offset`; U steps in
// flight.
template <int R, int P, int U>
PAGELOOM_INLINE void multiply(const uint8_t* weight, int64_t panel_bytes, const int8_t* x, int64_t stride, int64_t k,
                              const Prefetch& prefetch, const vi (&offset)[P * kVectors],
                              vi (&total)[R][P * kVectors]) {
  constexpr int V = P * kVectors;
  vi acc[U][R][V] = {};
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v)
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[0][r][v] = offset[v];
  const auto step = [&](int64_t i, int u) __attribute__((always_inline)) {
    vi w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      w[v] = load_as<vi>(weight + v / kVectors * panel_bytes + i * 4 * kPanel + v % kVectors * kVectorBytes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const vi word = splat_word(load_word(x + r * stride + 4 * i));
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[u][r][v] = dot(acc[u][r][v], w[v], word);
    }
  };
  const uint8_t* ahead = prefetch.ahead;
  const int64_t lines = prefetch.lines;
  const bool past = prefetch.past;
  int64_t i = 0;
  for (; i + kUnroll <= k / 4; i += kUnroll) {
    for (int64_t line = 0; line < lines; ++line, ahead += 64)
      for (int p = 0; p < P; ++p) ask_for_line(ahead + p * panel_bytes, past);
#pragma GCC unroll 4
    for (int j = 0; j < kUnroll; ++j) step(i + j, j % U);
  }
  for (; i < k / 4; ++i) step(i, 0);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      total[r][v] = acc[0][r][v];
      for (int u = 1; u < U; ++u) total[r][v] += acc[u][r][v];
    }
}

template <int R, int P>
void tile(const LinearProblem& p, const Operand& x, int64_t row, int64_t panel, const Prefetch& prefetch) {
  const uint8_t* const weight = p.weight + panel * p.panel_bytes;
  const int8_t* const data = (const int8_t*)x.data + row * x.stride;
  alignas(64) float sums[R][P][kPanel];
  for (int64_t o = 0; o < kPanel; o += kTileOutputs) {
    vi total[R][P * kVectors], offset[P * kVectors];
    vf scale[P * kVectors];
    for (int v = 0; v < P * kVectors; ++v) {
      const uint8_t* const scales = weight + v / kVectors * p.panel_bytes + p.k * kPanel + (o + v % kVectors * VW) * 4;
      scale[v] = load_as<vf>(scales);
      offset[v] = kVnni ? -(load_as<vi>(scales + kPanel * 4) << 7) : vi{};
    }
    const int64_t pass = o / kTileOutputs;
    const int64_t lines = pass == 0 || prefetch.turn > 0 ? prefetch.lines : 0;
    const Prefetch asked{prefetch.ahead + pass * prefetch.turn, lines, prefetch.past, 0};
    constexpr int kInFlight = R == 1 ? 4 : R <= 3 ? 2 : 1;
    multiply<R, P, kInFlight>(weight + o * 4, p.panel_bytes, data, x.stride, p.k, asked, offset, total);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const vf of_row = splat(x.scales[row + r]);
#pragma GCC unroll 4
      for (int v = 0; v < P * kVectors; ++v)
        storef(&sums[r][v / kVectors][o + v % kVectors * VW], to_float(total[r][v]) * (scale[v] * of_row));
    }
  }
  settle();
  store_tile(p, row, R, panel, P, sums[0][0]);
}

using Tile = void (*)(const LinearProblem&, const Operand&, int64_t row, int64_t panel, const Prefetch&);
#if defined(__AVX512F__)
constexpr Tile kOnly[kOnlyRows] = {tile<1, 1>, tile<2, 1>, tile<3, 1>, tile<4, 1>,  tile<5, 1>,  tile<6, 1>,
                                   tile<7, 1>, tile<8, 1>, tile<9, 1>, tile<10, 1>, tile<11, 1>, tile<12, 1>};
constexpr Tile kSeveral[kTileRows] = {tile<1, 2>, tile<2, 2>, tile<3, 2>, tile<4, 2>, tile<5, 2>, tile<6, 2>};
#else
constexpr Tile kOnly[kOnlyRows] = {tile<1, 1>, tile<2, 1>, tile<3, 1>, tile<4, 1>};
constexpr const Tile (&kSeveral)[kTileRows] = kOnly;
#endif

OperandKind operand_kind(const LinearProblem&) { return OperandKind::kInt8PerToken; }

void prepare(const LinearProblem& p, const Operand& target, int64_t row_begin, int64_t row_end) {
  quantise_rows(p, target, row_begin, row_end, kFlip);
}

size_t scratch_bytes(const LinearProblem&) { return 0; }

void compute(const LinearProblem& p, const Operand& x, int64_t row_begin, int64_t row_end, int64_t panel_begin,
             int64_t panel_end, void*) {
  const int64_t rows = row_end - row_begin;
  if (rows <= kOnlyRows) {
    const bool past = p.reading.past != 0 && kPasses == 1;
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {  // asks for what it reads itself, or in turns reads next
      const uint8_t* const ahead = p.weight + panel * p.panel_bytes + (kPasses == 1 ? kAhead : p.panel_bytes);
      kOnly[rows - 1](p, x, row_begin, panel, {ahead, kLines / kPasses, past, p.k / 4 / kUnroll * (kLines / kPasses) * 64});
    }
    return;
  }
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows, lines = (kLines + tiles - 1) / tiles;
  for (int64_t panel = panel_begin, panels; panel < panel_end; panel += panels) {
    panels = panel_end - panel < kTogether ? panel_end - panel : kTogether;
    const bool more = panel + panels < panel_end;
    const uint8_t* const next = p.weight + (panel + panels) * p.panel_bytes;
    for (int64_t t = 0; t < tiles; ++t) {  // of nearly equal size, each asking for its share of the next panels
      const int64_t row = rows * t / tiles, count = rows * (t + 1) / tiles - row;
      const Prefetch share{next + t * (p.k / 4 / kUnroll) * lines * 64, more && t * lines < kLines ? lines : 0, false, 0};
      (panels == kTogether ? kSeveral : kOnly)[count - 1](p, x, row_begin + row, panel, share);
    }
  }
}

const LinearKernels kTable = {operand_kind, prepare, scratch_bytes, compute};

}  // namespace

const LinearKernels* pageloom::PAGELOOM_FOR_ISA(linear_int8)() { return &kTable; }
