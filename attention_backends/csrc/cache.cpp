// The cache side of a step: writes of new tokens (with quantization, where the cache is int8) and copies of blocks.
#include <string.h>

#include <algorithm>
#include <atomic>

#include "schedule.h"

namespace pageloom {
namespace {

template <class T>
void write_token(const CacheLayout& cache, int64_t head, int64_t slot, const T* k, const T* v) {
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  uint32_t* keys = static_cast<uint32_t*>(cache.k_of(block, head)) + offset;
  if constexpr (sizeof(T) == 4) {
    for (int64_t d = 0; d < cache.head_dim && !cache.latent; ++d) memcpy(keys + d * cache.block_size, k + d, 4);
    memcpy(static_cast<uint32_t*>(cache.v_of(block, head)) + offset * cache.padded_dim, v, cache.head_dim * 4);
  } else {
    for (int64_t d = 0; d < cache.head_dim && !cache.latent; d += 2)
      memcpy(keys + d / 2 * cache.block_size, k + d, 4);
    // 16-bit stores, never a read-modify-write of the cell: the neighbouring token may be another thread's.
    T* values = static_cast<T*>(cache.v_of(block, head)) + offset / 2 * cache.padded_dim * 2 + (offset & 1);
    for (int64_t d = 0; d < cache.head_dim; ++d) values[2 * d] = v[d];
  }
}

// out = round(x / scale) with scale = max |x| / 127, which is returned; a NaN or an infinity makes the scale one, and
// with it whatever the token takes part in.
float quantize(const uint16_t* x, int64_t count, int8_t* out) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
  int32_t bits[kMaxHeadDim], largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    bits[i] = static_cast<int32_t>(static_cast<uint32_t>(x[i]) << 16);
    largest = std::max(largest, bits[i] & 0x7fffffff);  // orders like |x|, NaN last
  }
  float top;
  memcpy(&top, &largest, 4);
  const float inverse = top >= 1e-30f && largest < 0x7f800000 ? 127.0f / top : 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    float value;
    memcpy(&value, bits + i, 4);
    value = value * inverse + kRound;
    int32_t rounded;
    memcpy(&rounded, &value, 4);
    out[i] = static_cast<int8_t>(rounded);
  }
  return top * (1.0f / 127.0f);
}

void write_quantized(const CacheLayout& cache, int64_t head, int64_t slot, const uint16_t* k, const uint16_t* v) {
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  int8_t row[kMaxHeadDim];
  cache.k_scales(block, head)[offset] = quantize(k, cache.head_dim, row);
  uint16_t* const keys = static_cast<uint16_t*>(cache.k_of(block, head)) + offset;
  for (int64_t d = 0; d < cache.head_dim; d += 2) memcpy(keys + d / 2 * cache.block_size, row + d, 2);
  cache.v_scales(block, head)[offset] = quantize(v, cache.head_dim, row);
  int8_t* const values = static_cast<int8_t*>(cache.v_of(block, head)) + offset / 2 * cache.padded_dim * 2 + (offset & 1);
  for (int64_t d = 0; d < cache.head_dim; ++d) values[2 * d] = row[d];
}

// Four 16-bit tokens of consecutive slots, the first a multiple of 4: K in transposes of 4 x 4 cells, V in whole cells.
void write_four_tokens(const CacheLayout& cache, int64_t head, int64_t slot, const uint16_t* k, int64_t k_stride,
                       const uint16_t* v, int64_t v_stride) {
  typedef uint32_t Four __attribute__((vector_size(16)));
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  uint32_t* keys = static_cast<uint32_t*>(cache.k_of(block, head)) + offset;
  for (int64_t d = 0; d < cache.head_dim && !cache.latent; d += 8) {
    Four in[4];
    for (int i = 0; i < 4; ++i) memcpy(&in[i], k + i * k_stride + d, 16);
    const Four a = __builtin_shufflevector(in[0], in[1], 0, 4, 1, 5);
    const Four b = __builtin_shufflevector(in[2], in[3], 0, 4, 1, 5);
    const Four e = __builtin_shufflevector(in[0], in[1], 2, 6, 3, 7);
    const Four f = __builtin_shufflevector(in[2], in[3], 2, 6, 3, 7);
    const Four out[4] = {__builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7),
                         __builtin_shufflevector(e, f, 0, 1, 4, 5), __builtin_shufflevector(e, f, 2, 3, 6, 7)};
    for (int i = 0; i < 4; ++i) memcpy(keys + (d / 2 + i) * cache.block_size, &out[i], 16);
  }
  for (int64_t pair = 0; pair < 2; ++pair, v += 2 * v_stride) {
    uint32_t* values = static_cast<uint32_t*>(cache.v_of(block, head)) + (offset / 2 + pair) * cache.padded_dim;
    for (int64_t d = 0; d < cache.head_dim; ++d) values[d] = v[d] | static_cast<uint32_t>(v[v_stride + d]) << 16;
  }
}

