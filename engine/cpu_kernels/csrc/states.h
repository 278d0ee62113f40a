// Layers that keep a state of each sequence: the plain data between binding, schedule and kernels.
#pragma once

#include <stdint.h>
#include <string.h>

namespace pageloom {

// kShort: a convolution between two gates alone; kKimi: kDelta with a decay of each number of a key, and other gates.
enum class MixKind : int32_t { kDelta = 0, kMamba = 1, kShort = 2, kKimi = 3 };

constexpr int64_t kMostTaps = 16, kMostKeys = 512;       // of a convolution; of a head
constexpr int64_t kMixChannels = 256, kMixColumns = 32;  // that one call of a kernel makes, at most
constexpr int64_t kMixTokens = 128;  // of a stretch: what is between a layer's matrices stays in caches

// Where states lie: in bundles of pages, each page a row of every cache.
struct StatePlace {
  uint8_t* const* caches;
  const int64_t* widths;   // bytes of a page in each cache
  const int64_t* strides;  // bytes between its pages
  int64_t num_caches, page_bytes;
  const int64_t* blocks;  // [first block of a bundle][pages]
  int64_t pages;
};

// Bytes of one bundle, one after the other: walks over the pages that hold them.
class StateBytes {
 public:
  StateBytes(const StatePlace& place, int64_t first, int64_t offset) : place_(place), blocks_(place.blocks + first * place.pages) {
    page_ = offset / place.page_bytes;
    int64_t within = offset % place.page_bytes;
    for (cache_ = 0; within >= place.widths[cache_]; ++cache_) within -= place.widths[cache_];
    enter(within);
  }

  // From here on as many bytes, and so many more are passed over.
  void read(void* to, int64_t count, int64_t skipped = 0) {
    walk(count, [&](uint8_t* here, int64_t done, int64_t some) { memcpy(static_cast<uint8_t*>(to) + done, here, some); });
    walk(skipped, [](uint8_t*, int64_t, int64_t) {});
  }
  void write(const void* from, int64_t count, int64_t skipped = 0) {
    walk(count, [&](uint8_t* here, int64_t done, int64_t some) { memcpy(here, static_cast<const uint8_t*>(from) + done, some); });
    walk(skipped, [](uint8_t*, int64_t, int64_t) {});
  }
  // As many bytes where they lie, which are passed over; null, and nothing is: they lie in several pieces.
  uint8_t* whole(int64_t count) {
    if (left_ == 0) turn();
    if (left_ < count) return nullptr;
    uint8_t* const here = at_;
    at_ += count, left_ -= count;
    return here;
  }

 private:
  void turn() {
    if (++cache_ == place_.num_caches) cache_ = 0, ++page_;
    enter(0);
  }
  void enter(int64_t within) {
    at_ = place_.caches[cache_] + blocks_[page_] * place_.strides[cache_] + within;
    left_ = place_.widths[cache_] - within;
  }
  template <class Use>
  void walk(int64_t count, const Use& use) {
    for (int64_t done = 0; done < count;) {
      if (left_ == 0) turn();  // only where more is wanted: behind a bundle's last byte there is nothing
      const int64_t some = count - done < left_ ? count - done : left_;
      use(at_, done, some);
      at_ += some, left_ -= some, done += some;
    }
  }

  const StatePlace& place_;
  const int64_t* blocks_;
  int64_t page_, cache_;
  uint8_t* at_;
  int64_t left_;
};

struct StateSequence {
  int64_t begin, end;    // its tokens
  int64_t read;          // the first block of the bundle with its state; -1: it has none yet
  int64_t first_write;   // of its writes, which end where the next sequence's begin
};

struct StateWrite {
  int64_t end;      // behind which token
  int64_t written;  // the first block of the bundle
};

struct MixProblem {
  MixKind kind;
  bool bf16;  // of x, out and a state's inputs; else float32
  int64_t tokens, channels, taps, heads, groups, keys, values;
  int64_t decays;  // of a head: one, or one of each of its keys
  const void* x;
  int64_t x_stride;
  void* out;
  int64_t out_stride;
  int64_t mixed_at, gate_at, amount_at, decay_at;  // columns of x; amount_at: of the delta rule, or of a short one's inputs
  int64_t q_at, k_at, v_at;                        // channels
  const float* conv_weight;  // [taps][channels], the newest input's last
  const float* conv_bias;    // null: none
  const float* rate;         // [heads], negative: of the logarithm of a decay
  const float* decay_bias;   // [heads * decays]
  const float* passed_on;    // [heads]; null: none
  const float* norm;         // delta rule: [values]; else [heads * values], or null
  float norm_eps, lowest, highest;
  StatePlace place;
  int64_t start, matrices_at;  // bytes of a bundle: where the layer's state begins, and where its matrices do
  const StateSequence* sequences;
  int64_t num_sequences;
  const StateWrite* writes;
  int64_t num_writes;
  // A stretch of tokens, [first, last), and the sequences that have some of them, [first_sequence, last_sequence).
  int64_t first, last, first_sequence, last_sequence;
  float* mixed;   // [stretch][channels]: behind convolution and activation
  float* decay;   // [stretch][heads * decays]
  float* amount;  // [stretch][heads]
  float* made;    // [stretch][heads * values]
  float* carried[2];  // matrices from the stretch before, and for the next one, of a sequence that is in both

  int64_t inner() const { return heads * values; }
  float* mixed_of(int64_t t) const { return mixed + (t - first) * channels; }
  float* decay_of(int64_t t) const { return decay + (t - first) * heads * decays; }
  float* amount_of(int64_t t) const { return amount + (t - first) * heads; }
  float* made_of(int64_t t) const { return made + (t - first) * inner(); }
  int64_t begin_of(const StateSequence& s) const { return s.begin > first ? s.begin : first; }
  int64_t end_of(const StateSequence& s) const { return s.end < last ? s.end : last; }
  int64_t columns() const { return (values + kMixColumns - 1) / kMixColumns; }
  int64_t carried_at(int64_t head, int64_t column) const {
    return (head * columns() + column / kMixColumns) * keys * kMixColumns;
  }
  int64_t carried_size() const { return carried_at(heads, 0); }
  int64_t bytes_at(int64_t head, int64_t column) const { return start + matrices_at + (head * keys * values + column) * 4; }
  bool has_rule() const { return kind == MixKind::kDelta || kind == MixKind::kKimi; }
  int64_t writes_end(int64_t sequence) const {
    return sequence + 1 < num_sequences ? sequences[sequence + 1].first_write : num_writes;
  }
  // The first that is not behind a token before the stretch.
  int64_t next_write(int64_t sequence) const {
    int64_t write = sequences[sequence].first_write;
    for (const int64_t end = writes_end(sequence); write < end && writes[write].end <= first;) ++write;
    return write;
  }
};

// A token's result depends on its own past alone: not on what other tokens a step has, nor on how the work is cut. Tokens and
// sequences are numbered as the step's; each call keeps to those of the stretch.
struct MixKernels {
  // Inputs of channels [begin, end), at most kMixChannels, of one sequence's tokens; and those that states are to hold.
  void (*convolve)(const MixProblem&, int64_t sequence, int64_t begin, int64_t end);
  // What recurrences need beside that, of tokens [begin, end).
  void (*prepare)(const MixProblem&, int64_t begin, int64_t end);
  // Of one sequence and head kMixColumns columns of values, from `column` on; and of the matrices that are to be kept.
  void (*recur)(const MixProblem&, int64_t sequence, int64_t head, int64_t column);
  // From what queries read to what the layer gives back, of tokens [begin, end).
  void (*finish)(const MixProblem&, int64_t begin, int64_t end);
};

struct Threads;
const MixKernels* mix_states_portable();
const MixKernels* mix_states_avx2();
const MixKernels* mix_states_avx512();
const MixKernels* mix_states_avx512bf16();
void run_mix(MixProblem problem, const MixKernels& kernels, const Threads& threads);  // stretch by stretch
const MixKernels* mix_kernels_of(int64_t isa);  // null: none

}  // namespace pageloom
