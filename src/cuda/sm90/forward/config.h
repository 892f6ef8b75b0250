// Forward on Hopper: what a kernel is compiled for, and what follows from it.
#pragma once

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/sm90/common/scale16.cuh"
#include "cuda/sm90/common/state_tile.cuh"

namespace tfla::cuda::sm90::forward {

// The columns of dqk that a kernel sums over. Heads of dqk above 256 take two kernels: see inst/bf16_dqk512.cu.
enum class DqkPart : std::uint8_t { all, first, last };

// The order of the products of a token block: outputs/factored.cuh, outputs/plain.cuh, outputs/wide.cuh.
enum class Schedule : std::uint8_t { factored, plain, wide };

// How q.n is made: with Q C, as more columns of C; by a wgmma of its own; by mma.sync of each warp.
enum class QnProduct : std::uint8_t { none, in_state_product, wgmma, mma };

struct Options {
  int dqk_panels;  // 64 columns of Q and K each
  int columns;     // columns of dhv that a CTA owns
  bool normalized = false;
  Keep keep =
      Keep::nothing;  // denominators take no kernel of their own: they are stored where call.gates.inverse is set
  bool packed = false;
  Time direction = Time::forward;
  DqkPart dqk_part = DqkPart::all;
  bool grad_qk = false;   // dQ or dK: the state is transposed, and sums for the gates are left (inst/grad_q_k.cu)
  bool epilogue = false;  // of the state space dual: outputs/epilogue.cuh
};

// Registers per thread and role. The four warpgroups share 512 per lane (setmaxnreg). Tuned by hand: the smallest
// values without spills.
struct Registers {
  int outputs, state;
};
template <class C>
constexpr Registers split_state_registers() {
  if (C::dqk_part == DqkPart::last && !C::normalized) return {152, 168};
  if (C::grad_qk) return {144, 168};
  if ((C::packed && !C::reverse) || C::scaled || C::dqk_part != DqkPart::all) return {144, 168};
  return {136, 176};
}
template <class C>
constexpr Registers whole_state_registers() {
  if (C::large_dqk && C::keeps_states) return {128, 216};
  if (C::columns == 64) return C::normalized ? Registers{136, 200} : Registers{144, 184};
  if (C::dqk_panels == 1) return {160, 152};
  return {144, C::scaled && C::packed ? 192 : 184};
}

template <class Type, Options O>
struct Config {
  using T = Type;
  static constexpr int dqk_panels = O.dqk_panels, columns = O.columns;
  static constexpr bool normalized = O.normalized, packed = O.packed;
  static constexpr Keep keep = O.keep;
  static constexpr Time direction = O.direction;
  static constexpr DqkPart dqk_part = O.dqk_part;
  static constexpr bool grad_qk = O.grad_qk, epilogue = O.epilogue;

  static constexpr bool reverse = direction == Time::reverse;  // dC and dV: see inst/grad_states_v.cu
  static constexpr bool keeps_states = keep == Keep::states;
  static constexpr bool scaled = needs_scale16<T>;   // float16: rounded C, n and P have a scale16 each
  static constexpr bool large_dqk = dqk_panels > 2;  // above 128
  // Registers are short: what can be read or computed anew is not kept in them.
  static constexpr bool few_registers = large_dqk || packed, few_state_registers = few_registers || keeps_states;

  // Warps that free the place of a token block (Shared::place) besides the store warp. The outputs meet the store warp
  // before it does so, which is enough; racecheck does not follow that (docs/cuda/sanitizer.md).
  static constexpr int readers_of_places = grad_qk && arch::for_racecheck ? 4 : 0;

  static_assert(keep != Keep::denominators, "a kernel keeps states or nothing; denominators are kept at run time");
  static_assert(!scaled || !keeps_states, "kernels of float16 must keep nothing: plan.cc asks for no states there");
  static_assert(!(reverse || grad_qk) || !normalized, "a kernel of gradients must have no n");
  static_assert(!grad_qk || (!scaled && keep == Keep::nothing), "dQ and dK must be bfloat16, and keep no states");
  static_assert(!epilogue || (!scaled && !normalized && !large_dqk && !reverse && !grad_qk && keep == Keep::nothing),
                "the epilogue must be that of a bfloat16 forward without n to dqk 128 that keeps no states");

