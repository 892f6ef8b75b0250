// How the kernels that pass over [B,T,H,P] tensors walk through them: a thread has 16 bytes of columns of one head, and
// the tokens of a block one after the other.
#pragma once

#include "cuda/ssd/tokens.cuh"

namespace tfla::cuda::ssd {

inline constexpr int row_threads = 256;

// 16 bytes of a row.
template <class T>
struct alignas(16) Piece {
  static constexpr int size = 16 / static_cast<int>(sizeof(T));
  T x[size];
};

// The head and columns of a thread.
template <class T>
struct Columns {
  int head, first, count;  // columns [first, first + count); 0 where there is nothing to do

  __device__ Columns(const Dims& dims, unsigned cta) {
    constexpr int size = Piece<T>::size;
    const unsigned pieces = static_cast<unsigned>((dims.P + size - 1) / size);
    const unsigned piece = cta * blockDim.x + threadIdx.x;
    head = static_cast<int>(piece / pieces);
    first = static_cast<int>(piece % pieces) * size;
    count = head >= dims.heads ? 0 : min(size, dims.P - first);
  }
};

template <class T>
__device__ __forceinline__ std::int64_t row_at(const Strided& tensor, const Position& position, const Columns<T>& own) {
  return position.batch * tensor.batch + position.token * tensor.token + own.head * tensor.head + own.first;
}

// Columns of a row, zero behind the last.
template <class T, bool Wide, class Real>
__device__ __forceinline__ void load(const Strided& tensor, const Position& position, const Columns<T>& own,
                                     Real (&to)[Piece<T>::size]) {
  const T* from = static_cast<const T*>(tensor.data) + row_at(tensor, position, own);
  Piece<T> piece;
  if constexpr (Wide) piece = *reinterpret_cast<const Piece<T>*>(from);
#pragma unroll
  for (int e = 0; e < Piece<T>::size; ++e) {
    if constexpr (Wide) {
      to[e] = widen<Real>(piece.x[e]);
    } else {
      to[e] = e < own.count ? widen<Real>(from[e]) : Real{0};
    }
  }
}

template <class T, bool Wide, class Real>
__device__ __forceinline__ void store(const Strided& tensor, const Position& position, const Columns<T>& own,
                                      const Real (&x)[Piece<T>::size]) {
  T* to = static_cast<T*>(tensor.data) + row_at(tensor, position, own);
  Piece<T> piece;
#pragma unroll
  for (int e = 0; e < Piece<T>::size; ++e) {
    piece.x[e] = narrow<T>(x[e]);
    if constexpr (!Wide) {
      if (e < own.count) to[e] = piece.x[e];
    }
  }
  if constexpr (Wide) *reinterpret_cast<Piece<T>*>(to) = piece;
}

// D of a thread's columns.
template <class T, class Real>
__device__ __forceinline__ void load_skip(const PerHead& D, const Columns<T>& own, Real (&to)[Piece<T>::size]) {
#pragma unroll
  for (int e = 0; e < Piece<T>::size; ++e)
    to[e] = D.data != nullptr && e < own.count ? read_number<Real>(D, own.head, own.first + e) : Real{0};
}

// Calls work(position, number, whether it is in a sequence) for the tokens of a block.
template <class Work>
__device__ __forceinline__ void each_token(const Sequences& sequences, const Dims& dims, std::int64_t block, int count,
                                           const Work& work) {
  const Packed packed(sequences, dims);
  const std::int64_t begin = block * count, all = dims.positions(), end = begin + count < all ? begin + count : all;
  Position position(dims, begin);
  for (std::int64_t at = begin; at < end; ++at, position.advance(dims, 1)) work(position, packed.has(position.token));
}

// CTAs side by side on the heads of a token, and threads of each.
template <class T>
struct RowGrid {
  int ctas, threads;

  explicit RowGrid(const Dims& dims) {
    const std::int64_t pieces = dims.heads * ceil_div(dims.P, Piece<T>::size);
    threads = static_cast<int>(pieces < row_threads ? round_up(pieces, warp_size) : row_threads);
    ctas = static_cast<int>(ceil_div(pieces, threads));
  }
};

}  // namespace tfla::cuda::ssd
