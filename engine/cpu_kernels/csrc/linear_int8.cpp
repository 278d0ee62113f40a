// Linear layers with int8 weights (one scale an output) and int8 activations (one scale a row). Integer sums are exact,
// and what follows them is the same sequence of roundings on every ISA: so are the results.
//
// With VNNI activations are offset to unsigned, x + 128, and the panel's sums of weights take 128 * sum(w) back.
#include "epilogue.h"
#include "int_dot.h"
#include "linear.h"
#include "prepare_rows.h"

using namespace pageloom;

namespace {

constexpr int64_t kVectors = 2;                   // vectors of outputs that a tile holds for each of its rows
constexpr int64_t kTileOutputs = kVectors * VW;   // 32 with AVX-512
constexpr int64_t kTileRows = VW == 16 ? 12 : 4;  // 24 of 32 registers, or 8 of 16
constexpr int64_t kAhead = 4096;                  // bytes: how far ahead the first tile of rows asks for weights
constexpr uint8_t kFlip = kVnni ? 0x80 : 0;

PAGELOOM_INLINE vi dot(vi acc, vi w, vi x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)x, (__m512i)w);
#else
  return dot_signed(acc, w, x);
#endif
}

// Sums of R rows over outputs [0, kTileOutputs) of `weight`; four inputs a step, U steps in flight.
template <int R, int U>
PAGELOOM_INLINE void multiply(const uint8_t* weight, const int8_t* x, int64_t stride, int64_t k, bool first_rows,
                              vi (&total)[R][kVectors]) {
  vi acc[U][R][kVectors] = {};
  const auto step = [&](int64_t i, int u) {
    const uint8_t* const at = weight + i * 4 * kPanel;
    vi w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = load_as<vi>(at + v * kVectorBytes);
    if (first_rows) prefetch(at + kAhead, kTileOutputs * 4);
    for (int r = 0; r < R; ++r) {
      const vi word = splat_word(load_word(x + r * stride + 4 * i));
      for (int v = 0; v < kVectors; ++v) acc[u][r][v] = dot(acc[u][r][v], w[v], word);
    }
  };
  int64_t i = 0;
  for (; i + U <= k / 4; i += U)
    for (int u = 0; u < U; ++u) step(i + u, u);
  for (; i < k / 4; ++i) step(i, 0);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) {
      total[r][v] = acc[0][r][v];
      for (int u = 1; u < U; ++u) total[r][v] += acc[u][r][v];
    }
}

template <int R>
void tile(const LinearProblem& p, const Operand& x, int64_t row, int64_t panel, bool first_rows) {
  const uint8_t* const weight = p.weight + panel * p.panel_bytes;
  const uint8_t* const scales = weight + p.k * kPanel;
  const uint8_t* const weight_sums = scales + kPanel * 4;
  const int8_t* const data = (const int8_t*)x.data + row * x.stride;
  alignas(64) float sums[R][kPanel];
  for (int64_t o = 0; o < kPanel; o += kTileOutputs) {
    vi total[R][kVectors];
    if (first_rows) {
      multiply<R, R == 1 ? 4 : R <= 3 ? 2 : 1>(weight + o * 4, data, x.stride, p.k, true, total);
    } else {
      multiply<R, R == 1 ? 4 : R <= 3 ? 2 : 1>(weight + o * 4, data, x.stride, p.k, false, total);
    }
    for (int v = 0; v < kVectors; ++v) {
      const int64_t lane = o + v * VW;
      const vf scale = load_as<vf>(scales + lane * 4);
      const vi correction = kVnni ? load_as<vi>(weight_sums + lane * 4) << 7 : vi{};
      for (int r = 0; r < R; ++r)
        storef(&sums[r][lane], to_float(total[r][v] - correction) * (scale * splat(x.scales[row + r])));
    }
  }
  settle();
  for (int r = 0; r < R; ++r) store_panel_row(p, row + r, panel, sums[r]);
}

using Tile = void (*)(const LinearProblem&, const Operand&, int64_t row, int64_t panel, bool first_rows);
#if defined(__AVX512F__)
constexpr Tile kTiles[kTileRows] = {tile<1>, tile<2>, tile<3>, tile<4>,  tile<5>,  tile<6>,
                                    tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};
#else
constexpr Tile kTiles[kTileRows] = {tile<1>, tile<2>, tile<3>, tile<4>};
#endif

OperandKind operand_kind(const LinearProblem&) { return OperandKind::kInt8PerToken; }

void prepare(const LinearProblem& p, const Operand& target, int64_t row_begin, int64_t row_end) {
  quantise_rows(p, target, row_begin, row_end, kFlip);
}

size_t scratch_bytes(const LinearProblem&) { return 0; }

void compute(const LinearProblem& p, const Operand& x, int64_t row_begin, int64_t row_end, int64_t panel_begin,
             int64_t panel_end, void*) {
  const int64_t rows = row_end - row_begin, tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    int64_t row = row_begin;
    for (int64_t t = 0; t < tiles; ++t) {  // of nearly equal size: a last tile of one row would waste the registers
      const int64_t count = (row_end - row + tiles - t - 1) / (tiles - t);
      kTiles[count - 1](p, x, row, panel, t == 0);
      row += count;
    }
  }
}

const LinearKernels kTable = {operand_kind, prepare, scratch_bytes, compute};

}  // namespace

const LinearKernels* pageloom::PAGELOOM_FOR_ISA(linear_int8)() { return &kTable; }
