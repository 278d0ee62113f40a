// Strings as operators take them, beside `torch_abi.h`, whose libraries pass none.
#pragma once

#include <string>

#include "torch_abi.h"

extern "C" {
typedef struct StringOpaque* TorchString;

TorchError torch_delete_string(TorchString text);
TorchError torch_string_length(TorchString text, size_t* length);
TorchError torch_string_c_str(TorchString text, const char** data);
}

namespace pageloom {

template <>
struct Passed<std::string> {
  static std::string from(TorchValue value) {
    const std::unique_ptr<StringOpaque, void (*)(TorchString)> text(Passed<TorchString>::from(value),
                                                                    [](TorchString t) { torch_delete_string(t); });
    size_t length = 0;
    const char* data = nullptr;
    PAGELOOM_TORCH(torch_string_length(text.get(), &length));
    PAGELOOM_TORCH(torch_string_c_str(text.get(), &data));
    return std::string(data, length);
  }
};

}  // namespace pageloom
