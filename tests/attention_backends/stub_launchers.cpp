// Launchers that launch nothing: they write down what the binding gave them, so that a test on a CPU can read it.
#include <sstream>
#include <string>

#include "launch.h"

namespace {
std::ostringstream calls;
const char* failure = nullptr;
std::string text;

const char* done() {
  calls << '\n';
  return failure;
}

template <class... Values>
void note(const char* name, const Values&... values) {
  calls << name;
  ((calls << ' ' << values), ...);
}

int64_t at(const void* p) { return reinterpret_cast<int64_t>(p); }

void note_tokens(const pageloom::cuda::Tokens* t) { note(" tokens", at(t->data), t->token_stride, t->head_stride); }
void note_cache(const pageloom::cuda::Cache* c) {
  note(" cache", at(c->data), c->block_bytes, c->num_kv_heads, c->block_size);
}
void note_batch(const pageloom::cuda::Batch* b) {
  note(" batch", at(b->query_start_loc), at(b->seq_lens), at(b->block_tables), b->block_table_stride, b->first_seq,
       b->num_seqs);
}
void note_layer(const pageloom::cuda::Layer* l) {
  note(" layer", l->num_heads, l->window, l->scale, l->soft_cap, l->k_scale, l->v_scale, at(l->sinks));
}
void note_schedule(const pageloom::cuda::DecodeSchedule* s) {
  note(" schedule", at(s->header), at(s->items), at(s->item_start), s->max_items);
}
}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {
EXPORT const char* stub_calls() {
  text = calls.str();
  calls.str("");
  return text.c_str();
}
EXPORT void stub_fail(bool fail) { failure = fail ? "the stub fails on purpose" : nullptr; }
}

namespace pageloom::cuda {
extern "C" {
const char* pageloom_schedule_decode(const Batch* batch, int32_t window, int32_t max_query_len,
                                     const DecodeSchedule* schedule, Stream) {
  note("schedule_decode", window, max_query_len);
  note_batch(batch);
  note_schedule(schedule);
  return done();
}

const char* pageloom_decode(const Tokens* q, const Tokens* out, const Cache* cache, const Batch* batch, const Layer* layer,
                            const DecodeSchedule* schedule, const Partials* partials, int32_t max_rows, Stream) {
  note("decode", max_rows);
  note_tokens(q);
  note_tokens(out);
  note_cache(cache);
  note_batch(batch);
  note_layer(layer);
  note_schedule(schedule);
  note(" partials", at(partials->out), at(partials->lse), at(partials->arrivals));
  return done();
}

const char* pageloom_prefill(const Tokens* q, const Tokens* out, const Cache* cache, const Batch* batch, const Layer* layer,
                             int32_t num_tokens, Stream) {
  note("prefill", num_tokens);
  note_tokens(q);
  note_tokens(out);
  note_cache(cache);
  note_batch(batch);
  note_layer(layer);
  return done();
}

const char* pageloom_write_kv(const Tokens* k, const Tokens* v, const Cache* cache, const int64_t* slots, int32_t num_tokens,
                              float k_scale, float v_scale, Stream) {
  note("write_kv", at(slots), num_tokens, k_scale, v_scale);
  note_tokens(k);
  note_tokens(v);
  note_cache(cache);
  return done();
}

const char* pageloom_copy_blocks(void* const* bases, int32_t num_layers, int64_t block_bytes, const int64_t* pairs,
                                 int32_t num_pairs, Stream) {
  note("copy_blocks", at(bases), num_layers, block_bytes, at(pairs), num_pairs);
  return done();
}

const char* pageloom_gather_blocks(void* const* bases, int32_t num_layers, int64_t block_bytes, const int64_t* ids,
                                   int32_t num_ids, void* staging, Stream) {
  note("gather_blocks", at(bases), num_layers, block_bytes, at(ids), num_ids, at(staging));
  return done();
}

const char* pageloom_scatter_blocks(void* const* bases, int32_t num_layers, int64_t block_bytes, const int64_t* ids,
                                    int32_t num_ids, const void* staging, Stream) {
  note("scatter_blocks", at(bases), num_layers, block_bytes, at(ids), num_ids, at(staging));
  return done();
}
}
}  // namespace pageloom::cuda
