// bf16 weights, for every ISA but AMX's tiles. A register tile of some rows meets one or two panels; sums of an output
// run over k in one order whatever the tile, so that a row's bits do not depend on who its neighbours are.
#include <stddef.h>

#include "prologue.h"

using namespace pageloom;

namespace {

// A register tile: kTileRows rows x kVectors vectors of outputs, which are kTogether panels or a part of one. Pairs of
// inputs that are multiplied as they are take one register of weights for each vector, widened ones two.
#if defined(__AVX512F__)
constexpr int kTileRows = PAGELOOM_NATIVE_BF16 ? 6 : 12, kVectors = PAGELOOM_NATIVE_BF16 ? 4 : 2;
constexpr int64_t kTogether = PAGELOOM_NATIVE_BF16 ? 2 : 1;
constexpr int64_t kMaxPanels = 8;  // that one row may meet: how many streams of weights are best depends on the machine
#else
constexpr int kTileRows = 5, kVectors = 2;
#if defined(__AVX2__)
constexpr int64_t kTogether = 1, kMaxPanels = 2;
#else
constexpr int64_t kTogether = 1, kMaxPanels = 1;
#endif
#endif
constexpr int64_t kPanels = PAGELOOM_NATIVE_BF16 ? 2 : 4;  // that a tile's rows meet in turn, once they are widened
constexpr int64_t kRowBytes = kPanel * 4;    // of a panel: two inputs of 32 outputs
constexpr int64_t kDepth = 2048;             // inputs that several tiles of rows meet before the next ones
constexpr int64_t kHeldRows = 512;           // rows whose sums wait for the next kDepth inputs
constexpr int64_t kUnroll = 4;               // pairs of inputs between two looks at what to prefetch
constexpr int64_t kAheadBytes = 4096;        // of a stream of weights that come straight from memory

PAGELOOM_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// Panels that a tile of `rows` meets where it is the only one.
PAGELOOM_INLINE int64_t streams_of(const LinearProblem& p, int64_t rows) {
  if (kMaxPanels == 1 || rows > 2) return kPanels;
  const int64_t streams = min64(p.reading.streams, kMaxPanels);
  return rows == 1 ? streams : (streams + 1) / 2;
}

// Cache lines to ask for while a tile computes: `lines` of each panel's stream for kUnroll pairs of inputs. Passed by
// reference: a copy of words that have just been written waits until every store before them is in the cache.
struct Prefetch {
  const uint8_t* ahead;  // in the first panel
  int64_t lines;
  bool past;            // around the caches: nothing of it is read twice
  int64_t turn, jump;  // from pair `turn` on, `jump` bytes farther: where the next panels' streams begin
};

#if PAGELOOM_NATIVE_BF16
typedef uint16_t Input;  // pairs are multiplied as they are
#else
typedef float Input;  // widened once for a tile
constexpr int64_t kWideStride = kDepth + 16;  // of its rows: not a power of two, or all rows share a few sets of the L1
#endif

// Sums of all rows += a pair of inputs of each * their weights.
template <int R, int V>
PAGELOOM_INLINE void multiply_pairs(vf (&acc)[R][V], const Input* a, int64_t stride, const vu (&lanes)[V]) {
#if PAGELOOM_NATIVE_BF16
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    uint32_t pair;
    memcpy(&pair, a + r * stride, 4);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) acc[r][v] = BFloat16::mac(acc[r][v], pair, lanes[v]);
  }
#else
  vf half[V];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) half[v] = i == 0 ? BFloat16::low(lanes[v]) : BFloat16::high(lanes[v]);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const vf x = splat(a[r * stride + i]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) acc[r][v] = acc[r][v] + x * half[v];
    }
  }
#endif
}

// Vector `v` of a tile's row of weights.
template <int V>
PAGELOOM_INLINE const uint8_t* lanes_at(const uint8_t* w, int64_t panel_bytes, int v) {
  constexpr int kInPanel = (int)(kPanel / VW);
  return w + v / kInPanel * panel_bytes + v % kInPanel * PAGELOOM_VECTOR_BYTES;
}

// sums [R][width] (+)= rows * weights for `pairs` pairs of inputs; V vectors from `w` on. Asks for lines of `asked`
// panels, `skip` bytes farther than `prefetch` says.
template <int R, int V>
__attribute__((noinline)) void multiply_tile(const Input* x, int64_t stride, int64_t pairs, const uint8_t* w,
                                             int64_t panel_bytes, const Prefetch& prefetch, int64_t skip, int64_t asked,
                                             float* sums, int64_t width, bool more) {
  vf acc[R][V];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) acc[r][v] = more ? loadf(sums + r * width + v * VW) : vf{};
#if !PAGELOOM_NATIVE_BF16
  stride = kWideStride;  // known, so that rows need no pointers of their own
