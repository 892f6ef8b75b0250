// Whether tensors lie in memory as the fastest GPU kernels want them.
#pragma once

#include <cstdint>

#include "tfla/mlstm.h"

namespace tfla {

// Every row begins on 16 bytes.
[[nodiscard]] inline bool rows_on_16_bytes(const TensorView& view) {
  if (!view.given()) return true;
  const std::int64_t item = item_size(view.dtype);
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.strides[0] * item % 16 == 0 &&
         view.strides[1] * item % 16 == 0 && view.strides[2] * item % 16 == 0;
}

// And the tensor memory accelerator can step over them. Packed sequences are read through maps that begin as many
// tokens before the tensor as it has: addresses must not become negative.
[[nodiscard]] inline bool has_tensor_map(const TensorView& view, std::int64_t packed_tokens) {
  constexpr std::int64_t most = std::int64_t{1} << 40;
  const std::int64_t item = item_size(view.dtype);
  for (int axis = 0; axis < 3; ++axis)
    if (view.strides[axis] < 0 || view.strides[axis] * item >= most) return false;
  const double before = static_cast<double>(packed_tokens) * static_cast<double>(view.strides[1] * item);
  return rows_on_16_bytes(view) && before < static_cast<double>(reinterpret_cast<std::uintptr_t>(view.data));
}

}  // namespace tfla