  // A state of 256 x 128 takes two warpgroups, half of the rows each, which leaves one for the outputs.
  static constexpr bool split_state = dqk_panels * columns > 256;
  static constexpr int output_warpgroups = split_state ? 1 : 2, state_warpgroups = split_state ? 2 : 1;
  // Q and K of a token block come and go in parts: each warpgroup of the state reads one part of K.
  static constexpr int parts = state_warpgroups, part_panels = dqk_panels / parts;
  static_assert(dqk_part == DqkPart::all || (split_state && !scaled && !keeps_states && !packed && !reverse),
                "a part of dqk must be 256 columns of a dense bfloat16 forward that keeps no states");

  // Who stores kept states. One warpgroup of the state has too much to do, so a store warp does it; two do it
  // themselves.
  static constexpr bool store_keeps_states = keeps_states && !split_state;
  static constexpr bool state_keeps_states = keeps_states && split_state;

  // Factored: O = P V + Q C with everything divided by qbar till the end. P V does not wait for the state, and nothing
  // is multiplied between the products.
  static constexpr bool factored = !large_dqk && columns == 128 && !scaled && !keeps_states && !reverse && !grad_qk;
  static constexpr Schedule schedule = split_state ? Schedule::wide : factored ? Schedule::factored : Schedule::plain;

  // n as three more columns of C: q.n then comes with Q C, which reads Q once. Kept states leave in panels of 64
  // columns, and there is no room for a third panel.
  static constexpr bool n_in_state_product = normalized && !keeps_states && !large_dqk && columns == 128;
  // Otherwise n lies as an operand of wgmma of eight columns where shared memory has room, else as mma.sync reads it.
  static constexpr bool n_is_wgmma_operand = split_state || !large_dqk;
  static constexpr QnProduct qn_product = !normalized          ? QnProduct::none
                                          : n_in_state_product ? QnProduct::in_state_product
                                          : n_is_wgmma_operand ? QnProduct::wgmma
                                                               : QnProduct::mma;
  // The kernel begins with zeros in the rows, or columns, of that operand that n does not take.
  static constexpr bool clears_n = normalized && n_is_wgmma_operand;
  // The state hands n over for q.n, or for the store warp that keeps it.
  static constexpr bool hands_n = normalized || (store_keeps_states && !reverse);

  // The first token block of a sequence without an initial state has C = 0 and n = 0. Where states are not kept, such a
  // state is not handed over. Heads of large dqk multiply by the zeros: a product of theirs is in flight before the
  // scores are gated, and products must not end in a branch.
  static constexpr bool skips_fresh = !keeps_states && !split_state;
  // The last update of a state that nothing reads is left out. The state warps of a packed split state with n have no
  // register for the question.
  static constexpr bool skips_last = !(split_state && packed && normalized);

  // scale / den multiplies the rows of O last. Otherwise it is in P and in the weight of Q C. In float16 P is near the
  // upper end of the range, and both parts have the scale16 of the row till then.
  static constexpr bool late_factors = scaled || n_in_state_product || factored;
  // Steps of 16 keys whose P is the sum of two bfloat16: all of them where both parts of dqk round theirs. None in
  // gradients: dQ and dK are made of the same rounded dS, whose errors cancel in the gradient of the forget gate.
  static constexpr int split_steps = scaled || reverse || grad_qk ? 0 : dqk_part == DqkPart::all ? 1 : 4;

  // Keys are weighted in pairs where n or a second term of keys comes with them; with 64 rows that spills.
  static constexpr bool paired_weights =
      !scaled && (split_state ? normalized || keeps_states : keeps_states && dqk_panels == 2);
  static constexpr bool one_panel = paired_weights || split_state || dqk_panels == 1 || (scaled && packed);
  static constexpr TileConfig tile{.row_panels = part_panels,
                                   .columns = columns,
                                   .terms = !keeps_states    ? KeyTerms::one
                                            : paired_weights ? KeyTerms::two
                                                             : KeyTerms::two_in_turn,
                                   .panels_at_once = one_panel ? 1 : 2,
                                   .operand_sets = (paired_weights || split_state) && !keeps_states && !scaled ? 3 : 2,
                                   .paired_weights = paired_weights,
                                   .sums_n = !reverse && !grad_qk,
                                   .reads_ahead = factored};

  static constexpr Registers registers() {
    return split_state ? split_state_registers<Config>() : whole_state_registers<Config>();
  }
  static constexpr int output_registers = registers().outputs, state_registers = registers().state;
  static constexpr int move_registers = 512 - output_warpgroups * output_registers - state_warpgroups * state_registers;
};

}  // namespace tfla::cuda::sm90::forward
