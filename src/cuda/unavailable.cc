// What stands in for the CUDA backend in a build without it.
#include "plan/backend.h"
#include "plan/operators/conv_backend.h"
#include "plan/operators/delta_backend.h"
#include "plan/operators/ssd_backend.h"

namespace tfla {

const Backend* cuda_backend() { return nullptr; }
const ConvBackend* cuda_conv_backend() { return nullptr; }
const DeltaBackend* cuda_delta_backend() { return nullptr; }
const SsdBackend* cuda_ssd_backend() { return nullptr; }

}  // namespace tfla
