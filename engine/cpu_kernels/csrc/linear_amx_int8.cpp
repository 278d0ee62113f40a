// The int8 layers of linear_int8.cpp with AMX tiles: 32 rows by one panel of 32 outputs at a time, for enough rows to
// fill tiles; fewer go to the VNNI kernels. The integer sums are the same, so are the results.
//
// Sums leave the tiles through memory, and turning them into outputs takes about as long as a short product. So that is
// done between the tile instructions of the next product, which wait for the tile unit and leave the rest idle.
#include "epilogue.h"
#include "int_dot.h"
#include "linear.h"
#include "prepare_rows.h"

using namespace pageloom;

namespace {

constexpr int64_t kTile = 16;      // rows of a tile
constexpr int64_t kPassRows = 32;  // two tiles of rows meet two tiles of outputs: every loaded tile is used twice
constexpr int64_t kDepth = 64;     // inputs of a tile
constexpr int64_t kMinRows = 8;    // fewer are bound by memory, and the VNNI kernels have no set-up
constexpr int64_t kAhead = 8192;   // bytes: how far ahead the first pass asks for weights

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};

  // Tiles 0 to 3: sums (tile of rows, tile of outputs); 4, 5: rows; 6, 7: weights.
  explicit TileConfig(int64_t count) {
    const uint8_t first = (uint8_t)(count < kTile ? count : kTile), second = (uint8_t)(count - first);
    rows[0] = rows[1] = rows[4] = first;
    rows[2] = rows[3] = rows[5] = second == 0 ? 1 : second;
    rows[6] = rows[7] = kTile;
  }
};

// Sums of one pass that have left the tiles and wait to become outputs.
struct Pending {
  int64_t row, panel, count, done;
  alignas(64) int32_t sums[kPassRows][kPanel];
};

struct Scratch {
  Pending pending[2];
};

void finish_rows(const LinearProblem& p, const Operand& x, Pending& from, int64_t until) {
  const float* const scales = (const float*)(p.weight + from.panel * p.panel_bytes + p.k * kPanel);
  const vf low = loadf(scales), high = loadf(scales + VW);
  alignas(64) float out[kPanel];
  for (until = until < from.count ? until : from.count; from.done < until; ++from.done) {
    const vf scale = splat(x.scales[from.row + from.done]);
    storef(out, to_float(load_as<vi>(from.sums[from.done])) * (low * scale));
    storef(out + VW, to_float(load_as<vi>(from.sums[from.done] + VW)) * (high * scale));
    settle();
    store_panel_row(p, from.row + from.done, from.panel, out);
  }
}

// One pass: T tiles of rows from `target.row` against the panel, finishing `before` meanwhile.
template <int T>
void multiply(const LinearProblem& p, const Operand& x, Pending& target, Pending& before, bool first_rows) {
  const int8_t* const rows = (const int8_t*)x.data + target.row * x.stride;
  const uint8_t* const weight = p.weight + target.panel * p.panel_bytes;
  const int64_t quota = (before.count * kDepth + p.k - 1) / p.k;
  settle();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < p.k; k += kDepth) {
    const uint8_t* const at = weight + k * kPanel;
    if (first_rows) prefetch(at + kAhead, kDepth * kPanel);
    _tile_loadd(6, at, 4 * kPanel);
    _tile_loadd(4, rows + k, x.stride);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, at + 64, 4 * kPanel);
    _tile_dpbssd(1, 4, 7);
    if constexpr (T == 2) {
      _tile_loadd(5, rows + kTile * x.stride + k, x.stride);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
    finish_rows(p, x, before, before.done + quota);
  }
  _tile_stored(0, target.sums[0], kPanel * 4);
  _tile_stored(1, target.sums[0] + kTile, kPanel * 4);
  if constexpr (T == 2) {
    _tile_stored(2, target.sums[kTile], kPanel * 4);
    _tile_stored(3, target.sums[kTile] + kTile, kPanel * 4);
  }
}

PAGELOOM_INLINE bool takes_tiles(const LinearProblem& p) { return p.rows >= kMinRows && p.k % kDepth == 0; }

OperandKind operand_kind(const LinearProblem&) { return OperandKind::kInt8PerToken; }

void prepare(const LinearProblem& p, const Operand& target, int64_t row_begin, int64_t row_end) {
  if (!takes_tiles(p)) return linear_int8_avx512vnni()->prepare(p, target, row_begin, row_end);
  quantise_rows(p, target, row_begin, row_end, 0);
}

size_t scratch_bytes(const LinearProblem&) { return sizeof(Scratch); }

void compute(const LinearProblem& p, const Operand& x, int64_t row_begin, int64_t row_end, int64_t panel_begin,
             int64_t panel_end, void* memory) {
  if (!takes_tiles(p))
    return linear_int8_avx512vnni()->compute(p, x, row_begin, row_end, panel_begin, panel_end, memory);
  auto& scratch = *(Scratch*)memory;
  scratch.pending[1].count = scratch.pending[1].done = scratch.pending[1].panel = 0;
  int turn = 0;
  int64_t configured = 0;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    for (int64_t row = row_begin; row < row_end; row += kPassRows) {
      Pending& target = scratch.pending[turn];
      Pending& before = scratch.pending[turn ^= 1];
      target.row = row, target.panel = panel, target.done = 0;
      target.count = row_end - row < kPassRows ? row_end - row : kPassRows;
      if (configured != target.count) {
        const TileConfig config(configured = target.count);
        _tile_loadconfig(&config);
      }
      (target.count > kTile ? multiply<2> : multiply<1>)(p, x, target, before, row == row_begin);
    }
  }
  Pending& last = scratch.pending[turn ^ 1];
  if (configured != 0) finish_rows(p, x, last, last.count);
  _tile_release();
}

const LinearKernels kTable = {operand_kind, prepare, scratch_bytes, compute};

}  // namespace

const LinearKernels* pageloom::linear_int8_amx() { return &kTable; }
