// The step of the delta rule: a token reads what a state says of its key, and writes the difference to its value.
#pragma once

#include "core/decay.h"
#include "cpu/delta/tile.h"
#include "cpu/workers.h"

namespace tfla::cpu::delta {

template <class Real>
struct StepScratch {
  struct Worker {
    Real* q = nullptr;         // [dqk] times scale, normalised where the options say so
    Real* k = nullptr;         // [dqk]
    Real* value = nullptr;     // [panel]
    Real* recalled = nullptr;  // [panel] what the state says
    Real* h = nullptr;         // [panel]

    Worker(Arena& arena, const DeltaPlan& plan);
  };
  Workers<Worker> workers;

  StepScratch(Arena& arena, const DeltaPlan& plan) : workers(arena, plan) {}
};

template <class Real>
void run_step(const Problem& problem, const MutableTensorView& h, const MutableTensorView& state,
              const TensorView& slots, const StepScratch<Real>& scratch);

}  // namespace tfla::cpu::delta
