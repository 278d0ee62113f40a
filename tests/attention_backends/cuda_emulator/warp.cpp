#include "warp.h"

#include "numbers.h"

namespace pageloom::emulator {

namespace {

template <class T>
T& operand(const WarpCall& call, int lane) {
  return *static_cast<T*>(call.operands[lane]);
}

const char* shuffle(const WarpCall& call) {
  for (int lane = 0; lane < LANES; ++lane) {
    if (call.operands[lane] == nullptr) continue;
    Shuffle& mine = operand<Shuffle>(call, lane);
    if (mine.source < 0 || mine.source >= LANES) return "shuffle from a lane outside the warp";
    if (call.operands[mine.source] == nullptr) return "shuffle from a lane that has exited";
    mine.result = operand<Shuffle>(call, mine.source).value;
  }
  return nullptr;
}

const char* any(const WarpCall& call) {
  bool found = false;
  for (int lane = 0; lane < LANES; ++lane) found |= call.operands[lane] != nullptr && operand<Any>(call, lane).value;
  for (int lane = 0; lane < LANES; ++lane) {
    if (call.operands[lane] != nullptr) operand<Any>(call, lane).value = found;
  }
  return nullptr;
}

// Lane i receives elements (2 * (i % 4), + 1) of row i / 4 of every matrix; transposed: of column i / 4.
const char* ldmatrix(const WarpCall& call) {
  const LdMatrix& first = operand<LdMatrix>(call, 0);
  for (int lane = 0; lane < LANES; ++lane) {
    const LdMatrix& mine = operand<LdMatrix>(call, lane);
    for (int matrix = 0; matrix < first.matrices; ++matrix) {
      uint16_t two[2];
      for (int i = 0; i < 2; ++i) {
        const int along = lane % 4 * 2 + i, across = lane / 4;
        const int row = first.transposed ? along : across, column = first.transposed ? across : along;
        const auto* source = static_cast<const uint16_t*>(operand<LdMatrix>(call, matrix * 8 + row).row);
        two[i] = source[column];
      }
      mine.result[matrix] = two[0] | uint32_t{two[1]} << 16;
    }
  }
  return nullptr;
}

float element(uint32_t two, int which, bool is_f16) {
  const auto bits = static_cast<uint16_t>(two >> (16 * which));
  return is_f16 ? f16_to_float(bits) : bf16_to_float(bits);
}

// Fragments (PTX ISA, m16n8k16 with 16-bit elements), with group = lane / 4 and pair = lane % 4 * 2: a[0] (group, pair)
// a[1] (group + 8, pair) a[2] (group, pair + 8) a[3] (group + 8, pair + 8); b[0] (pair, group) b[1] (pair + 8, group);
// d[0..1] (group, pair) d[2..3] (group + 8, pair); pairs run along columns of a and d and along rows of b.
const char* mma(const WarpCall& call) {
  alignas(64) float a[16][16], b[16][8], d[16][8];
  for (int lane = 0; lane < LANES; ++lane) {
    const Mma& mine = operand<Mma>(call, lane);
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      for (int part = 0; part < 4; ++part) {
        a[group + part % 2 * 8][pair + part / 2 * 8 + i] = element(mine.a[part], i, mine.is_f16);
      }
      b[pair + i][group] = element(mine.b[0], i, mine.is_f16);
      b[pair + 8 + i][group] = element(mine.b[1], i, mine.is_f16);
      d[group][pair + i] = mine.d[i];
      d[group + 8][pair + i] = mine.d[2 + i];
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < LANES; ++lane) {
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      operand<Mma>(call, lane).d[i] = d[group][pair + i];
      operand<Mma>(call, lane).d[2 + i] = d[group + 8][pair + i];
    }
  }
  return nullptr;
}

}  // namespace

const char* name(Op op) {
  switch (op) {
    case Op::block_sync: return "sync_block";
    case Op::warp_sync: return "sync_warp";
    case Op::shuffle: return "shuffle";
    case Op::any: return "any_in_warp";
    case Op::ldmatrix: return "ldmatrix";
    case Op::mma: return "mma";
    default: return "nothing";
  }
}

const char* execute(const WarpCall& call) {
  if (call.op == Op::ldmatrix || call.op == Op::mma) {
    for (const void* present : call.operands) {
      if (present == nullptr) return "a matrix instruction needs all 32 lanes of the warp";
    }
  }
  switch (call.op) {
    case Op::shuffle: return shuffle(call);
    case Op::any: return any(call);
    case Op::ldmatrix: return ldmatrix(call);
    case Op::mma: return mma(call);
    default: return nullptr;
  }
}

}  // namespace pageloom::emulator