#endif
  const auto step = [&](int64_t i) __attribute__((always_inline)) {
    vu lanes[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) lanes[v] = load_as<vu>(lanes_at<V>(w, panel_bytes, v) + i * kRowBytes);
    multiply_pairs<R, V>(acc, x + 2 * i, stride, lanes);
  };
  const uint8_t* ahead = prefetch.ahead + skip;
  const int64_t lines = asked == 0 ? 0 : prefetch.lines, turn = prefetch.turn;
  const bool past = prefetch.past;
  int64_t i = 0;
  for (; i + kUnroll <= pairs; i += kUnroll) {
    if (i == turn) ahead += prefetch.jump;
    for (int64_t line = 0; line < lines; ++line, ahead += 64)
      for (int64_t s = 0; s < asked; ++s) ask_for_line(ahead + s * panel_bytes, past);
#pragma GCC unroll 4
    for (int64_t j = 0; j < kUnroll; ++j) step(i + j);
  }
  for (; i < pairs; ++i) step(i);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) storef(sums + r * width + v * VW, acc[r][v]);
}

typedef void (*Multiply)(const Input*, int64_t, int64_t, const uint8_t*, int64_t, const Prefetch&, int64_t, int64_t,
                         float*, int64_t, bool);
#if defined(__AVX512F__)
constexpr Multiply kWhole[kTileRows][kMaxPanels] = {
    {multiply_tile<1, 2>, multiply_tile<1, 4>, multiply_tile<1, 6>, multiply_tile<1, 8>, multiply_tile<1, 10>,
     multiply_tile<1, 12>, multiply_tile<1, 14>, multiply_tile<1, 16>},
    {multiply_tile<2, 2>, multiply_tile<2, 4>, multiply_tile<2, 6>, multiply_tile<2, 8>},
#if PAGELOOM_NATIVE_BF16
    {multiply_tile<3, 2>, multiply_tile<3, 4>},
    {multiply_tile<4, 2>, multiply_tile<4, 4>},
    {multiply_tile<5, 2>, multiply_tile<5, 4>},
    {multiply_tile<6, 2>, multiply_tile<6, 4>}};
#else
    {multiply_tile<3, 2>},
    {multiply_tile<4, 2>},
    {multiply_tile<5, 2>},
    {multiply_tile<6, 2>},
    {multiply_tile<7, 2>},
    {multiply_tile<8, 2>},
    {multiply_tile<9, 2>},
    {multiply_tile<10, 2>},
    {multiply_tile<11, 2>},
    {multiply_tile<12, 2>}};
#endif
#else
constexpr Multiply kPart[kTileRows] = {multiply_tile<1, kVectors>, multiply_tile<2, kVectors>,
                                       multiply_tile<3, kVectors>, multiply_tile<4, kVectors>,
                                       multiply_tile<5, kVectors>};
#if defined(__AVX2__)
// One row or two, which only wait for memory: they read whole lines, once.
constexpr Multiply kFew[2][kMaxPanels] = {{multiply_tile<1, 4>, multiply_tile<1, 8>}, {multiply_tile<2, 4>, nullptr}};
#endif
#endif

// One tile of rows against `panels` panels from `w` on, in register tiles one after the other.
void multiply(const Input* x, int64_t stride, int64_t rows, int64_t pairs, const uint8_t* w, int64_t panel_bytes,
              int64_t panels, const Prefetch& prefetch, float* sums, bool more) {
  const int64_t width = panels * kPanel, together = kMaxPanels > 1 && rows <= 2 ? panels : kTogether;
  for (int64_t panel = 0; panel < panels; panel += together) {
    const int64_t skip = panel * panel_bytes, count = min64(together, panels - panel);
    const uint8_t* const from = w + skip;
    float* const to = sums + panel * kPanel;
#if defined(__AVX512F__)
    kWhole[rows - 1][count - 1](x, stride, pairs, from, panel_bytes, prefetch, skip, count, to, width, more);
#else
#if defined(__AVX2__)
    if (rows <= 2) {
      kFew[rows - 1][count - 1](x, stride, pairs, from, panel_bytes, prefetch, skip, count, to, width, more);
      continue;
    }
#endif
    for (int64_t column = 0; column < kPanel; column += kVectors * VW)
      kPart[rows - 1](x, stride, pairs, from + column * 4, panel_bytes, prefetch, skip, column == 0 ? count : 0,
                      to + column, width, more);
#endif
  }
}

struct Block {
  int64_t row_begin, row_end;
  int64_t panel, panels;   // first, and how many at once
  int64_t begin, end;      // inputs
  bool warm;               // the one before asked for these weights already
  const uint8_t* next;     // weights of the next block, or null
};

// What tile `tile` of `tiles` prefetches: where weights come straight from memory, the stream it reads itself; else its
// share of the next block.
Prefetch prefetch_for(const LinearProblem& p, const Block& b, const uint8_t* w, int64_t tile, int64_t tiles) {
  constexpr int64_t kLines = kUnroll * kRowBytes / 64;
  Prefetch prefetch{nullptr, 0, p.reading.past != 0 && tiles == 1 && kMaxPanels > 1, -1, 0};
  if (tile == 0 && !b.warm) {
    prefetch.lines = kLines;
    prefetch.ahead = w + kAheadBytes;
    if (b.end == p.k) {
      prefetch.turn = ((b.end - b.begin) / 2 - kAheadBytes / kRowBytes) / kUnroll * kUnroll;
      prefetch.jump = (b.panels - 1) * p.panel_bytes;
    }
  } else if (b.next != nullptr) {
    prefetch.lines = (kLines + tiles - 1) / tiles;
    const int64_t share = (b.end - b.begin) / 2 / kUnroll * prefetch.lines * 64;
    if (tile * prefetch.lines >= kLines) prefetch.lines = 0;
    prefetch.ahead = b.next + tile * share;
  }
  return prefetch;
}

