#include "cli/support/blas.h"

#include <cblas.h>

namespace tfla::cli {
namespace {

// Threads of this program share the work out, so each product stays on the thread that asks for it. Debian's *serial*
// OpenBLAS would need no setting, but it is not thread safe: two threads calling sgemm at once got wrong products
// within a second.
void keep_products_on_one_thread() {
  static const bool done = [] {
    openblas_set_num_threads(1);
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace

void check_blas() {}

std::string blas_name() { return std::string(openblas_get_config()) + " on " + openblas_get_corename(); }

void blas_product(int size, const float* a, const float* b, float* out) {
  keep_products_on_one_thread();
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, size, size, size, 1.0F, a, size, b, size, 0.0F, out, size);
}

}  // namespace tfla::cli
