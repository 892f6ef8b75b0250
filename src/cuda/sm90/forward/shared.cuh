// Forward on Hopper: shared memory and barriers.
#pragma once

#include <algorithm>

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/shared.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/sm90/common/limits.h"
#include "cuda/sm90/forward/config.h"

namespace tfla::cuda::sm90::forward {

inline constexpr int threads = 4 * warpgroup_threads;

// The gate vectors of a token block: bytes from Shared::gates(slot) on.
struct GateOffsets {
  static constexpr int u = 0;                       // float2
  static constexpr int c = u + 8 * token_block;     // float2
  static constexpr int qbar = c + 8 * token_block;  // float
  static constexpr int abar = qbar + 4 * token_block;
  static constexpr int floor = abar + 4 * token_block;
  static constexpr int decay = floor + 4 * token_block;  // one float
  static constexpr int bytes = decay + 16;
};
// dQ and dK: which token block it is. Bytes from Shared::place(slot) on.
struct PlaceOffsets {
  static constexpr int rows = 0;         // int4, which comes and goes with Q: see RowPlace
  static constexpr int checkpoint = 16;  // int, with V: see Load::place_checkpoint
  static constexpr int bytes = 32;
};
// Its denominators, on their way to global memory: bytes from Shared::denominators(slot) on.
struct DenominatorOffsets {
  static constexpr int inverse = 0;              // 1 / den
  static constexpr int slope = 4 * token_block;  // derivative of den by q.n, times -1 / den
  static constexpr int bytes = slope + 4 * token_block;
};

// Named barriers. H of a token block is staged in a slot of Q, and each slot has a barrier of its own for each output
// warpgroup. Output warps only arrive there, and may be done with their next token block before their store warp has
// come for this one; the next one in the same slot cannot come, since its Q is loaded when H has left. Nor may the
// store warp of one warpgroup wait where that of the other does: with three slots both come to the same one.
enum NamedBarrier : int { cta_barrier, output_barrier, state_barrier = output_barrier + 2, staged_barrier };

// Shared memory from a 1,024-byte boundary on.
template <class C>
struct Shared {
  using Gates = GateOffsets;
  using Denominators = DenominatorOffsets;
  using Places = PlaceOffsets;

  static constexpr bool fewer_slots = C::large_dqk || (C::epilogue && C::columns == 128);
  static constexpr int slots = C::split_state ? 2 : fewer_slots ? 3 : 4;    // of Q, and of V with its gates
  static constexpr int k_slots = C::split_state ? 3 : fewer_slots ? 2 : 3;  // of parts of K
  static constexpr int part_bytes = C::part_panels * panel_bytes;           // of Q and K
  static constexpr int v_bytes = C::columns / panel * panel_bytes;
  static constexpr int h_bytes = std::max(C::dqk_panels * panel_bytes, v_bytes);  // H is staged where Q was
  static constexpr int q_bytes = h_bytes + (C::epilogue ? v_bytes : 0);           // z comes with Q and lies behind it
  // C lies in panels of 64 columns. With n behind it, both lie in groups of eight columns (arch::groups_descriptor).
  static constexpr int group_bytes = 64 * C::dqk_panels * 16;
  static constexpr int c_bytes =
      C::n_in_state_product ? (C::columns / 8 + 1) * group_bytes : C::dqk_panels * C::columns / panel * panel_bytes;
  // n in three terms, for each output warpgroup: rows of an operand of wgmma, or in the order of mma.sync.
  static constexpr int n_panel = C::n_is_wgmma_operand ? 1024 : 128;
  static constexpr int n_term = C::n_is_wgmma_operand ? 128 : C::dqk_panels * n_panel;
  static constexpr int n_bytes = C::n_in_state_product   ? 0
                                 : C::n_is_wgmma_operand ? C::dqk_panels * n_panel
                                                         : 3 * n_term;

  struct Offset {
    static constexpr int q = 0;
    static constexpr int k = q + slots * q_bytes;
    static constexpr int v = k + k_slots * part_bytes;
    static constexpr int state = v + slots * v_bytes;
    static constexpr int n = state + c_bytes;
    static constexpr int gates = n + C::output_warpgroups * n_bytes;
    static constexpr int denominators = gates + slots * Gates::bytes;
    static constexpr int places = denominators + (C::grad_qk ? 0 : slots * Denominators::bytes);
    static constexpr int q_full = places + (C::grad_qk ? slots * Places::bytes : 0);
    static constexpr int q_empty = q_full + 8 * slots * C::parts;
    static constexpr int k_full = q_empty + 8 * slots * C::parts;
    static constexpr int k_empty = k_full + 8 * k_slots;
    static constexpr int v_full = k_empty + 8 * k_slots;
    static constexpr int v_empty = v_full + 8 * slots;
    static constexpr int c_full = v_empty + 8 * slots;  // one for each output warpgroup
    static constexpr int c_empty = c_full + 16;
    static constexpr int end = c_empty + 8;
    // float16: what C and n are multiplied by to undo their scale16, for each output warpgroup; then the largest
    // numbers of the warps of the state, of two turns.
    static constexpr int inverse_scales = (end + 15) / 16 * 16;
    static constexpr int largest = inverse_scales + 16;
    static constexpr int scaled_end = largest + 2 * 8 * 4 * C::state_warpgroups;
  };
  static constexpr int bytes = (C::scaled ? Offset::scaled_end : Offset::end) + 1024;  // 1,024: to align the start
  static_assert(bytes <= cta_shared_bytes, "shared memory of a CTA must be at most cta_shared_bytes");

