// Few query rows against many keys: bound by memory, so everything serves one end, bytes in flight. A block works on
// one item (a chunk of a sequence's keys, see schedule.cuh) of one KV head. Its warps stream slices of the chunk
// through private rings of cp.async stages and meet only at the end, where their softmaxes are merged; no block barrier
// stands in the main loop.
#pragma once

#include "merge.cuh"
#include "schedule.cuh"

namespace pageloom::cuda {

struct DecodeParams {
  Tokens q;
  Tokens out;
  Cache cache;
  Batch batch;
  DecodeSchedule schedule;
  Partials partials;
  Scoring scoring;
  int32_t group;
  int32_t max_rows;
  int32_t row_blocks;
};

template <class S_, int M_>
struct DecodeShape {
  using S = S_;
  static constexpr int M = M_;
  static constexpr int ROWS = M * 16;
  static constexpr int ROW_BYTES = S::KeyRows::ROW_BYTES;
  static constexpr int SLICE = ROW_BYTES <= 128 ? 32 : 16;  // keys a warp takes at a time
  static constexpr int STAGE_BYTES = 2 * SLICE * ROW_BYTES;
  static constexpr int QUERY_BYTES = ROWS * S::QueryRows::ROW_BYTES;
  static constexpr int SIGHT_AT = QUERY_BYTES;
  static constexpr int RING_AT = SIGHT_AT + 128;
  static constexpr bool fits(int warps, int stages) { return RING_AT + warps * stages * STAGE_BYTES <= SHARED_LIMIT; }
  static constexpr int WARPS = fits(4, 2) ? 4 : 2;
  static constexpr int STAGES = fits(WARPS, 3) ? 3 : 2;
  static constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
  // At the end: sums and maxima where the queries were, accumulators where the rings were.
  static constexpr int MERGE_COLUMNS = S::HEAD_DIM + 8;  // + 8: rows start in different banks
  static constexpr int MERGE_BYTES = WARPS * ROWS * MERGE_COLUMNS * 4;
  static constexpr int SHARED_BYTES = RING_AT + (RING_BYTES > MERGE_BYTES ? RING_BYTES : MERGE_BYTES);
  static constexpr int BLOCKS = SHARED_BYTES <= 108 * 1024 ? 2 : 1;  // on a multiprocessor of an H100
  static constexpr bool KEPT = S::HEAD_DIM * M <= 128;
  static_assert(2 * WARPS * ROWS * 4 <= QUERY_BYTES && CHUNK_UNIT % SLICE == 0 && SHARED_BYTES <= SHARED_LIMIT);
};

// A warp's share of a chunk: every WARPS-th slice, in order.
template <class D>
struct SliceStream {
  using S = typename D::S;
  static constexpr int PIECES = D::SLICE / PIECE;
  Pages pages;
  int first_key;  // that counts
  int end_key;    // of the chunk
  int next_key;   // of the slice to be copied next
  int blocks[PIECES];
  int ring_at;

  // The block table is read a step ahead of the copy that needs it.
  __device__ __forceinline__ void look_up(int key, int (&found)[PIECES]) const {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) found[i] = pages.block_of(key + i * PIECE, first_key, end_key);
  }
  __device__ __forceinline__ void copy(int stage, int key, const int (&found)[PIECES]) const {
    const int to = ring_at + stage * D::STAGE_BYTES;
    if (key < end_key) {
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
        const char* from = pages.template key_row<S>(found[i], key + i * PIECE);
        const int first = first_key - key - i * PIECE;
        const int last = end_key - key - i * PIECE;
        copy_rows<typename S::KeyRows, PIECE, 2>(to + i * PIECE * D::ROW_BYTES, from, first, last,
                                                 D::SLICE * D::ROW_BYTES, pages.to_values);
      }
    }
    cp_async_commit();
  }
  // Fills all stages but one.
  __device__ __forceinline__ void start() {
    int found[D::STAGES][PIECES];
#pragma unroll
    for (int i = 0; i < D::STAGES; ++i) look_up(next_key + i * D::WARPS * D::SLICE, found[i]);
#pragma unroll
    for (int i = 0; i < D::STAGES - 1; ++i) copy(i, next_key + i * D::WARPS * D::SLICE, found[i]);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) blocks[i] = found[D::STAGES - 1][i];
    next_key += (D::STAGES - 1) * D::WARPS * D::SLICE;
  }
  __device__ __forceinline__ void step(int stage) {
    copy(stage, next_key, blocks);
    next_key += D::WARPS * D::SLICE;
    look_up(next_key, blocks);
  }
};

