// Argument checks of the C++ doors: the same sentences, in the same order, as carryover_kernels/ops/_check.py.
// The only header of common/ that knows torch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <charconv>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace carryover_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Dtypes = std::vector<ScalarType>;

inline const Dtypes kActivations{ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
inline const Dtypes kCaches{
    ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2};
inline const Dtypes kInt32{ScalarType::Int};
inline const Dtypes kInt64{ScalarType::Long};
inline const Dtypes kFloat32{ScalarType::Float};

enum class Layout { any, last_contiguous, contiguous };

inline std::string dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: return "number " + std::to_string(static_cast<int>(type));
  }
}

inline std::string dtype_names(const Dtypes& types) {
  std::string words;
  for (size_t i = 0; i < types.size(); ++i) {
    if (i > 0) words += i + 1 == types.size() ? " or " : ", ";
    words += dtype_name(types[i]);
  }
  return words;
}

template <class List>
std::string list_text(const List& values) {
  std::string text = "[";
  for (size_t i = 0; i < static_cast<size_t>(values.size()); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(values[i]);
  }
  return text + "]";
}

// As Python writes a float.
inline std::string number_text(double value) {
  const double size = std::abs(value);
  const auto format = size != 0 && (size < 1e-4 || size >= 1e16) ? std::chars_format::scientific : std::chars_format::fixed;
  char text[64];
  const std::string number(text, std::to_chars(text, text + sizeof text, value, format).ptr);
  return number.find_first_not_of("-0123456789") == std::string::npos ? number + ".0" : number;
}

inline std::string device_name(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device());
  return "another device";
}

// Checks the arguments of one call; sizes are bound to letters (R, T, ...) by the first tensor that has them.
class Checker {
 public:
  explicit Checker(const char* op) : op_(op) {}

  [[noreturn]] void fail(const std::string& sentence) const {
    STD_TORCH_CHECK(false, op_, ": ", sentence);
    __builtin_unreachable();
  }

  void require(bool holds, const std::string& sentence) const {
    if (!holds) fail(sentence);
  }

  // For sentences that cost something to build.
  template <class Sentence, class = decltype(std::declval<Sentence>()())>
  void require(bool holds, Sentence sentence) const {
    if (!holds) fail(sentence());
  }

  void bind(const char* letter, int64_t value) {
    for (auto& size : sizes_) {
      if (size.first == letter) {
        size.second = value;
        return;
      }
    }
    sizes_.emplace_back(letter, value);
  }

  // The size bound to a letter, or `otherwise` where no tensor had it.
  int64_t size(const std::string& letter, int64_t otherwise = 0) const {
    for (const auto& size : sizes_)
      if (size.first == letter) return size.second;
    return otherwise;
  }

  void tensor(const std::string& name, const Tensor& tensor, const char* shape, const Dtypes& types, Layout layout = Layout::any) {
    const std::vector<std::string> letters = split(shape);
    const int64_t rank = static_cast<int64_t>(letters.size());
    if (tensor.dim() != rank)
      fail(name + " has " + std::to_string(tensor.dim()) + " dimensions, must have " + std::to_string(rank) + ": " + drawn(letters));
    std::vector<int64_t> wanted;
    bool same = true;
    for (int64_t i = 0; i < rank; ++i) {
      wanted.push_back(resolve(letters[i], tensor.size(i)));
      same = same && wanted.back() == tensor.size(i);
    }
    if (!same) fail(name + " has shape " + list_text(tensor.sizes()) + ", must be " + list_text(wanted) + ": " + drawn(letters));
    bool known = false;
    for (ScalarType type : types) known = known || type == tensor.scalar_type();
    if (!known) fail(name + " has dtype " + dtype_name(tensor.scalar_type()) + ", must be " + dtype_names(types));
    if (device_of_.empty()) {
      device_of_ = name;
      device_ = device_name(tensor);
    } else if (device_name(tensor) != device_) {
      fail(name + " is on " + device_name(tensor) + ", must be on " + device_ + " as " + device_of_ + " is");
    }
    if (layout == Layout::last_contiguous && rank > 0 && tensor.size(rank - 1) > 1 && tensor.stride(rank - 1) != 1)
      fail(name + " has stride " + std::to_string(tensor.stride(rank - 1)) + " in its last dimension, must be 1");
    if (layout == Layout::contiguous && !tensor.is_contiguous())
      fail(name + " has strides " + list_text(tensor.strides()) + ", must be contiguous");
  }

  void tensor(const std::string& name, const std::optional<Tensor>& maybe, const char* shape, const Dtypes& types, Layout layout = Layout::any) {
    if (maybe) tensor(name, *maybe, shape, types, layout);
  }

  void at_least(const std::string& name, int64_t value, int64_t least) const {
    if (value < least) fail(name + " is " + std::to_string(value) + ", must be at least " + std::to_string(least));
  }

  void finite(const std::string& name, double value) const {
    if (!std::isfinite(value)) fail(name + " is " + number_text(value) + ", must be finite");
  }

  void finite_and_not_negative(const std::string& name, double value, const char* note = "") const {
    if (!(std::isfinite(value) && value >= 0)) fail(name + " is " + number_text(value) + ", must be finite and at least 0" + note);
  }

  void one_of(const char* name, const std::string& value, std::initializer_list<const char*> choices) const {
    std::string words;
    for (const char* choice : choices) {
      if (value == choice) return;
      words += (words.empty() ? "" : ", ") + std::string(choice);
    }
    fail(std::string(name) + " is '" + value + "', must be one of " + words);
  }

  // All of the arguments are given, or none is.
  void together(std::initializer_list<std::pair<const char*, bool>> arguments) const {
    const char *present = nullptr, *absent = nullptr;
    for (const auto& [name, given] : arguments) {
      if (given && !present) present = name;
      if (!given && !absent) absent = name;
    }
    if (present && absent) fail(std::string(absent) + " is None, must be given when " + present + " is");
  }

 private:
  static std::vector<std::string> split(const char* shape) {
    std::vector<std::string> letters(1);
    for (const char* c = shape; *c; ++c) {
      if (*c == ' ') letters.emplace_back();
      else letters.back() += *c;
    }
    return letters;
  }

  static std::string drawn(const std::vector<std::string>& letters) {
    std::string text = "[";
    for (size_t i = 0; i < letters.size(); ++i) text += (i > 0 ? ", " : "") + letters[i];
    return text + "]";
  }

  int64_t resolve(const std::string& letter, int64_t actual) {
    if (letter[0] >= '0' && letter[0] <= '9') return std::stoll(letter);
    for (const auto& size : sizes_)
      if (size.first == letter) return size.second;
    sizes_.emplace_back(letter, actual);
    return actual;
  }

  const char* op_;
  std::string device_, device_of_;
  std::vector<std::pair<std::string, int64_t>> sizes_;
};

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <class T>
T* data(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

}  // namespace carryover_kernels
