#include "socket_group.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace pageloom {
namespace {

constexpr int64_t kAtOnceBytes = 64 << 10;  // of x, up to which each of three or more ranks sums everything
constexpr int64_t kPieceBytes = 4 << 20;    // of what is exchanged at once: so much memory is kept for each rank
// How long a rank that lost another one waits for somebody who knows why: who watches the processes stops the group.
constexpr int64_t kGraceNs = 3'000'000'000;
constexpr int kHotLooks = 60;  // some ten microseconds

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

SocketGroup::SocketGroup(const std::vector<int64_t>& sockets, int64_t rank)
    : rank_(rank), kernels_(kernels_of_this_cpu()), peers_(sockets.size()), parts_(sockets.size()) {
  for (size_t other = 0; other < sockets.size(); ++other) {
    int type = 0;
    socklen_t length = sizeof type;
    const int fd = static_cast<int>(sockets[other]);
    const bool is_own = static_cast<int64_t>(other) == rank;
    if (is_own ? fd >= 0 : getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0 || type != SOCK_STREAM)
      throw std::runtime_error("descriptor " + std::to_string(fd) + " is no stream to rank " + std::to_string(other));
  }
  if (rank < 0 || rank >= size()) throw std::runtime_error("rank " + std::to_string(rank) + " has no place in its group");
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_ < 0) throw std::runtime_error(std::string("a group of sockets: ") + strerror(errno));
  for (size_t other = 0; other < sockets.size(); ++other) peers_[other].fd = static_cast<int>(sockets[other]);
}

SocketGroup::~SocketGroup() {
  for (const Peer& peer : peers_)
    if (peer.fd >= 0) close(peer.fd);
  close(wake_);
}

void SocketGroup::remember(const std::string& reason) {
  const std::lock_guard lock(reasoning_);
  if (stopped_.load()) return;
  reason_ = cut_reason(reason);
  stopped_.store(true);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_, &one, sizeof one);
}

void SocketGroup::stop(const std::string& reason) {
  remember(reason);
  // Else who is in a call tells them, as soon as it wakes or has ended.
  if (const std::unique_lock lock(calling_, std::try_to_lock); lock.owns_lock()) tell();
}

void SocketGroup::throw_reason() {
  const std::lock_guard lock(reasoning_);
  throw std::runtime_error(reason_);
}

// A peer in the middle of a frame cannot be told; it sees the end of the stream, and waits for what others say.
void SocketGroup::tell() {
  if (std::exchange(told_, true)) return;
  struct {
    Header header;
    char reason[kMostReason];
  } frame = {};
  frame.header.kind = kStop;
  frame.header.bytes = kMostReason;
  {
    const std::lock_guard lock(reasoning_);
    memcpy(frame.reason, reason_.data(), reason_.size());
  }
  for (const Peer& peer : peers_) {
    if (peer.fd < 0) continue;
    if (peer.sent == 0 || peer.has_sent()) send(peer.fd, &frame, sizeof frame, MSG_DONTWAIT | MSG_NOSIGNAL);
    shutdown(peer.fd, SHUT_WR);
  }
}

template <class Body>
void SocketGroup::in_call(const Body& body) {
  {
    const std::lock_guard lock(calling_);
    try {
      if (stopped_.load()) throw_reason();
      body();
    } catch (...) {
      if (stopped_.load()) tell();
      throw;
    }
  }
  if (!stopped_.load()) return;
  if (const std::unique_lock lock(calling_, std::try_to_lock); lock.owns_lock()) tell();
}

template <class To, class From>
void SocketGroup::exchange(const Tag& tag, const std::vector<int64_t>* columns, const To& to, const From& from) {
  for (int64_t rank = 0; rank < size(); ++rank) {
    if (rank == rank_) continue;
    Peer& peer = peers_[rank];
    std::tie(peer.out_body, peer.out_bytes) = to(rank);
    std::tie(peer.in_body, peer.in_bytes) = from(rank);
    peer.out = {kNumbers, 0, tag, peer.out_bytes};
    peer.sent = peer.received = 0;
  }
  carry(tag, columns);
}

