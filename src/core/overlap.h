// Do two strided tensors share memory? Exact for the layouts people use: slices of one buffer may interleave.
#pragma once

#include "tfla/tensor_view.h"

namespace tfla {

// True if some byte belongs to both. For contrived strides where deciding would take too long, also true.
[[nodiscard]] bool overlap(const TensorView& a, const TensorView& b);

// True if two different indices reach the same byte (a stride of 0, say).
[[nodiscard]] bool overlaps_itself(const TensorView& view);

// Lowest and one past the highest byte, relative to data. False if that does not fit in 64 bits. Needs no negative
// extent.
[[nodiscard]] bool byte_range(const TensorView& view, std::int64_t& low, std::int64_t& high);

// No elements.
[[nodiscard]] bool is_empty(const TensorView& view);

}  // namespace tfla
