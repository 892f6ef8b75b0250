// The kernels behind product.h, compiled once per instruction set. Included by product.cc through foreach_target only.
#if defined(TFLA_CPU_PRODUCT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TFLA_CPU_PRODUCT_INL_H
#undef TFLA_CPU_PRODUCT_INL_H
#else
#define TFLA_CPU_PRODUCT_INL_H
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace tfla::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using std::int64_t;

// A block of out stays in registers while the columns of a go by: 6 rows of 4 vectors where there are 32 registers, of
// 2 where there are 16. b is read in vectors and a element by element, so neither needs packing; of the shapes that
// fit, this one loads least per multiply-add (10 loads for 24: 175 GFLOP/s at 64 x 256 x 128 on an Ice Lake core, where
// 12 rows of 2 vectors reach 147).
constexpr int block_rows = 6;
constexpr int block_vectors = HWY_ARCH_X86 != 0 && HWY_TARGET > HWY_AVX3 ? 2 : 4;
// Rows of b at a time. With the vectors of a block that is 32 KiB, which the first-level cache keeps for all rows of a;
// 64 and 256 rows made training 3 and 2 % slower.
constexpr int64_t depth_block = 128;

template <class Real>
constexpr int64_t lanes = hn::MaxLanes(hn::ScalableTag<Real>());
template <class Real>
constexpr int64_t panel_cols = lanes<Real>* block_vectors;

// Some rows and vectors of out.
template <class Real>
struct Block {
  int64_t depth;
  const Real* a;
  int64_t a_row;
  int64_t a_col;
  const Real* b;
  int64_t b_row;
  Real beta;
  const Real* added;
  int64_t added_row;
  Real* out;
  int64_t out_row;
  Real* copy;  // null, or aligned to a vector in every row
};

template <int Rows, int Vectors, class Real>
void multiply_block(const Block<Real>& block) {
  const hn::ScalableTag<Real> d;
  using Vector = hn::Vec<decltype(d)>;
  Vector sums[Rows][Vectors];
  // Unrolled throughout: an array that is indexed by a variable anywhere would live in memory.
  HWY_UNROLL(6)
  for (int r = 0; r < Rows; ++r) {
    HWY_UNROLL(4)
    for (int v = 0; v < Vectors; ++v) sums[r][v] = hn::Zero(d);
  }
  const Real* a = block.a;
  const Real* b = block.b;
  for (int64_t k = 0; k < block.depth; ++k) {
    Vector right[Vectors];
    HWY_UNROLL(4)
    for (int v = 0; v < Vectors; ++v) right[v] = hn::LoadU(d, b + v * lanes<Real>);
    HWY_UNROLL(6)
    for (int r = 0; r < Rows; ++r) {
      const Vector left = hn::Set(d, a[r * block.a_row]);
      HWY_UNROLL(4)
      for (int v = 0; v < Vectors; ++v) sums[r][v] = hn::MulAdd(left, right[v], sums[r][v]);
    }
    a += block.a_col;
    b += block.b_row;
  }
  if (block.beta != 0) {
    const Vector beta = hn::Set(d, block.beta);
    HWY_UNROLL(6)
    for (int r = 0; r < Rows; ++r) {
      const Real* added = block.added + r * block.added_row;
      HWY_UNROLL(4)
      for (int v = 0; v < Vectors; ++v) {
        sums[r][v] = hn::MulAdd(beta, hn::LoadU(d, added + v * lanes<Real>), sums[r][v]);
      }
    }
  }
  HWY_UNROLL(6)
  for (int r = 0; r < Rows; ++r) {
    HWY_UNROLL(4)
    for (int v = 0; v < Vectors; ++v) hn::StoreU(sums[r][v], d, block.out + r * block.out_row + v * lanes<Real>);
  }
  if (block.copy == nullptr) return;
  HWY_UNROLL(6)
  for (int r = 0; r < Rows; ++r) {
    HWY_UNROLL(4)
    for (int v = 0; v < Vectors; ++v) hn::Stream(sums[r][v], d, block.copy + r * block.out_row + v * lanes<Real>);
  }
}

template <int Vectors, class Real>
void multiply_rows(int64_t rows, const Block<Real>& block) {
  switch (rows) {
    case 1: return multiply_block<1, Vectors>(block);
    case 2: return multiply_block<2, Vectors>(block);
    case 3: return multiply_block<3, Vectors>(block);
    case 4: return multiply_block<4, Vectors>(block);
    case 5: return multiply_block<5, Vectors>(block);
    default: return multiply_block<block_rows, Vectors>(block);
  }
}

