// A call as JAX lays it out: what all operators share. jax_mlstm.h and jax_delta.h have the arrays and options of
// theirs, for the handlers (jax.cc) and the check at the time of tracing (jax_check.cc).
//
// Options travel in two arrays, `flags` and `numbers`, in the order of the operator's two lists.
// python/tfla/jax/_ffi.py writes them in the order in which it finds their names in the library. Optional tensors are
// left out of the list of arguments; a flag says which are there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tfla/tfla.h"

#define TFLA_EXPORT extern "C" __attribute__((visibility("default")))

// An enumeration, and its names in their order.
#define TFLA_NAMED(Enumeration, names, count, ...)       \
  enum Enumeration : std::size_t { __VA_ARGS__, count }; \
  inline constexpr const char* names = #__VA_ARGS__

namespace tfla::jax {

// A dense tensor of any rank.
struct Array {
  void* data = nullptr;
  DType dtype = DType::float32;
  std::span<const std::int64_t> shape;
};

// The arguments or results of a call in their order, as views of one call of the operator.
class Arrays {
 public:
  Arrays(std::vector<Array> arrays, bool head_first) : arrays_(std::move(arrays)), head_first_(head_first) {}

  // Which part of the tensors is meant: their first `axes` axes come from vmap and make `count` calls.
  struct Part {
    std::size_t axes = 0;
    std::int64_t index = 0;
    std::int64_t count = 1;
    bool merged = true;  // all of them as one call
  };
  void start(const Part& part) {
    part_ = part;
    next_ = 0;
  }

  [[nodiscard]] TensorView tokens(const char* name) { return ordered(mutable_state(name)); }
  [[nodiscard]] MutableTensorView mutable_tokens(const char* name) { return ordered(mutable_state(name)); }
  [[nodiscard]] TensorView state(const char* name) { return mutable_state(name); }
  // An array of one axis, of any dtype, as the memory it has.
  [[nodiscard]] std::span<std::byte> bytes(const char* name) {
    const MutableTensorView view = mutable_state(name);
    return {static_cast<std::byte*>(view.data), static_cast<std::size_t>(view.shape[0]) * item_size(view.dtype)};
  }
  [[nodiscard]] MutableTensorView mutable_state(const char* name) {
    const Array& array = arrays_.at(next_++);
    if (array.shape.size() < part_.axes + 1 || array.shape.size() > part_.axes + MutableTensorView::max_rank) {
      throw InvalidArgument(std::string("tfla: ") + name + " has " + std::to_string(array.shape.size() - part_.axes) +
                            " axes; it must have 1 to 4");
    }
    const std::span<const std::int64_t> shape = array.shape.subspan(part_.axes);
    MutableTensorView view;
    view.dtype = array.dtype;
    view.rank = static_cast<int>(shape.size());
    std::int64_t size = 1;
    for (std::size_t axis = shape.size(); axis-- > 0;) {
      view.shape.at(axis) = shape[axis];
      view.strides.at(axis) = size;
      size *= shape[axis];
    }
    if (part_.merged) view.shape[0] *= part_.count;
    view.data = static_cast<std::byte*>(array.data) + part_.index * size * item_size(array.dtype);
    return view;
  }

 private:
  template <class View>
  [[nodiscard]] View ordered(const View& view) const {
    return head_first_ && view.rank >= 3 ? view.transposed(1, 2) : view;
  }

  std::vector<Array> arrays_;
  bool head_first_;
  Part part_;
  std::size_t next_ = 0;
};

// Settings: the flags and options of an operator.
template <class Settings>
struct CallOf {
  Settings settings;
  Arrays in, out;
};

}  // namespace tfla::jax
