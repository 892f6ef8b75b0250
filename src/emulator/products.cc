#include "emulator/products.h"

#include <algorithm>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "emulator/machine.h"

namespace tfla::emulator {

namespace {

constexpr unsigned rows = 16, depth = 16;  // of a warp's part of a product, and of one product
constexpr unsigned most_columns = 256;

// An operand in shared memory: start, leading and stride bytes in units of 16; bits 62 and 63 say how rows are
// swizzled: 0 not, 1 by 128 bytes.
struct Operand {
  unsigned start, leading, stride;
  bool swizzled, across;

  Operand(std::uint64_t descriptor, bool is_across)
      : start(field(descriptor, 0)),
        leading(field(descriptor, 16)),
        stride(field(descriptor, 32)),
        swizzled(descriptor >> 62 == 1),
        across(is_across) {
    if (!swizzled && descriptor >> 62 != 0) fail("operands are swizzled by 128 bytes or not at all");
    if (!swizzled && !across) fail("operands along the depth are swizzled");
  }
  static unsigned field(std::uint64_t descriptor, unsigned bit) {
    return static_cast<unsigned>(descriptor >> bit & 0x3FFF) << 4;
  }

  [[nodiscard]] unsigned address(unsigned row, unsigned k) const {
    if (!swizzled) return start + row / 8 * stride + k / 8 * leading + k % 8 * 16 + row % 8 * 2;
    const unsigned at = start + (across ? row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                                        : row / 8 * stride + row % 8 * 128 + k * 2);
    return at ^ (at >> 7 & 7) << 4;
  }
};

template <Item Of>
float widened(std::uint16_t bits) {
  if constexpr (Of == Item::float16) return __half2float({bits});
  return __bfloat162float({bits});
}

// out[k * columns + r] or [r * columns + k], of rows from `first` on.
template <Item Of, bool ByDepth>
void read(std::uint64_t descriptor, bool across, unsigned first, unsigned count, float* out) {
  const Operand operand(descriptor, across);
  const Cta& cta = *self().cta;
  for (unsigned r = 0; r < count; ++r) {
    for (unsigned k = 0; k < depth; ++k) {
      const unsigned address = operand.address(first + r, k);
      const unsigned char* at = address + 2 <= cta.shared_bytes ? cta.shared + address : shared_at(address, 2);
      out[ByDepth ? k * most_columns + r : r * depth + k] = widened<Of>(*reinterpret_cast<const std::uint16_t*>(at));
    }
  }
}

// Lane 4 r + c holds of row r the columns 2 c, 2 c + 1 and those eight further on; of row r + 8 likewise.
void read_registers(const Product& product, float* a) {
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    for (unsigned r = 0; r < 4; ++r) {
      const unsigned row = lane / 4 + r % 2 * 8, column = lane % 4 * 2 + r / 2 * 8;
      const std::uint32_t pair = product.a_registers[lane][r];
      a[row * depth + column] = widen(product.item, static_cast<std::uint16_t>(pair));
      a[row * depth + column + 1] = widen(product.item, static_cast<std::uint16_t>(pair >> 16));
    }
  }
}

template <Item Of>
void multiply_as(const Product& product) {
  float a[rows * depth];
  if (product.a_in_registers)
    read_registers(product, a);
  else
    read<Of, false>(product.a, product.a_across, static_cast<unsigned>(product.warp_of_group) * rows, rows, a);
  const auto columns = static_cast<unsigned>(product.columns);
  float b[depth * most_columns], out[rows][most_columns];
  read<Of, true>(product.b, product.b_across, 0, columns, b);
  for (unsigned r = 0; r < rows; ++r) {
    std::fill_n(out[r], columns, 0.0F);
    for (unsigned k = 0; k < depth; ++k)
      for (unsigned n = 0; n < columns; ++n) out[r][n] += a[r * depth + k] * b[k * most_columns + n];
  }
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    for (unsigned e = 0; e < columns / 2; ++e) {
      const float x = out[lane / 4 + e / 2 % 2 * 8][e / 4 * 8 + lane % 4 * 2 + e % 2];
      const bool apart = product.more[lane] != nullptr && e >= columns / 2 - 4;
      float& sum = apart ? product.more[lane][e - (columns / 2 - 4)] : product.sums[lane][e];
      sum = product.adds ? sum + x : x;
    }
  }
}

}  // namespace

float widen(Item item, std::uint16_t bits) {
  return item == Item::float16 ? widened<Item::float16>(bits) : widened<Item::bfloat16>(bits);
}

void multiply(const Product& product) {
  product.item == Item::float16 ? multiply_as<Item::float16>(product) : multiply_as<Item::bfloat16>(product);
}

}  // namespace tfla::emulator
