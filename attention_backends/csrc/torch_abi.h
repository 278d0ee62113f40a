// The part of torch's stable C ABI, as of 2.11, that the bindings of the CPU libraries use, and what makes operators of
// plain functions. Declared here and not included from torch, so that the libraries can be built where torch is not
// installed (when a wheel is made), and in a fraction of the time; torch promises that these functions stay.
//
// A library built with this needs libtorch_cpu.so by name only; it is loaded into a process that has torch already.
#pragma once

#include <stdint.h>
#include <string.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

extern "C" {
typedef int32_t TorchError;   // 0: success
typedef uint64_t TorchValue;  // an argument or a result; how each type lies in it: `Passed` below
typedef struct AtenTensorOpaque* TorchTensor;
typedef struct TorchLibraryOpaque* TorchLibrary;
typedef struct StableListOpaque* TorchList;

TorchError aoti_torch_new_tensor_handle(TorchTensor tensor, TorchTensor* result);
TorchError aoti_torch_delete_tensor_object(TorchTensor tensor);
TorchError aoti_torch_get_data_ptr(TorchTensor tensor, void** result);
TorchError aoti_torch_get_dim(TorchTensor tensor, int64_t* result);
TorchError aoti_torch_get_numel(TorchTensor tensor, int64_t* result);
TorchError aoti_torch_get_size(TorchTensor tensor, int64_t dim, int64_t* result);
TorchError aoti_torch_get_stride(TorchTensor tensor, int64_t dim, int64_t* result);
TorchError aoti_torch_get_dtype(TorchTensor tensor, int32_t* result);
TorchError aoti_torch_get_device_type(TorchTensor tensor, int32_t* result);
TorchError aoti_torch_is_contiguous(TorchTensor tensor, bool* result);
TorchError aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                    int32_t device_type, int32_t device_index, TorchTensor* result);
size_t aoti_torch_dtype_element_size(int32_t dtype);
int32_t aoti_torch_device_type_cpu();

TorchError aoti_torch_library_init_impl(const char* name, const char* key, const char* file, uint32_t line,
                                        TorchLibrary* result);
TorchError aoti_torch_library_init_fragment(const char* name, const char* file, uint32_t line, TorchLibrary* result);
TorchError aoti_torch_library_def(TorchLibrary library, const char* schema);
TorchError torch_library_impl(TorchLibrary library, const char* name, void (*boxed)(TorchValue*, uint64_t, uint64_t),
                              uint64_t abi_version);
TorchError aoti_torch_delete_library_object(TorchLibrary library);

TorchError torch_new_list_reserve_size(size_t size, TorchList* result);
TorchError torch_list_size(TorchList list, size_t* result);
TorchError torch_list_get_item(TorchList list, size_t index, TorchValue* result);
TorchError torch_list_push_back(TorchList list, TorchValue item);
TorchError torch_delete_list(TorchList list);

TorchError torch_get_num_threads(uint32_t* result);
}

namespace pageloom {

// What a caller got wrong, as Python sees it (RuntimeError): all arguments written one after another.
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

#define PAGELOOM_CHECK(condition, ...) \
  do {                                 \
    if (!(condition)) ::pageloom::refuse(__VA_ARGS__); \
  } while (0)

// Torch says on standard error what went wrong.
#define PAGELOOM_TORCH(call) PAGELOOM_CHECK((call) == 0, "torch failed: " #call)

enum class ScalarType : int32_t {  // c10::ScalarType
  Byte = 0, Char = 1, Short = 2, Int = 3, Long = 4, Half = 5, Float = 6, Double = 7, Bool = 11, BFloat16 = 15
};

// Shares a tensor with torch. Every question is torch's to answer: shapes are not copied.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(TorchTensor owned) : handle_(owned, [](TorchTensor t) { aoti_torch_delete_tensor_object(t); }) {}

  // New memory on the CPU, rows after one another.
  static Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype) {
    int64_t strides[8], step = 1;
    for (size_t i = sizes.size(); i-- > 0; step *= sizes.begin()[i]) strides[i] = step;
    TorchTensor made;
    PAGELOOM_TORCH(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides,
                                            static_cast<int32_t>(dtype), aoti_torch_device_type_cpu(), 0, &made));
    return Tensor(made);
  }

  TorchTensor get() const { return handle_.get(); }
  void* data_ptr() const { return ask(aoti_torch_get_data_ptr); }
  int64_t dim() const { return ask(aoti_torch_get_dim); }
  int64_t numel() const { return ask(aoti_torch_get_numel); }
  bool is_contiguous() const { return ask(aoti_torch_is_contiguous); }
  bool on_cpu() const { return ask(aoti_torch_get_device_type) == aoti_torch_device_type_cpu(); }
  ScalarType scalar_type() const { return static_cast<ScalarType>(ask(aoti_torch_get_dtype)); }
  int64_t element_size() const { return static_cast<int64_t>(aoti_torch_dtype_element_size(ask(aoti_torch_get_dtype))); }
  int64_t size(int64_t dim) const { return ask_of(get(), aoti_torch_get_size, dim); }
  int64_t stride(int64_t dim) const { return ask_of(get(), aoti_torch_get_stride, dim); }

 private:
  template <class Result>
  Result ask(TorchError (*question)(TorchTensor, Result*)) const {
    Result result;
    PAGELOOM_TORCH(question(get(), &result));
    return result;
  }

  static int64_t ask_of(TorchTensor tensor, TorchError (*question)(TorchTensor, int64_t, int64_t*), int64_t dim) {
    int64_t result;
    PAGELOOM_TORCH(question(tensor, dim, &result));
    return result;
  }

  std::shared_ptr<AtenTensorOpaque> handle_;
};

