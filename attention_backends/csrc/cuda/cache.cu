// The cache's side of launch.h: a step's keys and values into their slots, and whole blocks between places.
#include <pageloom_device.cuh>

#include "launch.h"

namespace pageloom::cuda {

namespace {

#if PAGELOOM_HALF
using Half = f16;
#else
using Half = bf16;
#endif
#if PAGELOOM_KV_FP8
using Kv = fp8;
#else
using Kv = Half;
#endif

constexpr int THREADS = 256;

// ---- write_kv: one thread makes one 16-byte chunk of a row of the cache ----

constexpr int HEAD_DIM = PAGELOOM_HEAD_DIM;
constexpr int CHUNK = 16 / static_cast<int>(sizeof(Kv));  // elements
constexpr int CHUNKS = HEAD_DIM / CHUNK;                  // of a row
static_assert(HEAD_DIM % CHUNK == 0);

struct Source {
  const Half* data;
  int64_t token_stride;
  int64_t head_stride;
  float scale;
};

struct WriteParams {
  Source k;
  Source v;
  Kv* cache;
  int64_t block_stride;  // in elements
  const int64_t* slots;
  int num_kv_heads;
  int block_shift;
  int num_tokens;
  int tokens_per_block;
};

// CHUNK elements from `from` on, as the cache holds them. A true division, as a checkpoint's scale is meant: a product
// with the reciprocal rounds differently.
__device__ __forceinline__ vec16 as_cached(const Half* from, [[maybe_unused]] float scale) {
  const vec16 first = load16_streaming(from);
  if constexpr (sizeof(Kv) == 1) {
    const vec16 halves[2] = {first, load16_streaming(from + 8)};
    vec16 y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = halves[i / 2].x[i % 2 * 2], high = halves[i / 2].x[i % 2 * 2 + 1];
      y.x[i] = pack4_fp8(unpack_low<Half>(low) / scale, unpack_high<Half>(low) / scale,
                         unpack_low<Half>(high) / scale, unpack_high<Half>(high) / scale);
    }
    return y;
  } else {
    return first;
  }
}

__global__ void __launch_bounds__(THREADS) write_kv(const WriteParams p) {
  const int part = static_cast<int>(blockIdx.y) * THREADS + static_cast<int>(threadIdx.x);
  const int per_token = 2 * p.num_kv_heads * CHUNKS;
  const int local = part / per_token;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * p.tokens_per_block + local;
  if (local >= p.tokens_per_block || token >= p.num_tokens) return;
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  const int row = part % per_token / CHUNKS, at = part % CHUNKS * CHUNK;
  const int half = row >= p.num_kv_heads ? 1 : 0;
  const int head = row - half * p.num_kv_heads;
  const Source rows = half != 0 ? p.v : p.k;
  const Half* from = rows.data + token * rows.token_stride + head * rows.head_stride + at;
  const int64_t block = slot >> p.block_shift, offset = slot & ((int64_t{1} << p.block_shift) - 1);
  const int64_t page = half * p.num_kv_heads + head;
  Kv* to = p.cache + block * p.block_stride + ((page << p.block_shift) + offset) * HEAD_DIM + at;
  store16(to, as_cached(from, rows.scale));
}

// ---- whole blocks: a thread block moves one slab of one block of one layer at a time ----

constexpr int VECTORS_EACH = 4;  // loads under way in each thread
constexpr int SLAB_VECTORS = THREADS * VECTORS_EACH;
// Swapping is bound by the bus to the host, which this many blocks fill many times over; the rest of the machine stays
// free for the step that runs beside it.
constexpr int64_t SWAP_GRID = 64;
constexpr int64_t COPY_GRID = 4096;

enum class Move { copy, gather, scatter };

struct MoveParams {
  void* const* bases;
  const int64_t* ids;  // copy: pairs
  char* staging;
  int64_t block_bytes;
  int64_t slabs;  // of a block
  int64_t items;  // blocks x layers x slabs
  int num_layers;
};

__device__ __forceinline__ void move_slab(char* to, const char* from, int64_t first, int64_t vectors) {
  vec16 held[VECTORS_EACH];
#pragma unroll
  for (int i = 0; i < VECTORS_EACH; ++i) {
    const int64_t at = first + i * THREADS + static_cast<int>(threadIdx.x);
    if (at < vectors) held[i] = load16_streaming(from + at * 16);
  }
#pragma unroll
  for (int i = 0; i < VECTORS_EACH; ++i) {
    const int64_t at = first + i * THREADS + static_cast<int>(threadIdx.x);
    if (at < vectors) store16_streaming(to + at * 16, held[i]);
  }
}

template <Move MOVE>
__global__ void __launch_bounds__(THREADS) move_blocks(const MoveParams p) {
  for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
    const int64_t which = item / p.slabs, slab = item % p.slabs;
    const int64_t i = which / p.num_layers;
    char* base = static_cast<char*>(p.bases[which % p.num_layers]);
    char *to, *from;
    if constexpr (MOVE == Move::copy) {
      from = base + p.ids[2 * i] * p.block_bytes;
      to = base + p.ids[2 * i + 1] * p.block_bytes;
    } else {
      char* const block = base + p.ids[i] * p.block_bytes;
      char* const staged = p.staging + which * p.block_bytes;  // [ids, layers, block_bytes]
      from = MOVE == Move::gather ? block : staged;
      to = MOVE == Move::gather ? staged : block;
    }
    move_slab(to, from, slab * SLAB_VECTORS, p.block_bytes / 16);
  }
}

