// Reading and writing elements of any dtype, with conversions of its own: the code under test must not judge itself.
#pragma once

#include <cstdint>

#include "tfla/tensor_view.h"

namespace tfla::reference {

// Round to nearest, ties to even, straight from double.
[[nodiscard]] std::uint16_t encode_bfloat16(double value);
[[nodiscard]] std::uint16_t encode_float16(double value);
[[nodiscard]] double decode_bfloat16(std::uint16_t bits);
[[nodiscard]] double decode_float16(std::uint16_t bits);

// Element number `index` of a dense array. The pointer need not be aligned.
[[nodiscard]] double load(const void* data, DType dtype, std::int64_t index);
void store(void* data, DType dtype, std::int64_t index, double value);

[[nodiscard]] std::int64_t element_count(const TensorView& view);

// Where element number `index`, counted row-major over the logical shape, lies: elements from view.data.
[[nodiscard]] std::int64_t offset_of(const TensorView& view, std::int64_t index);

}  // namespace tfla::reference
