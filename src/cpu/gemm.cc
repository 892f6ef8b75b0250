#include "cpu/gemm.h"

#ifndef TFLA_BLAS_REFERENCE
#include <cblas.h>

#include <string>
#endif

namespace tfla::cpu {

#ifdef TFLA_BLAS_REFERENCE

// Plain loops: the sanitizers see every access, and a machine without BLAS can still build.
namespace {
template <class Real>
void multiply(Matrix<Real> out, Matrix<const Real> a, Matrix<const Real> b, Real beta) {
  const std::int64_t a_row = a.transposed ? 1 : a.stride;
  const std::int64_t a_col = a.transposed ? a.stride : 1;
  const std::int64_t b_row = b.transposed ? 1 : b.stride;
  const std::int64_t b_col = b.transposed ? b.stride : 1;
  for (std::int64_t r = 0; r < out.rows; ++r) {
    Real* row = out.row(r);
    for (std::int64_t c = 0; c < out.cols; ++c) row[c] = beta == 0 ? 0 : beta * row[c];
    for (std::int64_t x = 0; x < a.cols; ++x) {
      const Real factor = a.data[r * a_row + x * a_col];
      for (std::int64_t c = 0; c < out.cols; ++c) row[c] += factor * b.data[x * b_row + c * b_col];
    }
  }
}
}  // namespace

void product(Matrix<float> out, Matrix<const float> a, Matrix<const float> b, float beta) { multiply(out, a, b, beta); }
void product(Matrix<double> out, Matrix<const double> a, Matrix<const double> b, double beta) {
  multiply(out, a, b, beta);
}
const char* blas_name() { return "plain loops"; }

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

void product(Matrix<float> out, Matrix<const float> a, Matrix<const float> b, float beta) {
  keep_products_on_one_thread();
  cblas_sgemm(CblasRowMajor, op(a.transposed), op(b.transposed), narrow(out.rows), narrow(out.cols), narrow(a.cols),
              1.0F, a.data, narrow(a.stride), b.data, narrow(b.stride), beta, out.data, narrow(out.stride));
}

void product(Matrix<double> out, Matrix<const double> a, Matrix<const double> b, double beta) {
  keep_products_on_one_thread();
  cblas_dgemm(CblasRowMajor, op(a.transposed), op(b.transposed), narrow(out.rows), narrow(out.cols), narrow(a.cols),
              1.0, a.data, narrow(a.stride), b.data, narrow(b.stride), beta, out.data, narrow(out.stride));
}

const char* blas_name() {
  static const std::string text = std::string(openblas_get_config()) + " on " + openblas_get_corename();
  return text.c_str();
}

#endif

}  // namespace tfla::cpu
