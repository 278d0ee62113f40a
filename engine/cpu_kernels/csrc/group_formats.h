// Where things lie in a panel of the group formats (linear.h says what they mean), for the kernels that multiply them
// and for those that decode them.
//
// High bits of Q6_K, low bits of Q3_K and all of Q2_K: byte [i][o][j] of the part for inputs [64 h, 64 h + 64) of a group of 256 holds two
// bits of four of them: input 4 i + j in its lowest two bits, then 16 + 4 i + j, 32 + 4 i + j, 48 + 4 i + j.
// The fifth bit of Q5_0, Q5_1 and Q5_K, and the third of Q3_K: of each 32 inputs byte [o][j] holds that of input 4 i + j in
// bit i.
#pragma once

#include "linear.h"

namespace {

constexpr int64_t kNibbleBytes = pageloom::kGroup / 2 * pageloom::kPanel;  // 32 inputs of a panel, two to a byte
constexpr int64_t kHighBytes = pageloom::kGroup / 2 * pageloom::kPanel;    // two bits of 64 inputs of a panel
constexpr int64_t kBitBytes = pageloom::kGroup / 8 * pageloom::kPanel;     // one bit of 32 inputs of a panel
constexpr int64_t kSubGroups = 8;                                          // of 32 inputs in the 256 of a K-quant

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

struct LayoutQ5_0 {
  static constexpr int64_t kInputs = 32, kFifth = kNibbleBytes, kD = kFifth + kBitBytes, kBytes = kD + 64;
};
struct LayoutQ5_1 {
  static constexpr int64_t kInputs = 32, kFifth = kNibbleBytes, kD = kFifth + kBitBytes, kM = kD + 64, kBytes = kM + 64;
};
struct LayoutQ5K {
  static constexpr int64_t kInputs = 256, kFifth = kSubGroups * kNibbleBytes, kScales = kFifth + kSubGroups * kBitBytes;
  static constexpr int64_t kMins = kScales + kSubGroups * 32, kD = kMins + kSubGroups * 32, kDMin = kD + 64;
  static constexpr int64_t kBytes = kDMin + 64;
};
struct LayoutQ3K {
  static constexpr int64_t kInputs = 256, kThird = kSubGroups / 2 * kHighBytes, kScales = kThird + kSubGroups * kBitBytes;
  static constexpr int64_t kD = kScales + 2 * kSubGroups * 32, kBytes = kD + 64;
};
struct LayoutQ2K {
  static constexpr int64_t kInputs = 256, kScales = kSubGroups / 2 * kHighBytes, kD = kScales + 2 * kSubGroups * 32;
  static constexpr int64_t kDMin = kD + 64, kBytes = kDMin + 64;
};
struct LayoutIQ4NL : LayoutQ4_0 {};
struct LayoutIQ4XS {
  static constexpr int64_t kInputs = 256, kScales = kSubGroups * kNibbleBytes, kD = kScales + kSubGroups * 32;
  static constexpr int64_t kBytes = kD + 64;
};

struct LayoutMxfp4 {
  static constexpr int64_t kInputs = 64, kScales = 2 * kNibbleBytes, kBytes = kScales + 2 * pageloom::kPanel;
};
struct LayoutNvfp4 {  // behind the groups a float for each output, by which its scales are divided
  static constexpr int64_t kInputs = 32, kScales = kNibbleBytes, kBytes = kScales + 2 * pageloom::kPanel;
};
struct LayoutFloat8 {  // behind the groups a float for each output, its scale
  static constexpr int64_t kInputs = 4, kBytes = 4 * pageloom::kPanel;
};
struct LayoutFloat8Block {
  static constexpr int64_t kInputs = 128, kD = kInputs * pageloom::kPanel, kBytes = kD + 4 * pageloom::kPanel;
};

// What the nibbles of IQ4_NL and IQ4_XS stand for.
constexpr int8_t kUnevenLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// Twice those of e2m1 (fp4).
constexpr int8_t kTwiceE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace
