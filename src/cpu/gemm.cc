#include "cpu/gemm.h"

#ifndef TFLA_BLAS_REFERENCE
#include <cblas.h>

#include <string>
#endif

namespace tfla::cpu {

#ifdef TFLA_BLAS_REFERENCE

void library_product(const Matrix<float>& out, const Matrix<const float>& a, const Matrix<const float>& b) {
  product(out, a, b, 0.0F);
}
const char* blas_name() { return "kernels of tfla"; }

#else

namespace {

// tfla's own threads share the work out, so each product stays on the thread that asks for it. The copy of OpenBLAS is
// private to this library (static, hidden), so this setting reaches nobody else. Debian's *serial* OpenBLAS would
// need no setting, but it is not thread safe: two threads calling sgemm at once got wrong products within a second.
void keep_products_on_one_thread() {
  static const bool done = [] {
    openblas_set_num_threads(1);
    return true;
  }();
  static_cast<void>(done);
}

CBLAS_TRANSPOSE op(bool transposed) { return transposed ? CblasTrans : CblasNoTrans; }
blasint narrow(std::int64_t value) { return static_cast<blasint>(value); }

}  // namespace

void library_product(const Matrix<float>& out, const Matrix<const float>& a, const Matrix<const float>& b) {
  keep_products_on_one_thread();
  cblas_sgemm(CblasRowMajor, op(a.transposed), op(b.transposed), narrow(out.rows), narrow(out.cols), narrow(a.cols),
              1.0F, a.data, narrow(a.stride), b.data, narrow(b.stride), 0.0F, out.data, narrow(out.stride));
}

const char* blas_name() {
  static const std::string text = std::string(openblas_get_config()) + " on " + openblas_get_corename();
  return text.c_str();
}

#endif

}  // namespace tfla::cpu
