// What stands in for blas.cc in a build that found no OpenBLAS.
#include "cli/support/blas.h"
#include "tfla/error.h"

namespace tfla::cli {

void check_blas() {
  throw Unavailable(
      "tfla: this build has no BLAS to compare with; install OpenBLAS (Debian: libopenblas-pthread-dev) "
      "and build again");
}

std::string blas_name() { return check_blas(), ""; }
void blas_product(int /*size*/, const float* /*a*/, const float* /*b*/, float* /*out*/) { check_blas(); }

}  // namespace tfla::cli
