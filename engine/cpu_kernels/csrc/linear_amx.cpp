// bf16 weights with AMX: tiles of weights straight from their panels, tiles of inputs straight from their rows. Layers
// that tiles do not fit (k not a multiple of 32) go to the AVX-512-BF16 kernels. One row gains nothing from tiles and
// loses nothing: it takes them too, so that its bits are the same alone and among others.
//
// Sums leave the tiles through memory, and turning them into outputs takes longer than a short product. So that is done
// between the tile instructions of the next product, which wait for the tile unit and leave the rest idle.
#include <stddef.h>

#include "amx_passes.h"
#include "prologue.h"

using namespace pageloom;

namespace {

constexpr int64_t kTile = 16;              // rows of a tile at most, and its 32-bit lanes
constexpr int64_t kStep = 32;              // inputs that a tile multiplies at once
constexpr int64_t kStreams = 3;            // panels that one tile of rows meets at once
constexpr int64_t kSumsBytes = kPanel * 4;  // of a row of sums
constexpr int64_t kStepBytes = 16 * 128;   // of a panel
constexpr int64_t kDepth = 576;         // inputs at most of a panel that stays in the first-level cache under many rows
constexpr int64_t kInputs = 3 << 17;    // rows * k that stay in the second-level cache under all panels
constexpr int64_t kFewestRows = 128;    // that share one reading of the weights
constexpr int64_t kAheadBytes = 4096;      // of weights that come straight from memory

// Rows in passes of equal height: two tiles, or one. The last pass overlaps the one before it instead of being shorter:
// it computes the same bits again.
struct Passes {
  int64_t count, height, upper;  // upper: rows of the first tile

