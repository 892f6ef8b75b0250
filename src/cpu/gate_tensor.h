// Single numbers of gate tensors [B,T,H] and vectors, of any float dtype.
#pragma once

#include <cstdint>

#include "cpu/problem.h"
#include "tfla/tensor_view.h"

namespace tfla::cpu {

[[nodiscard]] inline std::int64_t gate_offset(const TensorView& view, const Sequence& sequence, std::int64_t token,
                                              std::int64_t head) {
  return sequence.batch * view.strides[0] + (sequence.offset + token) * view.strides[1] + head * view.strides[2];
}

// One number: the rows of different heads interleave, so there is no vector to load. Offsets count elements.
[[nodiscard]] double read_gate(const TensorView& view, std::int64_t offset);
void write_gate(const MutableTensorView& view, std::int64_t offset, double value);

}  // namespace tfla::cpu
