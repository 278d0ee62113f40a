// Brings the chunks of a sequence together (the second half of flash-decoding, Dao et al. 2023): each chunk's result
// weighs as much as its sum of exponentials. The block that finishes last does it, so that a decode is one launch.
#pragma once

#include "softmax.cuh"

namespace pageloom::cuda {

// `count` blocks call it with the same counter when they have written; true for the last one, which may read what all
// have written. By the whole block; `flag_at`: 4 bytes of shared memory that nobody uses. The counter is 0 before and
// afterwards, so a captured graph may be replayed.
__device__ __forceinline__ bool last_to_arrive(int32_t* counter, int count, int flag_at) {
  int* flag = reinterpret_cast<int*>(shared_memory() + flag_at);
  sync_block();  // what the block wrote is before all that thread 0 does from here on
  if (threadIdx.x == 0) {
    fence_device();  // release, of the block's writes: only the adding thread's own fence, behind the barrier, covers them
    const bool last = atomic_add(counter, 1) == count - 1;
    fence_device();  // acquire: what those wrote whose additions this one has seen
    if (last) *counter = 0;
    *flag = last ? 1 : 0;
  }
  sync_block();  // and hands that on to the block
  return *flag != 0;
}

// A row's results, one per chunk of its sequence, `stride` rows apart.
struct RowChunks {
  const float* out;
  const float* lse;
  int64_t stride;
  int count;

  // Largest of the chunks' sums and their total weight relative to it; every lane of the warp gets both.
  __device__ __forceinline__ void weigh(float& top, float& total) const {
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    top = LOWEST;
    for (int i = lane; i < count; i += WARP) top = max_f(top, load_fresh(lse + i * stride));
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) top = max_f(top, shuffle_xor(top, mask));
    total = 0.0f;
    for (int i = lane; i < count; i += WARP) total += exp2_fast(load_fresh(lse + i * stride) - top);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) total += shuffle_xor(total, mask);
  }
};

// One warp; a lane holds 4 columns at a time.
template <class S>
__device__ __forceinline__ void merge_row(typename S::Half* to, const RowChunks& chunks, const Scoring& scoring,
                                          int head) {
  using Half = typename S::Half;
  constexpr int STEPS = (S::HEAD_DIM / 4 + WARP - 1) / WARP;
  constexpr int TOGETHER = 8;
  const int lane = static_cast<int>(threadIdx.x) % WARP;
  float top;
  float total;
  chunks.weigh(top, total);
  const bool empty = total == 0;  // which a NaN is not
  if (!empty) total += sink_weight(scoring, head, top);
  const float scale = empty ? 0.0f : 1.0f / total;
  float out[STEPS][4] = {};
  for (int first = 0; first < chunks.count; first += WARP) {
    const int mine = first + lane;
    float weight = 0.0f;
    if (mine < chunks.count) weight = exp2_fast(load_fresh(chunks.lse + mine * chunks.stride) - top) * scale;
    const int here = min_i(WARP, chunks.count - first);
    for (int i = 0; i < here; i += TOGETHER) {
#pragma unroll
      for (int k = 0; k < TOGETHER; ++k) {  // few chunks are the rule: all loads start at once
        const float share = shuffle(weight, i + k);
        const float* from = chunks.out + (first + min_i(i + k, here - 1)) * chunks.stride * S::HEAD_DIM + lane * 4;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          if ((step * WARP + lane) * 4 >= S::HEAD_DIM) continue;
          const vec16 four = load16_fresh(from + step * WARP * 4);
#pragma unroll
          for (int j = 0; j < 4; ++j) out[step][j] += i + k < here ? share * bits_float(four.x[j]) : 0.0f;
        }
      }
    }
  }
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int column = (step * WARP + lane) * 4;
    if (column >= S::HEAD_DIM) continue;
    auto* two = reinterpret_cast<uint32_t*>(to + column);
    two[0] = pack2<Half>(out[step][0], out[step][1]);
    two[1] = pack2<Half>(out[step][2], out[step][3]);
  }
}

}  // namespace pageloom::cuda
