// Reads int32 and int64 vectors alike.
#pragma once

#include "tfla/tensor_view.h"

namespace tfla {

inline constexpr std::int64_t padding_slot = -1;  // of a row of step that has no state

// The integer so many elements from view.data.
[[nodiscard]] inline std::int64_t read_integer(const TensorView& view, std::int64_t offset) {
  return view.dtype == DType::int32 ? static_cast<const std::int32_t*>(view.data)[offset]
                                    : static_cast<const std::int64_t*>(view.data)[offset];
}

[[nodiscard]] inline std::int64_t read_index(const TensorView& view, std::int64_t index) {
  return read_integer(view, index * view.strides[0]);
}

}  // namespace tfla
