// Matrices and their products, by kernels for the shapes that occur here: one side is a tile of tokens, the other a
// tile or a state.
#pragma once

#include <cstdint>

#include "plan/cpu_sizes.h"

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

// A dense matrix with padded rows.
template <class Real>
[[nodiscard]] Matrix<Real> spread(Real* data, std::int64_t rows, std::int64_t cols) {
  return {data, rows, cols, padded(cols), false};
}

// The part of a square matrix that matters, its diagonal included: the rest is zero, or nobody's concern.
enum class Part : std::uint8_t { all, lower, upper };

// out = a b + beta added. beta = 0 reads nothing.
template <class Real>
struct Product {
  Matrix<Real> out;  // not transposed
  Matrix<const Real> a;
  Matrix<const Real> b;
  Real beta = 0;
  Matrix<const Real> added = {};  // not transposed; `out` itself, or apart from it
  Part a_part = Part::all;        // the rest of a is zero
  Part out_part = Part::all;      // all or lower; the rest of out may be left as it was
  Real* copy = nullptr;  // of the whole out, its rows as far apart: for later, so it bypasses the caches where it can
};

// On the calling thread. Each element of out is one chain of multiply-adds in the order of a's columns, in blocks of
// 128 of them, so it depends on neither the number of rows and columns nor on where they begin.
void multiply(const Product<float>& product);
void multiply(const Product<double>& product);

// out = a b + beta out
inline void product(const Matrix<float>& out, const Matrix<const float>& a, const Matrix<const float>& b, float beta) {
  multiply(Product<float>{.out = out, .a = a, .b = b, .beta = beta, .added = out});
}
inline void product(const Matrix<double>& out, const Matrix<const double>& a, const Matrix<const double>& b,
                    double beta) {
  multiply(Product<double>{.out = out, .a = a, .b = b, .beta = beta, .added = out});
}

}  // namespace tfla::cpu
