// The kernels for matrix products against plain sums in double: every instruction set of this machine, both
// orientations, edges of blocks and vectors, triangles.
#include <gtest/gtest.h>
#include <hwy/aligned_allocator.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "cpu/kernels/product.h"

namespace tfla::test {
namespace {

using cpu::Matrix;
using cpu::Part;

struct Shape {
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t depth;
};

// One row, one vector, blocks of six rows with remainders, more columns than a panel, more depth than a block of it.
constexpr Shape shapes[] = {{1, 1, 1},    {6, 16, 8},   {7, 17, 5},   {13, 70, 33}, {32, 32, 128},
                            {48, 129, 1}, {5, 64, 300}, {64, 40, 64}, {3, 200, 0},  {67, 131, 129}};

bool inside(Part part, std::int64_t row, std::int64_t col) {
  return part == Part::all || (part == Part::lower ? col <= row : col >= row);
}

template <class Real>
class Case {
 public:
  Case(Shape shape, bool turn_a, bool turn_b, Part a_part, Part out_part)
      : shape_(shape), a_part_(a_part), out_part_(out_part) {
    const auto fill = [this](std::vector<Real>& values, std::int64_t count) {
      values.resize(static_cast<std::size_t>(count));
      for (Real& value : values) value = static_cast<Real>(uniform_(generator_));
    };
    // Rows are longer in memory than the matrices are wide.
    a_ = Matrix<const Real>{nullptr, shape.rows, shape.depth, (turn_a ? shape.rows : shape.depth) + 3, turn_a};
    b_ = Matrix<const Real>{nullptr, shape.depth, shape.cols, (turn_b ? shape.depth : shape.cols) + 5, turn_b};
    fill(a_values_, (turn_a ? shape.depth : shape.rows) * a_.stride);
    fill(b_values_, (turn_b ? shape.cols : shape.depth) * b_.stride);
    fill(added_, shape.rows * shape.cols);
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      for (std::int64_t k = 0; k < shape.depth; ++k) {
        if (!inside(a_part, r, k)) a_values_[at(a_, r, k)] = 0;
      }
    }
    a_.data = a_values_.data();
    b_.data = b_values_.data();
  }

  // Into memory of its own, or over what is added.
  void check(Real beta, bool in_place) const {
    std::vector<Real> out = added_;
    if (!in_place || beta == 0) {
      for (Real& value : out) value = std::numeric_limits<Real>::quiet_NaN();
    }
    const Matrix<Real> target = cpu::dense(out.data(), shape_.rows, shape_.cols);
    multiply(cpu::Product<Real>{.out = target,
                                .a = a_,
                                .b = b_,
                                .beta = beta,
                                .added = in_place ? Matrix<const Real>(target)
                                                  : cpu::dense<const Real>(added_.data(), shape_.rows, shape_.cols),
                                .a_part = a_part_,
                                .out_part = out_part_});
    const double bound = (static_cast<double>(shape_.depth) + 2) * std::numeric_limits<Real>::epsilon();
    for (std::int64_t r = 0; r < shape_.rows; ++r) {
      for (std::int64_t c = 0; c < shape_.cols; ++c) {
        if (!inside(out_part_, r, c)) continue;
        ASSERT_NEAR(out[static_cast<std::size_t>(r * shape_.cols + c)], expected(r, c, beta), bound)
            << shape_.rows << " x " << shape_.cols << " x " << shape_.depth << ", row " << r << ", column " << c;
      }
    }
  }

 private:
  static std::size_t at(const Matrix<const Real>& matrix, std::int64_t row, std::int64_t col) {
    return static_cast<std::size_t>(matrix.transposed ? col * matrix.stride + row : row * matrix.stride + col);
  }
  [[nodiscard]] double expected(std::int64_t row, std::int64_t col, Real beta) const {
    double sum =
        static_cast<double>(beta) * static_cast<double>(added_[static_cast<std::size_t>(row * shape_.cols + col)]);
    for (std::int64_t k = 0; k < shape_.depth; ++k) {
      sum += static_cast<double>(a_values_[at(a_, row, k)]) * static_cast<double>(b_values_[at(b_, k, col)]);
    }
    return sum;
  }

