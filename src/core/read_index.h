// Reads int32 and int64 vectors alike.
#pragma once

#include "tfla/tensor_view.h"

namespace tfla {

inline constexpr std::int64_t padding_slot = -1;  // of a row of step that has no state

[[nodiscard]] inline std::int64_t read_index(const TensorView& view, std::int64_t index) {
  const std::int64_t at = index * view.strides[0];
  return view.dtype == DType::int32 ? static_cast<const std::int32_t*>(view.data)[at]
                                    : static_cast<const std::int64_t*>(view.data)[at];
}

}  // namespace tfla
