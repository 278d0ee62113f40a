// Keys and values of one head in shared memory, and how they reach the tensor cores.
//
// A row is one token's head (ROW_BYTES), 16-byte chunk c of row r lying at position c ^ flip(r) of its row: any eight
// rows at the same chunk, which is what one matrix of ldmatrix reads, then lie in eight different groups of four banks,
// for every row length.
#pragma once

#include <pageloom_device.cuh>

#include "launch.h"

namespace pageloom::cuda {

constexpr int PIECE = 16;  // keys copied together: they never straddle two pages
constexpr int SHARED_LIMIT = PAGELOOM_SHARED_KIB * 1024;

template <int ROW_BYTES_>
struct Rows {
  static constexpr int ROW_BYTES = ROW_BYTES_;
  static constexpr int CHUNKS = ROW_BYTES / 16;
  static constexpr int PERIOD = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;
  static_assert(ROW_BYTES % 32 == 0);

  static __device__ __forceinline__ constexpr int flip(int row) { return row / (8 / PERIOD) % PERIOD; }
  static __device__ __forceinline__ constexpr int at(int row, int chunk) {
    return row * ROW_BYTES + (chunk ^ flip(row)) * 16;
  }
  // Moves an address that at() gave for chunk 0 (or 0 and 1, where `chunks` is even): only its lowest bits are flipped.
  static __device__ __forceinline__ constexpr int along(int address, int chunks) {
    return (address ^ (chunks % PERIOD * 16)) + chunks / PERIOD * PERIOD * 16;
  }
};

template <class Half_, class Kv_, int HEAD_DIM_>
struct Shape {
  using Half = Half_;
  using Kv = Kv_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr bool BYTES = sizeof(Kv) == 1;
  using QueryRows = Rows<HEAD_DIM * 2>;
  using KeyRows = Rows<HEAD_DIM * static_cast<int>(sizeof(Kv))>;
  static constexpr int TILES = HEAD_DIM / 8;  // of the accumulator, 8 columns each

  // The head's dimension that a thread's accumulator element [tile][element] belongs to, for element 0 or 1 (2, 3: 8
  // rows below). 8-bit values come from ldmatrix as pairs of dims, even ones in one tile, odd ones in the next.
  static __device__ __forceinline__ constexpr int column(int tile, int quad_lane, int element) {
    return BYTES ? tile / 2 * 16 + quad_lane * 4 + element * 2 + tile % 2 : tile * 8 + quad_lane * 2 + element;
  }
};

// Copies COUNT rows, contiguous in memory, to row 0.. of shared address `to` (a multiple of 8 rows); rows outside
// [first, last) become zeros and are not read. HALVES 2: and as many from `from_step` further on to `to_step` further
// on. One warp works together.
template <class R, int COUNT, int HALVES>
__device__ __forceinline__ void copy_rows(int to, const char* from, int first, int last, int to_step,
                                          int64_t from_step) {
  constexpr int STEPS = COUNT * R::CHUNKS / WARP;
  constexpr bool POWER = (R::CHUNKS & (R::CHUNKS - 1)) == 0 && R::CHUNKS <= WARP;
  constexpr int STRIDE = POWER ? WARP / R::CHUNKS : 0;  // rows in a step
  static_assert(COUNT * R::CHUNKS % WARP == 0);
  const int lane = static_cast<int>(threadIdx.x) % WARP;
  const auto count = static_cast<uint32_t>(max_i(last - first, 0));
  from += lane * 16;
  const int lane_row = lane / R::CHUNKS;
  const int lane_to = to + R::at(lane_row, lane % R::CHUNKS);
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    int row, at;
    if constexpr (POWER) {
      row = lane_row + i * STRIDE;
      at = (lane_to ^ (R::flip(i * STRIDE) * 16)) + i * STRIDE * R::ROW_BYTES;
    } else {
      row = (i * WARP + lane) / R::CHUNKS;
      at = to + R::at(row, (i * WARP + lane) % R::CHUNKS);
    }
    const bool valid = static_cast<uint32_t>(row - first) < count;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      cp_async16(shared_memory() + at + half * to_step, from + half * from_step + i * (WARP * 16), valid);
    }
  }
}

// Where the pages of one sequence and one head are.
struct Pages {
  const int32_t* table;
  const char* keys;     // of this head in block 0
  int64_t block_bytes;
  int64_t to_values;    // from a key to its value
  int32_t block_size;
  int32_t shift;        // log2(block_size)

