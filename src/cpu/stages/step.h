// Stage `step`: tokens one after another on a state in place, at the speed of memory. Over a whole sequence it is the
// recurrent formulation.
#pragma once

#include "core/decay.h"
#include "cpu/stages/denominators.h"
#include "cpu/stages/states.h"
#include "cpu/workers.h"

namespace tfla::cpu {

// What the tokens do to the state, in scalars: C = decay C + weight k v^T, h = C^T (scale q) * inverse.
template <class Real>
struct TokenGates {
  double* log_f = nullptr;       // [H,tokens]
  double* log_i = nullptr;       // [H,tokens]
  Decay<Real>* decay = nullptr;  // [H,tokens]
  Real* weight = nullptr;        // [H,tokens]
  Real* inverse = nullptr;       // [H,tokens] 1 / den

  TokenGates() = default;
  TokenGates(Arena& arena, const Plan& plan);
};

// Scratch of step and of the recurrent formulation.
template <class Real>
struct StepScratch {
  struct Worker {
    Real* q = nullptr;      // [dqk] scale q
    Real* input = nullptr;  // [dqk] weight k
    double* n = nullptr;    // [dqk] in double while tokens go by
    Real* v = nullptr;      // [panel] converted values
    Real* h = nullptr;      // [panel]
    Real* state = nullptr;  // [dqk,panel + 1]; only the recurrent formulation, whose state is not the caller's

    Worker(Arena& arena, const Plan& plan);
  };

  TokenGates<Real> gates;
  double* m_last = nullptr;  // [N,H]
  Workers<Worker> workers;

  StepScratch(Arena& arena, const Plan& plan);
};

// The scalar part of every token of one head, from max state m and n in place: gates, the recurrence of n and m, the
// denominators. Returns the new m.
template <class Real>
double token_gates(const Problem& problem, const Sequence& sequence, std::int64_t head, double m, Real* n,
                   const StepScratch<Real>& scratch, const typename StepScratch<Real>::Worker& worker);

// Every token of one head on some columns of its state, after its token_gates.
template <class Real>
void token_outputs(const Problem& problem, const Sequence& sequence, std::int64_t head, Columns columns,
                   const Matrix<Real>& C, const StepScratch<Real>& scratch,
                   const typename StepScratch<Real>::Worker& worker, const MutableTensorView& h);

// The columns of the state are dealt out in panels of plan.panel.
[[nodiscard]] inline std::int64_t step_panels(const Plan& plan) {
  return (plan.shape.dhv + plan.panel - 1) / plan.panel;
}
[[nodiscard]] inline Columns step_columns(const Plan& plan, std::int64_t panel) {
  return {panel * plan.panel, std::min(plan.panel, plan.shape.dhv - panel * plan.panel)};
}

// One call of step. `slots` may be absent: row b then uses state b.
template <class Real>
void run_step(const Problem& problem, const MutableTensorView& h, const MutableMlstmState& state,
              const TensorView& slots, const StepScratch<Real>& scratch);

}  // namespace tfla::cpu
