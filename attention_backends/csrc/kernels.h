// What crosses between the scheduler of the work (schedule.cpp) and the kernels, which are compiled once per ISA.
// Plain data only: a TU that is compiled for AVX-512 must not emit any shared inline function (std::vector, std::max),
// because the linker may keep that copy for every caller, and an older CPU would then meet an illegal instruction.
#pragma once

#include <stdint.h>

#define PAGELOOM_ALWAYS_INLINE inline __attribute__((always_inline))

namespace pageloom {

enum class Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3 };

// K and V lie in cells, the unit that a vector of the kernels has a lane for: 32 bits, which hold one float32 or two
// 16-bit elements, or 16 bits of two int8.
//   K of one block and head: cells [padded_dim / per_cell][block_size]; a cell pairs two neighbouring dims of a token.
//   V of one block and head: cells [block_size / per_cell][padded_dim]; a cell pairs two neighbouring tokens of a dim.
// A cache of latents has one head, and V alone: a row is a key, and its first elements are a value.
// One block: K of every head, then V of every head; an int8 cache has behind them float32 scales, of K
// [heads][block_size] and of V likewise: an element is its cell times the scale of its token and head. Between blocks there
// may be what is not this layer's.
struct CacheLayout {
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t padded_dim;    // head_dim rounded up to 16
  int64_t block_stride;  // bytes from one block to the next
  Dtype dtype;
  char* base;
  bool latent;

  PAGELOOM_ALWAYS_INLINE int64_t element_bytes() const {
    return dtype == Dtype::kFloat32 ? 4 : dtype == Dtype::kInt8 ? 1 : 2;
  }
  PAGELOOM_ALWAYS_INLINE int64_t cell_bytes() const { return dtype == Dtype::kInt8 ? 2 : 4; }
  PAGELOOM_ALWAYS_INLINE int64_t head_bytes() const { return block_size * padded_dim * element_bytes(); }
  PAGELOOM_ALWAYS_INLINE void* k_of(int64_t block, int64_t head) const {
    return base + block * block_stride + head * head_bytes();
  }
  PAGELOOM_ALWAYS_INLINE void* v_of(int64_t block, int64_t head) const {
    return k_of(block, latent ? head : num_kv_heads + head);
  }
  // int8 only: of the block's tokens
  PAGELOOM_ALWAYS_INLINE float* k_scales(int64_t block, int64_t head) const {
    return (float*)k_of(block, 2 * num_kv_heads) + head * block_size;
  }
  PAGELOOM_ALWAYS_INLINE float* v_scales(int64_t block, int64_t head) const {
    return k_scales(block, num_kv_heads + head);
  }
};

// [tokens, heads, head_dim] with free token and head strides (in elements); the last dimension is contiguous.
struct TokenView {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
};

// A query token whose rows take part in an item of several sequences, and where its partial results go (in floats).
struct SharedToken {
  int64_t partial;       // of KV head 0 and the item's part
  int64_t partial_step;  // from one KV head to the next
  int32_t token;
  int32_t split_group;  // of KV head 0, at the first token of a sequence; -1 at its others
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
  int64_t window;      // see oldest_key
  float scale;
  float soft_cap;      // 0: none
  const float* sinks;  // a logit of each query head that joins the softmax without a value; null: none
  int64_t step;        // not 0: calls with the same step and the same tables may be cut alike; see schedule.h
  const SharedToken* shared;
  int64_t parts;       // of every sequence the cache has the positions part, part + parts, ...; below 2: all
  int64_t part;

  // Then `out` is of floats, head_dim + 1 for each head: what these keys give, and the logarithm of their sum.
  PAGELOOM_ALWAYS_INLINE bool is_part() const { return parts > 1; }
  // How many of the cache's keys lie before `position` (at least 0) of their sequence.
  PAGELOOM_ALWAYS_INLINE int64_t keys_before(int64_t position) const {
    return is_part() ? (position - part + parts - 1) / parts : position;
  }
};

// The first key that the query at `position` sees: the last `window` keys end with its own. Below 0: those of its chunk of
// -window positions, up to its own. 0: all before it.
PAGELOOM_ALWAYS_INLINE int64_t oldest_key(int64_t position, int64_t window) {
  if (window > 0) return position < window ? 0 : position - window + 1;
  return window == 0 ? 0 : position / window * window;
}

// Rows are (query token, head of the group), token-major. Goes through them without a division for each.
struct RowCursor {
  int64_t row, token, head, group;

  PAGELOOM_ALWAYS_INLINE RowCursor(int64_t first, int64_t group)
      : row(first), token(first / group), head(first % group), group(group) {}
  PAGELOOM_ALWAYS_INLINE void next() {
    ++row;
    if (++head == group) head = 0, ++token;
  }
};

