// grad_qk_reverse: shared memory and barriers.
#pragma once

#include "cuda/arch/barrier.cuh"
#include "cuda/sm90/common/gates.cuh"
#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/grad_qk_reverse/config.h"

namespace tfla::cuda::sm90::grad_qk_reverse {

// Panels of 64 columns of dhv come through three rings.
enum Panels : int { panels_v, panels_dh, panels_C };

template <Panels P>
struct RingOf {
  // The state adds two panels of dH at a time, and holds them longest.
  static constexpr int slots = P == panels_v ? 2 : P == panels_dh ? 4 : 3;
  static constexpr int slots_before = P == panels_v ? 0 : P == panels_dh ? 2 : 6;  // of the rings before this one
  static constexpr unsigned slot_bytes = P == panels_C ? panel_bytes : chunk_panel_bytes;

  // The slot of a panel, by its number in all chunks, and the parity of its round.
  __device__ __forceinline__ static Ring<slots> at(unsigned panel_number) {
    return Ring<slots>::after_steps(panel_number);
  }
};
inline constexpr int ring_slots = RingOf<panels_C>::slots_before + RingOf<panels_C>::slots;

// Shared memory, in bytes. Q has two buffers: the state reads it from the chunk's first panel on, and dK leaves through
// it after the last.
template <class C>
struct Shared {
  // All rings, one behind the other; slots before that of C are chunk panels.
  static constexpr unsigned rings = 0;
  static constexpr unsigned dC =  // rounded
      rings + RingOf<panels_C>::slots_before * chunk_panel_bytes + RingOf<panels_C>::slots * panel_bytes;
  static constexpr unsigned q = dC + C::dhv_panels * panel_bytes;  // two buffers
  static constexpr unsigned k = q + 2 * chunk_panel_bytes;
  // [query block][key][query]: 64 keys for the queries of block 0, 128 for those of block 1. dQ leaves here.
  static constexpr unsigned ds = k + chunk_panel_bytes;
  using Gates = GateShared<ds + 3 * panel_bytes>;
  static constexpr unsigned weights = (Gates::end + 15) / 16 * 16;  // WeightPair [chunk_tokens / 2]: scale qbar / den
  static constexpr unsigned barriers = weights + 4 * chunk_tokens;

  template <Panels P>
  __device__ __forceinline__ static unsigned slot(unsigned memory, int number) {
    return memory + rings + RingOf<P>::slots_before * chunk_panel_bytes + number * RingOf<P>::slot_bytes;
  }
};

// Barriers by name. full: data has come; empty: all readers are done with it; staged: results wait to be stored.
template <class C>
struct Barriers {
  enum Place : int {
    q_full_at,
    q_empty_at = q_full_at + 2,
    q_added_at = q_empty_at + 2,
    k_full_at = q_added_at + 2,
    k_empty_at,
    gates_full_at,
    gates_empty_at,
    dC_full_at,
    dC_empty_at,
    ds_empty_at,
    dk_staged_at,
    dq_staged_at,
    ring_full_at,
    ring_empty_at = ring_full_at + ring_slots,
    count = ring_empty_at + ring_slots
  };
  unsigned memory;

  __device__ __forceinline__ unsigned at(int number) const { return memory + Shared<C>::barriers + 8 * number; }
  __device__ __forceinline__ unsigned q_full(int buffer) const { return at(q_full_at + buffer); }
  __device__ __forceinline__ unsigned q_empty(int buffer) const { return at(q_empty_at + buffer); }
  // The state has read Q. It may be done with the next chunk before math 0 comes for this one: each buffer has its own.
  __device__ __forceinline__ unsigned q_added(int buffer) const { return at(q_added_at + buffer); }
  __device__ __forceinline__ unsigned k_full() const { return at(k_full_at); }
  __device__ __forceinline__ unsigned k_empty() const { return at(k_empty_at); }
  __device__ __forceinline__ unsigned gates_full() const { return at(gates_full_at); }
  __device__ __forceinline__ unsigned gates_empty() const { return at(gates_empty_at); }
  __device__ __forceinline__ unsigned dC_full() const { return at(dC_full_at); }
  __device__ __forceinline__ unsigned dC_empty() const { return at(dC_empty_at); }
  __device__ __forceinline__ unsigned ds_empty() const { return at(ds_empty_at); }
  __device__ __forceinline__ unsigned dk_staged() const { return at(dk_staged_at); }
  __device__ __forceinline__ unsigned dq_staged() const { return at(dq_staged_at); }
  template <Panels P>
  __device__ __forceinline__ unsigned ring_full(int slot) const {
    return at(ring_full_at + RingOf<P>::slots_before + slot);
  }
  template <Panels P>
  __device__ __forceinline__ unsigned ring_empty(int slot) const {
    return at(ring_empty_at + RingOf<P>::slots_before + slot);
  }

  // Math 0 leaves its dK in Q and math 1 in K: there the store thread arrives in its place.
  __device__ void init() const {
    constexpr int state_warps = warpgroup_warps, all_warps = C::math_warps + state_warps;
    const auto init = [&](unsigned barrier, int warps) { arch::barrier_init(barrier, warps * arch::warp_arrivals); };
    for (int buffer = 0; buffer < 2; ++buffer) {
      arch::barrier_init(q_full(buffer), 1);
      init(q_empty(buffer), warpgroup_warps + 1);
      init(q_added(buffer), state_warps);
    }
    arch::barrier_init(k_full(), 1);
    init(k_empty(), warpgroup_warps + 1);
    arch::barrier_init(gates_full(), warp_threads);
    init(gates_empty(), all_warps);
    init(dC_full(), state_warps);
    init(dC_empty(), C::math_warps);
    arch::barrier_init(ds_empty(), 1);
    for (const unsigned staged : {dk_staged(), dq_staged()}) init(staged, C::math_warps);
    for (int slot = 0; slot < ring_slots; ++slot) {
      arch::barrier_init(at(ring_full_at + slot), 1);
      init(at(ring_empty_at + slot),
           slot < RingOf<panels_v>::slots ? C::math_warps : all_warps);  // the state reads no V
    }
  }
};

// ds_written, ds_read: by math 0, for math 1.
enum NamedBarrier : int { math_0_barrier = 1, ds_written, ds_read, state_barrier };

template <class C>
inline constexpr unsigned shared_bytes = Shared<C>::barriers + 8 * Barriers<C>::count;

}  // namespace tfla::cuda::sm90::grad_qk_reverse
