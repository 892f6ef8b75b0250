// grad_qk_reverse: the thread that stores.
#pragma once

#include "cuda/arch/tma.cuh"
#include "cuda/sm90/grad_qk_reverse/cta.cuh"

namespace tfla::cuda::sm90::grad_qk_reverse {

// dK of token block 0 leaves from the rows of block 0 in Q, dK of token block 1 from the rows of block 1 in K, dQ from
// dS.
template <class C>
struct Store {
  using S = Shared<C>;
  using Item = typename Cta<C>::Item;

  const Cta<C>& cta;

  __device__ __forceinline__ void results() const {
    const Barriers<C> barriers = cta.barriers();
    unsigned chunks = 0;
    cta.each_chunk([&](const Item& it, unsigned unit) {
      const Tile<C::packed> chunk(cta.work.chunks, unit);
      const int buffer = static_cast<int>(chunks % 2);
      const unsigned parity = chunks % 2;
      const auto store = [&](const CUtensorMap& map, unsigned from, int block) {
        arch::store_box(cta.memory + from, &map, it.row, chunk.token + block * token_block, chunk.head, chunk.batch);
      };
      arch::wait(barriers.dk_staged(), parity);
      store(cta.maps.dk, S::q + buffer * chunk_panel_bytes, 0);
      store(cta.maps.dk, S::k + panel_bytes, 1);
      arch::commit_stores();
      arch::wait(barriers.dq_staged(), parity);
#pragma unroll
      for (int block = 0; block < 2; ++block) store(cta.maps.dq, S::ds + block * panel_bytes, block);
      arch::commit_stores();
      arch::wait_stores_read<1>();
      arch::arrive_for_warp(barriers.q_empty(buffer));
      arch::arrive_for_warp(barriers.k_empty());
      arch::wait_stores_read<0>();
      arch::arrive(barriers.ds_empty());
      ++chunks;
    });
    arch::wait_stores<0>();
  }
};

}  // namespace tfla::cuda::sm90::grad_qk_reverse
