// What the matrix stages share: operands of a tile, its gate matrix, its gated scores.
#pragma once

#include "cpu/gates.h"
#include "cpu/gemm.h"
#include "cpu/problem.h"

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

// Asks for a tile of a [B,T,H,D] tensor ahead of its use. Rows of one head lie far apart, which hardware prefetchers do
// not follow; a tile's products leave time enough for the next tile to arrive.
enum class Access : std::uint8_t { read, write };
void prefetch_tile(Access access, const TensorView& view, const Tile& tile, std::int64_t head);

// Columns [first, first + cols) of a tile of a [B,T,H,D] tensor: in place where the matrix library can read it there,
// else converted into `buffer`.
template <class Real>
[[nodiscard]] Matrix<const Real> load_tile(const TensorView& view, const Tile& tile, std::int64_t head, Real* buffer,
                                           std::int64_t first, std::int64_t cols);

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
