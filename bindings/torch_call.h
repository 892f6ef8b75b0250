// What the operators share besides tensors: arguments taken from torch's stack, scratch memory, results, and the pieces
// of schemas.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "tfla/tfla.h"
#include "torch_tensor.h"

namespace tfla::binding {

// A number that is none of the enumeration's stays none of them, for validation to refuse.
template <class Enumeration>
Enumeration enumerator(std::int64_t value) {
  return static_cast<Enumeration>(value < 0 || value > 255 ? 255 : value);
}

// Memory for the length of one call: from torch's allocator, on a GPU for the current stream and, where torch offers
// that, without a tensor around it, or on the CPU, where little is needed, a block that each thread keeps (large blocks
// cost malloc microseconds).
class Scratch {
 public:
  Scratch(std::size_t bytes, const Place& place) : bytes_(bytes) {
    if (bytes == 0) return;
    const bool cuda = place.execution().device == Device::cuda;
    if (cuda && aoti_torch_cuda_caching_allocator_raw_alloc != nullptr) {
      void* memory = nullptr;
      check_allocation(aoti_torch_cuda_caching_allocator_raw_alloc(bytes, &memory), cuda);
      memory_ = static_cast<std::byte*>(memory);
      cuda_ = true;
    } else if (cuda || bytes > kept_bytes) {
      tensor_ = place.empty(codes().bytes, {static_cast<std::int64_t>(bytes)});
      memory_ = static_cast<std::byte*>(TensorRef(tensor_).mutable_data());
    } else {
      thread_local const std::unique_ptr<Kept> kept(new Kept);
      memory_ = kept->bytes.data();
    }
  }
  ~Scratch() {
    if (cuda_) aoti_torch_cuda_caching_allocator_raw_delete(memory_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const { return {memory_, bytes_}; }

 private:
  static constexpr std::size_t kept_bytes = std::size_t{1} << 18;
  struct alignas(scratch_alignment) Kept {
    std::array<std::byte, kept_bytes> bytes;
  };

  std::size_t bytes_;
  std::byte* memory_ = nullptr;
  bool cuda_ = false;
  Owned tensor_;
};

template <class Args, class Plan>
void run(const Plan& plan, const Args& args, const Place& place,
         void (*function)(const Args&, const std::type_identity_t<Plan>&, std::span<std::byte>, void*)) {
  const Scratch scratch(plan.scratch_bytes, place);
  function(args, plan, scratch.bytes(), place.execution().stream);
}

// Arguments of an operator, one after the other.
class Arguments {
 public:
  explicit Arguments(const StableIValue* stack) : next_(stack) {}

  template <class Value>
  Value take() {
    return torch::stable::detail::to<Value>(*next_++);
  }
  // The dispatcher lets None pass for a tensor. It is refused when all arguments are taken, since they are ours to
  // free.
  Owned tensor(const char* name) {
    Owned tensor(take<AtenTensorHandle>());
    if (missing_ == nullptr && !TensorRef(tensor).defined()) missing_ = name;
    return tensor;
  }
  Owned maybe_tensor() { return Owned(take<std::optional<AtenTensorHandle>>().value_or(nullptr)); }
  void refuse_missing() const {
    if (missing_ != nullptr)
      throw InvalidArgument(std::string("tfla: ") + missing_ + " is missing; it must be a tensor");
  }

 private:
  const StableIValue* next_;
  const char* missing_ = nullptr;
};

// Results, over the arguments, which have been taken by then.
template <class... Tensors>
void give(StableIValue* stack, Tensors... results) {
  ((*stack++ = torch::stable::detail::from<AtenTensorHandle>(results.release())), ...);
}

// Gradients arrive in any strides; tfla takes any but of the last axis.
inline Owned with_contiguous_last_axis(Owned tensor) {
  if (!tensor) return tensor;
  const std::int64_t rank = TensorRef(tensor).rank();
  if (rank == 0 || TensorRef(tensor).strides()[rank - 1] == 1) return tensor;
  const Tensor contiguous = torch::stable::contiguous(Tensor(tensor.release()));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(contiguous.get(), &handle));
  return Owned(handle);
}

// States are float64 where q is, else float32.
inline std::int32_t state_dtype(DType q) { return q == DType::float64 ? codes().float64 : codes().float32; }

// How many states a call has: one for each row of the batch, or for each packed sequence.
inline std::int64_t count_states(const TensorView& cu_seqlens, const TensorView& values) {
  const std::int64_t states = cu_seqlens.given() ? cu_seqlens.shape[0] - 1 : values.shape[0];
  if (states < 0) throw InvalidArgument("tfla: cu_seqlens is empty; it must hold at least the 0 it begins with");
  return states;
}

// For the gradient of an input that may be left out: an empty one stands for none.
inline Owned gradient_of(const Place& place, const char* name, const Owned& input) {
  return input ? place.empty_like(name, input) : place.empty(codes().float32, {0});
}

// One token as (B,H,D) or (B,H) becomes a token axis of one.
template <class View>
View with_token_axis(View view) {
  if (view.rank == View::max_rank) return view;  // too many axes already: left to validation
  for (int axis = view.rank++; axis > 1; --axis) {
    view.shape.at(axis) = view.shape.at(axis - 1);
    view.strides.at(axis) = view.strides.at(axis - 1);
  }
  view.shape[1] = 1;
  view.strides[1] = 0;
  return view;
}

// A default as schemas write it.
template <class Value>
std::string text(Value value) {
  if constexpr (std::is_same_v<Value, bool>) {
    return value ? "True" : "False";
  } else {
    std::array<char, 32> digits{};
    return std::string(digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr);
  }
}

}  // namespace tfla::binding
