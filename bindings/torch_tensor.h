// What the operators read of torch's tensors and where they run.
//
// Straight from the C functions of the stable ABI, each asked once: torch::stable::Tensor asks for the rank with every
// shape and compares each dtype and device with all that it knows, which for the nine tensors of a step adds up.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "tfla/tfla.h"

// Only builds of torch with CUDA have these.
extern "C" {
AOTITorchError __attribute__((weak)) aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
AOTITorchError __attribute__((weak)) aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t bytes, void** memory);
AOTITorchError __attribute__((weak)) aoti_torch_cuda_caching_allocator_raw_delete(void* memory);
// From torch 2.13 on.
const char* __attribute__((weak)) torch_exception_get_what_without_backtrace();
}

namespace tfla::binding {

using torch::stable::Tensor;

// Torch's numbers for dtypes and devices.
struct Codes {
  std::int32_t float32 = aoti_torch_dtype_float32(), float64 = aoti_torch_dtype_float64();
  std::int32_t bfloat16 = aoti_torch_dtype_bfloat16(), float16 = aoti_torch_dtype_float16();
  std::int32_t int32 = aoti_torch_dtype_int32(), int64 = aoti_torch_dtype_int64();
  std::int32_t bytes = aoti_torch_dtype_uint8();
  std::int32_t cuda = aoti_torch_device_type_cuda();
};
inline const Codes& codes() {
  static const Codes known;
  return known;
}

// Torch had no memory to give: its own sentence, by which callers know what it is (python/tfla/_torch/memory.py), or
// where it does not hand that on, one that begins alike.
inline void check_allocation(AOTITorchError status, bool cuda) {
  if (status == AOTI_TORCH_SUCCESS) return;
  if (torch_exception_get_what_without_backtrace != nullptr)
    throw std::runtime_error(torch_exception_get_what_without_backtrace());
  throw std::runtime_error(std::string(cuda ? "CUDA out of memory" : "DefaultCPUAllocator: not enough memory") +
                           ": torch had none to give for a call of tfla");
}

// A tensor of this call, or none. What a kernel finds on its stack is its own. torch::stable::Tensor would put a shared
// pointer with a count of its own around the handle.
struct Free {
  void operator()(AtenTensorHandle handle) const { (void)aoti_torch_delete_tensor_object(handle); }
};
using Owned = std::unique_ptr<AtenTensorOpaque, Free>;

// A tensor that somebody else owns.
class TensorRef {
 public:
  TensorRef(const Owned& tensor) : handle_(tensor.get()) {}  // NOLINT(google-explicit-constructor)

  [[nodiscard]] bool defined() const { return read<bool>(aoti_torch_is_defined); }
  [[nodiscard]] std::int64_t rank() const { return read<std::int64_t>(aoti_torch_get_dim); }
  [[nodiscard]] std::int32_t dtype() const { return read<std::int32_t>(aoti_torch_get_dtype); }
  [[nodiscard]] std::int32_t device_type() const { return read<std::int32_t>(aoti_torch_get_device_type); }
  [[nodiscard]] std::int32_t device_index() const { return read<std::int32_t>(aoti_torch_get_device_index); }
  [[nodiscard]] const std::int64_t* sizes() const { return read<std::int64_t*>(aoti_torch_get_sizes); }
  [[nodiscard]] const std::int64_t* strides() const { return read<std::int64_t*>(aoti_torch_get_strides); }
  [[nodiscard]] std::int64_t count() const { return read<std::int64_t>(aoti_torch_get_numel); }
  [[nodiscard]] const void* data() const { return read<const void*>(torch_get_const_data_ptr); }
  [[nodiscard]] void* mutable_data() const { return read<void*>(torch_get_mutable_data_ptr); }

 private:
  template <class Value>
  [[nodiscard]] Value read(AOTITorchError (*function)(AtenTensorHandle, Value*)) const {
    Value value{};
    TORCH_ERROR_CODE_CHECK(function(handle_, &value));
    return value;
  }

