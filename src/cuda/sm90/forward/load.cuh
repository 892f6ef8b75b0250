// Forward on Hopper: the warps that load.
#pragma once

#include "cuda/arch/stream.cuh"
#include "cuda/sm90/forward/cta.cuh"

namespace tfla::cuda::sm90::forward {

template <class C>
struct Load {
  using Item = typename Cta<C>::Item;
  using Slots = typename Cta<C>::Slots;
  using KeySlots = typename Cta<C>::KeySlots;
  using Index = typename Cta<C>::Index;
  using Token = typename Cta<C>::Token;
  using S = Shared<C>;
  using Gates = typename S::Gates;

  const Cta<C>& cta;

  // One thread: Q, K and V.
  __device__ void tokens() const {
    each_place([&](const Place& at, const Slots& ring, const KeySlots& k) {
      keys(at, k);
      values_and_queries(at, ring);
    });
  }
  // Split states: K by one thread, V and Q by another. K's ring has less room than theirs, and a thread that waits for
  // it would hold them up.
  __device__ void keys_alone() const {
    each_place([&](const Place& at, const Slots& /*ring*/, const KeySlots& k) { keys(at, k); });
  }
  __device__ void values_and_queries_alone() const {
    each_place([&](const Place& at, const Slots& ring, const KeySlots& /*k*/) { values_and_queries(at, ring); });
  }

  // One warp.
  __device__ void gates() const {
    const int lane = threadIdx.x % warp_threads;
    Slots ring;
    cta.each_item([&](const Item& it) {
      const Index row = cta.vectors(it);
#pragma unroll 1
      for (int block = cta.first(it); (C::reverse ? block >= it.low : block < it.high);
           block += cta.step, ring.advance()) {
        arch::wait(cta.shared.v_empty(ring.slot), ring.phase ^ 1);
        gates_of_block(it, block, row, cta.shared.gates(ring.slot), lane);
        if constexpr (C::epilogue) skip_of_columns(it, cta.shared.skip(ring.slot), lane);
        arch::arrive_after_copies(cta.shared.v_full(ring.slot));
      }
    });
  }

 private:
  struct Place {
    const Item& item;
    int qk_head;
    int block;  // in reverse time the first token, which takes fewer registers
    int token;  // as the tensor maps count them
  };
  template <class Visit>
  __device__ void each_place(const Visit& visit) const {
    Slots ring;
    KeySlots k;
    cta.each_item([&](const Item& it) {
      const int qk_head = it.head / cta.call.dims.group;
      const int last = C::reverse ? it.map_token(cta.call) + it.low * token_block : 0;
#pragma unroll 1
      for (int block = C::reverse ? last + (it.high - 1 - it.low) * token_block : it.low;
           (C::reverse ? block >= last : block < it.high);
           block += C::reverse ? -token_block : 1, ring.advance(), k.advance(C::parts))
        visit({it, qk_head, block, C::reverse ? block : it.map_token(cta.call) + block * token_block}, ring, k);
    });
  }

  // Panels of 64 columns, from `column` on of a tensor with `columns`, to offset `to` in shared memory.
  __device__ __forceinline__ void panels(const Place& at, const CUtensorMap& map, int to, unsigned full, int count,
                                         int column, int columns, int head) const {
    arch::arrive_expecting(full, count * panel_bytes);
#pragma unroll 1
    for (int p = 0; p < count; ++p)
      arch::load_box(cta.shared.base + to + p * panel_bytes, map_for(cta.maps, map, column + p * panel, columns), full,
                     column + p * panel, at.token, head, at.item.map_batch(cta.call));
  }

  __device__ __forceinline__ void keys(const Place& at, const KeySlots& k) const {
#pragma unroll
    for (int p = 0; p < C::parts; ++p) {
      const KeySlots part = k.after(p);
      arch::wait(cta.shared.k_empty(part.slot), part.phase ^ 1);
      panels(at, cta.maps.k, S::Offset::k + part.slot * S::part_bytes, cta.shared.k_full(part.slot), C::part_panels,
             p * (C::part_panels * panel), cta.call.dims.dqk, at.qk_head);
    }
    if constexpr (C::dqk_part == DqkPart::last)
      arch::prefetch(cta.dqk_partial(at.item, at.block), DqkPartial<C>::floats * static_cast<int>(sizeof(float)));
  }

