// How fast this machine's cores can read memory: the ceiling beside which a step's time is shown. A dependable reader
// keeps several streams open per thread, as the kernels do; one stream alone leaves a third of the bandwidth unused.

#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t kStreams = 8, kLine = 64, kWords = 64, kAhead = 512;  // words of 8 bytes, but for kLine

std::uint64_t read_part(const std::uint64_t* p, std::size_t words) {
  const std::size_t part = words / kStreams / kWords * kWords;
  std::uint64_t lanes[kWords] = {};
  for (std::size_t at = 0; at < part; at += kWords) {
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      const std::uint64_t* q = p + stream * part + at;
      for (std::size_t i = 0; i < kWords; i += kLine / 8) __builtin_prefetch(q + i + kAhead, 0, 2);
      for (std::size_t i = 0; i < kWords; ++i) lanes[i] ^= q[i];
    }
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t lane : lanes) sum ^= lane;
  return sum;
}

}  // namespace

// Reads `words` words of 8 bytes with `threads` threads; the result keeps the reads alive.
extern "C" __attribute__((visibility("default"))) std::uint64_t pageloom_read(const std::uint64_t* p,
                                                                              std::size_t words, int threads) {
  std::vector<std::uint64_t> sums(threads, 0);
  std::vector<std::thread> workers;
  const std::size_t share = words / threads;
  for (int t = 1; t < threads; ++t) {
    workers.emplace_back([&sums, p, share, t] { sums[t] = read_part(p + t * share, share); });
  }
  sums[0] = read_part(p, share);
  std::uint64_t sum = sums[0];
  for (std::size_t t = 0; t < workers.size(); ++t) {
    workers[t].join();
    sum ^= sums[t + 1];
  }
  return sum;
}
