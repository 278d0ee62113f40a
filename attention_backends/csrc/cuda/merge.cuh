// Brings the chunks of a sequence together (the second half of flash-decoding, Dao et al. 2023): each chunk's result
// weighs as much as its sum of exponentials. A block per sequence and KV head; returns at once where decode wrote the
// output itself.
#pragma once

#include "decode.cuh"

namespace pageloom::cuda {

constexpr int MERGE_WARPS = 8;

// Largest of the items' sums and their total weight relative to it; every lane of the warp gets both.
__device__ __forceinline__ void weigh_items(const float* lse, int64_t stride, int count, float& top, float& total) {
  const int lane = static_cast<int>(threadIdx.x) % WARP;
  top = LOWEST;
  for (int i = lane; i < count; i += WARP) top = max_f(top, lse[i * stride]);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) top = max_f(top, shuffle_xor(top, mask));
  total = 0.0f;
  for (int i = lane; i < count; i += WARP) total += exp2_fast(lse[i * stride] - top);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) total += shuffle_xor(total, mask);
}

// A row is the work of `splits` warps, each of which adds up every splits-th item; a lane holds 4 columns at a time.
template <class S>
__device__ __forceinline__ void merge_row(const DecodeParams& p, const PackedRows& rows, int row, int kv_head,
                                          int first_item, int items, int split, int splits) {
  constexpr int STEPS = (S::HEAD_DIM / 4 + WARP - 1) / WARP;
  const int lane = static_cast<int>(threadIdx.x) % WARP;
  const int warp = static_cast<int>(threadIdx.x) / WARP;
  float* shared = reinterpret_cast<float*>(shared_memory());
  const bool real = row < rows.count;
  const int64_t stride = int64_t{p.cache.num_kv_heads} * p.max_rows;
  const int64_t at = first_item * stride + int64_t{kv_head} * p.max_rows + (real ? row : 0);
  float top;
  float total;
  weigh_items(p.partials.lse + at, stride, items, top, total);
  const bool empty = total == 0;
  total += real && !empty ? sink_weight(p.scoring, rows.first_head + row % rows.group, top) : 0.0f;
  const float scale = empty ? 0.0f : 1.0f / total;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int column = (step * WARP + lane) * 4;
    float out[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (real && column < S::HEAD_DIM) {
#pragma unroll 4
      for (int i = split; i < items; i += splits) {
        const float weight = exp2_fast(p.partials.lse[at + i * stride] - top) * scale;
        const vec16 four = load16(p.partials.out + (at + i * stride) * S::HEAD_DIM + column);
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j] += weight * bits_float(four.x[j]);
      }
    }
    if (splits > 1) {
      sync_block();
#pragma unroll
      for (int j = 0; j < 4; ++j) shared[warp * WARP * 4 + lane * 4 + j] = out[j];
      sync_block();
      for (int other = 1; split == 0 && other < splits; ++other) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j] += shared[(warp + other) * WARP * 4 + lane * 4 + j];
      }
    }
    if (real && split == 0 && column < S::HEAD_DIM) {
      using Half = typename S::Half;
      uint32_t* to = reinterpret_cast<uint32_t*>(rows.address<Half>(p.out, row) + column);
      to[0] = pack2<Half>(out[0], out[1]);
      to[1] = pack2<Half>(out[2], out[3]);
    }
  }
}

inline int merge_shared_bytes() { return MERGE_WARPS * WARP * 16; }

// Grid: (sequence, KV head).
template <class S>
__global__ void __launch_bounds__(MERGE_WARPS * WARP) merge_kernel(DecodeParams p) {
  const int seq = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y);
  const int first_item = p.schedule.item_start[seq];
  const int items = p.schedule.item_start[seq + 1] - first_item;
  if (items == 1) return;
  Sequence sequence;
  sequence.open(p.batch, seq);
  PackedRows rows;
  rows.open(sequence, p.group, kv_head);
  int splits = MERGE_WARPS;  // few rows: several warps share one
  while (splits > 1 && splits * rows.count > MERGE_WARPS) splits /= 2;
  const int warp = static_cast<int>(threadIdx.x) / WARP;
  const int together = MERGE_WARPS / splits;
  for (int row = 0; row < rows.count; row += together) {
    merge_row<S>(p, rows, row + warp / splits, kv_head, first_item, items, warp % splits, splits);
  }
}

}  // namespace pageloom::cuda
