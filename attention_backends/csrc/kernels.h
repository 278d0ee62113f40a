// What crosses between the scheduler of the work (schedule.cpp) and the kernels, which are compiled once per ISA.
// Plain data only: a TU that is compiled for AVX-512 must not emit any shared inline function (std::vector, std::max),
// because the linker may keep that copy for every caller, and an older CPU would then meet an illegal instruction.
#pragma once

#include <stdint.h>

#define PAGELOOM_ALWAYS_INLINE inline __attribute__((always_inline))

namespace pageloom {

enum class Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// A 32-bit lane holds one float32, or two 16-bit elements.
//   K of one block and head: lanes [padded_dim / per_lane][block_size]; a lane pairs two neighbouring dims of a token.
//   V of one block and head: lanes [block_size / per_lane][padded_dim]; a lane pairs two neighbouring tokens of a dim.
// One block: K of every head, then V of every head.
struct CacheLayout {
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t padded_dim;  // head_dim rounded up to 16
  Dtype dtype;
  uint32_t* base;

  PAGELOOM_ALWAYS_INLINE int64_t per_lane() const { return dtype == Dtype::kFloat32 ? 1 : 2; }
  PAGELOOM_ALWAYS_INLINE int64_t head_lanes() const { return block_size * padded_dim / per_lane(); }
  PAGELOOM_ALWAYS_INLINE int64_t block_lanes() const { return 2 * num_kv_heads * head_lanes(); }
  PAGELOOM_ALWAYS_INLINE uint32_t* k_of(int64_t block, int64_t head) const {
    return base + block * block_lanes() + head * head_lanes();
  }
  PAGELOOM_ALWAYS_INLINE uint32_t* v_of(int64_t block, int64_t head) const {
    return k_of(block, num_kv_heads + head);
  }
};

// [tokens, heads, head_dim] with free token and head strides (in elements); the last dimension is contiguous.
struct TokenView {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
};

struct AttentionProblem {
  CacheLayout cache;
  TokenView q;
  TokenView out;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  int64_t block_table_stride;
  int64_t max_blocks;  // columns of block_tables
  int64_t num_seqs;
  int64_t group;       // query heads per KV head
  int64_t window;      // 0: none
  float scale;
  float soft_cap;      // 0: none
};

// Rows are (query token, head of the group), token-major: row r of a sequence is token r / group, head r % group.
// One item: some rows of one (sequence, KV head) against keys [kv_begin, kv_end).
struct WorkItem {
  int32_t seq;
  int32_t kv_head;
  int32_t row_begin;
  int32_t row_end;
  int32_t kv_begin;
  int32_t kv_end;
  int32_t split_group;  // -1: the item owns its output; otherwise which group of partial results it belongs to
  int32_t part;         // index within the split group
};

// A partial result of one item: rows x (accumulator[padded_dim], maximum, sum), unnormalised.
inline constexpr int64_t kPartialExtra = 16;
inline constexpr int64_t kRowTile = 96;   // query rows that share one pass over the keys (AMX takes more)
inline constexpr int64_t kKeyTile = 128;  // keys between two rescalings of the accumulator
inline constexpr int64_t kSplit = 256;    // keys per part (4x for many rows); never depends on threads or batch

struct KernelTable {
  int64_t vector_tokens;  // a block size must be a multiple of this
  int64_t row_tile;       // the most rows of an item
  int64_t (*scratch_bytes)(const AttentionProblem&);
  // False if a block-table entry points outside the cache: nothing is read there.
  bool (*attend)(const AttentionProblem&, const WorkItem&, void* scratch, float* partial);
  void (*combine)(const AttentionProblem&, const WorkItem& rows, const float* partials, int64_t parts,
                  int64_t partial_stride);
};

const KernelTable* kernels_portable();
const KernelTable* kernels_avx2();
const KernelTable* kernels_avx512();
const KernelTable* kernels_avx512bf16();
const KernelTable* kernels_amx();  // for bfloat16 caches; the caller has leave to use tiles, and AVX-512-BF16

}  // namespace pageloom