  explicit Passes(int64_t rows) {
    count = (rows + 2 * kTile - 1) / (2 * kTile);
    height = (rows + count - 1) / count;
    upper = height > kTile ? (height + 1) / 2 : height;
  }
  int64_t begin(int64_t rows, int64_t i) const { return min64(i * height, rows - height); }
};

// A thread's tiles for the life of one call; afterwards they are as empty as everybody else expects them.
class TileSession {
 public:
  explicit TileSession(const Passes& passes) {
    TileConfig config;
    const auto upper = (uint8_t)passes.upper, lower = (uint8_t)(passes.height - passes.upper);
    // Two tiles of rows: sums 0-3 (upper left, upper right, lower left, lower right), inputs 4 and 5, weights 6 and 7.
    const uint8_t two[8] = {upper, upper, lower, lower, upper, lower, kTile, kTile};
    // One: sums of three panels 0-5, inputs 6, weights 7.
    const uint8_t one[8] = {upper, upper, upper, upper, upper, upper, upper, kTile};
    memcpy(config.rows, lower > 0 ? two : one, sizeof two);
    config.load();
  }
  ~TileSession() { _tile_release(); }
  TileSession(const TileSession&) = delete;
};

// Sums that have left the tiles and wait to become outputs: rows [row, end) of one panel.
struct Waiting {
  const float* sums = nullptr;
  int64_t row = 0, end = 0, panel = 0;
};

template <Store S>
PAGELOOM_INLINE void store_some(const LinearProblem& p, Waiting& w, int64_t count) {
  for (const int64_t stop = min64(w.end, w.row + count); w.row < stop; ++w.row, w.sums += kPanel) {
    vf v[kPanelVectors] = {loadf(w.sums), loadf(w.sums + VW)};
    store_panel_values<S>(p, w.row, w.panel, v);
  }
}

// sums [rows][32] (+)= two tiles of rows * one panel for `steps` steps. Meanwhile `before` is stored, if it has no more
// rows than a pass.
template <Store S>
void multiply_pass(const LinearProblem& p, const uint16_t* x, int64_t stride, int64_t upper, int64_t steps,
                   const uint8_t* w, Prefetch prefetch, float* sums, bool more, Waiting& before) {
  float* const lower = sums + upper * kPanel;
  const uint16_t* below = x + upper * stride;
  const int64_t quota = (before.end - before.row + steps - 1) / steps;
  tiles_read_memory();
  if (more) {
    _tile_loadd(0, sums, kSumsBytes);
    _tile_loadd(1, sums + kTile, kSumsBytes);
    _tile_loadd(2, lower, kSumsBytes);
    _tile_loadd(3, lower + kTile, kSumsBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < steps; ++i, x += kStep, below += kStep, w += kStepBytes) {
    ask(prefetch);
    _tile_loadd(4, x, stride * 2);
    _tile_loadd(6, w, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + 64, 128);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, below, stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    store_some<S>(p, before, quota);
  }
  _tile_stored(0, sums, kSumsBytes);
  _tile_stored(1, sums + kTile, kSumsBytes);
  _tile_stored(2, lower, kSumsBytes);
  _tile_stored(3, lower + kTile, kSumsBytes);
  tiles_read_memory();
}

// sums [P][16][32] = one tile of rows * P panels: as many streams of weights, so that more memory is asked for at once.
// Each stream goes on where that of the next P panels begins.
template <int P>
void multiply_streams(const uint16_t* x, int64_t stride, int64_t steps, const uint8_t* w, int64_t panel_bytes,
                      float* sums) {
  constexpr int64_t kPanelSums = kTile * kPanel;
  tiles_read_memory();
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (P > 1) _tile_zero(2);
  if constexpr (P > 1) _tile_zero(3);
  if constexpr (P > 2) _tile_zero(4);
  if constexpr (P > 2) _tile_zero(5);
  const uint8_t* ahead = w + kAheadBytes;
  const int64_t turn = steps - kAheadBytes / kStepBytes;
  for (int64_t i = 0; i < steps; ++i, x += kStep, w += kStepBytes, ahead += kStepBytes) {
    if (i == turn) ahead += (P - 1) * panel_bytes;
    for (int64_t line = 0; line < kStepBytes; line += 64)
      for (int64_t s = 0; s < P; ++s) __builtin_prefetch(ahead + s * panel_bytes + line, 0, 3);
    _tile_loadd(6, x, stride * 2);
    _tile_loadd(7, w, 128);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(7, w + 64, 128);
    _tile_dpbf16ps(1, 6, 7);
    if constexpr (P > 1) _tile_loadd(7, w + panel_bytes, 128);
    if constexpr (P > 1) _tile_dpbf16ps(2, 6, 7);
    if constexpr (P > 1) _tile_loadd(7, w + panel_bytes + 64, 128);
    if constexpr (P > 1) _tile_dpbf16ps(3, 6, 7);
    if constexpr (P > 2) _tile_loadd(7, w + 2 * panel_bytes, 128);
    if constexpr (P > 2) _tile_dpbf16ps(4, 6, 7);
    if constexpr (P > 2) _tile_loadd(7, w + 2 * panel_bytes + 64, 128);
    if constexpr (P > 2) _tile_dpbf16ps(5, 6, 7);
  }
  _tile_stored(0, sums, kSumsBytes);
  _tile_stored(1, sums + kTile, kSumsBytes);
  if constexpr (P > 1) _tile_stored(2, sums + kPanelSums, kSumsBytes);
  if constexpr (P > 1) _tile_stored(3, sums + kPanelSums + kTile, kSumsBytes);
  if constexpr (P > 2) _tile_stored(4, sums + 2 * kPanelSums, kSumsBytes);
  if constexpr (P > 2) _tile_stored(5, sums + 2 * kPanelSums + kTile, kSumsBytes);
  tiles_read_memory();
}

// Rows that fill one tile at most, against all panels.
void compute_few(const LinearProblem& p, const Operand& x, int64_t row, int64_t rows, int64_t panel_begin,
                 int64_t panel_end, float* sums) {
  const auto* const from = (const uint16_t*)x.data + row * x.stride;
  for (int64_t panel = panel_begin; panel < panel_end;) {
    const int64_t count = min64(kStreams, panel_end - panel);
    const auto multiply = count == 3 ? multiply_streams<3> : count == 2 ? multiply_streams<2> : multiply_streams<1>;
    multiply(from, x.stride, p.k / kStep, p.weight + panel * p.panel_bytes, p.panel_bytes, sums);
    for (int64_t i = 0; i < count; ++i, ++panel)
      for (int64_t r = 0; r < rows; ++r) store_panel_row(p, row + r, panel, sums + (i * kTile + r) * kPanel);
  }
}

// Inputs between two looks at the sums: equal parts of k, multiples of kStep.
int64_t depth_of(int64_t k, int64_t rows) {
  const int64_t parts = rows <= 4 * kTile ? 1 : (k + kDepth - 1) / kDepth;
  return (k / kStep + parts - 1) / parts * kStep;
}

int64_t rows_at_once(int64_t k) {
  const int64_t rows = kInputs / k / (2 * kTile) * (2 * kTile);
  return rows > kFewestRows ? rows : kFewestRows;
}

bool fits(const LinearProblem& p) { return p.k % kStep == 0; }

// All panels for rows of which the second-level cache holds inputs and `sums` the sums.
template <Store S>
void compute_panels(const LinearProblem& p, const Operand& x, int64_t row_begin, int64_t rows, int64_t panel_begin,
                    int64_t panel_end, float* sums) {
  const Passes passes(rows);
  const int64_t depth = depth_of(p.k, p.rows), slot = passes.height * kPanel;
  Waiting before;
  int64_t turn = 0;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    for (int64_t begin = 0; begin < p.k; begin += depth) {
      const uint8_t* const block = p.weight + panel * p.panel_bytes + begin * 64;
      const int64_t steps = (min64(p.k, begin + depth) - begin) / kStep;
      const bool whole = depth == p.k, last = begin + depth >= p.k;
      for (int64_t pass = 0; pass < passes.count; ++pass) {
        const int64_t row = row_begin + passes.begin(rows, pass);
        // The overlapping rows of the last pass would be added twice where sums are held; they have their own place.
        float* const target = sums + (whole ? turn : pass) * slot;
        Prefetch prefetch = next_block(block, steps * kStepBytes, steps, pass, passes.count);
        if (last && panel + 1 == panel_end) prefetch.lines = 0;
        multiply_pass<S>(p, (const uint16_t*)x.data + row * x.stride + begin, x.stride, passes.upper, steps, block,
                         prefetch, target, begin > 0, before);
        turn ^= 1;
        if (last) before = {target, row, row + passes.height, panel};
      }
    }
  }
  store_some<S>(p, before, passes.height);
}

OperandKind operand_kind(const LinearProblem&) { return OperandKind::kBFloat16; }

void prepare(const LinearProblem& p, const Operand& target, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row)
    normalise_row(p, row, (uint16_t*)target.data + row * target.stride);
}