// A type as torch hands it over (what it points to is ours then), and as torch takes it over.
template <class T>
struct Passed {
  static_assert(std::is_arithmetic_v<T> || std::is_pointer_v<T>);
  static T from(TorchValue value) {
    T result;
    memcpy(&result, &value, sizeof result);
    return result;
  }
  static TorchValue to(T value) {
    TorchValue result = 0;
    memcpy(&result, &value, sizeof value);
    return result;
  }
};

template <>
struct Passed<Tensor> {
  static Tensor from(TorchValue value) { return Tensor(Passed<TorchTensor>::from(value)); }
  static TorchValue to(const Tensor& tensor) {
    TorchTensor given;
    PAGELOOM_TORCH(aoti_torch_new_tensor_handle(tensor.get(), &given));
    return Passed<TorchTensor>::to(given);
  }
};

template <class T>
struct Passed<std::optional<T>> {
  static std::optional<T> from(TorchValue value) {
    const std::unique_ptr<TorchValue> held(Passed<TorchValue*>::from(value));
    if (held == nullptr) return {};
    return Passed<T>::from(*held);
  }
};

template <class T>
struct Passed<std::vector<T>> {
  static std::vector<T> from(TorchValue value) {
    const std::unique_ptr<StableListOpaque, void (*)(TorchList)> list(Passed<TorchList>::from(value),
                                                                      [](TorchList l) { torch_delete_list(l); });
    size_t size = 0;
    PAGELOOM_TORCH(torch_list_size(list.get(), &size));
    std::vector<T> result;
    result.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      TorchValue item;
      PAGELOOM_TORCH(torch_list_get_item(list.get(), i, &item));
      result.push_back(Passed<T>::from(item));
    }
    return result;
  }
  static TorchValue to(const std::vector<T>& items) {
    TorchList list;
    PAGELOOM_TORCH(torch_new_list_reserve_size(items.size(), &list));
    for (const T& item : items) PAGELOOM_TORCH(torch_list_push_back(list, Passed<T>::to(item)));
    return Passed<TorchList>::to(list);
  }
};

template <class Function>
struct Boxed;

template <class Result, class... Arguments>
struct Boxed<Result(Arguments...)> {
  // The kernel that torch calls: arguments lie on `stack`, results are left there.
  template <Result (*function)(Arguments...)>
  static void call(TorchValue* stack, uint64_t arguments, uint64_t results) {
    PAGELOOM_CHECK(arguments == sizeof...(Arguments), "an operator of ", sizeof...(Arguments), " arguments was given ",
                   arguments);
    const uint64_t given = unpack<function>(stack, std::index_sequence_for<Arguments...>());
    PAGELOOM_CHECK(results == given, "an operator has ", given, " results, its schema ", results);
  }

 private:
  template <Result (*function)(Arguments...), size_t... I>
  static uint64_t unpack(TorchValue* stack, std::index_sequence<I...>) {
    std::tuple<Arguments...> taken{Passed<Arguments>::from(stack[I])...};
    if constexpr (std::is_void_v<Result>) {
      std::apply(function, std::move(taken));
      return 0;
    } else {
      return leave(stack, std::apply(function, std::move(taken)));
    }
  }

  template <class T>
  static uint64_t leave(TorchValue* stack, const T& result) {
    stack[0] = Passed<T>::to(result);
    return 1;
  }

  template <class... T>
  static uint64_t leave(TorchValue* stack, const std::tuple<T...>& results) {
    uint64_t at = 0;
    std::apply([&](const T&... each) { ((stack[at++] = Passed<T>::to(each)), ...); }, results);
    return at;
  }
};

// Operators of one namespace, while the library is loaded: what `fill` defines, or implements for a dispatch key.
class Operators {
 public:
  Operators(const char* space, void (*fill)(Operators&)) {
    PAGELOOM_TORCH(aoti_torch_library_init_fragment(space, __FILE__, __LINE__, &library_));
    fill(*this);
  }
  Operators(const char* space, const char* dispatch_key, void (*fill)(Operators&)) {
    PAGELOOM_TORCH(aoti_torch_library_init_impl(space, dispatch_key, __FILE__, __LINE__, &library_));
    fill(*this);
  }
  Operators(const Operators&) = delete;
  ~Operators() { aoti_torch_delete_library_object(library_); }

  void define(const char* schema) { PAGELOOM_TORCH(aoti_torch_library_def(library_, schema)); }

  template <auto* function>
  void implement(const char* name) {
    constexpr uint64_t kAbi = 2ULL << 56 | 11ULL << 48;
    PAGELOOM_TORCH(torch_library_impl(
        library_, name, Boxed<std::remove_pointer_t<decltype(function)>>::template call<function>, kAbi));
  }

 private:
  TorchLibrary library_;
};

#define PAGELOOM_QUOTED_(text) #text
#define PAGELOOM_QUOTED(text) PAGELOOM_QUOTED_(text)
#define PAGELOOM_NAMESPACE PAGELOOM_QUOTED(PAGELOOM_OPS)  // names the build

}  // namespace pageloom