// Leaves each warp's accumulator, maxima and sums in shared memory; the whole block.
template <class D>
__device__ __forceinline__ void lay_out(Accumulator<typename D::S, D::M>& state) {
  const int lane = static_cast<int>(threadIdx.x) % WARP;
  const int warp = static_cast<int>(threadIdx.x) / WARP;
  float* top = reinterpret_cast<float*>(shared_memory()) + warp * D::ROWS;
  float* sum = top + D::WARPS * D::ROWS;
  float* out = reinterpret_cast<float*>(shared_memory() + D::RING_AT) + warp * D::ROWS * D::MERGE_COLUMNS;
  state.add_up_lanes();
  cp_async_wait<0>();
  sync_block();  // queries and rings have been read
#pragma unroll
  for (int m = 0; m < D::M; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = m * 16 + h * 8 + lane / 4;
      if (lane % 4 == 0) {
        top[row] = state.top[m][h];
        sum[row] = state.sum[m][h];
      }
#pragma unroll
      for (int t = 0; t < D::S::TILES; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          out[row * D::MERGE_COLUMNS + D::S::column(t, lane % 4, i)] = state.out[m][t][h * 2 + i];
        }
      }
    }
  }
  sync_block();
}

// What the warps together say about a row.
template <class D>
struct RowTotal {
  float top;  // in exponents of 2
  float sum;  // of exponentials relative to top
  float weight[D::WARPS];
};

template <class D>
__device__ __forceinline__ RowTotal<D> total_of_row(int row, float scale) {
  const float* tops = reinterpret_cast<const float*>(shared_memory()) + row;
  const float* sums = tops + D::WARPS * D::ROWS;
  float top = LOWEST;
#pragma unroll
  for (int w = 0; w < D::WARPS; ++w) top = max_f(top, tops[w * D::ROWS]);
  RowTotal<D> total{top * scale, 0.0f, {}};
#pragma unroll
  for (int w = 0; w < D::WARPS; ++w) {
    total.weight[w] = exp2_fast((tops[w * D::ROWS] - top) * scale);
    total.sum += total.weight[w] * sums[w * D::ROWS];
  }
  return total;
}

template <class D>
__device__ __forceinline__ void add_warps(float (&out)[8], const RowTotal<D>& total, int row, int column, float scale) {
  const char* from = shared_memory() + D::RING_AT + (row * D::MERGE_COLUMNS + column) * 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = 0.0f;
#pragma unroll
  for (int w = 0; w < D::WARPS; ++w) {
    const float weight = total.weight[w] * scale;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const vec16 four = load16(from + (w * D::ROWS * D::MERGE_COLUMNS + i) * 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i + j] += weight * bits_float(four.x[j]);
    }
  }
}

// Rows first_row .. of the sequence: to the output where the item is the only one, else to its partial.
template <class D>
__device__ __forceinline__ void write_rows(const DecodeParams& p, const PackedRows& rows, int first_row, int kv_head,
                                           int item, bool only) {
  using Half = typename D::S::Half;
  constexpr int EIGHTS = D::S::HEAD_DIM / 8;
  const int count = min_i(D::ROWS, rows.count - first_row) * EIGHTS;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    const int row = i / EIGHTS;
    const int column = i % EIGHTS * 8;
    const RowTotal<D> total = total_of_row<D>(row, p.scoring.scale);
    const int head = rows.first_head + (first_row + row) % rows.group;
    const bool empty = total.sum == 0;  // which a NaN is not
    const float sum = total.sum + (only && !empty ? sink_weight(p.scoring, head, total.top) : 0.0f);
    float out[8];
    add_warps<D>(out, total, row, column, empty ? 0.0f : p.scoring.value_scale / sum);
    if (only) {
      vec16 packed;
#pragma unroll
      for (int j = 0; j < 4; ++j) packed.x[j] = pack2<Half>(out[j * 2], out[j * 2 + 1]);
      store16(rows.address<Half>(p.out, first_row + row) + column, packed);
    } else {
      const int64_t at = (int64_t{item} * p.cache.num_kv_heads + kv_head) * p.max_rows + first_row + row;
      float* to = p.partials.out + at * D::S::HEAD_DIM + column;
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        vec16 four;
#pragma unroll
        for (int k = 0; k < 4; ++k) four.x[k] = float_bits(out[j + k]);
        store16(to + j, four);
      }
      if (column == 0) p.partials.lse[at] = empty ? -INFINITY : total.top + log2_fast(sum);
    }
  }
}

