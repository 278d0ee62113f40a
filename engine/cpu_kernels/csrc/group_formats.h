// Where things lie in a panel of the group formats (linear.h says what they mean), for the kernels that multiply them
// and for those that decode them.
//
// High bits of Q6_K: byte [i][o][j] of the part for inputs [64 h, 64 h + 64) of a group of 256 holds bits 4 and 5 of
// four of them: input 4 i + j in its lowest two bits, then 16 + 4 i + j, 32 + 4 i + j, 48 + 4 i + j.
#pragma once

#include "linear.h"

namespace {

constexpr int64_t kNibbleBytes = pageloom::kGroup / 2 * pageloom::kPanel;  // 32 inputs of a panel, two to a byte
constexpr int64_t kHighBytes = pageloom::kGroup / 2 * pageloom::kPanel;    // bits 4 and 5 of 64 inputs of a panel
constexpr int64_t kSubGroups = 8;                                // of 32 inputs in the 256 of a K-quant

struct LayoutQ4_0 {
  static constexpr int64_t kInputs = 32, kD = kNibbleBytes, kBytes = kD + 64;
};
struct LayoutQ4_1 {
  static constexpr int64_t kInputs = 32, kD = kNibbleBytes, kM = kD + 64, kBytes = kM + 64;
};
struct LayoutInt4Group {
  static constexpr int64_t kInputs = 32, kD = kNibbleBytes, kZ = kD + 64, kBytes = kZ + 64;
};
struct LayoutQ8_0 {
  static constexpr int64_t kInputs = 32, kD = 2 * kNibbleBytes, kBytes = kD + 64;
};
struct LayoutQ4K {
  static constexpr int64_t kInputs = 256, kScales = kSubGroups * kNibbleBytes, kMins = kScales + kSubGroups * 32;
  static constexpr int64_t kD = kMins + kSubGroups * 32, kDMin = kD + 64, kBytes = kDMin + 64;
};
struct LayoutQ6K {
  static constexpr int64_t kInputs = 256, kHigh = kSubGroups * kNibbleBytes;
  static constexpr int64_t kScales = kHigh + kSubGroups / 2 * kHighBytes, kD = kScales + 2 * kSubGroups * 32;
  static constexpr int64_t kBytes = kD + 64;
};

}  // namespace
