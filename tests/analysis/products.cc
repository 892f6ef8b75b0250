// The linker sends each call of cpu::product here (--wrap), and from here to the real one. So the library needs no
// counter of its own: what is counted is what ships. The names are the mangled ones of src/cpu/gemm.h; should its
// signature change, this program no longer links.
#include "products.h"

#include <atomic>
#include <cstdint>

#include "cpu/gemm.h"

namespace tfla::test {
namespace {

std::atomic<std::int64_t> count{0};

template <class Real>
void add(const cpu::Matrix<Real>& out, const cpu::Matrix<const Real>& a) {
  count += 2 * out.rows * out.cols * a.cols;
}

}  // namespace

void reset_product_count() { count = 0; }
double counted_flops() { return static_cast<double>(count.load()); }

}  // namespace tfla::test

// NOLINTBEGIN(bugprone-reserved-identifier, readability-identifier-naming): the linker's names
extern "C" {

void __real__ZN4tfla3cpu7productENS0_6MatrixIfEENS1_IKfEES4_f(tfla::cpu::Matrix<float> out,
                                                              tfla::cpu::Matrix<const float> a,
                                                              tfla::cpu::Matrix<const float> b, float beta);
void __wrap__ZN4tfla3cpu7productENS0_6MatrixIfEENS1_IKfEES4_f(tfla::cpu::Matrix<float> out,
                                                              tfla::cpu::Matrix<const float> a,
                                                              tfla::cpu::Matrix<const float> b, float beta) {
  tfla::test::add(out, a);
  __real__ZN4tfla3cpu7productENS0_6MatrixIfEENS1_IKfEES4_f(out, a, b, beta);
}

void __real__ZN4tfla3cpu7productENS0_6MatrixIdEENS1_IKdEES4_d(tfla::cpu::Matrix<double> out,
                                                              tfla::cpu::Matrix<const double> a,
                                                              tfla::cpu::Matrix<const double> b, double beta);
void __wrap__ZN4tfla3cpu7productENS0_6MatrixIdEENS1_IKdEES4_d(tfla::cpu::Matrix<double> out,
                                                              tfla::cpu::Matrix<const double> a,
                                                              tfla::cpu::Matrix<const double> b, double beta) {
  tfla::test::add(out, a);
  __real__ZN4tfla3cpu7productENS0_6MatrixIdEENS1_IKdEES4_d(out, a, b, beta);
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier, readability-identifier-naming)