template <class Real>
void multiply_rows_and_vectors(int64_t rows, int64_t vectors, const Block<Real>& block) {
  if (vectors == 1) return multiply_rows<1>(rows, block);
  if (vectors == 2) return multiply_rows<2>(rows, block);
  if constexpr (block_vectors > 2) {
    if (vectors == 3) return multiply_rows<3>(rows, block);
    multiply_rows<4>(rows, block);
  }
}

// ---------------------------------------------------------------- rows of b that are not vectors in memory

#if HWY_TARGET != HWY_SCALAR  // which has no vectors to shuffle
// Of consecutive rows, the same 128 bits of as many as fill a vector: of every fourth one of floats, of every second of
// doubles.
template <class D, class Real>
HWY_INLINE hn::Vec<D> load_strided(D d, const Real* from, int64_t stride) {
  constexpr auto count = static_cast<int64_t>(hn::MaxLanes(D()));
  if constexpr (count * sizeof(Real) == 16) {
    return hn::LoadU(d, from);
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, load_strided(half, from + count / 2 * stride, stride), load_strided(half, from, stride));
  }
}

// to_kj = from_jk for as many j as a vector has lanes, and as many k as 128 bits have.
HWY_INLINE void transpose_block(const float* from, int64_t stride, float* to, int64_t to_stride) {
  const hn::ScalableTag<float> d;
  const auto row0 = load_strided(d, from, stride);
  const auto row1 = load_strided(d, from + stride, stride);
  const auto row2 = load_strided(d, from + 2 * stride, stride);
  const auto row3 = load_strided(d, from + 3 * stride, stride);
  const auto even01 = hn::InterleaveLower(d, row0, row2);
  const auto odd01 = hn::InterleaveLower(d, row1, row3);
  const auto even23 = hn::InterleaveUpper(d, row0, row2);
  const auto odd23 = hn::InterleaveUpper(d, row1, row3);
  hn::StoreU(hn::InterleaveLower(d, even01, odd01), d, to);
  hn::StoreU(hn::InterleaveUpper(d, even01, odd01), d, to + to_stride);
  hn::StoreU(hn::InterleaveLower(d, even23, odd23), d, to + 2 * to_stride);
  hn::StoreU(hn::InterleaveUpper(d, even23, odd23), d, to + 3 * to_stride);
}
HWY_INLINE void transpose_block(const double* from, int64_t stride, double* to, int64_t to_stride) {
  const hn::ScalableTag<double> d;
  const auto row0 = load_strided(d, from, stride);
  const auto row1 = load_strided(d, from + stride, stride);
  hn::StoreU(hn::InterleaveLower(d, row0, row1), d, to);
  hn::StoreU(hn::InterleaveUpper(d, row0, row1), d, to + to_stride);
}
#endif

// to_kj = from_jk for j < rows, k < cols.
template <class Real>
void transpose(const Real* from, int64_t stride, int64_t rows, int64_t cols, Real* to, int64_t to_stride) {
  int64_t j = 0;
#if HWY_TARGET != HWY_SCALAR
  constexpr int64_t step = 16 / sizeof(Real);
  for (; j + lanes<Real> <= rows; j += lanes<Real>) {
    const Real* group = from + j * stride;
    int64_t k = 0;
    for (; k + step <= cols; k += step) transpose_block(group + k, stride, to + k * to_stride + j, to_stride);
    for (; k < cols; ++k) {
      for (int64_t lane = 0; lane < lanes<Real>; ++lane) to[k * to_stride + j + lane] = group[lane * stride + k];
    }
  }
#endif
  for (; j < rows; ++j) {
    for (int64_t k = 0; k < cols; ++k) to[k * to_stride + j] = from[j * stride + k];
  }
}

// Packs [depth,width] elements of b into rows of whole vectors, zeros after the last.
template <class Real>
void pack(const Matrix<const Real>& b, int64_t first_row, int64_t first_col, int64_t depth, int64_t width, Real* to,
          int64_t to_stride) {
  if (b.transposed) {
    transpose(b.data + first_col * b.stride + first_row, b.stride, width, depth, to, to_stride);
  } else {
    for (int64_t k = 0; k < depth; ++k) {
      std::copy_n(b.data + (first_row + k) * b.stride + first_col, width, to + k * to_stride);
    }
  }
  for (int64_t k = 0; k < depth; ++k) std::fill(to + k * to_stride + width, to + (k + 1) * to_stride, Real{0});
}

// ---------------------------------------------------------------- the product