  AtenTensorHandle handle_;
};

inline DType dtype_of(const char* name, TensorRef tensor) {
  const Codes& known = codes();
  const std::int32_t code = tensor.dtype();
  if (code == known.float32) return DType::float32;
  if (code == known.bfloat16) return DType::bfloat16;
  if (code == known.float16) return DType::float16;
  if (code == known.float64) return DType::float64;
  if (code == known.int32) return DType::int32;
  if (code == known.int64) return DType::int64;
  throw InvalidArgument(std::string("tfla: ") + name +
                        " has a dtype other than float32, float64, bfloat16, float16, int32 and int64");
}

inline std::int64_t rank_of(const char* name, TensorRef tensor) {
  const std::int64_t rank = tensor.rank();
  if (rank >= 1 && rank <= TensorView::max_rank) return rank;
  throw InvalidArgument(std::string("tfla: ") + name + " has " + std::to_string(rank) + " axes; it must have 1 to 4");
}

// Where a call runs: the device of its first tensor, and torch's current stream and number of threads there.
class Place {
 public:
  explicit Place(TensorRef first, const char* name = "q")
      : device_type_(first.device_type()), device_index_(first.device_index()), name_(name) {
    if (device_type_ == codes().cuda) {
      execution_.device = Device::cuda;
      if (aoti_torch_get_current_cuda_stream == nullptr) {
        throw Unavailable(std::string("tfla: ") + name + " is on a GPU and this build of torch has no CUDA streams");
      }
      if (torch::stable::accelerator::getCurrentDeviceIndex() != device_index_) guard_.emplace(device_index_);
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index_, &execution_.stream));
    } else {
      execution_.threads = static_cast<int>(torch::stable::get_num_threads());
    }
  }

  [[nodiscard]] const Execution& execution() const { return execution_; }

  void check(const char* name, TensorRef tensor) const {
    if (tensor.device_type() == device_type_ && tensor.device_index() == device_index_) return;
    throw InvalidArgument(std::string("tfla: ") + name + " and " + name_ +
                          " are on different devices; all tensors must be on one");
  }

  // dtype: as torch counts them.
  [[nodiscard]] Owned empty(std::int32_t dtype, std::initializer_list<std::int64_t> shape) const {
    return empty(dtype, shape.begin(), static_cast<std::int64_t>(shape.size()));
  }
  [[nodiscard]] Owned empty_like(const char* name, TensorRef tensor) const {
    const std::int64_t rank = rank_of(name, tensor);
    return empty(tensor.dtype(), tensor.sizes(), rank);
  }

  [[nodiscard]] Owned empty_strided(std::int32_t dtype, const std::int64_t* shape, const std::int64_t* strides,
                                    std::int64_t rank) const {
    AtenTensorHandle handle = nullptr;
    check_allocation(aoti_torch_empty_strided(rank, shape, strides, dtype, device_type_, device_index_, &handle),
                     device_type_ == codes().cuda);
    return Owned(handle);
  }

 private:
  [[nodiscard]] Owned empty(std::int32_t dtype, const std::int64_t* shape, std::int64_t rank) const {
    std::array<std::int64_t, TensorView::max_rank> strides{};
    std::int64_t stride = 1;
    for (std::int64_t axis = rank - 1; axis >= 0; --axis) {
      strides.at(axis) = stride;
      stride *= shape[axis] > 0 ? shape[axis] : 1;
    }
    return empty_strided(dtype, shape, strides.data(), rank);
  }

  std::int32_t device_type_;
  std::int32_t device_index_;
  const char* name_;
  Execution execution_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;  // where another device is the current one
};

template <class View>
View view_of(const char* name, TensorRef tensor) {
  const std::int64_t rank = rank_of(name, tensor);
  View view;
  if constexpr (std::is_same_v<View, TensorView>)
    view.data = tensor.data();
  else
    view.data = tensor.mutable_data();
  view.dtype = dtype_of(name, tensor);
  view.rank = static_cast<int>(rank);
  const std::int64_t* sizes = tensor.sizes();
  const std::int64_t* strides = tensor.strides();
  for (std::int64_t axis = 0; axis < rank; ++axis) {
    view.shape.at(axis) = sizes[axis];
    view.strides.at(axis) = strides[axis];
  }
  return view;
}

// Views of the tensors of one call, in the order of axes tfla takes: (B,T,H,D).
class Views {
 public:
  Views(const Place& place, bool head_first) : place_(place), head_first_(head_first) {}

  [[nodiscard]] TensorView input(const char* name, TensorRef tensor) const {
    place_.check(name, tensor);
    return ordered(view_of<TensorView>(name, tensor));
  }
  [[nodiscard]] MutableTensorView output(const char* name, TensorRef tensor) const {
    return ordered(view_of<MutableTensorView>(name, tensor));
  }
  // States, cu_seqlens, slots: the same in both layouts.
  [[nodiscard]] TensorView plain(const char* name, const Owned& tensor) const {
    if (!tensor) return {};
    place_.check(name, tensor);
    return view_of<TensorView>(name, tensor);
  }
  [[nodiscard]] MutableTensorView in_place(const char* name, TensorRef tensor) const {
    place_.check(name, tensor);
    return view_of<MutableTensorView>(name, tensor);
  }

 private:
  template <class View>
  [[nodiscard]] View ordered(const View& view) const {
    return head_first_ ? view.transposed(1, 2) : view;
  }

  const Place& place_;
  bool head_first_;
};

}  // namespace tfla::binding
