// The only unit that sees torch: groups by their names, and operators that check tensors.
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>

#include "native_group.h"
#include "shared_group.h"
#include "socket_group.h"
#include "torch_string.h"

namespace pageloom {
namespace {

// Of this process. Who is in a collective, or stops it, keeps its group while somebody closes it.
class OpenGroups {
 public:
  // Under `name`, or the first of name-2, name-3 ... that is free; which of them.
  int64_t add(const std::string& name, const std::shared_ptr<Group>& group) {
    const std::lock_guard lock(mutex_);
    for (int64_t number = 1;; ++number)
      if (groups_.emplace(number == 1 ? name : name + "-" + std::to_string(number), group).second) return number;
  }
  void remove(const std::string& name) {
    std::shared_ptr<Group> last;  // unmapped without the lock
    const std::lock_guard lock(mutex_);
    if (const auto found = groups_.find(name); found != groups_.end()) {
      last = std::move(found->second);
      groups_.erase(found);
    }
  }
  std::shared_ptr<Group> find(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const auto found = groups_.find(name);
    PAGELOOM_CHECK(found != groups_.end(), "no group named ", name, " is open");
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Group>> groups_;
};

OpenGroups& open_groups() {
  static OpenGroups groups;
  return groups;
}

Float float_of(ScalarType type, const char* op) {
  switch (type) {
    case ScalarType::Float: return Float::k32;
    case ScalarType::BFloat16: return Float::kBrain16;
    case ScalarType::Half: return Float::kHalf16;
    default: refuse(op, ": sums are made of float32, bfloat16 and float16, not of torch's type ", static_cast<int>(type));
  }
}

uint32_t extent(int64_t size, const char* op) {
  PAGELOOM_CHECK(size >= 0 && size <= UINT32_MAX, op, ": ", size, " rows or columns are too many");
  return static_cast<uint32_t>(size);
}

Tag tag_of(Kind kind, ScalarType type, int64_t rows, int64_t columns, int64_t own_columns, const char* op) {
  const auto number = static_cast<uint8_t>(type);
  return {kind, number, number, 0, extent(rows, op), extent(columns, op), extent(own_columns, op)};
}

// Whether the calling thread's collectives are with nobody: a compiler tries code whose results nobody reads.
thread_local bool is_alone = false;

Tensor zeros(Tensor out) {
  memset(out.data_ptr(), 0, out.numel() * out.element_size());
  return out;
}

// What one rank is refused, the others would wait for.
template <class Call>
Tensor stopping_where_refused(Group& group, const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    group.stop("rank " + std::to_string(group.rank()) + ": " + error.what());
    throw;
  }
}

Tensor all_reduce(Tensor x, std::optional<Tensor> residual, int32_t dtype, std::string name) {
  static constexpr const char* kOp = "all_reduce";
  const std::shared_ptr<Group> group = open_groups().find(name);
  return stopping_where_refused(*group, [&] {
    const ScalarType type = x.scalar_type(), out_type = static_cast<ScalarType>(dtype);
    ReduceCall call{};
    call.type = float_of(type, kOp);
    call.out_type = float_of(out_type, kOp);
    PAGELOOM_CHECK(type == ScalarType::Float || type == out_type, kOp, ": x must be float32, or of the result's dtype");
    PAGELOOM_CHECK(x.dim() == 2 && x.is_contiguous(), kOp, ": x must be contiguous [rows, columns]");
    const int64_t rows = x.size(0), columns = x.size(1);
    if (residual.has_value()) {
      PAGELOOM_CHECK(residual->on_cpu() && residual->scalar_type() == out_type && residual->dim() == 2 &&
                         residual->size(0) == rows && residual->size(1) == columns && residual->is_contiguous(),
                     kOp, ": the residual must be contiguous [", rows, ", ", columns, "] of the result's dtype");
      call.residual = static_cast<const char*>(residual->data_ptr());
    }
    call.tag = {residual.has_value() ? Kind::kAllReduceAdd : Kind::kAllReduce, static_cast<uint8_t>(type),
                static_cast<uint8_t>(out_type), 0, extent(rows, kOp), extent(columns, kOp), extent(columns, kOp)};
    call.x = static_cast<const char*>(x.data_ptr());
    call.count = rows * columns;
    Tensor out = Tensor::empty({rows, columns}, out_type);
    call.out = static_cast<char*>(out.data_ptr());
    if (is_alone) return zeros(std::move(out));
    group->all_reduce(call);
    return out;
  });
}

// Columns of every rank to all, or to each its own.
Tensor exchange(Kind kind, const Tensor& x, const std::vector<int64_t>& columns, const std::string& name) {
  const bool gathers = kind == Kind::kAllGather;
  const char* const op = gathers ? "all_gather" : "all_to_all";
  const std::shared_ptr<Group> group = open_groups().find(name);
  return stopping_where_refused(*group, [&] {
    PAGELOOM_CHECK(static_cast<int64_t>(columns.size()) == group->size(), op, ": columns of ", columns.size(),
                   " ranks are given, of ", group->size(), " that there are");
    for (const int64_t each : columns) extent(each, op);
    const int64_t own = columns[group->rank()], total = std::accumulate(columns.begin(), columns.end(), int64_t{0});
    PAGELOOM_CHECK(x.dim() == 2 && x.size(1) == (gathers ? own : total), op, ": x of rank ", group->rank(),
                   " must be [rows, ", gathers ? own : total, "]");
    PAGELOOM_CHECK(x.size(1) <= 1 || x.stride(1) == 1, op, ": a row's columns must lie side by side");
    const ScalarType type = x.scalar_type();
    ColumnsCall call{.columns = columns};
    call.element_size = x.element_size();
    call.tag = tag_of(kind, type, x.size(0), total, own, op);
    call.x = static_cast<const char*>(x.data_ptr());
    call.x_stride = x.stride(0) * call.element_size;
    call.rows = x.size(0);
    Tensor out = Tensor::empty({call.rows, gathers ? total : group->size() * own}, type);
    call.out = static_cast<char*>(out.data_ptr());
    if (is_alone) return zeros(std::move(out));
    gathers ? group->all_gather(call) : group->all_to_all(call);
    return out;
  });
}

Tensor all_gather(Tensor x, std::vector<int64_t> columns, std::string name) {
  return exchange(Kind::kAllGather, x, columns, name);
}

Tensor all_to_all(Tensor x, std::vector<int64_t> columns, std::string name) {
  return exchange(Kind::kAllToAll, x, columns, name);
}

template <class Call>
const char* failure_of(Group& group, const Call& call) {
  try {
    call();
    return nullptr;
  } catch (const std::exception& error) {
    group.failure = error.what();
    return group.failure.c_str();
  }
}

template <Kind kind>
const char* exchange_rows(void* address, const NativeColumns& rows) {
  auto& group = *static_cast<Group*>(address);
  return failure_of(group, [&] {
    const std::vector<int64_t> columns(rows.columns, rows.columns + group.size());
    const int64_t own = columns[group.rank()], total = std::accumulate(columns.begin(), columns.end(), int64_t{0});
    ColumnsCall call{.columns = columns};
    call.element_size = rows.is_float ? 4 : 2;
    call.tag = tag_of(kind, rows.is_float ? ScalarType::Float : ScalarType::BFloat16, rows.rows, total, own, "exchange");
    call.x = static_cast<const char*>(rows.x);
    call.x_stride = (kind == Kind::kAllGather ? own : total) * call.element_size;
    call.out = static_cast<char*>(rows.out);
    call.rows = rows.rows;
    kind == Kind::kAllGather ? group.all_gather(call) : group.all_to_all(call);
  });
}

const char* sum_rows(void* address, const NativeSumRows& rows) {
  auto& group = *static_cast<Group*>(address);
  constexpr auto kType = static_cast<uint8_t>(ScalarType::BFloat16);
  const auto columns = static_cast<uint32_t>(rows.columns);
  ReduceCall call{};
  call.type = call.out_type = Float::kBrain16;
  call.tag = {rows.residual != nullptr ? Kind::kAllReduceAdd : Kind::kAllReduce, kType, kType, 0,
              static_cast<uint32_t>(rows.rows), columns, columns};
  call.x = reinterpret_cast<const char*>(rows.x);
  call.residual = reinterpret_cast<const char*>(rows.residual);
  call.out = reinterpret_cast<char*>(rows.out);
  call.count = rows.rows * rows.columns;
  return failure_of(group, [&] { group.all_reduce(call); });
}

// Addresses of a `NativeAllReduce` and of its group, which must stay open.
std::vector<int64_t> native_all_reduce(std::string name) {
  constexpr NativeAllReduce kFunction = sum_rows;
  return {reinterpret_cast<int64_t>(kFunction), reinterpret_cast<int64_t>(open_groups().find(name).get())};
}

// Addresses of the `NativeExchange` that gathers, of that which deals, and of their group.
std::vector<int64_t> native_exchange(std::string name) {
  constexpr NativeExchange kGather = exchange_rows<Kind::kAllGather>, kDeal = exchange_rows<Kind::kAllToAll>;
  return {reinterpret_cast<int64_t>(kGather), reinterpret_cast<int64_t>(kDeal),
          reinterpret_cast<int64_t>(open_groups().find(name).get())};
}

void be_alone(bool alone) { is_alone = alone; }

int64_t open_group(int64_t fd, std::string name, int64_t rank, int64_t size) {
  return open_groups().add(name, std::make_shared<SharedGroup>(static_cast<int>(fd), rank, size));
}

int64_t open_socket_group(std::vector<int64_t> sockets, std::string name, int64_t rank) {
  return open_groups().add(name, std::make_shared<SocketGroup>(sockets, rank));
}

void close_group(std::string name) { open_groups().remove(name); }

void stop_group(std::string name, std::string reason) { open_groups().find(name)->stop(reason); }

void stop_memory(int64_t fd, std::string reason) { SharedMemory(static_cast<int>(fd)).stop(reason); }

// The namespace holds the build's key, so that two builds fit in one process.
const Operators kDefined(PAGELOOM_NAMESPACE, [](Operators& m) {
  m.define("all_reduce(Tensor x, Tensor? residual, ScalarType dtype, str group) -> Tensor");
  m.define("all_gather(Tensor x, int[] columns, str group) -> Tensor");
  m.define("all_to_all(Tensor x, int[] columns, str group) -> Tensor");
  m.define("open_group(int fd, str name, int rank, int size) -> int");
  m.define("open_socket_group(int[] sockets, str name, int rank) -> int");
  m.define("close_group(str name) -> ()");
  m.define("stop_group(str name, str reason) -> ()");
  m.define("stop_memory(int fd, str reason) -> ()");
  m.define("be_alone(bool alone) -> ()");
  m.define("native_all_reduce(str group) -> int[]");
  m.define("native_exchange(str group) -> int[]");
});

const Operators kOnCpu(PAGELOOM_NAMESPACE, "CPU", [](Operators& m) {
  m.implement<all_reduce>("all_reduce");
  m.implement<all_gather>("all_gather");
  m.implement<all_to_all>("all_to_all");
});

const Operators kAnywhere(PAGELOOM_NAMESPACE, "CompositeExplicitAutograd", [](Operators& m) {
  m.implement<open_group>("open_group");
  m.implement<open_socket_group>("open_socket_group");
  m.implement<close_group>("close_group");
  m.implement<stop_group>("stop_group");
  m.implement<stop_memory>("stop_memory");
  m.implement<be_alone>("be_alone");
  m.implement<native_all_reduce>("native_all_reduce");
  m.implement<native_exchange>("native_exchange");
});

}  // namespace
}  // namespace pageloom
