// Boxes of a tensor as the tensor memory accelerator moves them, in rows of 128 bytes that are swizzled.
#pragma once

#include <array>

#include <cuda.h>

namespace tfla::emulator {

using Place = std::array<int, 4>;  // of the first element, by axes

void load_box(unsigned shared, const CUtensorMap& map, unsigned barrier, const Place& place);
void store_box(unsigned shared, const CUtensorMap& map, const Place& place);

}  // namespace tfla::emulator
