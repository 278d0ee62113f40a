// The launchers of attention for one (head_dim, element type, cache type); see launch.h.
#include "decode.cuh"
#include "prefill.cuh"

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
using S = Shape<Half, Kv, PAGELOOM_HEAD_DIM>;
static_assert(S::HEAD_DIM == 64 || S::HEAD_DIM == 96 || S::HEAD_DIM == 128 || S::HEAD_DIM == 256);

constexpr int MAX_ROWS = 64;
constexpr int MAX_GRID_Y = 65535;

const char* refuse(const Cache& cache, const Layer& layer) {
  if (cache.block_size < PIECE || (cache.block_size & (cache.block_size - 1)) != 0) {
    return "the block size must be a power of two of at least 16";
  }
  if (cache.num_kv_heads < 1 || cache.num_kv_heads > MAX_GRID_Y || layer.num_heads % cache.num_kv_heads != 0) {
    return "the number of query heads must be a multiple of the number of KV heads";
  }
  return nullptr;
}

template <class D, bool VARIANT>
const char* launch_decode(DecodeParams& p, Stream stream) {
  p.row_blocks = ceil_div(p.max_rows, D::ROWS);
  const unsigned blocks = static_cast<unsigned>(p.cache.num_kv_heads * p.row_blocks);
  const dim3 grid(blocks, static_cast<unsigned>(p.schedule.max_items));
  return launch(decode_kernel<D, VARIANT>, grid, D::WARPS * WARP, D::SHARED_BYTES, stream, p);
}

// Two row tiles in a block read keys once for 32 rows; with head_dim 256 their accumulators would not fit the
// registers.
template <bool VARIANT>
const char* launch_decode_rows(DecodeParams& p, Stream stream) {
  if constexpr (S::HEAD_DIM <= 128) {
    if (p.max_rows > 16) return launch_decode<DecodeShape<S, 2>, VARIANT>(p, stream);
  }
  return launch_decode<DecodeShape<S, 1>, VARIANT>(p, stream);
}

}  // namespace

extern "C" const char* pageloom_schedule_decode(const Batch* batch, int32_t window, int32_t max_query_len,
                                                const DecodeSchedule* schedule, Stream stream) {
  if (batch->num_seqs <= 0) return nullptr;
  if (max_query_len < 1) return "a decode needs a query";
  if (schedule->max_items < batch->num_seqs) return "a decode schedule needs an item for every sequence";
  const ScheduleParams p{*batch, *schedule, window};
  return launch(schedule_kernel, dim3(1), SCHEDULE_THREADS, schedule_shared_bytes(batch->num_seqs), stream, p);
}

extern "C" const char* pageloom_decode(const Tokens* q, const Tokens* out, const Cache* cache, const Batch* batch,
                                       const Layer* layer, const DecodeSchedule* schedule, const Partials* partials,
                                       int32_t max_rows, Stream stream) {
  if (batch->num_seqs <= 0) return nullptr;
  if (const char* reason = refuse(*cache, *layer)) return reason;
  if (max_rows < 1 || max_rows > MAX_ROWS) return "a decode takes 1 to 64 rows (queries x heads of a group)";
  if (schedule->max_items > MAX_GRID_Y) return "a decode schedule holds at most 65535 items";
  DecodeParams p{*q, *out, *cache, *batch, *schedule, *partials, scoring_of(*layer, S::BYTES), 0, max_rows, 0};
  p.group = layer->num_heads / cache->num_kv_heads;
  return is_plain(*layer) ? launch_decode_rows<false>(p, stream) : launch_decode_rows<true>(p, stream);
}

extern "C" const char* pageloom_prefill(const Tokens* q, const Tokens* out, const Cache* cache, const Batch* batch,
                                        const Layer* layer, int32_t num_tokens, Stream stream) {
  if (batch->num_seqs <= 0 || num_tokens <= 0) return nullptr;
  if (const char* reason = refuse(*cache, *layer)) return reason;
  using P = PrefillShape<S>;
  const PrefillParams p{*q, *out, *cache, *batch, scoring_of(*layer, S::BYTES), layer->num_heads / cache->num_kv_heads};
  const int64_t slots = int64_t{num_tokens} * p.group / P::ROWS + batch->num_seqs;
  const dim3 grid(static_cast<unsigned>(slots), static_cast<unsigned>(cache->num_kv_heads));
  const auto kernel = is_plain(*layer) ? prefill_kernel<P, false> : prefill_kernel<P, true>;
  return launch(kernel, grid, P::WARPS * WARP, P::SHARED_BYTES, stream, p);
}

}  // namespace pageloom::cuda