template <class D>
__device__ __forceinline__ void merge_rows(const DecodeParams& p, const PackedRows& rows, int first_row, int kv_head,
                                           int first_item, int items) {
  using S = typename D::S;
  const int64_t stride = int64_t{p.cache.num_kv_heads} * p.max_rows;
  const int64_t first = first_item * stride + int64_t{kv_head} * p.max_rows + first_row;
  const int count = min_i(D::ROWS, rows.count - first_row);
  for (int row = static_cast<int>(threadIdx.x) / WARP; row < count; row += D::WARPS) {
    const int64_t at = first + row;
    const RowChunks chunks{p.partials.out + at * S::HEAD_DIM, p.partials.lse + at, stride, items};
    merge_row<S>(rows.address<typename S::Half>(p.out, first_row + row), chunks, p.scoring,
                 rows.first_head + (first_row + row) % rows.group);
  }
}

// Grid: (KV head x row block, item). Items beyond those in use have nothing to do.
template <class D, bool VARIANT>
__global__ void __launch_bounds__(D::WARPS * WARP, D::BLOCKS) decode_kernel(DecodeParams p) {
  using S = typename D::S;
  const int item = static_cast<int>(blockIdx.y);
  const int seq = p.schedule.items[item * 2];
  const int chunk = p.schedule.items[item * 2 + 1];
  const int chunk_keys = p.schedule.header[1];
  if (item >= p.schedule.header[0]) return;
  const int kv_head = static_cast<int>(blockIdx.x) / p.row_blocks;
  const int first_row = static_cast<int>(blockIdx.x) % p.row_blocks * D::ROWS;
  const int first_item = p.schedule.item_start[seq];
  const int items = p.schedule.item_start[seq + 1] - first_item;
  const int window = VARIANT ? p.scoring.window : 0;
  Sequence sequence;
  sequence.open(p.batch, seq);
  PackedRows rows;
  rows.open(sequence, p.group, kv_head);
  if (first_row >= rows.count) return;

  copy_queries<S, D::ROWS>(0, p.q, rows, first_row);
  cp_async_commit();
  const int warp = static_cast<int>(threadIdx.x) / WARP;
  SliceStream<D> stream;
  stream.pages.template open<S>(p.cache, p.batch, seq, kv_head);
  stream.first_key = sequence.first_key(window);
  const int begin = first_unit(sequence, window) + chunk * chunk_keys;
  stream.end_key = min_i(begin + chunk_keys, sequence.length);
  stream.next_key = begin + warp * D::SLICE;
  stream.ring_at = D::RING_AT + warp * D::STAGES * D::STAGE_BYTES;
  stream.start();
  const Sight sight{D::SIGHT_AT, window};
  Sight::prepare<D::ROWS, D::ROWS>(D::SIGHT_AT, sequence, rows, first_row);
  cp_async_wait<D::STAGES - 1>();
  sync_block();
  prepare_queries<S, D::ROWS>(0, p.scoring.sign);
  Queries<S, D::M, D::KEPT> queries;
  queries.open(0, 0);
  Accumulator<S, D::M> state;
  state.clear();

  int stage = 0;
  int free_stage = D::STAGES - 1;
  for (int key = begin + warp * D::SLICE; key < stream.end_key; key += D::WARPS * D::SLICE) {
    cp_async_wait<D::STAGES - 2>();
    sync_warp();  // the slice is there for all lanes, and all have done with the one before, whose stage is free
    stream.step(free_stage);
    const int keys_at = stream.ring_at + stage * D::STAGE_BYTES;
    const int values_at = keys_at + D::SLICE * D::ROW_BYTES;
    attend<S, D::M, D::SLICE, D::KEPT, VARIANT>(state, queries, keys_at, values_at, sight, key, p.scoring);
    free_stage = stage;
    stage = stage + 1 < D::STAGES ? stage + 1 : 0;
  }
  lay_out<D>(state);
  write_rows<D>(p, rows, first_row, kv_head, item, items == 1);
  if (items == 1) return;
  int32_t* arrivals = p.partials.arrivals + seq * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  if (!last_to_arrive(arrivals, items, D::SIGHT_AT)) return;
  merge_rows<D>(p, rows, first_row, kv_head, first_item, items);
}

}  // namespace pageloom::cuda
