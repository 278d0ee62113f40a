// What crosses between the binding (which sees torch) and the CUDA kernels (which do not): plain data and C launchers.
// One library serves one (head_dim, element type, cache type); the macros that choose them are
//   PAGELOOM_HEAD_DIM  64 | 96 | 128 | 256
//   PAGELOOM_HALF      0: bfloat16, 1: float16      (queries, outputs and, unless 8-bit, the cache)
//   PAGELOOM_KV_FP8    0: the cache has the type of the queries, 1: float8 e4m3
// and a fourth says what the device has:
//   PAGELOOM_SHARED_KIB  shared memory that a thread block may have: 99 (compute capability 8.6, 8.9, 12.x) | 163 | 227
// Every launcher queues work on `stream` and returns null, or a message that lives for ever. None synchronises. Grids depend
// on sizes given by value only, never on what the device tensors hold, so every launch may be captured and replayed.
#pragma once

#include <stdint.h>

namespace pageloom::cuda {

using Stream = void*;  // cudaStream_t

// [tokens, heads, head_dim], strides in elements; the last dimension is contiguous, rows start at 16-byte boundaries.
struct Tokens {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
};

// [num_blocks, 2 (K, V), num_kv_heads, block_size, head_dim], blocks contiguous; block_size is a power of two, 16 or more.
struct Cache {
  void* data;
  int64_t block_bytes;  // from one block to the next, a multiple of 16
  int32_t num_kv_heads;
  int32_t block_size;
};

// Sequences [first_seq, first_seq + num_seqs) of a step. Rows of a sequence: (query token, head of the GQA group), token-major:
// row r is token r / group, head r % group. A sequence of length 0 writes zeros to its rows of the output.
struct Batch {
  const int32_t* query_start_loc;  // indexed by sequence, one entry more than sequences
  const int32_t* seq_lens;         // this step's tokens included
  const int32_t* block_tables;     // [sequences, >= blocks in use]; entries beyond those, or left by the window, are never read
  int64_t block_table_stride;
  int32_t first_seq;
  int32_t num_seqs;
};

struct Layer {
  int32_t num_heads;
  int32_t window;    // 0: none; w: query at position p sees keys in (p - w, p]; -c: in [p / c * c, p], its chunk
  float scale;
  float soft_cap;    // 0: none
  float k_scale;     // an 8-bit cache holds k / k_scale and v / v_scale
  float v_scale;
  const float* sinks;  // [num_heads] or null: a logit that joins the softmax without a value
};

// How a decode is split over the machine; written by schedule_decode on the device once a step (for each distinct window),
// read by decode in every layer. An item is one chunk of one sequence's keys.
struct DecodeSchedule {
  int32_t* header;      // [2]: items in use, tokens per chunk (a multiple of 64)
  int32_t* items;       // [max_items, 2]: sequence (counted from first_seq), chunk
  int32_t* item_start;  // [num_seqs + 1]: first item of each sequence; a sequence of length 0 has one item
  int32_t max_items;    // >= num_seqs + 1
};

// Results of chunks, each divided by its own sum, where a sequence has several: [item, kv_head, row], max_rows rows each.
struct Partials {
  float* out;  // [max_items, num_kv_heads, max_rows, head_dim]
  float* lse;  // [max_items, num_kv_heads, max_rows]: log2 of the sum of exponentials; -inf where no key was seen
  int32_t* arrivals;  // [num_seqs, num_kv_heads, ceil(max_rows / 16)]: zero before every decode, and after it
};

extern "C" {

// 1 <= queries of each sequence <= max_query_len.
const char* pageloom_schedule_decode(const Batch* batch, int32_t window, int32_t max_query_len,
                                     const DecodeSchedule* schedule, Stream stream);

// Few queries against long contexts: one token, or several for speculative verification. max_rows = max_query_len * group, at most
// 64. The keys and values of this step are already in the cache.
const char* pageloom_decode(const Tokens* q, const Tokens* out, const Cache* cache, const Batch* batch, const Layer* layer,
                            const DecodeSchedule* schedule, const Partials* partials, int32_t max_rows, Stream stream);

// Many queries. num_tokens: query tokens of these sequences together (an upper bound will do).
const char* pageloom_prefill(const Tokens* q, const Tokens* out, const Cache* cache, const Batch* batch, const Layer* layer,
                             int32_t num_tokens, Stream stream);

// Token t's K and V go to slot slots[t] = block * block_size + offset; a negative slot is skipped.
const char* pageloom_write_kv(const Tokens* k, const Tokens* v, const Cache* cache, const int64_t* slots, int32_t num_tokens,
                              float k_scale, float v_scale, Stream stream);

// `bases`, `pairs`, `ids` are device arrays. bases: start of each layer's cache; a block has block_bytes bytes (a multiple of 16).
const char* pageloom_copy_blocks(void* const* bases, int32_t num_layers, int64_t block_bytes,
                                 const int64_t* pairs /* [n, 2]: from, to; all destinations distinct from all sources */,
                                 int32_t num_pairs, Stream stream);

// staging [num_ids, num_layers, block_bytes] on the device.
const char* pageloom_gather_blocks(void* const* bases, int32_t num_layers, int64_t block_bytes, const int64_t* ids,
                                   int32_t num_ids, void* staging, Stream stream);
const char* pageloom_scatter_blocks(void* const* bases, int32_t num_layers, int64_t block_bytes, const int64_t* ids,
                                    int32_t num_ids, const void* staging, Stream stream);
}

}  // namespace pageloom::cuda