void SocketGroup::carry(const Tag& tag, const std::vector<int64_t>* columns) {
  for (int looks = 0;;) {
    bool is_done = true, has_moved = false;
    for (int64_t rank = 0; rank < size(); ++rank) {
      Peer& peer = peers_[rank];
      if (peer.fd < 0) continue;
      if (!peer.has_sent()) has_moved |= push(peer);
      if (!peer.has_received()) has_moved |= pull(rank, tag, columns);
      is_done = is_done && peer.has_sent() && peer.has_received();
    }
    if (is_done) return;
    if (stopped_.load(std::memory_order_acquire)) throw_reason();
    if (has_moved) looks = 0;
    else if (++looks > kHotLooks) wait();
  }
}

// Whether anything was sent.
bool SocketGroup::push(Peer& peer) {
  if (!peer.gone.empty()) return false;
  constexpr int64_t kHeader = sizeof peer.out;
  iovec parts[2];
  int count = 0;
  if (peer.sent < kHeader) parts[count++] = {reinterpret_cast<char*>(&peer.out) + peer.sent, size_t(kHeader - peer.sent)};
  const int64_t from = std::max<int64_t>(peer.sent - kHeader, 0);
  if (from < peer.out_bytes) parts[count++] = {const_cast<char*>(peer.out_body) + from, size_t(peer.out_bytes - from)};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  const ssize_t sent = sendmsg(peer.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent > 0) peer.sent += sent;
  else if (sent < 0 && errno != EAGAIN && errno != EINTR) peer.gone = strerror(errno);
  return sent > 0;
}

// Whether anything came. What a rank that has gone had sent before is still read.
bool SocketGroup::pull(int64_t rank, const Tag& tag, const std::vector<int64_t>* columns) {
  Peer& peer = peers_[rank];
  constexpr int64_t kHeader = sizeof peer.in;
  const bool in_header = peer.received < kHeader;
  char* const to = in_header ? reinterpret_cast<char*>(&peer.in) + peer.received : peer.in_body + (peer.received - kHeader);
  const int64_t most = in_header ? kHeader - peer.received : kHeader + peer.in_bytes - peer.received;
  const ssize_t came = recv(peer.fd, to, most, MSG_DONTWAIT);
  if (came <= 0) {
    if (came == 0) peer.gone = "it closed its connection";
    else if (errno != EAGAIN && errno != EINTR) peer.gone = strerror(errno);
    return false;
  }
  peer.received += came;
  if (in_header && peer.received == kHeader) check(rank, tag, columns);
  if (peer.in.kind == kStop && peer.received >= kHeader && peer.has_received()) {
    remember(std::string(peer.reason.data(), strnlen(peer.reason.data(), peer.reason.size())));
    throw_reason();
  }
  return true;
}

void SocketGroup::check(int64_t rank, const Tag& tag, const std::vector<int64_t>* columns) {
  Peer& peer = peers_[rank];
  if (peer.in.kind == kStop && peer.in.bytes == kMostReason) {
    peer.reason.resize(kMostReason);
    peer.in_body = peer.reason.data();
    peer.in_bytes = kMostReason;
    return;
  }
  Tag expected = tag;
  if (columns != nullptr) expected.own_columns = static_cast<uint32_t>((*columns)[rank]);
  if (peer.in.kind != kNumbers)
    remember("rank " + std::to_string(rank_) + " received what rank " + std::to_string(rank) + " cannot have sent");
  else if (memcmp(&peer.in.tag, &expected, sizeof expected) != 0)  // both ranks say it in the same words
    remember(rank > rank_ ? difference(rank, peer.in.tag, rank_, tag) : difference(rank_, tag, rank, peer.in.tag));
  else if (peer.in.bytes != peer.in_bytes)
    remember("rank " + std::to_string(rank) + " sent " + std::to_string(peer.in.bytes) + " bytes where rank " +
             std::to_string(rank_) + " waits for " + std::to_string(peer.in_bytes));
  else
    return;
  throw_reason();
}

