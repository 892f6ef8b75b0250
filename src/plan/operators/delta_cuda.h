// What the plan and the CUDA backend of the delta rule both know: the kernels, the tile, and how scratch is laid out.
#pragma once

#include <cstdint>

#include "core/arena.h"
#include "plan/arithmetic.h"
#include "tfla/delta.h"

namespace tfla {

// Launches of a plan for CUDA.
enum class DeltaKernel : std::uint8_t {
  norms,                // 1 / |q| and 1 / |k| of every token
  padding,              // zeros in outputs of tokens that are in no sequence
  forward,              // residuals, outputs and states, tile by tile
  solve,                // Hopper: the triangular system of every tile, all tiles side by side
  forward_on_chip,      // Hopper: forward from what solve made, with the states in registers
  states_on_chip,       // the same for states
  grad_states_on_chip,  // the same for grad_states
  states,               // residuals, and the states at the starts of tiles
  grad_states,  // dX and dV, and the gradients of the states at the ends of tiles, from the last tile to the first
  gradients,    // dq and dk of every value head, dbeta and dg, all tiles side by side
  sum_heads,    // dq and dk over the value heads that share them, through the norm
  sum_tokens,   // dA_log and ddt_bias
  step
};
[[nodiscard]] const char* name(DeltaKernel kernel);

// Tokens of a tile, columns of a state that a CTA takes, and rows and columns of one product: as many as shared memory
// of every GPU has room for.
[[nodiscard]] constexpr int delta_block(DType compute) { return compute == DType::float64 ? 32 : 64; }

// Hopper: what solve leaves of a tile of one head, in rows of 64 numbers of 16 bits: a square in two terms, and vectors
// of 64 floats.
namespace hopper {
inline constexpr std::int64_t delta_tile = 64;
inline constexpr std::int64_t delta_vector_rows = 24;  // two for each of ten vectors, and eight rows are a kilobyte
inline constexpr std::int64_t solved_rows = 2 * delta_tile + delta_vector_rows;
inline constexpr std::int64_t solved_numbers = solved_rows * delta_tile;
inline constexpr std::int64_t delta_most_dqk = 128;
}  // namespace hopper

[[nodiscard]] bool launches(const DeltaPlan& plan, DeltaKernel kernel);

// Upper bound of the number of tiles. Those of a packed sequence are counted from start / tile + its number.
[[nodiscard]] inline std::int64_t delta_tiles(const DeltaPlan& plan) {
  const DeltaShape& shape = plan.shape;
  return shape.packed ? shape.tokens / plan.tile + shape.sequences
                      : shape.sequences * ceil_div(shape.tokens, plan.tile);
}

// Scratch of a call. Real: float, or double for float64 tensors.
template <class Real>
struct DeltaScratch {
  Real* q_norm = nullptr;          // [B,T,Hqk] 1 / |q|, where q and k are normalised
  Real* k_norm = nullptr;          // [B,T,Hqk]
  Real* states = nullptr;          // forward: [N,H,dqk,dhv]; backward: [tiles,H,dqk,dhv] at the starts of tiles
  Real* grad_states = nullptr;     // [tiles,H,dqk,dhv] at the ends of tiles
  void* solved = nullptr;          // [tiles,H,solved_rows,64] of 16 bits, for forward_on_chip
  Real* residuals = nullptr;       // [B,T,H,dhv] r
  Real* grad_residuals = nullptr;  // [B,T,H,dhv] dX
  Real* dq = nullptr;              // [B,T,H,dqk] by value head, before the norm
  Real* dk = nullptr;              // [B,T,H,dqk]
  double* dA_log = nullptr;        // [tiles,H]
  double* ddt_bias = nullptr;      // [tiles,H]

  DeltaScratch() = default;
  // Of one slice of the heads, all of them in forward.
  DeltaScratch(Arena& arena, const DeltaPlan& plan) {
    const DeltaShape& shape = plan.shape;
    if (plan.operation == Operation::step) return;
    const std::int64_t tokens = shape.batch * shape.tokens;
    const std::int64_t qk_heads = ceil_div(shape.qk_heads, plan.slices);
    const std::int64_t heads = qk_heads * (shape.heads / shape.qk_heads);
    if (plan.options.normalize_qk) {
      for (Real** norms : {&q_norm, &k_norm}) *norms = arena.take<Real>(tokens * qk_heads);
    }
    const bool forward = plan.operation == Operation::forward;
    const std::int64_t tiles = delta_tiles(plan);
    if (launches(plan, DeltaKernel::solve)) {
      solved = arena.take<std::uint16_t>(tiles * heads * hopper::solved_numbers);
      if (forward) return;
    }
    states = arena.take<Real>((forward ? shape.sequences : tiles) * heads * shape.dqk * shape.dhv);
    if (forward) return;
    grad_states = arena.take<Real>(tiles * heads * shape.dqk * shape.dhv);
    for (Real** rows : {&residuals, &grad_residuals}) *rows = arena.take<Real>(tokens * heads * shape.dhv);
    for (Real** rows : {&dq, &dk}) *rows = arena.take<Real>(tokens * heads * shape.dqk);
    for (double** sums : {&dA_log, &ddt_bias}) *sums = arena.take<double>(tiles * heads);
  }
};

}  // namespace tfla