size_t scratch_bytes(const LinearProblem& p) {
  if (!fits(p)) return linear_bf16_avx512bf16()->scratch_bytes(p);
  const int64_t most = min64(p.rows, rows_at_once(p.k));
  const int64_t held = depth_of(p.k, p.rows) < p.k ? most + most / kTile : 0;  // passes overlap by less than a row
  return (size_t)((held + 4 * kTile) * kPanel * 4);  // else two passes, or three panels for one tile
}

void compute(const LinearProblem& p, const Operand& x, int64_t row_begin, int64_t row_end, int64_t panel_begin,
             int64_t panel_end, void* scratch) {
  if (!fits(p)) {
    linear_bf16_avx512bf16()->compute(p, x, row_begin, row_end, panel_begin, panel_end, scratch);
    return;
  }
  const int64_t most = rows_at_once(p.k);
  const Store store = store_of(p);
  for (int64_t row = row_begin; row < row_end; row += most) {
    const int64_t rows = min64(row_end - row, most);
    const Passes passes(rows);
    const TileSession session(passes);
    if (rows <= kTile) {
      compute_few(p, x, row, rows, panel_begin, panel_end, (float*)scratch);
      continue;
    }
    const auto compute_rows = store == Store::kPlain      ? compute_panels<Store::kPlain>
                              : store == Store::kResidual ? compute_panels<Store::kResidual>
                              : store == Store::kGated    ? compute_panels<Store::kGated>
                                                          : compute_panels<Store::kAny>;
    compute_rows(p, x, row, rows, panel_begin, panel_end, (float*)scratch);
  }
}

const LinearKernels kKernels = {operand_kind, prepare, scratch_bytes, compute};

}  // namespace

const LinearKernels* pageloom::PAGELOOM_FOR_ISA(linear_bf16)() { return &kKernels; }