const Input* tile_input(const uint16_t* x, int64_t stride, int64_t rows, int64_t k, Input* widened, int64_t& out) {
#if PAGELOOM_NATIVE_BF16
  out = stride;
  return x;
#else
  out = kWideStride;
  for (int64_t r = 0; r < rows; ++r) {
    int64_t i = 0;
    for (; i + VW <= k; i += VW) storef(widened + r * kWideStride + i, load_bf16(x + r * stride + i));
    for (; i < k; ++i) widened[r * kWideStride + i] = bits_to_float((uint32_t)x[r * stride + i] << 16);
  }
  return widened;
#endif
}

struct Scratch {
  float* sums;     // [min(rows, kHeldRows)][panels at once * kPanel]
  Input* widened;  // [kTileRows][kWideStride] where bf16 is not multiplied as it is
};

void multiply_block(const LinearProblem& p, const Operand& x, const Block& b, const Scratch& s) {
  const uint8_t* const w = p.weight + b.panel * p.panel_bytes + b.begin / 2 * kRowBytes;
  const int64_t rows = b.row_end - b.row_begin, tiles = (rows + kTileRows - 1) / kTileRows;
  const bool last = b.end == p.k;
  const int64_t width = b.panels * kPanel;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first, row = b.row_begin + first;
    float* const sums = s.sums + (last && b.begin == 0 ? 0 : first) * width;
    const uint16_t* const from = (const uint16_t*)x.data + row * x.stride + b.begin;
    int64_t stride;
    const Input* const input = tile_input(from, x.stride, count, b.end - b.begin, s.widened, stride);
    multiply(input, stride, count, (b.end - b.begin) / 2, w, p.panel_bytes, b.panels,
             prefetch_for(p, b, w, tile, tiles), sums, b.begin > 0);
    if (last) store_tile(p, row, count, b.panel, b.panels, sums);
  }
}

OperandKind operand_kind(const LinearProblem&) { return OperandKind::kBFloat16; }

void prepare(const LinearProblem& p, const Operand& target, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row)
    normalise_row(p, row, (uint16_t*)target.data + row * target.stride);
}

int64_t sums_floats(const LinearProblem& p) {
  const int64_t held = p.k > kDepth ? min64(p.rows, kHeldRows) : 0;
  return (held > kTileRows ? held : kTileRows) * kPanels * kPanel + kMaxPanels * kPanel;
}

size_t scratch_bytes(const LinearProblem& p) {
  #if PAGELOOM_NATIVE_BF16
  return (size_t)(sums_floats(p) * 4);
#else
  return (size_t)((sums_floats(p) + kTileRows * kWideStride) * 4);
#endif
}

void compute_rows(const LinearProblem& p, const Operand& x, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                  int64_t panel_end, const Scratch& s) {
  const bool streams = row_end - row_begin <= kTileRows;  // one tile of rows: nothing is used twice
  bool warm = false;
  const int64_t at_once = streams ? streams_of(p, row_end - row_begin) : kPanels;
  for (int64_t panel = panel_begin; panel < panel_end; panel += at_once) {
    const int64_t panels = min64(at_once, panel_end - panel);
    for (int64_t begin = 0; begin < p.k; begin += kDepth) {
      const int64_t end = min64(p.k, begin + kDepth), next_panel = panel + panels;
      const uint8_t* next = end < p.k                ? p.weight + panel * p.panel_bytes + end / 2 * kRowBytes
                            : next_panel < panel_end ? p.weight + next_panel * p.panel_bytes
                                                     : nullptr;
      multiply_block(p, x, {row_begin, row_end, panel, panels, begin, end, warm, streams ? nullptr : next}, s);
      warm = !streams;
    }
  }
}

void compute(const LinearProblem& p, const Operand& x, int64_t row_begin, int64_t row_end, int64_t panel_begin,
             int64_t panel_end, void* scratch) {
  const int64_t held = p.k > kDepth ? kHeldRows : row_end - row_begin;
  const Scratch s{(float*)scratch, (Input*)((float*)scratch + sums_floats(p))};
  for (int64_t row = row_begin; row < row_end; row += held)
    compute_rows(p, x, row, min64(row_end, row + held), panel_begin, panel_end, s);
}

const LinearKernels kKernels = {operand_kind, prepare, scratch_bytes, compute};

}  // namespace

const LinearKernels* pageloom::PAGELOOM_FOR_ISA(linear_bf16)() { return &kKernels; }
