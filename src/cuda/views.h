// Tensors of the caller as the kernels see them.
#pragma once

#include <cstdint>

#include "cuda/call.h"
#include "tfla/tensor_view.h"

namespace tfla::cuda {

inline Strided strided(const TensorView& view) {
  if (!view.given()) return {};
  const std::int64_t item = item_size(view.dtype);
  const bool wide = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.strides[0] * item % 16 == 0 &&
                    view.strides[1] * item % 16 == 0 && view.strides[2] * item % 16 == 0;
  return {const_cast<void*>(view.data), view.strides[0], view.strides[1], view.strides[2], wide};
}

inline StridedState strided_state(const TensorView& view) {
  if (!view.given()) return {};
  return {const_cast<void*>(view.data), view.strides[0], view.strides[1], view.strides[2]};
}

inline GateType gate_type(const TensorView& view) {
  switch (view.dtype) {
    case DType::float64: return GateType::float64;
    case DType::bfloat16: return GateType::bfloat16;
    case DType::float16: return GateType::float16;
    default: return GateType::float32;
  }
}

}  // namespace tfla::cuda
