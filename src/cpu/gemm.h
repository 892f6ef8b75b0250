// Matrices and their product. The only place that knows a BLAS exists.
#pragma once

#include <cstdint>

namespace tfla::cpu {

// A row-major matrix in memory, or its transpose as seen by a product.
template <class Real>
struct Matrix {
  Real* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t stride = 0;  // elements between rows in memory
  bool transposed = false;  // rows and cols are those of the transpose

  [[nodiscard]] Matrix t() const { return {data, cols, rows, stride, !transposed}; }
  // For matrices that are not transposed:
  [[nodiscard]] Real* row(std::int64_t index) const { return data + index * stride; }
  [[nodiscard]] Matrix columns(std::int64_t begin, std::int64_t count) const {
    return {data + begin, rows, count, stride, false};
  }
  operator Matrix<const Real>() const {
    return {data, rows, cols, stride, transposed};
  }  // NOLINT(google-explicit-constructor)
};

template <class Real>
[[nodiscard]] Matrix<Real> dense(Real* data, std::int64_t rows, std::int64_t cols) {
  return {data, rows, cols, cols, false};
}

// out = a b + beta out, on the calling thread. beta = 0 never reads out.
void product(Matrix<float> out, Matrix<const float> a, Matrix<const float> b, float beta);
void product(Matrix<double> out, Matrix<const double> a, Matrix<const double> b, double beta);

// Name and version of the matrix library, for reports.
[[nodiscard]] const char* blas_name();

}  // namespace tfla::cpu
