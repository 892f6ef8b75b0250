// The arithmetic type of a call.
#pragma once

#include "tfla/tensor_view.h"

namespace tfla::cpu {

// Calls work(Real{}) with that of the plan.
template <class AnyPlan, class Work>
void with_real(const AnyPlan& plan, const Work& work) {
  if (plan.compute == DType::float64) {
    work(double{});
  } else {
    work(float{});
  }
}

}  // namespace tfla::cpu
