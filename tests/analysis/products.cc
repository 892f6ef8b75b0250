// The linker sends each call of cpu::multiply here (--wrap), and from here to the real one. So the library needs no
// counter of its own: what is counted is what ships. The names are the mangled ones of src/cpu/kernels/product.h;
// should its signature change, this program no longer links.
#include "tests/analysis/products.h"

#include <atomic>
#include <cstdint>

#include "cpu/kernels/product.h"

namespace tfla::test {
namespace {

std::atomic<std::int64_t> count{0};

// Whole squares: that the kernels leave out blocks beside a diagonal does not count.
template <class Real>
void add(const cpu::Product<Real>& product) {
  count += 2 * product.out.rows * product.out.cols * product.a.cols;
}

}  // namespace

void reset_product_count() { count = 0; }
double counted_flops() { return static_cast<double>(count.load()); }

}  // namespace tfla::test

// NOLINTBEGIN(bugprone-reserved-identifier, readability-identifier-naming): the linker's names
extern "C" {

void __real__ZN4tfla3cpu8multiplyERKNS0_7ProductIfEE(const tfla::cpu::Product<float>& product);
void __wrap__ZN4tfla3cpu8multiplyERKNS0_7ProductIfEE(const tfla::cpu::Product<float>& product) {
  tfla::test::add(product);
  __real__ZN4tfla3cpu8multiplyERKNS0_7ProductIfEE(product);
}

void __real__ZN4tfla3cpu8multiplyERKNS0_7ProductIdEE(const tfla::cpu::Product<double>& product);
void __wrap__ZN4tfla3cpu8multiplyERKNS0_7ProductIdEE(const tfla::cpu::Product<double>& product) {
  tfla::test::add(product);
  __real__ZN4tfla3cpu8multiplyERKNS0_7ProductIdEE(product);
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier, readability-identifier-naming)