  template <class S>
  __device__ __forceinline__ void open(const Cache& cache, const Batch& batch, int seq, int head) {
    const int64_t page_bytes = int64_t{cache.block_size} * S::KeyRows::ROW_BYTES;
    table = batch.block_tables + (batch.first_seq + seq) * batch.block_table_stride;
    keys = static_cast<const char*>(cache.data) + head * page_bytes;
    to_values = cache.num_kv_heads * page_bytes;
    block_bytes = cache.block_bytes;
    block_size = cache.block_size;
    shift = 0;
    while ((2 << shift) <= block_size) ++shift;
  }
  // Entries outside the keys that count are never read: they may name no block, or lie outside the table.
  __device__ __forceinline__ int block_of(int key, int first, int last) const {
    return key + PIECE > first && key < last ? table[key >> shift] : 0;
  }
  template <class S>
  __device__ __forceinline__ const char* key_row(int block, int key) const {
    return keys + block * block_bytes + (key & (block_size - 1)) * S::KeyRows::ROW_BYTES;
  }
};

// ---- fragments: a lane's addresses are found once, ldmatrix then walks by constants ----

// Queries as the left operand: rows row .. row + 16 of the tile at `from`.
template <class S>
__device__ __forceinline__ int query_lane(int from, int row) {
  const int lane = static_cast<int>(threadIdx.x) % WARP;
  return from + S::QueryRows::at(row + lane % 16, lane / 16);
}
template <class S>
__device__ __forceinline__ void query_fragment(uint32_t (&a)[4], int lane_at, int step) {
  ldmatrix_x4(a, shared_memory() + S::QueryRows::along(lane_at, step * 2));
}

// KEYS keys x 16 dims as right operands, one per 8 keys: what one ldmatrix brings.
template <class S, int KEYS>
__device__ __forceinline__ int key_lane(int from) {
  const int lane = static_cast<int>(threadIdx.x) % WARP;
  return from + (S::BYTES ? S::KeyRows::at(lane % KEYS, 0) : S::KeyRows::at(lane / 16 * 8 + lane % 8, lane / 8 % 2));
}
template <class S, int KEYS>
__device__ __forceinline__ void key_fragments(uint32_t (&b)[KEYS / 8][2], int lane_at, int first_key, int step) {
  using R = typename S::KeyRows;
  using Half = typename S::Half;
  static_assert(S::BYTES ? KEYS == 16 || KEYS == 32 : KEYS == 16);
  constexpr int CHUNKS = S::BYTES ? 1 : 2;
  uint32_t r[S::BYTES ? KEYS / 8 : 4];
  const char* row = shared_memory() + first_key * R::ROW_BYTES + R::along(lane_at, step * CHUNKS);
  if constexpr (S::BYTES && KEYS == 16) {
    ldmatrix_x2(r, row);
  } else {
    ldmatrix_x4(r, row);
  }
#pragma unroll
  for (int i = 0; i < KEYS / 8; ++i) {
    if constexpr (S::BYTES) {  // a lane's four bytes are dims 4t..4t+3 of 16: prepare_queries follows that order
      b[i][0] = fp8x2_to<Half>(static_cast<uint16_t>(r[i]));
      b[i][1] = fp8x2_to<Half>(static_cast<uint16_t>(r[i] >> 16));
    } else {
      b[i][0] = r[i * 2];
      b[i][1] = r[i * 2 + 1];
    }
  }
}

// 16 keys x 32 columns of values as right operands of four accumulator tiles.
template <class S>
__device__ __forceinline__ int value_lane(int from) {
  const int lane = static_cast<int>(threadIdx.x) % WARP;
  return from + S::KeyRows::at(lane % 16, lane / 16);
}
template <class S>
__device__ __forceinline__ void value_fragments(uint32_t (&b)[4][2], int lane_at, int keys16, int dims32) {
  using R = typename S::KeyRows;
  const char* from = shared_memory() + keys16 * 16 * R::ROW_BYTES;
  uint32_t r[4];
  if constexpr (S::BYTES) {  // r[i]: two keys of the lane's pair of dims; split into its even and its odd dim
    ldmatrix_x4_trans(r, from + R::along(lane_at, dims32 * 2));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      b[i / 2 * 2][i % 2] = fp8x2_to<typename S::Half>(static_cast<uint16_t>(byte_perm(r[i], 0, 0x4420)));
      b[i / 2 * 2 + 1][i % 2] = fp8x2_to<typename S::Half>(static_cast<uint16_t>(byte_perm(r[i], 0, 0x4431)));
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ldmatrix_x4_trans(r, from + R::along(lane_at, dims32 * 4 + half * 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) b[half * 2 + i / 2][i % 2] = r[i];
    }
  }
}

}  // namespace pageloom::cuda