  unsigned base;

  __device__ __forceinline__ static int staged(int slot, int warpgroup) {
    return staged_barrier + slot + slots * warpgroup;
  }
  static_assert(staged_barrier + slots * C::output_warpgroups <= 16, "a CTA must have at most 16 named barriers");

  __device__ __forceinline__ unsigned q(int slot) const { return base + Offset::q + slot * q_bytes; }
  __device__ __forceinline__ unsigned z(int slot) const { return q(slot) + h_bytes; }
  __device__ __forceinline__ unsigned k(int slot) const { return base + Offset::k + slot * part_bytes; }
  __device__ __forceinline__ unsigned v(int slot) const { return base + Offset::v + slot * v_bytes; }
  __device__ __forceinline__ unsigned state() const { return base + Offset::state; }
  __device__ __forceinline__ unsigned n(int warpgroup) const { return base + Offset::n + warpgroup * n_bytes; }
  __device__ __forceinline__ unsigned n_columns() const { return base + (Offset::n - group_bytes); }  // behind C's
  __device__ __forceinline__ unsigned gates(int slot) const { return base + Offset::gates + slot * Gates::bytes; }
  __device__ __forceinline__ unsigned denominators(int slot) const {
    return base + Offset::denominators + slot * Denominators::bytes;
  }
  // D of the columns, one float each: what has an epilogue has no denominators.
  __device__ __forceinline__ unsigned skip(int slot) const { return denominators(slot); }
  static_assert(!C::epilogue || 4 * C::columns <= Denominators::bytes);
  __device__ __forceinline__ unsigned place(int slot) const { return base + Offset::places + slot * Places::bytes; }
  __device__ __forceinline__ unsigned inverse_scales(int warpgroup) const {
    return base + Offset::inverse_scales + warpgroup * 8;
  }
  __device__ __forceinline__ unsigned largest() const { return base + Offset::largest; }

  // Barriers. full: data has come; empty: all readers are done with it.
  __device__ __forceinline__ unsigned q_full(int slot, int part) const {
    return base + Offset::q_full + (slot * C::parts + part) * 8;
  }
  __device__ __forceinline__ unsigned q_empty(int slot, int part) const {
    return base + Offset::q_empty + (slot * C::parts + part) * 8;
  }
  __device__ __forceinline__ unsigned k_full(int slot) const { return base + Offset::k_full + slot * 8; }
  __device__ __forceinline__ unsigned k_empty(int slot) const { return base + Offset::k_empty + slot * 8; }
  __device__ __forceinline__ unsigned v_full(int slot) const { return base + Offset::v_full + slot * 8; }
  __device__ __forceinline__ unsigned v_empty(int slot) const { return base + Offset::v_empty + slot * 8; }
  __device__ __forceinline__ unsigned c_full(int warpgroup) const { return base + Offset::c_full + warpgroup * 8; }
  __device__ __forceinline__ unsigned c_empty() const { return base + Offset::c_empty; }

  // By one thread.
  __device__ __forceinline__ void init_barriers() const {
    const auto init = [&](int offset, int count, unsigned arrivals) {
      for (int s = 0; s < count; ++s) arch::barrier_init(base + offset + 8 * s, arrivals);
    };
    init(Offset::q_full, slots * C::parts, C::epilogue ? 2 : 1);  // Q, and z
    for (int s = 0; s < slots; ++s)  // H leaves through the first part; output warps free the other one
      for (int p = 0; p < C::parts; ++p)
        init(Offset::q_empty + 8 * (s * C::parts + p), 1,
             (p == 0 ? 1 + C::readers_of_places : 4) * arch::warp_arrivals);
    init(Offset::k_full, k_slots, 1);
    init(Offset::k_empty, k_slots, 8 * arch::warp_arrivals);  // four output warps, four of the state
    init(Offset::v_full, slots, 1 + 32);                      // the copy of V, and the lanes that load gates
    init(Offset::v_empty, slots, (4 + 4 * C::state_warpgroups) * arch::warp_arrivals);
    init(Offset::c_full, C::output_warpgroups, 4 * C::state_warpgroups * arch::warp_arrivals);
    init(Offset::c_empty, 1, (C::store_keeps_states ? 5 : 4) * arch::warp_arrivals);
    arch::barriers_ready();
  }
  // By all threads: rows, or columns, of the operand that n does not take stay zero.
  __device__ __forceinline__ void clear_n() const {
    constexpr int first = C::n_in_state_product ? Offset::n - group_bytes : Offset::n;
    for (int at = 4 * threadIdx.x; at < Offset::gates - first; at += 4 * threads)
      arch::write_float(base + first + at, 0);
    arch::writes_before_copies();
  }
};

}  // namespace tfla::cuda::sm90::forward
