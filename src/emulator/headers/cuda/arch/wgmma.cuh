// In the place of cuda/arch/wgmma.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "emulator/tiles.h"

namespace tfla::cuda::arch {

enum class Major { depth, across };

inline std::uint64_t tile_descriptor(unsigned shared_address, unsigned panel_bytes = 16) {
  return static_cast<std::uint64_t>(shared_address >> 4) | static_cast<std::uint64_t>(panel_bytes >> 4) << 16 |
         static_cast<std::uint64_t>(1024 >> 4) << 32 | std::uint64_t{1} << 62;
}
inline std::uint64_t tile_at(unsigned shared_address, unsigned offset, unsigned panel_bytes = 16) {
  const unsigned low = (shared_address >> 4) + ((offset >> 4) | (panel_bytes >> 4) << 16);
  return std::uint64_t{1024 >> 4 | 1U << 30} << 32 | low;
}
inline std::uint64_t groups_descriptor(unsigned shared_address, unsigned group_bytes) {
  return static_cast<std::uint64_t>(shared_address >> 4) | static_cast<std::uint64_t>(8 * 16 >> 4) << 16 |
         static_cast<std::uint64_t>(group_bytes >> 4) << 32;
}

inline void products_begin() { emulator::meet_warp(~0U); }
inline void products_commit() { emulator::commit_products(); }
template <int Pending>
void products_wait() {
  emulator::finish_products(Pending);
}
template <int R>
void pin(float (&)[R]) {}
inline void pin(float2&) {}

template <class T, Major A, Major B, int R>
void multiply(float (&sum)[R], std::uint64_t a, std::uint64_t b, bool add) {
  static_assert(R == 4 || R == 16 || R == 32 || R == 64 || R == 96 || R == 128, "8, 32, 64, 128, 192 or 256 columns");
  emulator::begin_product({.item = emulator::item_of<T>,
                           .columns = 2 * R,
                           .adds = add,
                           .a_across = A == Major::across,
                           .b_across = B == Major::across,
                           .a = a,
                           .b = b},
                          sum, nullptr, nullptr);
}
template <class T, Major A, Major B>
void multiply(float (&sum)[64], float (&more)[4], std::uint64_t a, std::uint64_t b, bool add) {
  emulator::begin_product({.item = emulator::item_of<T>,
                           .columns = 136,
                           .adds = add,
                           .a_across = A == Major::across,
                           .b_across = B == Major::across,
                           .a = a,
                           .b = b},
                          sum, more, nullptr);
}
template <class T, Major B, int R>
void multiply(float (&sum)[R], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
  static_assert(R == 16 || R == 32 || R == 64 || R == 96 || R == 128, "32, 64, 128, 192 or 256 columns");
  emulator::begin_product({.item = emulator::item_of<T>,
                           .columns = 2 * R,
                           .adds = add,
                           .a_in_registers = true,
                           .b_across = B == Major::across,
                           .b = b},
                          sum, nullptr, a);
}

}  // namespace tfla::cuda::arch
