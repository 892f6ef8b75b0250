#include "cpu/tile.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <type_traits>

#include "cpu/simd.h"

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

void prefetch_tile(Access access, const TensorView& view, const Tile& tile, std::int64_t head) {
  constexpr std::int64_t line = 64;
  const std::int64_t bytes = view.shape[3] * item_size(view.dtype);
  for (std::int64_t t = tile.begin; t < tile.end; ++t) {
    const auto* row = static_cast<const std::byte*>(row_of(view, tile.sequence, t, head));
    for (std::int64_t at = 0; at < bytes; at += line) {
      if (access == Access::read) {
        __builtin_prefetch(row + at, 0, 2);
      } else {
        __builtin_prefetch(row + at, 1, 2);
      }
    }
  }
}

template <class Real>
Matrix<const Real> load_tile(const TensorView& view, const Tile& tile, std::int64_t head, Real* buffer,
                             std::int64_t first, std::int64_t cols) {
  constexpr DType native = std::is_same_v<Real, double> ? DType::float64 : DType::float32;
  const std::int64_t stride = view.strides[1];
  const bool readable = stride >= cols && stride <= std::numeric_limits<std::int32_t>::max();
  if (view.dtype == native && readable) {
    const auto* data = static_cast<const Real*>(row_of(view, tile.sequence, tile.begin, head)) + first;
    return {data, tile.size(), cols, stride, false};
  }
  const std::int64_t skip = first * item_size(view.dtype);
  for (std::int64_t t = tile.begin; t < tile.end; ++t) {
    const auto* row = static_cast<const std::byte*>(row_of(view, tile.sequence, t, head)) + skip;
    simd::load(row, view.dtype, buffer + (t - tile.begin) * cols, cols);
  }
  return dense<const Real>(buffer, tile.size(), cols);
}

template <class Real>
void store_tile(const Matrix<Real>& from, const Real* factors, const MutableTensorView& view, const Tile& tile,
                std::int64_t head) {
  for (std::int64_t r = 0; r < from.rows; ++r) {
    const Real factor = factors == nullptr ? Real{1} : factors[r];
    simd::store(factor, from.row(r), row_of(view, tile.sequence, tile.begin + r, head), view.dtype, from.cols);
  }
}

template <class Real>
void gate_matrix(const GateVectors<Real>& gates, Real scale, const Matrix<Real>& D) {
  for (std::int64_t t = 0; t < D.rows; ++t) {
    simd::exp_shifted(scale, gates.u[t], gates.c, D.row(t), t + 1);
    std::fill(D.row(t) + t + 1, D.row(t) + D.cols, Real{0});
  }
}

template <class Real>
void gated_scores(Square square, const Matrix<const Real>& Q, const Matrix<const Real>& K, const Matrix<Real>& D,
                  const Matrix<Real>& S) {
  product(S, Q, K.t(), Real{0});
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

#define TFLA_INSTANTIATE(Real)                                                                                     \
  template Matrix<const Real> load_tile(const TensorView&, const Tile&, std::int64_t, Real*, std::int64_t,         \
                                        std::int64_t);                                                             \
  template void store_tile(const Matrix<Real>&, const Real*, const MutableTensorView&, const Tile&, std::int64_t); \
  template void gate_matrix(const GateVectors<Real>&, Real, const Matrix<Real>&);                                  \
  template void gated_scores(Square, const Matrix<const Real>&, const Matrix<const Real>&, const Matrix<Real>&,    \
                             const Matrix<Real>&);                                                                 \
  template void scale_rows(Real, const Real*, const Matrix<const Real>&, const Matrix<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu
