// The recurrent formulation: step over every token of a sequence, on a state in the thread's own memory.
#pragma once

#include "cpu/stages/step.h"

namespace tfla::cpu {

template <class Real>
void run_recurrent(const Problem& problem, const ForwardOutputs& outputs, const StepScratch<Real>& scratch);

}  // namespace tfla::cpu
