// dQ and dK on Hopper: the products of their rows with those of q and k, from which grad_gates makes di and df.
#pragma once

#include "cuda/arch/stream.cuh"
#include "cuda/sm90/forward/outputs/token_block.cuh"

namespace tfla::cuda::sm90::forward {

// The rows of q or k, in flight on return.
template <class C>
__device__ __forceinline__ void read_factors(const TokenBlock<C>& b, Rows<C>& rows) {
  if constexpr (C::grad_qk) {
    using T = typename C::T;
    const Lane here = Lane::again();
    const RowPlace place = RowPlace::read(b.cta.shared.place(b.ring.slot));
    const Strided& tensor = b.cta.work.factors;
    const T* from = static_cast<const T*>(tensor.data) + place.head * tensor.head + place.tile * C::columns;
    if constexpr (C::packed) {
      from += place.token * tensor.token;
    } else {
      const int sequence = place.token / static_cast<int>(b.cta.call.dims.tokens);
      from += sequence * tensor.batch + (place.token - sequence * static_cast<int>(b.cta.call.dims.tokens)) * tensor.token;
    }
    const int columns = b.cta.call.dims.dhv - place.tile * C::columns;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = here.row + 8 * h;
#pragma unroll
      for (int p = 0; p < RowFactors<C>::pieces; ++p) {
        const int column = 32 * p + here.pair * 4;
        rows.factors.row[h][p] =
            row < place.inside && column < columns
                ? arch::read_once(reinterpret_cast<const uint4*>(from + row * tensor.token + column))
                : uint4{};
      }
    }
  }
}

template <class T>
__device__ __forceinline__ float product_of_eight(const uint4& a, const uint4& b) {
  const auto two = [](std::uint32_t x, std::uint32_t y) {
    const float2 s = arch::unpack(x, T{}), t = arch::unpack(y, T{});
    return fmaf(s.x, t.x, s.y * t.y);
  };
  return (two(a.x, b.x) + two(a.y, b.y)) + (two(a.z, b.z) + two(a.w, b.w));
}

// Of the rows of a warp, which lie rounded where Q was.
template <class C>
__device__ __forceinline__ void sum_rows(const TokenBlock<C>& b, const Rows<C>& rows) {
  if constexpr (C::grad_qk) {
    __syncwarp();  // all lanes have written
    const Lane here = Lane::again();
    const RowPlace place = RowPlace::read(b.cta.shared.place(b.ring.slot));
    const Dims& dims = b.cta.call.dims;
    float* to = b.cta.call.sums.rows +
                (static_cast<std::int64_t>(place.tile) * dims.heads + place.head) * dims.all_tokens() + place.token;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = here.row + 8 * h;
      float sum = 0;
#pragma unroll
      for (int p = 0; p < RowFactors<C>::pieces; ++p) {
        const int piece = 4 * (p % 2) + here.pair / 2;  // of the 16 bytes of a panel's row
        const unsigned from = b.q + p / 2 * panel_bytes + row * panel_row_bytes + (piece ^ row % 8) * 16;
        sum += product_of_eight<typename C::T>(arch::read_quad(from), rows.factors.row[h][p]);
      }
      sum = over_row(sum);
      if (here.pair == 0 && row < place.inside) to[row] = sum;
    }
  }
}

}  // namespace tfla::cuda::sm90::forward
