// Lines of a tensor, elements at equal distances, to and from the arithmetic type.
#pragma once

#include <cstdint>

#include "tfla/tensor_view.h"

namespace tfla::cpu::conv {

// `n` elements from element number `at` of the view on, `stride` apart. Any float dtype.
void load_line(const TensorView& view, std::int64_t at, std::int64_t stride, float* to, std::int64_t n);
void load_line(const TensorView& view, std::int64_t at, std::int64_t stride, double* to, std::int64_t n);
void store_line(const float* from, const MutableTensorView& view, std::int64_t at, std::int64_t stride, std::int64_t n);
void store_line(const double* from, const MutableTensorView& view, std::int64_t at, std::int64_t stride,
                std::int64_t n);
void clear_line(const MutableTensorView& view, std::int64_t at, std::int64_t stride, std::int64_t n);
// Of any dtype to any other.
void copy_line(const TensorView& view, std::int64_t at, std::int64_t stride, const MutableTensorView& to,
               std::int64_t to_at, std::int64_t to_stride, std::int64_t n);
// As they are, from a line of the same view that may be the same but does not cross it.
void move_line(const MutableTensorView& view, std::int64_t from, std::int64_t to, std::int64_t stride, std::int64_t n);

}  // namespace tfla::cpu::conv
