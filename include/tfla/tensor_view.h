// Non-owning, strided views of tensors. A view never allocates, copies or frees.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace tfla {

enum class DType : std::uint8_t { float32, float64, bfloat16, float16, int32, int64 };

[[nodiscard]] constexpr std::int64_t item_size(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64: return 8;
    case DType::float32:
    case DType::int32: return 4;
    case DType::bfloat16:
    case DType::float16: return 2;
  }
  return 0;
}

[[nodiscard]] constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::float32: return "float32";
    case DType::float64: return "float64";
    case DType::bfloat16: return "bfloat16";
    case DType::float16: return "float16";
    case DType::int32: return "int32";
    case DType::int64: return "int64";
  }
  return "unknown";
}

// Data is `const void` for inputs and `void` for outputs. A default-constructed view (rank 0) means
// "not given" and is how optional arguments are left out.
template <class Data>
struct BasicTensorView {
  static constexpr int max_rank = 4;

  Data* data = nullptr;
  DType dtype = DType::float32;
  int rank = 0;
  std::array<std::int64_t, max_rank> shape{};
  std::array<std::int64_t, max_rank> strides{};  // in elements, not bytes

  BasicTensorView() = default;

  // Row-major, densely packed.
  BasicTensorView(Data* data_, DType dtype_, std::initializer_list<std::int64_t> shape_)
      : data(data_), dtype(dtype_), rank(checked_rank(shape_.size())) {
    int axis = 0;
    for (std::int64_t extent : shape_) shape[axis++] = extent;
    // Unsigned arithmetic: absurd extents must wrap here, not be undefined; validation refuses them.
    std::uint64_t stride = 1;
    for (axis = rank - 1; axis >= 0; --axis) {
      strides[axis] = static_cast<std::int64_t>(stride);
      stride *= static_cast<std::uint64_t>(shape[axis]);
    }
  }

  BasicTensorView(Data* data_, DType dtype_, std::initializer_list<std::int64_t> shape_,
                  std::initializer_list<std::int64_t> strides_)
      : data(data_), dtype(dtype_), rank(checked_rank(shape_.size())) {
    if (strides_.size() != shape_.size()) {
      throw std::invalid_argument("tfla: a tensor view needs as many strides as extents");
    }
    int axis = 0;
    for (std::int64_t extent : shape_) shape[axis++] = extent;
    axis = 0;
    for (std::int64_t stride : strides_) strides[axis++] = stride;
  }

  [[nodiscard]] bool given() const { return rank != 0; }

  // The same memory with two axes exchanged: turns a (B,H,T,D) tensor into the (B,T,H,D) the operators take.
  [[nodiscard]] BasicTensorView transposed(int first, int second) const {
    BasicTensorView view = *this;
    std::swap(view.shape.at(first), view.shape.at(second));
    std::swap(view.strides.at(first), view.strides.at(second));
    return view;
  }

  operator BasicTensorView<const void>() const  // NOLINT(google-explicit-constructor): an output can be read
      requires(!std::is_const_v<Data>) {
    BasicTensorView<const void> view;
    view.data = data;
    view.dtype = dtype;
    view.rank = rank;
    view.shape = shape;
    view.strides = strides;
    return view;
  }

 private:
  static int checked_rank(std::size_t rank_) {
    if (rank_ == 0 || rank_ > max_rank) throw std::invalid_argument("tfla: a tensor view has 1 to 4 axes");
    return static_cast<int>(rank_);
  }
};

using TensorView = BasicTensorView<const void>;
using MutableTensorView = BasicTensorView<void>;

}  // namespace tfla
