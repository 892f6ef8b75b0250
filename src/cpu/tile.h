// What the matrix stages share: operands of a tile, its gate matrix, its gated scores.
#pragma once

#include <type_traits>

#include "cpu/kernels/product.h"
#include "cpu/problem.h"
#include "cpu/stages/gates.h"

namespace tfla::cpu {

// Tokens [begin, end) of one head of one sequence.
struct Tile {
  const Sequence& sequence;
  std::int64_t head = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;

  [[nodiscard]] std::int64_t size() const { return end - begin; }
};

// Address of row (token of the sequence, head) of a [B,T,H,D] tensor.
[[nodiscard]] const void* row_of(const TensorView& view, const Sequence& sequence, std::int64_t token,
                                 std::int64_t head);
[[nodiscard]] void* row_of(const MutableTensorView& view, const Sequence& sequence, std::int64_t token,
                           std::int64_t head);

// The type that needs no conversion.
template <class Real>
inline constexpr DType native = std::is_same_v<Real, double> ? DType::float64 : DType::float32;

// Columns [first, first + cols) of a tile of a [B,T,H,D] tensor, converted into `buffer`. Numbers that need no
// conversion are copied too: rows of one head often lie a power of two apart and would share a few sets of the
// first-level cache (training at T 2,048, 4 heads 128/256 took a quarter longer in place).
template <class Real>
[[nodiscard]] Matrix<const Real> load_tile(const TensorView& view, const Tile& tile, std::int64_t head, Real* buffer,
                                           std::int64_t first, std::int64_t cols);

// The same with each row times its factor.
template <class Real>
[[nodiscard]] Matrix<Real> load_scaled(const TensorView& view, const Tile& tile, std::int64_t head, const Real* factors,
                                       Real* buffer, std::int64_t first, std::int64_t cols);

// Rows of `from`, each times its factor (null: 1), into a tile of a [B,T,H,D] tensor.
template <class Real>
void store_tile(const Matrix<Real>& from, const Real* factors, const MutableTensorView& view, const Tile& tile,
                std::int64_t head);

// Gate matrix D_tj = scale exp(u_t + c_j) of a tile on the diagonal; zero above it.
template <class Real>
void gate_matrix(const GateVectors<Real>& gates, Real scale, const Matrix<Real>& D);

// A square of the gate matrix lies on the diagonal, where row t sees columns up to t, or below it, where it sees all.
enum class Square : std::uint8_t { diagonal, below };
[[nodiscard]] inline std::int64_t visible(Square square, std::int64_t row, std::int64_t cols) {
  return square == Square::diagonal ? row + 1 : cols;
}

// S = D . (Q K^T). Above the diagonal S is set to zero, whatever Q and K hold there.
template <class Real>
void gated_scores(Square square, const Matrix<const Real>& Q, const Matrix<const Real>& K, const Matrix<Real>& D,
                  const Matrix<Real>& S);

// out_t = factor_t x_t for the rows of a tile.
template <class Real>
void scale_rows(Real scale, const Real* factors, const Matrix<const Real>& x, const Matrix<Real>& out);

}  // namespace tfla::cpu
