// One call of the state space dual's step: tokens one after another on states in place, at the speed of memory.
#pragma once

#include "core/arena.h"
#include "cpu/workers.h"
#include "tfla/ssd.h"

namespace tfla::cpu::ssd {

template <class Real>
struct StepScratch {
  struct Worker {
    Real* B = nullptr;  // [S]
    Real* C = nullptr;  // [S]
    Real* x = nullptr;  // [P]
    Real* y = nullptr;  // [P]
    Real* z = nullptr;  // [P]
    Real* S = nullptr;  // [S] a row of a state that is kept in 16 bits

    Worker(Arena& arena, const SsdPlan& plan);
  };
  Workers<Worker> workers;

  StepScratch(Arena& arena, const SsdPlan& plan);
};

template <class Real>
void run_step(const SsdStep& args, const SsdPlan& plan, const StepScratch<Real>& scratch);

}  // namespace tfla::cpu::ssd
