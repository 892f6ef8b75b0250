// Do two strided tensors share memory? Exact for the layouts people use: slices of one buffer may interleave.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tfla/tensor_view.h"

namespace tfla {

// True if some byte belongs to both. For contrived strides where deciding would take too long, also true.
[[nodiscard]] bool overlap(const TensorView& a, const TensorView& b);

// True if two different indices reach the same byte (a stride of 0, say).
[[nodiscard]] bool overlaps_itself(const TensorView& view);

// No elements.
[[nodiscard]] inline bool is_empty(const TensorView& view) {
  bool empty = false;
  for (int axis = 0; axis < view.rank; ++axis) empty |= view.shape[axis] == 0;
  return empty;
}

// Lowest and one past the highest byte, relative to data. False if that does not fit in 64 bits. Needs no negative
// extent. Every call asks for it of every tensor.
[[nodiscard]] inline bool byte_range(const TensorView& view, std::int64_t& low, std::int64_t& high) {
  const std::int64_t item = item_size(view.dtype);
  const bool empty = is_empty(view);
  std::int64_t least = 0, most = empty ? 0 : item;
  bool wrong = false;
  for (int axis = 0; axis < (empty ? 0 : view.rank); ++axis) {
    std::int64_t reach = 0;
    wrong |= __builtin_mul_overflow(view.shape[axis] - 1, view.strides[axis], &reach);
    wrong |= __builtin_mul_overflow(reach, item, &reach);
    wrong |= __builtin_add_overflow(least, std::min<std::int64_t>(reach, 0), &least);
    wrong |= __builtin_add_overflow(most, std::max<std::int64_t>(reach, 0), &most);
  }
  low = least;
  high = most;
  std::int64_t extent = 0;
  wrong |= __builtin_sub_overflow(most, least, &extent);
  return !wrong;
}

}  // namespace tfla
