// The collectives of one warp, executed when all of its lanes have arrived.
#pragma once

#include "emulator.h"

namespace pageloom::emulator {

constexpr int LANES = 32;

struct WarpCall {
  Op op;
  Site site;
  void* operands[LANES];  // null: the lane has exited
};

const char* name(Op op);
// Null, or why this is not allowed.
const char* execute(const WarpCall& call);

}  // namespace pageloom::emulator
