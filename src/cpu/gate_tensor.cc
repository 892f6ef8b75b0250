#include "cpu/gate_tensor.h"

#include <cstddef>

#include "cpu/kernels/simd.h"

namespace tfla::cpu {

double read_gate(const TensorView& view, std::int64_t offset) {
  switch (view.dtype) {
    case DType::float64: return static_cast<const double*>(view.data)[offset];
    case DType::float32: return static_cast<double>(static_cast<const float*>(view.data)[offset]);
    default: {
      float value = 0;
      simd::load(static_cast<const std::uint16_t*>(view.data) + offset, view.dtype, &value, 1);
      return static_cast<double>(value);
    }
  }
}

void write_gate(const MutableTensorView& view, std::int64_t offset, double value) {
  if (view.dtype == DType::float64) {
    static_cast<double*>(view.data)[offset] = value;
    return;
  }
  const auto narrow = static_cast<float>(value);
  auto* at = static_cast<std::byte*>(view.data) + offset * item_size(view.dtype);
  simd::store(1.0F, &narrow, at, view.dtype, 1);
}

}  // namespace tfla::cpu
