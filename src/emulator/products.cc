#include "emulator/products.h"

#include <vector>

#include "emulator/machine.h"

namespace tfla::emulator {

namespace {

constexpr int rows = 16, depth = 16;  // of a warp's part of a product, and of one product

float element(const Product& product, std::uint64_t descriptor, bool across, unsigned row, unsigned k) {
  const auto* at = reinterpret_cast<const std::uint16_t*>(shared_at(operand_address(descriptor, across, row, k), 2));
  return product.widen(*at);
}

// Lane 4 r + c holds of row r the columns 2 c, 2 c + 1 and those eight further on; of row r + 8 likewise.
void read_registers(const Product& product, float (&a)[rows][depth]) {
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    for (unsigned r = 0; r < 4; ++r) {
      const unsigned row = lane / 4 + r % 2 * 8, column = lane % 4 * 2 + r / 2 * 8;
      const std::uint32_t pair = product.a_registers[lane][r];
      a[row][column] = product.widen(static_cast<std::uint16_t>(pair));
      a[row][column + 1] = product.widen(static_cast<std::uint16_t>(pair >> 16));
    }
  }
}

}  // namespace

// Start, leading and stride bytes in units of 16; bits 62 and 63 say how rows are swizzled: 0 not, 1 by 128 bytes.
unsigned operand_address(std::uint64_t descriptor, bool across, unsigned row, unsigned k) {
  const auto field = [&](unsigned bit) { return static_cast<unsigned>(descriptor >> bit & 0x3FFF) << 4; };
  const unsigned start = field(0), leading = field(16), stride = field(32);
  const bool swizzled = descriptor >> 62 == 1;
  if (!swizzled && descriptor >> 62 != 0) fail("operands are swizzled by 128 bytes or not at all");
  if (!swizzled && !across) fail("operands along the depth are swizzled");
  unsigned address = start;
  if (!swizzled) return address + row / 8 * stride + k / 8 * leading + k % 8 * 16 + row % 8 * 2;
  address += across ? row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                    : row / 8 * stride + row % 8 * 128 + k * 2;
  return address ^ (address >> 7 & 7) << 4;
}

void multiply(const Product& product) {
  float a[rows][depth];
  if (product.a_in_registers) {
    read_registers(product, a);
  } else {
    for (unsigned r = 0; r < rows; ++r) {
      const unsigned row = static_cast<unsigned>(product.warp_of_group) * rows + r;
      for (unsigned k = 0; k < depth; ++k) a[r][k] = element(product, product.a, product.a_across, row, k);
    }
  }
  const auto columns = static_cast<unsigned>(product.columns);
  float b[depth][256], out[rows][256] = {};
  for (unsigned k = 0; k < depth; ++k)
    for (unsigned n = 0; n < columns; ++n) b[k][n] = element(product, product.b, product.b_across, n, k);
  for (unsigned r = 0; r < rows; ++r)
    for (unsigned k = 0; k < depth; ++k)
      for (unsigned n = 0; n < columns; ++n) out[r][n] += a[r][k] * b[k][n];
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    for (unsigned e = 0; e < columns / 2; ++e) {
      const float x = out[lane / 4 + e / 2 % 2 * 8][e / 4 * 8 + lane % 4 * 2 + e % 2];
      const bool apart = product.more[lane] != nullptr && e >= columns / 2 - 4;
      float& sum = apart ? product.more[lane][e - (columns / 2 - 4)] : product.sums[lane][e];
      sum = product.adds ? sum + x : x;
    }
  }
}

}  // namespace tfla::emulator
