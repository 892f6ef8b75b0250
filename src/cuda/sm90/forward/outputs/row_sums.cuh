// dQ and dK on Hopper: the products of their rows with those of q and k, from which grad_gates makes di and df. They
// are of dQ and dK before these are rounded: what cancels between the rows of dS and its columns cancels in them too.
#pragma once

#include "cuda/arch/stream.cuh"
#include "cuda/sm90/forward/outputs/token_block.cuh"

namespace tfla::cuda::sm90::forward {

// Half of what this thread needs of its two rows of q or k, in flight on return. All of it would not fit into
// registers.
template <int Half, class C>
__device__ __forceinline__ void read_factors(const TokenBlock<C>& b, Rows<C>& rows) {
  if constexpr (C::grad_qk) {
    using T = typename C::T;
    constexpr int eights = RowFactors<C>::eights, first = Half * 8 * eights;
    const Lane here = Lane::again();
    const RowPlace place = RowPlace::read(b.cta.shared.place(b.ring.slot));
    const Strided& tensor = b.cta.work.factors;
    const T* head = static_cast<const T*>(tensor.data) + place.sequence * tensor.batch + place.head * tensor.head +
                    place.tile() * C::columns + here.pair;
    // Beyond the last row and column the last one is read again: the products there are zeros, or not written.
    const int last_row = place.inside() - 1, last_column = b.cta.call.dims.dhv - place.tile() * C::columns - 8;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const T* row = head + (place.token + min(here.row + 8 * h, last_row)) * tensor.token;
#pragma unroll
      for (int n = 0; n < eights; ++n)
        rows.factors.pairs[Half][n][h] =
            arch::read_word(reinterpret_cast<const std::uint32_t*>(row + min(first + 8 * n, last_column)));
    }
  }
}

// Adds this thread's share of the products with that half.
template <int Half, class C>
__device__ __forceinline__ void add_products(const Outputs<C>& o, Rows<C>& rows) {
  if constexpr (C::grad_qk) {
    constexpr int eights = RowFactors<C>::eights;
#pragma unroll
    for (int n = 0; n < eights; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 x = arch::unpack(rows.factors.pairs[Half][n][h], typename C::T{});
        const float* own = o + 4 * (Half * eights + n) + 2 * h;
        float& sum = rows.factors.sums[h];
        sum = fmaf(own[0], x.x, fmaf(own[1], x.y, Half == 0 && n == 0 ? 0.0F : sum));
      }
  }
}

template <class C>
__device__ __forceinline__ void write_row_sums(const TokenBlock<C>& b, const Rows<C>& rows) {
  if constexpr (C::grad_qk) {
    const Lane here = Lane::again();
    const RowPlace place = RowPlace::read(b.cta.shared.place(b.ring.slot));
    const Dims& dims = b.cta.call.dims;
    float* to = b.cta.call.sums.rows +
                (static_cast<std::int64_t>(place.tile()) * dims.heads + place.head) * dims.all_tokens() +
                place.sequence * dims.tokens + place.token;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = over_row(rows.factors.sums[h]);
      const int row = here.row + 8 * h;
      if (here.pair == 0 && row < place.inside()) to[row] = sum;
    }
  }
}

}  // namespace tfla::cuda::sm90::forward
