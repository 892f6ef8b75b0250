// States on Hopper: shared memory and barriers.
#pragma once

#include "cuda/arch/barrier.cuh"
#include "cuda/sm90/states/config.h"

namespace tfla::cuda::sm90::states {

enum NamedBarrier : int { cta_barrier, state_barrier };

// The gate vectors of a token block: bytes from Shared::gates(slot) on.
struct GateOffsets {
  static constexpr int weight = 0;                          // abar, or in reverse time qbar
  static constexpr int inverse = weight + 4 * token_block;  // 1 / den, in reverse time
  static constexpr int decay = inverse + 4 * token_block;   // one float
  static constexpr int bytes = decay + 16;
};

// Shared memory from a 1,024-byte boundary on.
template <class C>
struct Shared {
  using Gates = GateOffsets;

  static constexpr int slots = C::reverse ? 2 : 3;
  static constexpr int x_bytes = C::row_panels * panel_bytes;
  static constexpr int y_bytes = C::warpgroup_columns / panel * panel_bytes;  // of one warpgroup
  static constexpr int slot_bytes = x_bytes + C::warpgroups * y_bytes;
  static constexpr int buffers = C::reverse ? 2 : 1;                                              // of rounded states
  static constexpr int share_bytes = C::row_panels * C::warpgroup_columns / panel * panel_bytes;  // of one warpgroup

  struct Offset {
    static constexpr int buffer = slots * slot_bytes;
    static constexpr int gates = buffer + buffers * C::warpgroups * share_bytes;
    static constexpr int full = gates + slots * Gates::bytes;
    static constexpr int empty = full + 8 * slots;
    // One for each buffer: a warp may be done with the next chunk while another is not with this one.
    static constexpr int staged = empty + 8 * slots;
    static constexpr int drained = staged + 8 * buffers;
    static constexpr int loaded = drained + 8;
    static constexpr int largest = (loaded + 8 * buffers + 15) / 16 * 16;  // float16: the largest numbers of warps
    static constexpr int end = largest + 2 * 4 * 4 * C::warpgroups;
  };
  static constexpr int bytes = Offset::end + 1024;  // 1,024: to align the start
  static_assert(bytes <= cta_shared_bytes, "shared memory of a CTA must be at most cta_shared_bytes");
  static_assert(C::ctas * (bytes + cta_reserved_bytes) <= multiprocessor_shared_bytes,
                "shared memory of all CTAs of a multiprocessor must be at most multiprocessor_shared_bytes");

  unsigned base;

  // A slot has X, then Y of each warpgroup.
  __device__ __forceinline__ unsigned x(int slot) const { return base + slot * slot_bytes; }
  // A warpgroup's share of a rounded state.
  __device__ __forceinline__ unsigned share(int buffer, int warpgroup) const {
    return base + Offset::buffer + (buffer * C::warpgroups + warpgroup) * share_bytes;
  }
  __device__ __forceinline__ unsigned gates(int slot) const { return base + Offset::gates + slot * Gates::bytes; }
  __device__ __forceinline__ unsigned largest() const { return base + Offset::largest; }

  // Barriers. full, empty: of slots. staged: a rounded state is complete; drained: it has left; loaded: C has come.
  __device__ __forceinline__ unsigned full(int slot) const { return base + Offset::full + 8 * slot; }
  __device__ __forceinline__ unsigned empty(int slot) const { return base + Offset::empty + 8 * slot; }
  __device__ __forceinline__ unsigned staged(int buffer) const { return base + Offset::staged + 8 * buffer; }
  __device__ __forceinline__ unsigned drained() const { return base + Offset::drained; }
  __device__ __forceinline__ unsigned loaded(int buffer) const { return base + Offset::loaded + 8 * buffer; }

  // By one thread.
  __device__ __forceinline__ void init_barriers() const {
    constexpr unsigned state_warps = warpgroup_warps * C::warpgroups * arch::warp_arrivals;
    for (int s = 0; s < slots; ++s) {
      arch::barrier_init(full(s), 1 + warp_threads);  // the copies of X and Y, and the lanes that load gates
      arch::barrier_init(empty(s), state_warps);
    }
    arch::barrier_init(drained(), 1);
    for (int b = 0; b < buffers; ++b) {
      arch::barrier_init(staged(b), state_warps);
      arch::barrier_init(loaded(b), 1);
    }
  }
};

}  // namespace tfla::cuda::sm90::states
