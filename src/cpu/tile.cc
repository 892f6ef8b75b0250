#include "cpu/tile.h"

#include <algorithm>
#include <cstddef>

#include "cpu/kernels/simd.h"

namespace tfla::cpu {

namespace {

std::int64_t byte_offset(const TensorView& view, const Sequence& sequence, std::int64_t token, std::int64_t head) {
  return (sequence.batch * view.strides[0] + (sequence.offset + token) * view.strides[1] + head * view.strides[2]) *
         item_size(view.dtype);
}

}  // namespace

const void* row_of(const TensorView& view, const Sequence& sequence, std::int64_t token, std::int64_t head) {
  return static_cast<const std::byte*>(view.data) + byte_offset(view, sequence, token, head);
}

void* row_of(const MutableTensorView& view, const Sequence& sequence, std::int64_t token, std::int64_t head) {
  return static_cast<std::byte*>(view.data) + byte_offset(view, sequence, token, head);
}

template <class Real>
Matrix<const Real> load_tile(const TensorView& view, const Tile& tile, std::int64_t head, Real* buffer,
                             std::int64_t first, std::int64_t cols) {
  const std::int64_t skip = first * item_size(view.dtype);
  for (std::int64_t t = tile.begin; t < tile.end; ++t) {
    const auto* row = static_cast<const std::byte*>(row_of(view, tile.sequence, t, head)) + skip;
    simd::load(row, view.dtype, buffer + (t - tile.begin) * padded(cols), cols);
  }
  return spread<const Real>(buffer, tile.size(), cols);
}

template <class Real>
Matrix<Real> load_scaled(const TensorView& view, const Tile& tile, std::int64_t head, const Real* factors, Real* buffer,
                         std::int64_t first, std::int64_t cols) {
  const Matrix<Real> out = spread(buffer, tile.size(), cols);
  for (std::int64_t r = 0; r < tile.size(); ++r) {
    const void* row = row_of(view, tile.sequence, tile.begin + r, head);
    if (view.dtype == native<Real>) {
      simd::scale(factors[r], static_cast<const Real*>(row) + first, out.row(r), cols);
    } else {
      simd::load(static_cast<const std::byte*>(row) + first * item_size(view.dtype), view.dtype, out.row(r), cols);
      simd::scale(factors[r], out.row(r), out.row(r), cols);
    }
  }
  return out;
}

template <class Real>
void store_tile(const Matrix<Real>& from, const Real* factors, const MutableTensorView& view, const Tile& tile,
                std::int64_t head) {
  // A tensor that a core's cache would not keep anyway need not pass through it.
  constexpr std::int64_t large = std::int64_t{1} << 20;
  const bool streams =
      view.dtype == native<Real> && view.shape[1] * view.shape[2] * view.shape[3] * item_size(view.dtype) > large;
  for (std::int64_t r = 0; r < from.rows; ++r) {
    const Real factor = factors == nullptr ? Real{1} : factors[r];
    void* row = row_of(view, tile.sequence, tile.begin + r, head);
    if (streams) {
      simd::stream(factor, from.row(r), static_cast<Real*>(row), from.cols);
    } else {
      simd::store(factor, from.row(r), row, view.dtype, from.cols);
    }
  }
}

template <class Real>
void gate_matrix(const GateVectors<Real>& gates, Real scale, const Matrix<Real>& D) {
  for (std::int64_t t = 0; t < D.rows; ++t) {
    // Whole vectors, where the row has room for them; what is beyond the diagonal is overwritten.
    constexpr std::int64_t step = 16;
    simd::exp_shifted(scale, gates.u[t], gates.c, D.row(t), std::min((t + step) / step * step, D.cols));
    std::fill(D.row(t) + t + 1, D.row(t) + D.cols, Real{0});
  }
}

template <class Real>
void gated_scores(Square square, const Matrix<const Real>& Q, const Matrix<const Real>& K, const Matrix<Real>& D,
                  const Matrix<Real>& S) {
  const Part part = square == Square::diagonal ? Part::lower : Part::all;
  multiply(Product<Real>{.out = S, .a = Q, .b = K.t(), .out_part = part});
  for (std::int64_t t = 0; t < S.rows; ++t) {
    const std::int64_t seen = visible(square, t, S.cols);
    simd::multiply(D.row(t), S.row(t), seen);
    std::fill(S.row(t) + seen, S.row(t) + S.cols, Real{0});
  }
}

template <class Real>
void scale_rows(Real scale, const Real* factors, const Matrix<const Real>& x, const Matrix<Real>& out) {
  for (std::int64_t t = 0; t < x.rows; ++t) simd::scale(scale * factors[t], x.row(t), out.row(t), x.cols);
}

#define TFLA_INSTANTIATE(Real)                                                                                      \
  template Matrix<const Real> load_tile(const TensorView&, const Tile&, std::int64_t, Real*, std::int64_t,          \
                                        std::int64_t);                                                              \
  template Matrix<Real> load_scaled(const TensorView&, const Tile&, std::int64_t, const Real*, Real*, std::int64_t, \
                                    std::int64_t);                                                                  \
  template void store_tile(const Matrix<Real>&, const Real*, const MutableTensorView&, const Tile&, std::int64_t);  \
  template void gate_matrix(const GateVectors<Real>&, Real, const Matrix<Real>&);                                   \
  template void gated_scores(Square, const Matrix<const Real>&, const Matrix<const Real>&, const Matrix<Real>&,     \
                             const Matrix<Real>&);                                                                  \
  template void scale_rows(Real, const Real*, const Matrix<const Real>&, const Matrix<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu
