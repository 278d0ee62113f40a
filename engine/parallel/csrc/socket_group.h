// Collectives of processes on several hosts, over a stream socket to each other rank: see README.md beside this folder.
// Knows nothing of torch.
#pragma once

#include <stdint.h>

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "group.h"

namespace pageloom {

class SocketGroup final : public Group {
 public:
  // Connected stream sockets by rank, which are the group's from now on; at this rank's own place -1.
  // Throws std::runtime_error: they are not so.
  SocketGroup(const std::vector<int64_t>& sockets, int64_t rank);
  ~SocketGroup() override;
  SocketGroup(const SocketGroup&) = delete;

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return static_cast<int64_t>(peers_.size()); }
  void stop(const std::string& reason) override;
  void all_reduce(const ReduceCall& call) override;
  void all_gather(const ColumnsCall& call) override;
  void all_to_all(const ColumnsCall& call) override;

 private:
  enum FrameKind : uint32_t { kNumbers = 0x31'73'6c'70, kStop = 0x31'74'6c'70 };  // "pls1", "plt1"

  // Precedes what is sent: numbers, or a reason of kMostReason bytes.
  struct Header {
    FrameKind kind;
    uint32_t unused;
    Tag tag;
    int64_t bytes;
  };

  struct Peer {
    int fd = -1;
    Header out, in;
    const char* out_body = nullptr;
    char* in_body = nullptr;
    int64_t out_bytes = 0, in_bytes = 0;
    int64_t sent = 0, received = 0;  // of header and body
    std::string gone;                // why nothing can be sent to it or come from it any more
    std::vector<char> buffer;
    std::vector<char> reason;  // of a kStop

    bool has_sent() const { return sent == static_cast<int64_t>(sizeof out) + out_bytes; }
    bool has_received() const { return received == static_cast<int64_t>(sizeof in) + in_bytes; }
  };

  template <class Body>
  void in_call(const Body& body);
  // `to`: what goes to a rank, as (address, bytes); `from`: where what comes from it is put.
  template <class To, class From>
  void exchange(const Tag& tag, const std::vector<int64_t>* columns, const To& to, const From& from);
  void carry(const Tag& tag, const std::vector<int64_t>* columns);
  bool push(Peer& peer);
  bool pull(int64_t rank, const Tag& tag, const std::vector<int64_t>* columns);
  void check(int64_t rank, const Tag& tag, const std::vector<int64_t>* columns);
  void wait();
  char* buffer_of(int64_t rank, int64_t bytes);

  void reduce_at_once(const ReduceCall& call, int64_t begin, int64_t count);
  void reduce_by_shares(const ReduceCall& call, int64_t begin, int64_t count);
  void sum(const ReduceCall& call, const char* own, const char* residual, char* out, int64_t count);

  void remember(const std::string& reason);
  void tell();  // the others of the reason; by who has `calling_`
  [[noreturn]] void throw_reason();

  const int64_t rank_;
  const SumKernels& kernels_;
  std::vector<Peer> peers_;
  std::vector<char> packed_;
  std::vector<const void*> parts_;
  int wake_ = -1;  // readable once the group is stopped
  int64_t give_up_at_ns_ = 0;  // 0: nobody has gone

  std::mutex calling_, reasoning_;
  std::string reason_;
  std::atomic<bool> stopped_{false};
  bool told_ = false;
};

}  // namespace pageloom
