// What stands in for the CUDA backend in a build without it.
#include "plan/backend.h"

namespace tfla {

const Backend* cuda_backend() { return nullptr; }

}  // namespace tfla