// One item: some rows of one KV head against keys [kv_begin, kv_end) of one block table (as the cache counts them; none: 0 and 0). The rows belong to sequence
// `seq`, or (shared >= 0) to tokens shared[item.shared], ... of several sequences, all of which see all of these keys.
struct WorkItem {
  int64_t partial;  // where the first row's partial result goes; unused if there is none, or by shared rows
  int32_t seq;
  int32_t kv_head;
  int32_t row_begin;
  int32_t row_end;
  int32_t kv_begin;
  int32_t kv_end;
  int32_t split_group;  // -1: the item owns its output, or is shared; otherwise which group it is a part of
  int32_t shared;

  PAGELOOM_ALWAYS_INLINE RowCursor first_row(const AttentionProblem& p) const { return {row_begin, p.group}; }
  PAGELOOM_ALWAYS_INLINE int64_t token_of(const AttentionProblem& p, const RowCursor& at) const {
    return shared < 0 ? p.query_start_loc[seq] + at.token : p.shared[shared + at.token].token;
  }
  // The row's query or output, in elements.
  PAGELOOM_ALWAYS_INLINE int64_t place_of(const AttentionProblem& p, const TokenView& view, const RowCursor& at) const {
    return token_of(p, at) * view.token_stride + (kv_head * p.group + at.head) * view.head_stride;
  }
  // Position of the row's query, or one behind all keys of the item.
  PAGELOOM_ALWAYS_INLINE int64_t position_of(const AttentionProblem& p, const RowCursor& at) const {
    const int32_t* const start = p.query_start_loc + seq;
    return shared < 0 ? p.seq_lens[seq] - (start[1] - start[0]) + at.token : p.is_part() ? kv_end * p.parts + p.part : kv_end;
  }
  PAGELOOM_ALWAYS_INLINE int64_t window_of(const AttentionProblem& p) const { return shared < 0 ? p.window : 0; }
  // Null where the item owns its output. `stride`: floats of one row.
  PAGELOOM_ALWAYS_INLINE float* partial_of(const AttentionProblem& p, float* partials, const RowCursor& at,
                                           int64_t stride) const {
    if (shared >= 0) {
      const SharedToken& t = p.shared[shared + at.token];
      return partials + t.partial + kv_head * t.partial_step + at.head * stride;
    }
    return split_group < 0 ? nullptr : partials + partial + (at.row - row_begin) * stride;
  }
};

// A partial result of one item: rows x (accumulator[padded_dim], maximum, sum), unnormalised.
inline constexpr int64_t kMaxHeadDim = 640;
inline constexpr int64_t kPartialExtra = 16;
inline constexpr int64_t kRowTile = 96;   // query rows that share one pass over the keys (AMX takes more)
inline constexpr int64_t kKeyTile = 256;  // keys between two rescalings of the accumulator
inline constexpr int64_t kSplit = 256;    // keys per part (4x for many rows); never depends on threads or batch
inline constexpr int64_t kFewRows = 32;   // up to so many rows, a sequence has parts of kSplit keys

// What ranks found in their parts of a context, in order, and what that makes of the whole.
struct MergeProblem {
  const float* found;  // [tokens, parts, heads, head_dim + 1], as a part's `out`
  int64_t parts, heads, head_dim;
  const float* sinks;  // as in AttentionProblem, of these heads
  TokenView out;
  Dtype dtype;  // of out
};

// Rows of each head times its matrix: `weight`'s [depth][outs], or `transposed` [outs][depth]. None is larger than
// kMaxHeadDim.
struct HeadProduct {
  TokenView x, out;
  const void* weight;
  int64_t head_stride, row_stride;  // in elements, from one head's matrix to the next, and within it
  int64_t depth, outs;
  bool transposed;
  Dtype dtype;
};

struct KernelTable {
  int64_t vector_tokens;  // a block size must be a multiple of this
  int64_t row_tile;       // the most rows of an item
  int64_t (*scratch_bytes)(const AttentionProblem&);
  // False if a block-table entry points outside the cache: nothing is read there. `next`: an item that this thread may
  // come to next, or null.
  bool (*attend)(const AttentionProblem&, const WorkItem&, const WorkItem* next, void* scratch, float* partials);
  // Adds up the parts of the rows of one split group; part i starts at partials + i * partial_stride.
  void (*combine)(const AttentionProblem&, const WorkItem& rows, const float* partials, int64_t parts,
                  int64_t partial_stride);
  // Rows [begin, end).
  void (*merge)(const MergeProblem&, int64_t begin, int64_t end);
  // Rows [begin, end) of one head.
  void (*product)(const HeadProduct&, int64_t head, int64_t begin, int64_t end);
};

const KernelTable* kernels_portable();
const KernelTable* kernels_avx2();
const KernelTable* kernels_avx512();
const KernelTable* kernels_avx512bf16();
const KernelTable* kernels_amx();  // for bfloat16 and int8 caches of keys and values; the caller has leave to use tiles, and AVX-512-BF16

}  // namespace pageloom