template <Move MOVE>
const char* launch_move(void* const* bases, int32_t num_layers, int64_t block_bytes, const int64_t* ids, int32_t count,
                        void* staging, int64_t most_blocks, Stream stream) {
  if (num_layers < 0 || count < 0) return "a negative number of layers or blocks";
  if (block_bytes <= 0 || block_bytes % 16 != 0) return "the bytes of a block must be a positive multiple of 16";
  const int64_t slabs = (block_bytes / 16 + SLAB_VECTORS - 1) / SLAB_VECTORS;
  const int64_t items = slabs * num_layers * count;
  const MoveParams params{bases, ids, static_cast<char*>(staging), block_bytes, slabs, items, num_layers};
  const int64_t blocks = items < most_blocks ? items : most_blocks;
  return launch(move_blocks<MOVE>, dim3(static_cast<unsigned>(blocks)), THREADS, 0, stream, params);
}

}  // namespace

extern "C" {

const char* pageloom_write_kv(const Tokens* k, const Tokens* v, const Cache* cache, const int64_t* slots,
                              int32_t num_tokens, float k_scale, float v_scale, Stream stream) {
  if (num_tokens < 0 || cache->num_kv_heads < 1) return "write_kv: a negative number of tokens, or no heads";
  int block_shift = 0;
  while ((1 << block_shift) < cache->block_size) ++block_shift;
  if (cache->block_size != 1 << block_shift) return "write_kv: the block size must be a power of two";
  const int per_token = 2 * cache->num_kv_heads * CHUNKS;
  const int tokens_per_block = per_token < THREADS ? THREADS / per_token : 1;
  const WriteParams params{{static_cast<const Half*>(k->data), k->token_stride, k->head_stride, k_scale},
                           {static_cast<const Half*>(v->data), v->token_stride, v->head_stride, v_scale},
                           static_cast<Kv*>(cache->data),
                           cache->block_bytes / static_cast<int64_t>(sizeof(Kv)),
                           slots,
                           cache->num_kv_heads,
                           block_shift,
                           num_tokens,
                           tokens_per_block};
  const dim3 grid(static_cast<unsigned>(ceil_div(num_tokens, tokens_per_block)),
                  static_cast<unsigned>(ceil_div(tokens_per_block * per_token, THREADS)));
  return launch(write_kv, grid, THREADS, 0, stream, params);
}

const char* pageloom_copy_blocks(void* const* bases, int32_t num_layers, int64_t block_bytes, const int64_t* pairs,
                                 int32_t num_pairs, Stream stream) {
  return launch_move<Move::copy>(bases, num_layers, block_bytes, pairs, num_pairs, nullptr, COPY_GRID, stream);
}

const char* pageloom_gather_blocks(void* const* bases, int32_t num_layers, int64_t block_bytes, const int64_t* ids,
                                   int32_t num_ids, void* staging, Stream stream) {
  return launch_move<Move::gather>(bases, num_layers, block_bytes, ids, num_ids, staging, SWAP_GRID, stream);
}

const char* pageloom_scatter_blocks(void* const* bases, int32_t num_layers, int64_t block_bytes, const int64_t* ids,
                                    int32_t num_ids, const void* staging, Stream stream) {
  return launch_move<Move::scatter>(bases, num_layers, block_bytes, ids, num_ids, const_cast<void*>(staging), SWAP_GRID,
                                    stream);
}

}  // extern "C"

}  // namespace pageloom::cuda