// Asks for the lines that a token's K goes to: one for every cell, each of which a store would wait for in turn.
void ask_for_keys(const CacheLayout& cache, int64_t slot) {
  if (cache.latent || slot < 0 || slot >= cache.num_blocks * cache.block_size) return;
  const int64_t row = cache.block_size * cache.cell_bytes(), bytes = slot % cache.block_size * cache.cell_bytes();
  for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
    const char* const keys = static_cast<const char*>(cache.k_of(slot / cache.block_size, head)) + bytes;
    for (int64_t at = 0; at < cache.head_bytes(); at += std::max<int64_t>(row, 64)) __builtin_prefetch(keys + at, 1, 3);
  }
}

template <class T>
void write_range(WriteStage& run, int64_t begin, int64_t end) {
  const int64_t capacity = run.cache.num_blocks * run.cache.block_size;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t slot = run.slots[t];
    if (slot == -1) continue;
    if (slot < 0 || slot >= capacity) {
      run.error.store("attention: slot_mapping names a slot outside the KV cache", std::memory_order_relaxed);
      return;
    }
    const T* k = static_cast<const T*>(run.k.data) + t * run.k.token_stride;
    const T* v = static_cast<const T*>(run.v.data) + t * run.v.token_stride;
    if constexpr (sizeof(T) == 2) {
      if (run.cache.dtype == Dtype::kInt8) {
        for (int64_t head = 0; head < run.cache.num_kv_heads; ++head)
          write_quantized(run.cache, head, slot, k + head * run.k.head_stride, v + head * run.v.head_stride);
        continue;
      }
      const int64_t* next = run.slots + t;
      if (t + 4 <= end && slot % 4 == 0 && next[1] == slot + 1 && next[2] == slot + 2 && next[3] == slot + 3) {
        for (int64_t head = 0; head < run.cache.num_kv_heads; ++head)
          write_four_tokens(run.cache, head, slot, k + head * run.k.head_stride, run.k.token_stride,
                            v + head * run.v.head_stride, run.v.token_stride);
        t += 3;
        continue;
      }
    }
    if (t + 1 < end) ask_for_keys(run.cache, run.slots[t + 1]);
    for (int64_t head = 0; head < run.cache.num_kv_heads; ++head)
      write_token<T>(run.cache, head, slot, k + head * run.k.head_stride, v + head * run.v.head_stride);
  }
}

constexpr int64_t kChunk = 8;          // tokens
constexpr int64_t kScatteredStore = 8;  // of a cell of K, as lane operations

bool write(Stage& stage, int64_t, Turn& turn) {
  auto& run = static_cast<WriteStage&>(stage);
  for (int64_t i; (i = run.next.fetch_add(1, std::memory_order_relaxed)) < run.units;) {
    const int64_t begin = i * kChunk, end = std::min(run.num_tokens, begin + kChunk);
    run.cache.dtype == Dtype::kFloat32 ? write_range<float>(run, begin, end) : write_range<uint16_t>(run, begin, end);
    run.finish(1);
    if (!turn.pass()) return false;
  }
  return true;
}

struct CopyRun {
  const char* const* sources;
  char* const* destinations;
  const int64_t* block_bytes;
  int64_t count, num_pairs;
  const int64_t* pairs;
  std::atomic<int64_t> next{0};
};

void copy_worker(void* context) {
  auto& run = *static_cast<CopyRun*>(context);
  for (int64_t i; (i = run.next.fetch_add(1, std::memory_order_relaxed)) < run.count;) {
    const int64_t cache = i / run.num_pairs, bytes = run.block_bytes[cache];
    const int64_t* pair = run.pairs + 2 * (i % run.num_pairs);
    memcpy(run.destinations[cache] + pair[1] * bytes, run.sources[cache] + pair[0] * bytes, bytes);
  }
}

}  // namespace

WriteStage::WriteStage(const CacheLayout& to, TokenView keys, TokenView values, const int64_t* at, int64_t tokens,
                       int64_t threads)
    : cache(to), k(keys), v(values), slots(at), num_tokens(tokens) {
  work = write;
  units = (tokens + kChunk - 1) / kChunk;
  workers = threads_worth(threads, tokens * cache.num_kv_heads * cache.head_dim * kScatteredStore, units);
}

void run_copy_blocks(const char* const* sources, char* const* destinations, const int64_t* block_bytes,
                     int64_t num_caches, const int64_t* pairs, int64_t num_pairs, const Threads& threads) {
  if (num_pairs == 0 || num_caches == 0) return;
  CopyRun run{sources, destinations, block_bytes, num_caches * num_pairs, num_pairs, pairs};
  threads.run(threads_worth(threads.count, run.count * block_bytes[0] / 4, run.count), copy_worker, &run);
}

}  // namespace pageloom
