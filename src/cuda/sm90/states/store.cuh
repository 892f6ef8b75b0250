// States on Hopper: the thread that stores states.
#pragma once

#include "cuda/arch/tma.cuh"
#include "cuda/sm90/states/cta.cuh"

namespace tfla::cuda::sm90::states {

// In reverse time it also loads the C of each chunk into the buffer that dC leaves from later.
template <class C>
struct Store {
  using S = Shared<C>;
  using Item = typename Cta<C>::Item;

  const Cta<C>& cta;

  __device__ void states() const {
    unsigned turns = 0;  // parity of each buffer
    cta.each_item([&](const Item& it) {
      const int count = it.high - it.low;
      if (C::reverse)
        for (int k = 0; k < min(count, S::buffers); ++k) load_c(it, it.high - 1 - k, k);
      for (int k = 0; k < count; ++k) {
        const int chunk = C::reverse ? it.high - 1 - k : it.low + k;
        const int buffer = k % S::buffers;
        arch::wait(cta.shared.staged(buffer), turns >> buffer & 1);
        turns ^= 1U << buffer;
        const auto unit = static_cast<int>((it.first_number + chunk) * cta.call.dims.heads + it.head);
        for (int p = 0; p < C::columns / panel; ++p)
          arch::store_box(cta.shared.share(buffer, 0) + p * C::row_panels * panel_bytes, &cta.maps.stored,
                          it.column + p * panel, it.row, unit);
        arch::commit_stores();
        arch::wait_stores_read<0>();
        if (!C::reverse)
          arch::arrive(cta.shared.drained());
        else if (k + S::buffers < count)
          load_c(it, chunk - S::buffers, buffer);
      }
    });
    arch::wait_stores<0>();
  }

 private:
  __device__ __forceinline__ void load_c(const Item& it, int chunk, int buffer) const {
    const unsigned barrier = cta.shared.loaded(buffer);
    arch::arrive_expecting(barrier, C::warpgroups * S::share_bytes);
    const auto unit = static_cast<int>((it.first_number + chunk) * cta.call.dims.heads + it.head);
    for (int p = 0; p < C::columns / panel; ++p)
      arch::load_box(cta.shared.share(buffer, 0) + p * C::row_panels * panel_bytes, &cta.maps.c, barrier,
                     it.column + p * panel, it.row, unit);
  }
};

}  // namespace tfla::cuda::sm90::states
