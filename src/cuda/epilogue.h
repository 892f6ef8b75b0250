// What Hopper's forward adds to H where it is the scan of the state space dual: y = (H + D x) silu(z), x being V.
#pragma once

#include "cuda/call.h"
#include "tfla/mlstm.h"
#include "tfla/plan.h"

namespace tfla::cuda {

struct Epilogue {
  const float* D = nullptr;  // [H,dhv], or null
  Strided z;                 // data is null where it is not given
  Strided ungated;           // H + D x, where that is wanted besides y
};

// A forward whose plan has the variant `epilogue`: args.h is y.
void forward_with_epilogue(const MlstmForward& args, const Plan& plan, const Epilogue& epilogue, std::byte* scratch,
                           void* stream);

}  // namespace tfla::cuda
