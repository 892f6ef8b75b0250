// Forward on Hopper, for the state space dual: y = (H + D x) silu(z). x is V, which a token block has in shared memory,
// and z comes with Q. What backward reads, H + D x, leaves out of the place of z.
#pragma once

#include "cuda/common/device.cuh"
#include "cuda/sm90/forward/outputs/token_block.cuh"

namespace tfla::cuda::sm90::forward {

// O = H + D x, which nothing is left to multiply. Before V is given back.
template <class C>
__device__ __forceinline__ void add_skip(const TokenBlock<C>& b, Outputs<C>& o, const Rows<C>& rows) {
  if constexpr (C::late_factors) {
#pragma unroll
    for (int e = 0; e < C::columns / 2; ++e) o[e] *= rows.factor[e / 2 % 2];
  }
  if (b.cta.work.D == nullptr) return;
  const Lane here = b.here();
  const unsigned row = b.cta.shared.v(b.ring.slot) + here.tile_row(),
                 D = b.cta.shared.skip(b.ring.slot) + 4 * here.pair;
#pragma unroll
  for (int n = 0; n < C::columns / 16; ++n) {
    std::uint32_t x[4];  // as arch::store_tiles takes them: two rows of eight columns, then of the next eight
    arch::load_tiles(x, (row + n / 4 * panel_bytes) ^ (n % 4 * 32));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 skip = arch::read_float2(D + 4 * (16 * n + 8 * half));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 two = arch::unpack(x[2 * half + h], typename C::T{});
        float* own = o + 8 * n + 4 * half + 2 * h;
        own[0] = fmaf(skip.x, two.x, own[0]);
        own[1] = fmaf(skip.y, two.y, own[1]);
      }
    }
  }
}

// y where Q was, and O where z was.
template <class C>
__device__ __forceinline__ void stage_gated(const TokenBlock<C>& b, const Outputs<C>& o) {
  using T = typename C::T;
  arch::named_wait(output_barrier + b.warpgroup, warpgroup_threads);  // no warp reads Q any more
  const bool has_z = b.cta.work.has_z, has_ungated = b.cta.work.has_ungated;
  const unsigned row = b.q + b.here().tile_row();
#pragma unroll
  for (int n = 0; n < C::columns / 16; ++n) {
    const unsigned to = (row + n / 4 * panel_bytes) ^ (n % 4 * 32), gate = to + Shared<C>::h_bytes;
    std::uint32_t y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = arch::pack(float2{o[8 * n + 2 * i], o[8 * n + 2 * i + 1]}, T{});
    if (has_z) {
      std::uint32_t z[4];
      arch::load_tiles(z, gate);
      if (has_ungated) arch::store_tiles(gate, y[0], y[1], y[2], y[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = arch::unpack(z[i], T{});
        y[i] = arch::pack(float2{o[8 * n + 2 * i] * (two.x * sigmoid_of<T>(two.x)),
                                 o[8 * n + 2 * i + 1] * (two.y * sigmoid_of<T>(two.y))},
                          T{});
      }
    }
    arch::store_tiles(to, y[0], y[1], y[2], y[3]);
  }
  arch::writes_before_copies();
}

}  // namespace tfla::cuda::sm90::forward
