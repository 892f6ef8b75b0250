// What the plan and the CUDA backend of the state space dual both know: the kernels, and how scratch is laid out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/arena.h"
#include "plan/arithmetic.h"
#include "tfla/ssd.h"

namespace tfla {

// Launches of a plan for CUDA.
enum class SsdKernel : std::uint8_t {
  turn_states,          // states of the caller, [N,H,P,S], as the scan takes them, [N,H,S,P]
  time_steps,           // log f and log i; D as the scan reads it
  epilogue_gradients,   // the gradients of h and z
  scan,                 // the launches of SsdPlan::scan
  epilogue,             // D x and silu(z) behind h, where the scan has not done that
  skip_gradients,       // D dh into dx, and sums of dh x over blocks of tokens
  time_step_gradients,  // ddt, and sums for dA and ddt_bias over blocks of tokens
  sum_tokens,           // dA, ddt_bias and dD from these
  turn_back,            // states of the scan as the caller wants them
  step
};
[[nodiscard]] const char* name(SsdKernel kernel);

// Whether the scan adds D x and multiplies by silu(z) itself.
[[nodiscard]] bool has_fused_epilogue(const SsdPlan& plan);

inline constexpr std::int64_t ssd_token_block = 64;  // tokens of a sum
[[nodiscard]] inline std::int64_t ssd_token_blocks(const MlstmShape& shape) {
  return ceil_div(shape.batch * shape.tokens, ssd_token_block);
}

// A state of the scan. n and m have no denominator to enter, and the scan carries them all the same.
template <class Real>
struct SsdState {
  Real* C = nullptr;  // [N,H,S,P]
  Real* n = nullptr;  // [N,H,S]
  Real* m = nullptr;  // [N,H]
};

// Scratch of a call. Real: float, or double for float64 tensors. What a call does not need is null.
template <class Real>
struct SsdScratch {
  std::byte* scan = nullptr;
  Real* log_f = nullptr;  // [B,T,H]
  Real* log_i = nullptr;
  Real* D = nullptr;       // [H,P] for a fused epilogue
  SsdState<Real> initial;  // n and m are the same zeros
  SsdState<Real> last;
  Real* df = nullptr;  // [B,T,H]
  Real* di = nullptr;
  std::byte* dh = nullptr;     // [B,T,H,P] in the dtype of x
  Real* dlast = nullptr;       // [N,H,S,P]
  Real* dinitial = nullptr;    // [N,H,S,P]
  double* dA = nullptr;        // [blocks,H]
  double* ddt_bias = nullptr;  // [blocks,H]
  Real* dD = nullptr;          // [blocks,H,P]

  SsdScratch() = default;
  SsdScratch(Arena& arena, const SsdPlan& plan) {
    if (plan.operation == Operation::step) return;
    const MlstmShape& shape = plan.scan.shape;
    const SsdGiven& given = plan.given;
    const bool forward = plan.operation == Operation::forward;
    const std::int64_t steps = shape.batch * shape.tokens * shape.heads, states = shape.sequences * shape.heads;
    const std::int64_t matrices = states * shape.dqk * shape.dhv;
    scan = arena.take<std::byte>(static_cast<std::int64_t>(plan.scan.scratch_bytes));
    for (Real** gate : {&log_f, &log_i}) *gate = arena.take<Real>(steps);
    if (given.D && has_fused_epilogue(plan)) D = arena.take<Real>(shape.heads * shape.dhv);
    if (given.initial_state) {
      initial.C = arena.take<Real>(matrices);
      initial.n = initial.m = arena.take<Real>(states * shape.dqk);
    }
    if (forward) {
      if (!given.last_state) return;
      last = {arena.take<Real>(matrices), arena.take<Real>(states * shape.dqk), arena.take<Real>(states)};
      return;
    }
    for (Real** gradient : {&df, &di}) *gradient = arena.take<Real>(steps);
    if (given.z) dh = arena.take<std::byte>(steps * shape.dhv * item_size(shape.dtype));
    if (given.last_state) dlast = arena.take<Real>(matrices);
    if (given.dinitial_state) dinitial = arena.take<Real>(matrices);
    const std::int64_t blocks = ssd_token_blocks(shape);
    for (double** sums : {&dA, &ddt_bias}) *sums = arena.take<double>(blocks * shape.heads);
    if (given.D) dD = arena.take<Real>(blocks * shape.heads * shape.dhv);
  }
};

}  // namespace tfla
