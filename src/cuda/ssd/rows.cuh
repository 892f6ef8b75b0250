// How the kernels that pass over [B,T,H,P] tensors walk through them: a thread has 16 bytes of columns of one head, or
// one column where rows are not aligned, and the tokens of a block one after the other.
#pragma once

#include "cuda/ssd/tokens.cuh"

namespace tfla::cuda::ssd {

inline constexpr int row_threads = 256;

// Columns of a thread.
template <class T, bool Wide>
inline constexpr int piece_size = Wide ? 16 / static_cast<int>(sizeof(T)) : 1;

// Columns of a row that are moved at once.
template <class T, int Size>
struct alignas(Size * sizeof(T)) Piece {
  T x[Size];
};

// The head and columns of a thread.
template <int Size>
struct Columns {
  int head, first;
  bool exist;

  __device__ Columns(const Dims& dims, unsigned cta) {
    const unsigned pieces = static_cast<unsigned>(dims.P) / Size, piece = cta * blockDim.x + threadIdx.x;
    head = static_cast<int>(piece / pieces);
    first = static_cast<int>(piece % pieces) * Size;
    exist = head < dims.heads;
  }
};

template <int Size>
__device__ __forceinline__ std::int64_t row_at(const Strided& tensor, const Position& position,
                                               const Columns<Size>& own) {
  return position.batch * tensor.batch + position.token * tensor.token + own.head * tensor.head + own.first;
}

template <class T, int Size, class Real>
__device__ __forceinline__ void load(const Strided& tensor, const Position& position, const Columns<Size>& own,
                                     Real (&to)[Size]) {
  const T* from = static_cast<const T*>(tensor.data) + row_at(tensor, position, own);
  const auto piece = *reinterpret_cast<const Piece<T, Size>*>(from);
#pragma unroll
  for (int e = 0; e < Size; ++e) to[e] = widen<Real>(piece.x[e]);
}

template <class T, int Size, class Real>
__device__ __forceinline__ void store(const Strided& tensor, const Position& position, const Columns<Size>& own,
                                      const Real (&x)[Size]) {
  T* to = static_cast<T*>(tensor.data) + row_at(tensor, position, own);
  Piece<T, Size> piece;
#pragma unroll
  for (int e = 0; e < Size; ++e) piece.x[e] = narrow<T>(x[e]);
  *reinterpret_cast<Piece<T, Size>*>(to) = piece;
}

// D of a thread's columns.
template <int Size, class Real>
__device__ __forceinline__ void load_skip(const PerHead& D, const Columns<Size>& own, Real (&to)[Size]) {
#pragma unroll
  for (int e = 0; e < Size; ++e) to[e] = D.data != nullptr ? read_number<Real>(D, own.head, own.first + e) : Real{0};
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
struct RowGrid {
  int ctas, threads;

  RowGrid(const Dims& dims, int size) {
    const std::int64_t pieces = dims.heads * (dims.P / size);
    threads = static_cast<int>(pieces < row_threads ? round_up(pieces, warp_size) : row_threads);
    ctas = static_cast<int>(ceil_div(pieces, threads));
  }
};

}  // namespace tfla::cuda::ssd
