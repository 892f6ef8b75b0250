// grad_qk and row_dots: what their math warpgroups have in common.
#pragma once

#include "cuda/sm90/common/scores.cuh"
#include "cuda/sm90/grad_qk/shared.cuh"

namespace tfla::cuda::sm90::grad_qk {

// The math warpgroups' end of the ring. number: of the panel, counted over all tiles.
__device__ __forceinline__ int first_slot(unsigned number) { return static_cast<int>(number % 2) * stage_slots; }
template <class C>
__device__ __forceinline__ unsigned take(unsigned memory, unsigned number, Slot slot) {
  static_assert(Shared<C>::stages == 2);
  arch::wait(Barriers<C>{memory}.ring_full(first_slot(number) + slot), number / 2 & 1);
  return memory + Shared<C>::ring + (first_slot(number) + slot) * chunk_panel_bytes;
}
template <class C>
__device__ __forceinline__ void give_back(unsigned memory, unsigned number, Slot slot) {
  if (arch::arrives(threadIdx.x % warp_threads == 0))
    arch::arrive(Barriers<C>{memory}.ring_empty(first_slot(number) + slot));
}

// The number of a tile, as it comes with the gate vectors.
template <class C>
__device__ __forceinline__ unsigned tile_from_gates(unsigned memory) {
  return static_cast<unsigned>(arch::read_int2(memory + Shared<C>::Gates::index).x);
}

// float16: C and dC are stored in tiles of so many panels of dhv, each with a scale16.
inline constexpr int state_panels = 4;

// What a sum over panels of the state's tile `from` is multiplied by to have the scale of tile `to`, or after the last
// one no scale. Returns a function of the inverse scales, of C or of dC.
template <class C>
__device__ __forceinline__ auto rescaling(const Work& work, unsigned memory, unsigned parity, unsigned tile, int from,
                                          int to) {
  if constexpr (C::packed) {  // their tiles are not every gridDim.x-th one
    arch::wait(Barriers<C>{memory}.gates_full(), parity);
    tile = tile_from_gates<C>(memory);
  }
  const unsigned first =
      work.tiles.chunk_of(tile) * work.state_tiles + work.tiles.column_tile_of(tile) * work.state_columns + from;
  const bool last = to * state_panels >= work.dhv_panels;
  return [first, last](const float* inverse_scales) {
    const float x = inverse_scales[first] * (last ? 1.0F : inverse_power(inverse_scales[first + 1]));
    return float2{x, x};
  };
}

}  // namespace tfla::cuda::sm90::grad_qk
