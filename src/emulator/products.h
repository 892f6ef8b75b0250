// Products of the tensor cores as warps hold their operands and results.
#pragma once

#include <array>
#include <cstdint>

namespace tfla::emulator {

enum class Item : std::uint8_t { bfloat16, float16 };

// 16 rows of a by `columns` of b, in float32: one warp's part of wgmma, or mma.sync.
struct Product {
  Item item = Item::bfloat16;
  int columns = 0;
  bool adds = false;
  // a: registers of all lanes, or shared memory; b: shared memory.
  bool a_in_registers = false, a_across = false, b_across = false;
  std::array<std::array<std::uint32_t, 4>, 32> a_registers{};
  std::uint64_t a = 0, b = 0;
  int warp_of_group = 0;
  std::array<float*, 32> sums{};  // of every lane: `columns` / 2 of them
  std::array<float*, 32> more{};  // of the last eight columns where they have registers of their own
};
void multiply(const Product& product);

// A number of a tile as float32.
[[nodiscard]] float widen(Item item, std::uint16_t bits);

}  // namespace tfla::emulator
