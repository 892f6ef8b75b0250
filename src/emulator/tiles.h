// 16-bit tiles between shared memory and the registers of a warp, and products of them.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "emulator/products.h"

namespace tfla::emulator {

template <class T>
inline constexpr Item item_of = std::is_same_v<T, __half> ? Item::float16 : Item::bfloat16;

// ldmatrix and stmatrix: four tiles of 8 x 8, of which lane l names row l % 8 of tile l / 8.
void load_tiles(std::uint32_t (&tiles)[4], unsigned row, bool transposed);
void store_tiles(unsigned row, const std::array<std::uint32_t, 4>& tiles, bool transposed);

// mma.sync: d += a b with a of 16 x 16, b of 16 x 8.
void multiply_tiles(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, Item item);

// wgmma. A product is done at once, or when its batch is waited for.
void begin_product(Product product, float* sums, float* more, const std::uint32_t* a);
void commit_products();
void finish_products(std::size_t all_but);

}  // namespace tfla::emulator
