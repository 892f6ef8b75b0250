// grad_qk: <C, dC> of a tile, from the panels that its products read.
#pragma once

#include "cuda/sm90/grad_qk/shared.cuh"

namespace tfla::cuda::sm90::grad_qk {

// Two numbers of C or dC.
template <class C>
__device__ __forceinline__ float2 widen(std::uint32_t pair) {
  if constexpr (C::scaled)
    return arch::unpack(pair, typename C::T{});
  else
    return arch::widen_pair(pair);
}

// Adds a panel to the share of a thread of math warpgroup 1, while the panel's products are in flight. The order does
// not matter: C and dC are read as they lie. dC: where the thread begins in its slot, which that of C follows.
template <class C>
__device__ __forceinline__ void add_trace(float& trace, unsigned dC) {
  constexpr unsigned step_bytes = warpgroup_threads * 16;
  float chains[4]{};
#pragma unroll
  for (unsigned at = 0; at < chunk_panel_bytes; at += step_bytes) {
    const uint4 x = arch::read_quad(dC + at), y = arch::read_quad(dC + (slot_C - slot_dC) * chunk_panel_bytes + at);
    const auto add = [&](std::uint32_t a, std::uint32_t b, float& even, float& odd) {
      const float2 pair = widen<C>(a), other = widen<C>(b);
      even = fmaf(pair.x, other.x, even);
      odd = fmaf(pair.y, other.y, odd);
    };
    add(x.x, y.x, chains[0], chains[1]);
    add(x.y, y.y, chains[2], chains[3]);
    add(x.z, y.z, chains[0], chains[1]);
    add(x.w, y.w, chains[2], chains[3]);
  }
  trace += (chains[0] + chains[1]) + (chains[2] + chains[3]);
  __syncwarp();  // all lanes have read what one of them gives back
}

// Writes the share of this warp in gbar <C, dC>, and with the first one <n, dn>.
template <class C>
__device__ __forceinline__ void store_trace(float& trace, const Work& work, unsigned memory, unsigned tile) {
  const unsigned unit = work.tiles.chunk_of(tile), warp = threadIdx.x % warpgroup_threads / warp_threads;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) trace += __shfl_xor_sync(0xFFFFFFFFU, trace, offset);
  double sum = trace;
  if (C::norm && warp == 0)
    sum += static_cast<double>(__int_as_float(arch::read_int2(memory + Shared<C>::Gates::index).y));
  if (threadIdx.x % warp_threads == 0)
    work.traces[(static_cast<std::int64_t>(unit) * work.tiles.per_chunk + work.tiles.column_tile_of(tile)) *
                    trace_warps +
                warp] = sum * static_cast<double>(work.decays[unit]);
  trace = 0;
}

}  // namespace tfla::cuda::sm90::grad_qk
