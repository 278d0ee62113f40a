// Cuts the keys of a decode step into items of about equal length, on the device: nothing is planned by the host, so a
// captured graph serves any lengths. One block; decode reads its result in every layer.
#pragma once

#include "rows.cuh"

namespace pageloom::cuda {

constexpr int CHUNK_UNIT = 64;  // chunks start at multiples of it, hence no slice of a warp straddles two chunks
constexpr int SMALLEST_CHUNK = 256;
constexpr int SCHEDULE_THREADS = 256;

struct ScheduleParams {
  Batch batch;
  DecodeSchedule schedule;
  int32_t window;
};

// Keys from the start of the unit that holds the first key which any query of the sequence sees.
__device__ __forceinline__ int first_unit(const Sequence& sequence, int window) {
  return sequence.first_key(window) & -CHUNK_UNIT;
}

__device__ __forceinline__ int items_of(int keys, int chunk) { return max_i(1, (keys + chunk - 1) / chunk); }

// Over the block; every thread gets the result. `scratch` holds an integer per warp.
template <class Combine>
__device__ __forceinline__ int over_block(int value, int* scratch, Combine combine) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = combine(value, shuffle_xor(value, mask));
  const int thread = static_cast<int>(threadIdx.x);
  sync_block();
  if (thread % WARP == 0) scratch[thread / WARP] = value;
  sync_block();
  value = scratch[0];
#pragma unroll
  for (int i = 1; i < SCHEDULE_THREADS / WARP; ++i) value = combine(value, scratch[i]);
  return value;
}

struct Add {
  __device__ __forceinline__ int operator()(int a, int b) const { return a + b; }
};
struct Larger {
  __device__ __forceinline__ int operator()(int a, int b) const { return max_i(a, b); }
};

// The shortest chunk, in units, with which the items fit.
__device__ __forceinline__ int choose_chunk(const int* keys, int num_seqs, int max_items, int* scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  int longest = 0;
  for (int i = thread; i < num_seqs; i += SCHEDULE_THREADS) longest = max_i(longest, keys[i]);
  int low = SMALLEST_CHUNK / CHUNK_UNIT;
  int high = max_i(low, ceil_div(over_block(longest, scratch, Larger{}), CHUNK_UNIT));
  while (low < high) {
    const int middle = (low + high) / 2;
    int items = 0;
    for (int i = thread; i < num_seqs; i += SCHEDULE_THREADS) items += items_of(keys[i], middle * CHUNK_UNIT);
    if (over_block(items, scratch, Add{}) <= max_items) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// keys[i] becomes the first item of sequence i, keys[num_seqs] their number.
__device__ __forceinline__ void add_up_items(int* keys, int num_seqs, int chunk, int* scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  const int each = ceil_div(num_seqs, SCHEDULE_THREADS);
  const int begin = min_i(thread * each, num_seqs);
  const int end = min_i(begin + each, num_seqs);
  int mine = 0;
  for (int i = begin; i < end; ++i) mine += items_of(keys[i], chunk);
  int before = 0;  // of this thread's sequences, within the warp
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const int lane = thread % WARP;
    const int other = shuffle(mine + before, max_i(lane - distance, 0));
    before += lane >= distance ? other : 0;
  }
  sync_block();
  if (thread % WARP == WARP - 1) scratch[thread / WARP] = before + mine;
  sync_block();
  for (int i = 0; i < thread / WARP; ++i) before += scratch[i];
  for (int i = begin; i < end; ++i) {
    const int items = items_of(keys[i], chunk);
    keys[i] = before;
    before += items;
  }
  if (thread == SCHEDULE_THREADS - 1) keys[num_seqs] = before;
  sync_block();
}

// Shared memory: an integer per warp, then num_seqs + 1 of them.
inline int schedule_shared_bytes(int num_seqs) { return (SCHEDULE_THREADS / WARP + num_seqs + 1) * 4; }

__global__ void __launch_bounds__(SCHEDULE_THREADS) schedule_kernel(ScheduleParams p) {
  int* scratch = reinterpret_cast<int*>(shared_memory());
  int* keys = scratch + SCHEDULE_THREADS / WARP;
  const int num_seqs = p.batch.num_seqs;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < num_seqs; i += SCHEDULE_THREADS) {
    Sequence sequence;
    sequence.open(p.batch, i);
    keys[i] = max_i(0, sequence.length - first_unit(sequence, p.window));
  }
  sync_block();
  const int chunk = choose_chunk(keys, num_seqs, p.schedule.max_items, scratch) * CHUNK_UNIT;
  add_up_items(keys, num_seqs, chunk, scratch);
  const int items = keys[num_seqs];
  if (thread == 0) {
    p.schedule.header[0] = items;
    p.schedule.header[1] = chunk;
  }
  for (int i = thread; i <= num_seqs; i += SCHEDULE_THREADS) p.schedule.item_start[i] = keys[i];
  for (int item = thread; item < items; item += SCHEDULE_THREADS) {
    int low = 0;  // the last sequence that starts at or before the item
    int high = num_seqs - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (keys[middle] <= item) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    p.schedule.items[item * 2] = low;
    p.schedule.items[item * 2 + 1] = item - keys[low];
  }
}

}  // namespace pageloom::cuda
