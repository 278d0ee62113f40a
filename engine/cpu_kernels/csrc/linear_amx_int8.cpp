// The int8 layers of linear_int8.cpp with AMX tiles: 32 rows by one panel of 32 outputs at a time, for enough rows to
// fill tiles; fewer go to the VNNI kernels. The integer sums are the same, so are the results.
//
// Sums leave the tiles through memory, and turning them into outputs takes about as long as a short product. So that is
// done between the tile instructions of the next product, which wait for the tile unit and leave the rest idle.
#include "amx_passes.h"
#include "int_dot.h"
#include "linear.h"
#include "prepare_rows.h"

using namespace pageloom;

namespace {

constexpr int64_t kTile = 16;      // rows of a tile
constexpr int64_t kPassRows = 32;  // two tiles of rows meet two tiles of outputs: every loaded tile is used twice
constexpr int64_t kDepth = 64;     // inputs of a tile
constexpr int64_t kMinRows = 8;    // fewer are bound by memory, and the VNNI kernels have no set-up

// Tiles 0 to 3: sums (tile of rows, tile of outputs); 4, 5: rows; 6, 7: weights.
TileConfig tiles_of(int64_t count) {
  const uint8_t first = (uint8_t)(count < kTile ? count : kTile), second = (uint8_t)(count - first);
  TileConfig config;
  config.rows[0] = config.rows[1] = config.rows[4] = first;
  config.rows[2] = config.rows[3] = config.rows[5] = second == 0 ? 1 : second;
  config.rows[6] = config.rows[7] = kTile;
  return config;
}

// Sums of one pass that have left the tiles and wait to become outputs.
struct Pending {
  int64_t row, panel, count, done;
  alignas(64) int32_t sums[kPassRows][kPanel];
};

struct Scratch {
  Pending pending[2];
};

template <Store S>
PAGELOOM_INLINE void finish_rows(const LinearProblem& p, const Operand& x, Pending& from, int64_t until) {
  const float* const scales = (const float*)(p.weight + from.panel * p.panel_bytes + p.k * kPanel);
  const vf low = loadf(scales), high = loadf(scales + VW);
  for (until = min64(until, from.count); from.done < until; ++from.done) {
    const vf scale = splat(x.scales[from.row + from.done]);
    const int32_t* const sums = from.sums[from.done];
    vf v[kPanelVectors] = {to_float(load_as<vi>(sums)) * (low * scale), to_float(load_as<vi>(sums + VW)) * (high * scale)};
    __asm__("" : "+v"(v[0]), "+v"(v[1]));  // rounded here on every ISA: no contraction with what follows
    store_panel_values<S>(p, from.row + from.done, from.panel, v);
  }
}

// One pass: T tiles of rows from `target.row` against the panel, finishing `before` meanwhile.
template <int T, Store S>
void multiply(const LinearProblem& p, const Operand& x, Pending& target, Pending& before, Prefetch prefetch) {
  const int8_t* const rows = (const int8_t*)x.data + target.row * x.stride;
  const uint8_t* const weight = p.weight + target.panel * p.panel_bytes;
  const int64_t quota = (before.count * kDepth + p.k - 1) / p.k;
  tiles_read_memory();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < p.k; k += kDepth) {
    const uint8_t* const at = weight + k * kPanel;
    ask(prefetch);
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
    finish_rows<S>(p, x, before, before.done + quota);
  }
  _tile_stored(0, target.sums[0], kPanel * 4);
  _tile_stored(1, target.sums[0] + kTile, kPanel * 4);
  if constexpr (T == 2) {
    _tile_stored(2, target.sums[kTile], kPanel * 4);
    _tile_stored(3, target.sums[kTile] + kTile, kPanel * 4);
  }
  tiles_read_memory();
}

template <Store S>
void compute_panels(const LinearProblem& p, const Operand& x, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                    int64_t panel_end, Scratch& scratch) {
  scratch.pending[1].count = scratch.pending[1].done = scratch.pending[1].panel = 0;
  const int64_t passes = (row_end - row_begin + kPassRows - 1) / kPassRows;
  int turn = 0;
  int64_t configured = 0;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    for (int64_t pass = 0; pass < passes; ++pass) {
      Pending& target = scratch.pending[turn];
      Pending& before = scratch.pending[turn ^= 1];
      target.row = row_begin + pass * kPassRows, target.panel = panel, target.done = 0;
      target.count = min64(row_end - target.row, kPassRows);
      if (configured != target.count) tiles_of(configured = target.count).load();
      Prefetch prefetch = next_block(p.weight + panel * p.panel_bytes, p.panel_bytes, p.k / kDepth, pass, passes);
      if (panel + 1 == panel_end) prefetch.lines = 0;
      (target.count > kTile ? multiply<2, S> : multiply<1, S>)(p, x, target, before, prefetch);
    }
  }
  Pending& last = scratch.pending[turn ^ 1];
  if (configured != 0) finish_rows<S>(p, x, last, last.count);
  _tile_release();
}

PAGELOOM_INLINE bool takes_tiles(const LinearProblem& p) { return p.rows >= kMinRows && p.k % kDepth == 0; }

OperandKind operand_kind(const LinearProblem&) { return OperandKind::kInt8PerToken; }

void prepare(const LinearProblem& p, const Operand& target, int64_t row_begin, int64_t row_end) {
  if (!takes_tiles(p)) return linear_int8_avx512bf16()->prepare(p, target, row_begin, row_end);
  quantise_rows(p, target, row_begin, row_end, 0);
}

size_t scratch_bytes(const LinearProblem&) { return sizeof(Scratch); }

void compute(const LinearProblem& p, const Operand& x, int64_t row_begin, int64_t row_end, int64_t panel_begin,
             int64_t panel_end, void* memory) {
  if (!takes_tiles(p))
    return linear_int8_avx512bf16()->compute(p, x, row_begin, row_end, panel_begin, panel_end, memory);
  const Store store = store_of(p);
  const auto compute_rows = store == Store::kPlain      ? compute_panels<Store::kPlain>
                            : store == Store::kResidual ? compute_panels<Store::kResidual>
                            : store == Store::kGated    ? compute_panels<Store::kGated>
                                                        : compute_panels<Store::kAny>;
  compute_rows(p, x, row_begin, row_end, panel_begin, panel_end, *(Scratch*)memory);
}

const LinearKernels kTable = {operand_kind, prepare, scratch_bytes, compute};

}  // namespace

const LinearKernels* pageloom::linear_int8_amx() { return &kTable; }
