// Packed rows: a tile's rows are (query token, head of the GQA group), token-major, so that all heads which share a KV
// head, and several tokens where there are some, use what is in shared memory together.
#pragma once

#include "tile.cuh"

namespace pageloom::cuda {

constexpr float LOG2_E = 1.4426950408889634f;

// That a query at `position` sees: with a window w the first of (position - w, position], with -c that of its chunk of c
// keys. It never falls as positions rise.
__device__ __forceinline__ int oldest_key(int position, int window) {
  if (window == 0) return 0;
  return max_i(0, window > 0 ? position - window + 1 : position - position % -window);
}

struct Sequence {
  int first_token;  // of the step
  int queries;
  int length;       // keys, this step's included

  __device__ __forceinline__ void open(const Batch& batch, int seq) {
    first_token = batch.query_start_loc[batch.first_seq + seq];
    queries = batch.query_start_loc[batch.first_seq + seq + 1] - first_token;
    length = batch.seq_lens[batch.first_seq + seq];
  }
  // Of the first query; negative only where the length is 0.
  __device__ __forceinline__ int position() const { return length - queries; }
  __device__ __forceinline__ int first_key(int window) const { return oldest_key(position(), window); }
};

// How scores become exponents of 2. Kernels see no negative scale: the queries take its sign.
struct Scoring {
  float scale;        // of raw scores, in exponents of 2; 1 where a cap has been applied
  float cap_in;       // soft cap: score = cap_out * tanh(cap_in * raw)
  float cap_out;
  float value_scale;
  uint32_t sign;      // flips a pair of query elements
  int32_t window;
  const float* sinks;
};

inline Scoring scoring_of(const Layer& layer, bool eight_bit) {
  const float raw = layer.scale * (eight_bit ? layer.k_scale : 1.0f);
  const float size = raw < 0 ? -raw : raw;
  const float scale = size > 1e-30f ? size : 1e-30f;  // 0 would turn the -infinity of hidden scores into NaN
  const bool capped = layer.soft_cap > 0;
  Scoring scoring{};
  scoring.scale = capped ? 1.0f : scale * LOG2_E;
  scoring.cap_in = capped ? scale / layer.soft_cap : 0.0f;
  scoring.cap_out = capped ? layer.soft_cap * LOG2_E : 0.0f;
  scoring.value_scale = eight_bit ? layer.v_scale : 1.0f;
  scoring.sign = raw < 0 ? 0x80008000u : 0u;
  scoring.window = layer.window;
  scoring.sinks = layer.sinks;
  return scoring;
}

inline bool is_plain(const Layer& layer) {
  return layer.window == 0 && !(layer.soft_cap > 0) && layer.sinks == nullptr;
}

// The rows of one sequence and KV head.
struct PackedRows {
  int count;
  int group;
  int first_head;
  int first_token;

  __device__ __forceinline__ void open(const Sequence& sequence, int group_, int kv_head) {
    count = sequence.queries * group_;
    group = group_;
    first_head = kv_head * group_;
    first_token = sequence.first_token;
  }
  template <class T>
  __device__ __forceinline__ T* address(const Tokens& tokens, int row) const {
    const int token = row / group;
    const int head = first_head + row - token * group;
    return static_cast<T*>(tokens.data) + (first_token + token) * tokens.token_stride + head * tokens.head_stride;
  }
};

// Queues the copy of rows first .. first + COUNT of the queries to rows 0 .. of shared address `to`; rows that are not
// become 0.
template <class S, int COUNT>
__device__ __forceinline__ void copy_queries(int to, const Tokens& q, const PackedRows& rows, int first) {
  using R = typename S::QueryRows;
  for (int i = static_cast<int>(threadIdx.x); i < COUNT * R::CHUNKS; i += static_cast<int>(blockDim.x)) {
    const int row = i / R::CHUNKS;
    const int chunk = i % R::CHUNKS;
    const bool valid = first + row < rows.count;
    const auto* from = rows.address<const typename S::Half>(q, valid ? first + row : 0) + chunk * 8;
    cp_async16(shared_memory() + to + R::at(row, chunk), from, valid);
  }
}

// Once the copy has landed, by the whole block: the sign of the scale, and for an 8-bit cache the order of dims in
// which key_fragments finds them in a key.
template <class S, int COUNT>
__device__ __forceinline__ void prepare_queries(int from, uint32_t sign) {
  constexpr int PAIRS = S::QueryRows::CHUNKS / 2;
  if (!S::BYTES && sign == 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < COUNT * PAIRS; i += static_cast<int>(blockDim.x)) {
    char* low = shared_memory() + from + S::QueryRows::at(i / PAIRS, i % PAIRS * 2);
    char* high = shared_memory() + from + S::QueryRows::at(i / PAIRS, i % PAIRS * 2 + 1);
    vec16 a = load16(low);
    vec16 b = load16(high);
    if constexpr (S::BYTES) {
      const vec16 mixed = a;
      a = vec16{{mixed.x[0], mixed.x[2], b.x[0], b.x[2]}};
      b = vec16{{mixed.x[1], mixed.x[3], b.x[1], b.x[3]}};
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      a.x[j] ^= sign;
      b.x[j] ^= sign;
    }
    store16(low, a);
    store16(high, b);
  }
  sync_block();
}

// What the rows of one warp may see: a row's newest key lies in shared memory, because it is needed in few tiles and
// registers are needed in all. Rows behind the last one of a sequence are its equals, except in a warp that has no
// others: they see nothing.
struct Sight {
  int at;  // of the warp's first row
  int window;

  // Rows 0 .. COUNT of the tile, whose first is row first_row of the sequence; WARP_ROWS for each warp. By the whole
  // block, before a barrier.
  template <int COUNT, int WARP_ROWS>
  static __device__ __forceinline__ void prepare(int at, const Sequence& sequence, const PackedRows& rows,
                                                 int first_row) {
    for (int i = static_cast<int>(threadIdx.x); i < COUNT; i += static_cast<int>(blockDim.x)) {
      const bool idle = first_row + i / WARP_ROWS * WARP_ROWS >= rows.count;
      const int position = sequence.position() + min_i(first_row + i, rows.count - 1) / rows.group;
      *reinterpret_cast<int*>(shared_memory() + at + i * 4) = idle ? -1 : position;
    }
  }
  __device__ __forceinline__ int newest(int row) const {
    return *reinterpret_cast<const int*>(shared_memory() + at + row * 4);
  }
  // Of keys [key, key + count): does any of the warp's rows see any, do all see all?
  template <int ROWS>
  __device__ __forceinline__ bool any(int key, int count) const {
    return key <= newest(ROWS - 1) && (window == 0 || key + count > oldest_key(newest(0), window));
  }
  template <int ROWS>
  __device__ __forceinline__ bool all(int key, int count) const {
    return key + count - 1 <= newest(0) && (window == 0 || key >= oldest_key(newest(ROWS - 1), window));
  }
};

}  // namespace pageloom::cuda
