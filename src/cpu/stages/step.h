// Stage `step`: tokens one after another on a state in place, at the speed of memory. In a loop over a whole sequence
// it is the recurrent formulation.
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

// `slots` may be absent: row b then uses state b.
template <class Real>
void run_step(const Problem& problem, const MutableTensorView& h, const MutableMlstmState& state,
              const TensorView& slots, const StepScratch<Real>& scratch);

template <class Real>
void run_recurrent(const Problem& problem, const MutableTensorView& h, const MutableMlstmState& last_state,
                   const StepScratch<Real>& scratch);

}  // namespace tfla::cpu
