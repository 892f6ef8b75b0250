#include "reference/values.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

namespace tfla::reference {
namespace {

// A 16-bit format with a sign, an exponent and `mantissa` stored bits; `lowest` is the exponent of its least normal.
struct Format {
  int mantissa;
  int lowest;
  std::uint16_t infinity;
};
constexpr Format bfloat16_format{7, -126, 0x7F80};
constexpr Format float16_format{10, -14, 0x7C00};

std::uint16_t encode(double value, const Format& format) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::abs(value);
  if (std::isnan(value)) return sign | format.infinity | 1U << (format.mantissa - 1);
  if (magnitude == 0) return sign;
  if (std::isinf(value)) return sign | format.infinity;
  const int exponent = std::max(std::ilogb(magnitude), format.lowest);
  if (exponent > 200) return sign | format.infinity;
  // In units of the last place; the default rounding mode of nearbyint is to nearest, ties to even. Adding instead
  // of or-ing lets the implicit bit count as one step of the exponent and a carry as another.
  const double units = std::nearbyint(std::ldexp(magnitude, format.mantissa - exponent));
  const auto bits =
      (static_cast<std::uint32_t>(exponent - format.lowest) << format.mantissa) + static_cast<std::uint32_t>(units);
  return sign | static_cast<std::uint16_t>(std::min<std::uint32_t>(bits, format.infinity));
}

template <class Stored>
Stored read(const void* data, std::int64_t index) {
  Stored stored;
  std::memcpy(&stored, static_cast<const std::byte*>(data) + index * static_cast<std::int64_t>(sizeof(Stored)),
              sizeof(Stored));
  return stored;
}

template <class Stored>
void write(void* data, std::int64_t index, Stored stored) {
  std::memcpy(static_cast<std::byte*>(data) + index * static_cast<std::int64_t>(sizeof(Stored)), &stored,
              sizeof(Stored));
}

}  // namespace

std::uint16_t encode_bfloat16(double value) { return encode(value, bfloat16_format); }
std::uint16_t encode_float16(double value) { return encode(value, float16_format); }

double decode_bfloat16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

double decode_float16(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  double magnitude = 0;
  if (exponent == 31) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, -24);
  } else {
    magnitude = std::ldexp(1024 + mantissa, exponent - 25);
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

double load(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::float32: return read<float>(data, index);
    case DType::float64: return read<double>(data, index);
    case DType::bfloat16: return decode_bfloat16(read<std::uint16_t>(data, index));
    case DType::float16: return decode_float16(read<std::uint16_t>(data, index));
    case DType::int32: return read<std::int32_t>(data, index);
    case DType::int64: return static_cast<double>(read<std::int64_t>(data, index));
  }
  return std::numeric_limits<double>::quiet_NaN();
}

void store(void* data, DType dtype, std::int64_t index, double value) {
  switch (dtype) {
    case DType::float32: return write(data, index, static_cast<float>(value));
    case DType::float64: return write(data, index, value);
    case DType::bfloat16: return write(data, index, encode_bfloat16(value));
    case DType::float16: return write(data, index, encode_float16(value));
    case DType::int32: return write(data, index, static_cast<std::int32_t>(value));
    case DType::int64: return write(data, index, static_cast<std::int64_t>(value));
  }
}

std::int64_t element_count(const TensorView& view) {
  if (!view.given()) return 0;
  std::int64_t count = 1;
  for (int axis = 0; axis < view.rank; ++axis) count *= view.shape[axis];
  return count;
}

std::int64_t offset_of(const TensorView& view, std::int64_t index) {
  std::int64_t offset = 0;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    offset += index % view.shape[axis] * view.strides[axis];
    index /= view.shape[axis];
  }
  return offset;
}

}  // namespace tfla::reference
