// Checks that the operators have in common: values, states, packed sequences, slots.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "core/checks.h"
#include "tfla/plan.h"

namespace tfla {

inline constexpr std::initializer_list<DType> floats = {DType::float32, DType::float64, DType::bfloat16,
                                                        DType::float16};
inline constexpr std::initializer_list<DType> integers = {DType::int32, DType::int64};

[[nodiscard]] inline DType state_dtype(const MlstmShape& shape) {
  return shape.dtype == DType::float64 ? DType::float64 : DType::float32;
}

// A tensor like q, and one like v.
void check_keys(const char* name, const TensorView& view, const MlstmShape& shape);
void check_values(const char* name, const TensorView& view, const MlstmShape& shape);

// A number per head.
void check_per_head(const char* name, const TensorView& view, const MlstmShape& shape);

// A gradient of an optional input is given where that is. Whether both are.
[[nodiscard]] bool has_gradient(const char* name, const TensorView& gradient, const char* input_name,
                                const TensorView& input);

// Of a state: any part, and C.
void check_state_part(std::string_view name, const TensorView& view, const MlstmShape& shape,
                      std::initializer_list<std::int64_t> extents, const char* axes, LastAxis last_axis);
void check_state_C(std::string_view name, const TensorView& C, std::int64_t states, const MlstmShape& shape);

// Packed sequences: fills `packed`, `sequences` and `longest`.
void check_cu_seqlens(const TensorView& cu, Device device, MlstmShape& shape);

// States that a step works on: `state_name` has so many.
void check_slots(const TensorView& slots, Device device, const MlstmShape& shape, const char* state_name,
                 std::int64_t states);

}  // namespace tfla