  __device__ __forceinline__ void values_and_queries(const Place& at, const Slots& ring) const {
    arch::wait(cta.shared.v_empty(ring.slot), ring.phase ^ 1);
    if constexpr (C::grad_qk) place_checkpoint(at, cta.shared.place(ring.slot));
    panels(at, cta.maps.v, S::Offset::v + ring.slot * S::v_bytes, cta.shared.v_full(ring.slot), C::columns / panel,
           at.item.tile * C::columns, cta.call.dims.dhv, at.item.head);
#pragma unroll
    for (int p = C::parts - 1; p >= 0; --p) {
      arch::wait(cta.shared.q_empty(ring.slot, p), ring.phase ^ 1);
      if (C::grad_qk && p == 0) place_rows(at, cta.shared.place(ring.slot));
      panels(at, cta.maps.q, S::Offset::q + ring.slot * S::q_bytes + p * S::part_bytes, cta.shared.q_full(ring.slot, p),
             C::part_panels, p * (C::part_panels * panel), cta.call.dims.dqk, at.qk_head);
    }
    if constexpr (C::epilogue)
      panels(at, cta.maps.z, S::Offset::q + ring.slot * S::q_bytes + S::h_bytes, cta.shared.q_full(ring.slot, 0),
             cta.work.has_z ? C::columns / panel : 0, at.item.tile * C::columns, cta.call.dims.dhv, at.item.head);
    if constexpr (C::grad_qk) prefetch_factors(at);
  }
  // The first token of a place in its sequence.
  __device__ __forceinline__ int first_token(const Place& at) const {
    return C::packed ? at.token - at.item.map_token(cta.call) : at.token;
  }
  __device__ __forceinline__ void place_rows(const Place& at, unsigned to) const {
    const int token = first_token(at);
    const int inside = min(static_cast<int>(at.item.tokens(cta.call)) - token, token_block);
    if constexpr (C::packed)
      RowPlace{0, at.item.start + token, at.item.head, inside | at.item.tile << 8}.write(to);
    else
      RowPlace{at.item.sequence, token, at.item.head, inside | at.item.tile << 8}.write(to);
  }
  // The checkpoint before a token block in the order of time; -1: there is none.
  __device__ __forceinline__ void place_checkpoint(const Place& at, unsigned to) const {
    const int block = first_token(at) / token_block + (C::reverse ? 1 : 0);
    int checkpoint = -1;
    if (cta.is_checkpoint(at.item, block)) {
      checkpoint = cta.checkpoint(at.item, block);
      if (C::reverse) arch::prefetch(cta.checkpoint_state(checkpoint), Cta<C>::checkpoint_bytes);
    }
    arch::write_int(to + PlaceOffsets::checkpoint, checkpoint);
  }
  // Rows of q or k, which the outputs read from global memory when they have theirs.
  __device__ __forceinline__ void prefetch_factors(const Place& at) const {
#pragma unroll 1
    for (int p = 0; p < C::columns / panel; ++p)
      arch::prefetch_box(&cta.maps.factors, at.item.tile * C::columns + p * panel, at.token, at.item.head,
                         at.item.map_batch(cta.call));
  }

  __device__ __forceinline__ Token first_chunk(const Item& it) const {
    if constexpr (C::packed) return it.first_chunk_number(token_block);
    return static_cast<Token>(it.sequence) * it.chunks;
  }

  __device__ __forceinline__ void gates_of_block(const Item& it, int block, Index row, unsigned to, int lane) const {
    const Call<float>& call = cta.call;
#pragma unroll 1
    for (int t = lane; t < token_block; t += warp_threads) {
      const Token token = static_cast<Token>(block) * token_block + t;
      // In reverse time all keys of a token block see its last queries. Where it has fewer than 64, the gates of the
      // last one are repeated: others might overflow, and the rows of zeros there make nothing of them.
      const bool valid = C::reverse || token < it.tokens(call);
      Index from = valid ? row + token : row;
      if (C::reverse) from = row + static_cast<Index>(min(token, static_cast<Token>(it.tokens(call)) - 1));
      arch::forget(from);  // five pointers kept over the loop would not fit into the registers
      arch::copy_small<8>(to + Gates::u + 8 * t, call.gates.u + from, valid);
      arch::copy_small<8>(to + Gates::c + 8 * t, call.gates.log_c + from, valid);
      arch::copy_small<4>(to + Gates::qbar + 4 * t, call.gates.qbar + from, valid);
      arch::copy_small<4>(to + Gates::abar + 4 * t, call.gates.abar + from, valid);
      if (C::normalized) arch::copy_small<4>(to + Gates::floor + 4 * t, call.gates.floor + from, valid);
    }
    if (lane == 0) {
      Token unit = (first_chunk(it) + block) * call.dims.heads + it.head;
      arch::forget(unit);
      arch::copy_small<4>(to + Gates::decay, call.gates.gbar + unit, true);
    }
  }

  // D of the columns of an item. P is a multiple of eight.
  __device__ __forceinline__ void skip_of_columns(const Item& it, unsigned to, int lane) const {
    if (cta.work.D == nullptr) return;
    const int columns = cta.call.dims.dhv;
    const float* head = cta.work.D + static_cast<std::int64_t>(it.head) * columns;
#pragma unroll
    for (int c = 2 * lane; c < C::columns; c += 2 * warp_threads) {
      const int column = it.tile * C::columns + c;
      const bool exists = column < columns;
      arch::copy_small<8>(to + 4 * c, head + (exists ? column : 0), exists);
    }
  }
};

}  // namespace tfla::cuda::sm90::forward