  Shape shape_;
  Part a_part_;
  Part out_part_;
  std::mt19937 generator_{7};
  std::uniform_real_distribution<double> uniform_{-1, 1};
  std::vector<Real> a_values_, b_values_, added_;
  Matrix<const Real> a_, b_;
};

template <class Real>
void check_all() {
  for (const Shape& shape : shapes) {
    for (const bool turn_a : {false, true}) {
      for (const bool turn_b : {false, true}) {
        const Case<Real> whole(shape, turn_a, turn_b, Part::all, Part::all);
        whole.check(0, true);
        whole.check(1, true);
        whole.check(static_cast<Real>(0.75), false);
        const Shape square_a{shape.rows, shape.cols, shape.rows};
        Case<Real>(square_a, turn_a, turn_b, Part::lower, Part::all).check(1, true);
        Case<Real>(square_a, turn_a, turn_b, Part::upper, Part::all).check(1, true);
        const Shape square_out{shape.cols, shape.cols, shape.depth};
        Case<Real>(square_out, turn_a, turn_b, Part::all, Part::lower).check(0, false);
      }
    }
  }
}

class ProductSmall : public testing::Test {
 protected:
  static void use(std::int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().DeInit();
  }
  void TearDown() override { use(0); }
};

TEST_F(ProductSmall, IsTheSumOfProductsOnEveryInstructionSet) {
  const std::int64_t supported = hwy::SupportedTargets();
  for (std::int64_t target = 1; target > 0; target <<= 1) {
    if ((supported & target) == 0) continue;
    SCOPED_TRACE(hwy::TargetName(target));
    use(target);
    check_all<float>();
    check_all<double>();
  }
}

// A copy holds what out does, wherever its rows begin, and nothing is written between them.
template <class Real>
void check_copies() {
  constexpr Real untouched = 7;
  constexpr std::int64_t alignment = 64 / sizeof(Real);
  for (const Shape& shape : shapes) {
    for (const std::int64_t stride : {shape.cols + 3, (shape.cols / alignment + 2) * alignment}) {
      for (const std::int64_t shift : {0, 1}) {
        const std::vector<Real> a(static_cast<std::size_t>(shape.rows * shape.depth), Real{2});
        const std::vector<Real> b(static_cast<std::size_t>(shape.depth * shape.cols), Real{3});
        const auto size = static_cast<std::size_t>(shape.rows * stride + shift);
        std::vector<Real> out(size, Real{1});
        const auto copy = hwy::AllocateAligned<Real>(size);
        std::fill_n(copy.get(), size, untouched);
        const Matrix<Real> target{out.data(), shape.rows, shape.cols, stride, false};
        multiply(cpu::Product<Real>{.out = target,
                                    .a = cpu::dense(a.data(), shape.rows, shape.depth),
                                    .b = cpu::dense(b.data(), shape.depth, shape.cols),
                                    .beta = 1,
                                    .added = target,
                                    .copy = copy.get() + shift});
        for (std::int64_t x = 0; x < shape.rows * stride; ++x) {
          const Real expected = x % stride < shape.cols ? static_cast<Real>(6 * shape.depth + 1) : untouched;
          ASSERT_EQ(copy[static_cast<std::size_t>(x + shift)], expected)
              << shape.rows << " x " << shape.cols << " x " << shape.depth << ", stride " << stride << ", at " << x;
        }
      }
    }
  }
}

TEST_F(ProductSmall, CopiesAreWhatOutIs) {
  const std::int64_t supported = hwy::SupportedTargets();
  for (std::int64_t target = 1; target > 0; target <<= 1) {
    if ((supported & target) == 0) continue;
    SCOPED_TRACE(hwy::TargetName(target));
    use(target);
    check_copies<float>();
    check_copies<double>();
  }
}

// What makes results equal for any number of threads: an element does not depend on how much is computed with it.
TEST_F(ProductSmall, ElementsDoNotDependOnTheRest) {
  constexpr std::int64_t rows = 20, cols = 100, depth = 150;
  std::mt19937 generator(3);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> a(rows * depth), b(depth * cols), whole(rows * cols), part(rows * cols);
  for (float& value : a) value = uniform(generator);
  for (float& value : b) value = uniform(generator);
  const Matrix<const float> A = cpu::dense<const float>(a.data(), rows, depth);
  const Matrix<const float> B = cpu::dense<const float>(b.data(), depth, cols);
  product(cpu::dense(whole.data(), rows, cols), A, B, 0.0F);
  for (const std::int64_t first : {0, 7, 64}) {
    for (const std::int64_t width : {1, 16, 33}) {
      const Matrix<float> out = cpu::dense(part.data(), rows, cols).columns(first, width);
      product(out, A, B.columns(first, width), 0.0F);
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < width; ++c) {
          ASSERT_EQ(out.row(r)[c], whole[static_cast<std::size_t>(r * cols + first + c)]) << r << ", " << c;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tfla::test