// Until something may be sent, or came, or the group is stopped.
void SocketGroup::wait() {
  std::vector<pollfd> polled = {{wake_, POLLIN, 0}};
  int64_t lost = -1;
  for (int64_t rank = 0; rank < size(); ++rank) {
    const Peer& peer = peers_[rank];
    if (peer.fd < 0) continue;
    if (!peer.gone.empty()) {
      lost = rank;
      continue;
    }
    const int events = (peer.has_sent() ? 0 : POLLOUT) | (peer.has_received() ? 0 : POLLIN);
    if (events != 0) polled.push_back({peer.fd, static_cast<short>(events), 0});
  }
  int timeout_ms = -1;
  if (lost >= 0) {
    const int64_t now = now_ns();
    if (give_up_at_ns_ == 0) give_up_at_ns_ = now + kGraceNs;
    if (now >= give_up_at_ns_) {
      remember("rank " + std::to_string(rank_) + " has lost rank " + std::to_string(lost) + ": " + peers_[lost].gone);
      throw_reason();
    }
    timeout_ms = static_cast<int>((give_up_at_ns_ - now) / 1'000'000) + 1;
  }
  poll(polled.data(), polled.size(), timeout_ms);
}

char* SocketGroup::buffer_of(int64_t rank, int64_t bytes) {
  std::vector<char>& buffer = peers_[rank].buffer;
  if (static_cast<int64_t>(buffer.size()) < bytes) buffer.resize(bytes);
  return buffer.data();
}

void SocketGroup::all_reduce(const ReduceCall& call) {
  in_call([&] {
    const int64_t most = kPieceBytes / size_of(call.type);
    const bool at_once = size() <= 2 || call.count * size_of(call.type) <= kAtOnceBytes;
    for (int64_t at = 0; at == 0 || at < call.count; at += most) {
      const int64_t count = std::min(most, call.count - at);
      at_once ? reduce_at_once(call, at, count) : reduce_by_shares(call, at, count);
    }
  });
}

// What came of the others, and `own`, in the order of ranks.
void SocketGroup::sum(const ReduceCall& call, const char* own, const char* residual, char* out, int64_t count) {
  for (int64_t rank = 0; rank < size(); ++rank) parts_[rank] = rank == rank_ ? own : peers_[rank].in_body;
  kernels_.sum(parts_.data(), size(), call.type, residual, out, call.out_type, count);
}

void SocketGroup::reduce_at_once(const ReduceCall& call, int64_t begin, int64_t count) {
  const char* const x = call.x + begin * size_of(call.type);
  const int64_t bytes = count * size_of(call.type), to = begin * size_of(call.out_type);
  exchange(
      call.tag, nullptr, [&](int64_t) { return std::pair{x, bytes}; },
      [&](int64_t rank) { return std::pair{buffer_of(rank, bytes), bytes}; });
  sum(call, x, call.residual == nullptr ? nullptr : call.residual + to, call.out + to, count);
}

// Every rank sums a share of the elements, rounds it, and sends it to the others.
void SocketGroup::reduce_by_shares(const ReduceCall& call, int64_t begin, int64_t count) {
  const int64_t type_bytes = size_of(call.type), out_bytes = size_of(call.out_type);
  const auto start = [&](int64_t rank) { return share_start(rank, size(), count); };
  const auto share = [&](int64_t rank) { return start(rank + 1) - start(rank); };
  const char* const x = call.x + begin * type_bytes;
  char* const out = call.out + begin * out_bytes;
  const int64_t own = share(rank_) * type_bytes;
  exchange(
      call.tag, nullptr, [&](int64_t rank) { return std::pair{x + start(rank) * type_bytes, share(rank) * type_bytes}; },
      [&](int64_t rank) { return std::pair{buffer_of(rank, own), own}; });
  char* const mine = out + start(rank_) * out_bytes;
  sum(call, x + start(rank_) * type_bytes, nullptr, mine, share(rank_));
  exchange(
      call.tag, nullptr,
      [&](int64_t) { return std::pair{static_cast<const char*>(mine), share(rank_) * out_bytes}; },
      [&](int64_t rank) { return std::pair{out + start(rank) * out_bytes, share(rank) * out_bytes}; });
  if (call.residual == nullptr) return;
  const void* const rounded = out;
  kernels_.sum(&rounded, 1, call.out_type, call.residual + begin * out_bytes, out, call.out_type, count);
}

void SocketGroup::all_gather(const ColumnsCall& call) {
  in_call([&] {
    int64_t total = 0, widest = 1;  // bytes of a row
    for (const int64_t columns : call.columns) {
      total += columns * call.element_size;
      widest = std::max(widest, columns * call.element_size);
    }
    const int64_t most = std::max<int64_t>(kPieceBytes / widest, 1), own = call.columns[rank_] * call.element_size;
    for (int64_t row = 0; row == 0 || row < call.rows; row += most) {
      const int64_t rows = std::min(most, call.rows - row);
      const char* x = call.x + row * call.x_stride;
      if (call.x_stride != own && rows > 1) {
        packed_.resize(rows * own);
        copy_rows(x, call.x_stride, packed_.data(), own, std::max<int64_t>(own, 1), 0, rows * own);
        x = packed_.data();
      }
      const auto bytes = [&](int64_t rank) { return rows * call.columns[rank] * call.element_size; };
      exchange(
          call.tag, &call.columns, [&](int64_t) { return std::pair{x, bytes(rank_)}; },
          [&](int64_t rank) { return std::pair{buffer_of(rank, bytes(rank)), bytes(rank)}; });
      char* to = call.out + row * total;
      for (int64_t rank = 0; rank < size(); ++rank) {
        const int64_t columns = call.columns[rank] * call.element_size;
        const char* const from = rank == rank_ ? x : peers_[rank].in_body;
        if (columns > 0) copy_rows(from, columns, to, total, columns, 0, rows * columns);
        to += columns;
      }
    }
  });
}

void SocketGroup::all_to_all(const ColumnsCall& call) {
  in_call([&] {
    std::vector<int64_t> starts = {0};  // of each rank's columns, in bytes
    for (const int64_t columns : call.columns) starts.push_back(starts.back() + columns * call.element_size);
    const auto width = [&](int64_t rank) { return starts[rank + 1] - starts[rank]; };
    const int64_t own = width(rank_), most = std::max<int64_t>(kPieceBytes / std::max<int64_t>(starts.back(), 1), 1);
    for (int64_t row = 0; row == 0 || row < call.rows; row += most) {
      const int64_t rows = std::min(most, call.rows - row);
      const char* const x = call.x + row * call.x_stride;
      packed_.resize(rows * starts.back());
      const auto packed = [&](int64_t rank) { return packed_.data() + rows * starts[rank]; };
      for (int64_t rank = 0; rank < size(); ++rank)
        if (width(rank) > 0)
          copy_rows(x + starts[rank], call.x_stride, packed(rank), width(rank), width(rank), 0, rows * width(rank));
      exchange(
          call.tag, &call.columns,
          [&](int64_t rank) { return std::pair{static_cast<const char*>(packed(rank)), rows * width(rank)}; },
          [&](int64_t rank) { return std::pair{buffer_of(rank, rows * own), rows * own}; });
      char* const out = call.out + row * size() * own;
      for (int64_t rank = 0; own > 0 && rank < size(); ++rank)
        copy_rows(rank == rank_ ? packed(rank) : peers_[rank].in_body, own, out + rank * own, size() * own, own, 0,
                  rows * own);
    }
  });
}

}  // namespace pageloom