// A block whose last vector reaches beyond the last column goes through a copy with room for it.
template <class Real>
void multiply_ragged(int64_t rows, int64_t vectors, int64_t width, const Block<Real>& block) {
  HWY_ALIGN Real copy[block_rows * panel_cols<Real>] = {};
  Block<Real> inner = block;
  inner.added = copy;
  inner.out = copy;
  inner.added_row = inner.out_row = panel_cols<Real>;
  inner.copy = nullptr;
  for (int64_t r = 0; r < rows && block.beta != 0; ++r) {
    std::copy_n(block.added + r * block.added_row, width, copy + r * panel_cols<Real>);
  }
  multiply_rows_and_vectors(rows, vectors, inner);
  for (int64_t r = 0; r < rows; ++r) {
    std::copy_n(copy + r * panel_cols<Real>, width, block.out + r * block.out_row);
  }
}

// Columns [first_col, first_col + width) of out, from rows [first_row, first_row + depth) of b.
template <class Real>
void multiply_panel(const Product<Real>& x, int64_t first_row, int64_t depth, int64_t first_col, int64_t width) {
  constexpr int64_t most = panel_cols<Real>;
  HWY_ALIGN Real packed[depth_block * most];
  const int64_t vectors = (width + lanes<Real> - 1) / lanes<Real>;
  const Real* b = packed;
  int64_t b_row = vectors * lanes<Real>;
  if (x.b.transposed || width % lanes<Real> != 0) {
    pack(x.b, first_row, first_col, depth, width, packed, b_row);
  } else if (depth > 0) {  // else a and b may be nowhere
    b = x.b.data + first_row * x.b.stride + first_col;
    b_row = x.b.stride;
  }
  const bool begins = first_row == 0;
  const Real beta = begins ? x.beta : Real{1};
  const Matrix<const Real> added = begins && beta != 0 ? x.added : Matrix<const Real>(x.out);
  Real* copy = first_row + depth < x.a.cols || x.copy == nullptr ? nullptr : x.copy + first_col;
  const bool streams = copy != nullptr && width % lanes<Real> == 0 && x.out.stride % lanes<Real> == 0 &&
                       reinterpret_cast<uintptr_t>(copy) % (sizeof(Real) * lanes<Real>) == 0;
  const int64_t a_row = x.a.transposed ? 1 : x.a.stride;
  const int64_t a_col = x.a.transposed ? x.a.stride : 1;
  const int64_t blocks = (x.out.rows + block_rows - 1) / block_rows;
  int64_t end = 0;
  for (int64_t index = 0; index < blocks; ++index) {
    const int64_t row = end;
    end = x.out.rows * (index + 1) / blocks;  // of even height: a block of few rows is no faster than one of six
    int64_t skip = 0;
    int64_t last = depth;
    if (x.a_part == Part::lower) last = std::clamp<int64_t>(end - first_row, 0, depth);
    if (x.a_part == Part::upper) skip = std::clamp<int64_t>(row - first_row, 0, depth);
    int64_t wanted = vectors;
    if (x.out_part == Part::lower) wanted = std::min(vectors, (end - first_col + lanes<Real> - 1) / lanes<Real>);
    if (wanted <= 0) continue;
    const Block<Real> block{.depth = last - skip,
                            .a = depth > 0 ? x.a.data + row * a_row + (first_row + skip) * a_col : nullptr,
                            .a_row = a_row,
                            .a_col = a_col,
                            .b = b + skip * b_row,
                            .b_row = b_row,
                            .beta = beta,
                            .added = added.data + row * added.stride + first_col,
                            .added_row = added.stride,
                            .out = x.out.data + row * x.out.stride + first_col,
                            .out_row = x.out.stride,
                            .copy = streams ? copy + row * x.out.stride : nullptr};
    const int64_t reach = wanted * lanes<Real>;
    if (reach > width) {
      multiply_ragged(end - row, wanted, width, block);
    } else {
      multiply_rows_and_vectors(end - row, wanted, block);
    }
  }
  if (streams || copy == nullptr) return;
  for (int64_t row = 0; row < x.out.rows; ++row) {
    std::copy_n(x.out.data + row * x.out.stride + first_col, width, copy + row * x.out.stride);
  }
}

template <class Real>
HWY_INLINE void multiply_all(const Product<Real>& x) {
  for (int64_t col = 0; col < x.out.cols; col += panel_cols<Real>) {
    const int64_t width = std::min(panel_cols<Real>, x.out.cols - col);
    int64_t row = 0;
    do {
      multiply_panel(x, row, std::min(depth_block, x.a.cols - row), col, width);
      row += depth_block;
    } while (row < x.a.cols);
  }
}

HWY_ATTR void multiply_f32(const Product<float>& product) { multiply_all(product); }
HWY_ATTR void multiply_f64(const Product<double>& product) { multiply_all(product); }

}  // namespace HWY_NAMESPACE
}  // namespace tfla::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard
