// Many query rows against pages: FlashAttention-2 (Dao 2023) with the rows of all heads of a GQA group in one tile.
// Bound by the tensor cores: a warp's 32 rows use every fragment of keys and values twice (head_dim 256: 16 rows, for
// want of registers).
#pragma once

#include "softmax.cuh"

namespace pageloom::cuda {

struct PrefillParams {
  Tokens q;
  Tokens out;
  Cache cache;
  Batch batch;
  Scoring scoring;
  int32_t group;
};

// What a block works on. In shared memory, to be read where it is needed: the products need all registers.
struct TileJob {
  Pages pages;
  PackedRows rows;
  int first_row;  // of the tile
};

template <class S_>
struct PrefillShape {
  using S = S_;
  static constexpr int M = S::HEAD_DIM <= 128 ? 2 : 1;
  static constexpr int WARPS = S::HEAD_DIM <= 128 || SHARED_LIMIT < 132 * 1024 ? 4 : 8;
  static constexpr int WARP_ROWS = M * 16;
  static constexpr int ROWS = WARPS * WARP_ROWS;  // 128; 64 where shared memory is small and the head is not
  // 8-bit values need registers to be unpacked in: with 64 keys, head_dim 128 would spill.
  static constexpr int KEYS = S::HEAD_DIM < 128 || (S::HEAD_DIM == 128 && !S::BYTES) ? 64 : 32;
  static constexpr int ROW_BYTES = S::KeyRows::ROW_BYTES;
  static constexpr int KEYS_AT = ROWS * S::QueryRows::ROW_BYTES;
  static constexpr int HALF_STAGE = KEYS * ROW_BYTES;  // the keys; the values follow
  static constexpr int SIGHT_AT = KEYS_AT + 4 * HALF_STAGE;
  static constexpr int JOB_AT = SIGHT_AT + ROWS * 4;
  static constexpr int SHARED_BYTES = JOB_AT + 64;
  static constexpr int BLOCKS = S::HEAD_DIM <= 128 ? 2 : 1;
  static constexpr bool KEPT = S::HEAD_DIM <= 64;
  static constexpr int SHARES = WARPS / (KEYS / PIECE);  // warps that copy one piece
  static __device__ __forceinline__ TileJob* job() { return reinterpret_cast<TileJob*>(shared_memory() + JOB_AT); }
  static_assert((SHARES == 1 || SHARES == 2 || SHARES == 4) && sizeof(TileJob) <= 64 && SHARED_BYTES <= SHARED_LIMIT);
};

// Slots of the grid to tiles of sequences. Sequence i's tiles start at slot floor(rows before it / ROWS) + i, which
// leaves room for every sequence before it whatever the lengths, and can be computed for one sequence alone. Slots
// between are empty.
template <int ROWS>
struct TileSlot {
  int seq;
  int tile;

  static __device__ __forceinline__ int start(const Batch& batch, int group, int first, int seq) {
    return static_cast<int>(int64_t{batch.query_start_loc[batch.first_seq + seq] - first} * group / ROWS) + seq;
  }
  // The last sequence that starts at or before the slot; 32 candidates a round, one per lane.
  __device__ __forceinline__ void open(const Batch& batch, int group, int slot) {
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    const int first = batch.query_start_loc[batch.first_seq];
    int low = 0;
    int begin = 0;
    int count = batch.num_seqs;
    while (count > 0) {
      const int stride = (count + WARP - 1) / WARP;
      const int candidate = low + lane * stride;
      int best = -1;
      int best_start = 0;
      if (candidate < min_i(low + count, batch.num_seqs)) {
        best_start = start(batch, group, first, candidate);
        best = best_start <= slot ? candidate : -1;
      }
      best_start = best < 0 ? 0 : best_start;
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) {
        best = max_i(best, shuffle_xor(best, mask));
        best_start = max_i(best_start, shuffle_xor(best_start, mask));
      }
      low = best;
      begin = best_start;
      count = stride > 1 ? stride : 0;
    }
    seq = low;
    tile = slot - begin;
  }
};

// Copies tiles of keys and values; every warp its share.
template <class P>
struct TileStream {
  using S = typename P::S;
  using R = typename S::KeyRows;
  int first_key;  // that any row of the tile sees
  int end_key;
  int block;  // of this warp's piece of the next tile, looked up a tile ahead

  static __device__ __forceinline__ const Pages* pages() { return &P::job()->pages; }
  static __device__ __forceinline__ int piece() {
    return static_cast<int>(threadIdx.x) / WARP / P::SHARES * PIECE;
  }
  __device__ __forceinline__ void look_up(int key) { block = pages()->block_of(key + piece(), first_key, end_key); }
  __device__ __forceinline__ void copy(int stage, int key) {
    const int to = P::KEYS_AT + stage * 2 * P::HALF_STAGE + piece() * P::ROW_BYTES;
    key += piece();
    const char* from = pages()->template key_row<S>(block, key);
    if constexpr (P::SHARES == 1) {
      copy_rows<R, PIECE, 2>(to, from, first_key - key, end_key - key, P::HALF_STAGE, pages()->to_values);
    } else {
      constexpr int COUNT = PIECE * 2 / P::SHARES;
      const int share = static_cast<int>(threadIdx.x) / WARP % P::SHARES;
      const int row = share / 2 * COUNT;
      const int at = to + row * P::ROW_BYTES + share % 2 * P::HALF_STAGE;
      key += row;
      from += row * P::ROW_BYTES + share % 2 * pages()->to_values;
      copy_rows<R, COUNT, 1>(at, from, first_key - key, end_key - key, 0, 0);
    }
    cp_async_commit();
  }
};

// Through shared memory, where the warp's queries were, so that whole rows are written at once.
template <class P>
__device__ __forceinline__ void write_tile(Accumulator<typename P::S, P::M>& state, const PrefillParams& p) {
  using S = typename P::S;
  using Half = typename S::Half;
  using R = typename S::QueryRows;
  const int lane = static_cast<int>(threadIdx.x) % WARP;
  const int quad = lane % 4;
  const int warp_row = static_cast<int>(threadIdx.x) / WARP * P::WARP_ROWS;
  const PackedRows rows = P::job()->rows;
  const int first_row = P::job()->first_row + warp_row;
  state.add_up_lanes();
  sync_warp();
#pragma unroll
  for (int m = 0; m < P::M; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = m * 16 + h * 8 + lane / 4;
      const bool empty = state.sum[m][h] == 0;
      const float sink = empty ? 0.0f
                               : sink_weight(p.scoring, rows.first_head + (first_row + row) % rows.group,
                                             state.top[m][h] * p.scoring.scale);
      const float scale = empty ? 0.0f : p.scoring.value_scale / (state.sum[m][h] + sink);
#pragma unroll
      for (int t = 0; t < S::TILES; t += 2) {
        const float a = state.out[m][t][h * 2] * scale;
        const float b = state.out[m][t][h * 2 + 1] * scale;
        const float c = state.out[m][t + 1][h * 2] * scale;
        const float d = state.out[m][t + 1][h * 2 + 1] * scale;
        const int to = (warp_row + row) * R::ROW_BYTES;
        const int flip = R::flip(row);
        const int low = S::BYTES ? ((t + quad / 2) ^ flip) * 16 + quad % 2 * 8 : (t ^ flip) * 16 + quad * 4;
        const int high = S::BYTES ? low + 4 : ((t + 1) ^ flip) * 16 + quad * 4;
        *reinterpret_cast<uint32_t*>(shared_memory() + to + low) = S::BYTES ? pack2<Half>(a, c) : pack2<Half>(a, b);
        *reinterpret_cast<uint32_t*>(shared_memory() + to + high) = S::BYTES ? pack2<Half>(b, d) : pack2<Half>(c, d);
      }
    }
  }
  sync_warp();
  const int count = min_i(P::WARP_ROWS, rows.count - first_row);
  for (int i = lane; i < count * R::CHUNKS; i += WARP) {
    const vec16 chunk = load16(shared_memory() + R::at(warp_row + i / R::CHUNKS, i % R::CHUNKS));
    store16(rows.address<Half>(p.out, first_row + i / R::CHUNKS) + i % R::CHUNKS * 8, chunk);
  }
}

// Grid: (tile slot, KV head). A sequence's late tiles see most keys and go first.
template <class P, bool VARIANT>
__global__ void __launch_bounds__(P::WARPS * WARP, P::BLOCKS) prefill_kernel(PrefillParams p) {
  using S = typename P::S;
  TileSlot<P::ROWS> slot;
  slot.open(p.batch, p.group, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  const int kv_head = static_cast<int>(blockIdx.y);
  const int window = VARIANT ? p.scoring.window : 0;
  const int tile_row = slot.tile * P::ROWS;
  Sequence sequence;
  sequence.open(p.batch, slot.seq);
  PackedRows rows;
  rows.open(sequence, p.group, kv_head);
  if (tile_row >= rows.count) return;

  if (threadIdx.x == 0) {
    P::job()->pages.template open<S>(p.cache, p.batch, slot.seq, kv_head);
    P::job()->rows = rows;
    P::job()->first_row = tile_row;
  }
  const int first_token = tile_row / rows.group;
  const int last_token = (min_i(tile_row + P::ROWS, rows.count) - 1) / rows.group;
  TileStream<P> stream;
  stream.first_key = VARIANT ? oldest_key(sequence.position() + first_token, window) : 0;
  stream.end_key = min_i(sequence.position() + last_token + 1, sequence.length);
  const int warp_row = static_cast<int>(threadIdx.x) / WARP * P::WARP_ROWS;
  const Sight sight{P::SIGHT_AT + warp_row * 4, window};
  Sight::prepare<P::ROWS, P::WARP_ROWS>(P::SIGHT_AT, sequence, rows, tile_row);
  int key = stream.first_key & -P::KEYS;  // tiles lie at fixed positions: a row's sums do not depend on the others'
  copy_queries<S, P::ROWS>(0, p.q, rows, tile_row);
  sync_block();  // the job is known to all
  stream.look_up(key);
  stream.copy(0, key);
  stream.look_up(key + P::KEYS);
  cp_async_wait<0>();
  sync_block();
  prepare_queries<S, P::ROWS>(0, p.scoring.sign);
  Queries<S, P::M, P::KEPT> queries;
  queries.open(0, warp_row);
  Accumulator<S, P::M> state;
  state.clear();

  for (int stage = 0; key < stream.end_key; key += P::KEYS, stage ^= 1) {
    cp_async_wait<0>();
    sync_block();  // the tile is there for all warps, and all have done with the one before, whose stage is free
    if (key + P::KEYS < stream.end_key) {
      stream.copy(stage ^ 1, key + P::KEYS);
      stream.look_up(key + 2 * P::KEYS);
    }
    if (!sight.template any<P::WARP_ROWS>(key, P::KEYS)) continue;
    const int at = P::KEYS_AT + stage * 2 * P::HALF_STAGE;
    attend<S, P::M, P::KEYS, P::KEPT, VARIANT>(state, queries, at, at + P::HALF_STAGE, sight, key, p.scoring);
  }
  write_tile<P>(state, p);
}

}  // namespace pageloom::cuda
