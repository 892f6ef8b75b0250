// Vector loops against plain ones: every instruction set of this machine, lengths around whole vectors, any alignment.
#include "cpu/kernels/simd.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "reference/values.h"

namespace tfla::test {
namespace {

namespace simd = cpu::simd;

class SimdSmall : public testing::Test {
 protected:
  static void use(std::int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().DeInit();
  }
  void TearDown() override { use(0); }

  // Calls work once for every instruction set.
  template <class Work>
  static void on_every_target(const Work& work) {
    const std::int64_t supported = hwy::SupportedTargets();
    for (std::int64_t target = 1; target > 0; target <<= 1) {
      if ((supported & target) == 0) continue;
      SCOPED_TRACE(hwy::TargetName(target));
      use(target);
      work();
    }
  }
};

// Numbers that sums and products of a few of them leave exact.
template <class Real>
std::vector<Real> numbers(std::size_t count, std::size_t seed) {
  std::vector<Real> values(count);
  for (std::size_t j = 0; j < count; ++j) values[j] = static_cast<Real>((j * 7 + seed * 13) % 31) - Real{15};
  return values;
}

constexpr std::size_t longest = 70, margin = 20;

template <class Real>
void check_rows(std::size_t n, std::size_t offset) {
  const auto count = static_cast<std::int64_t>(n);
  const std::vector<Real> x = numbers<Real>(longest + margin, 1), y = numbers<Real>(longest + margin, 2),
                          before = numbers<Real>(longest + margin, 3);
  const Real* a = x.data() + offset;
  const Real* b = y.data() + offset;
  const Real factor = 3;
  // What lies beyond the n elements stays.
  const auto expect = [&](const std::vector<Real>& out, const auto& element) {
    for (std::size_t j = 0; j < out.size(); ++j) {
      const bool written = j >= offset && j < offset + n;
      ASSERT_EQ(out[j], written ? element(j) : before[j]) << "element " << j << " of " << offset << " + " << n;
    }
  };
  std::vector<Real> out = before;
  simd::scale(factor, a, out.data() + offset, count);
  expect(out, [&](std::size_t j) { return factor * x[j]; });
  out = before;
  simd::stream(factor, a, out.data() + offset, count);
  expect(out, [&](std::size_t j) { return factor * x[j]; });
  out = before;
  simd::add(factor, a, out.data() + offset, count);
  expect(out, [&](std::size_t j) { return before[j] + factor * x[j]; });
  out = before;
  simd::multiply(a, out.data() + offset, count);
  expect(out, [&](std::size_t j) { return before[j] * x[j]; });

  double products = 0, weighed = 0, weighed_more = 0;
  for (std::size_t j = offset; j < offset + n; ++j) {
    products += static_cast<double>(x[j] * y[j]);
    weighed += static_cast<double>(x[j] * before[j]);
    weighed_more += static_cast<double>(x[j] * (before[j] + y[j]));
  }
  EXPECT_EQ(simd::dot(a, b, count), products);
  out = before;
  EXPECT_EQ(simd::weigh(factor, a, static_cast<const Real*>(nullptr), out.data() + offset, count), weighed);
  expect(out, [&](std::size_t j) { return factor * before[j]; });
  out = before;
  EXPECT_EQ(simd::weigh(factor, a, b, out.data() + offset, count), weighed_more);
  expect(out, [&](std::size_t j) { return factor * (before[j] + y[j]); });
  std::vector<double> columns(longest + margin, 5);
  EXPECT_EQ(simd::add_products(a, b, columns.data() + offset, count), products);
  for (std::size_t j = 0; j < columns.size(); ++j) {
    const bool written = j >= offset && j < offset + n;
    ASSERT_EQ(columns[j], written ? 5 + static_cast<double>(x[j] * y[j]) : 5);
  }
}

TEST_F(SimdSmall, RowsOfEveryLength) {
  on_every_target([] {
    for (std::size_t n = 0; n <= longest; ++n) {
      for (const std::size_t offset : {0U, 1U, 16U}) {
        check_rows<float>(n, offset);
        check_rows<double>(n, offset);
      }
    }
  });
}

// Each 16-bit number there is; and what lies between two neighbours, in the middle and a little to either side of it.
TEST_F(SimdSmall, ConversionsOfEveryNumberAndEveryTie) {
  on_every_target([] {
    for (const DType dtype : {DType::bfloat16, DType::float16}) {
      const bool bfloat16 = dtype == DType::bfloat16;
      const auto decode = bfloat16 ? reference::decode_bfloat16 : reference::decode_float16;
      const auto encode = bfloat16 ? reference::encode_bfloat16 : reference::encode_float16;
      constexpr std::size_t count = 1 << 16;
      std::vector<std::uint16_t> all(count);
      for (std::size_t bits = 0; bits < count; ++bits) all[bits] = static_cast<std::uint16_t>(bits);
      std::vector<float> wide(count);
      simd::load(all.data(), dtype, wide.data(), count);
      for (std::size_t bits = 0; bits < count; ++bits) {
        const double want = decode(all[bits]);
        ASSERT_TRUE(wide[bits] == static_cast<float>(want) || (std::isnan(wide[bits]) && std::isnan(want))) << bits;
      }
      std::vector<float> between;
      for (std::size_t bits = 0; bits + 1 < count; ++bits) {
        const double low = decode(all[bits]), high = decode(all[bits + 1]);
        if (!std::isfinite(low) || !std::isfinite(high) || bits == 0x7FFF) continue;
        const auto middle = static_cast<float>((low + high) / 2);
        if (std::abs(middle) < std::numeric_limits<float>::min()) continue;  // workers flush them
        for (const float x : {middle, std::nextafter(middle, 1e30F), std::nextafter(middle, -1e30F)})
          between.push_back(x);
      }
      std::vector<std::uint16_t> narrow(between.size());
      simd::store(1.0F, between.data(), narrow.data(), dtype, static_cast<std::int64_t>(between.size()));
      for (std::size_t j = 0; j < between.size(); ++j)
        ASSERT_EQ(narrow[j], encode(static_cast<double>(between[j]))) << name(dtype) << " of " << between[j];
    }
  });
}

// A NaN stays one, and infinities have their limits, at every place of a vector.
// Not among the small tests, which sanitizers run: on the target without instructions of its own Highway's Exp makes an
// integer of NaN and then does not use it.
using Simd = SimdSmall;
TEST_F(Simd, GatesThatAreNotNumbers) {
  on_every_target([] {
    constexpr double infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
    for (std::size_t n = 1; n <= 20; ++n) {
      for (std::size_t at = 0; at < n; ++at) {
        const auto with = [&](double value) {
          std::vector<double> x(n, 0.5);
          x[at] = value;
          return x;
        };
        const auto count = static_cast<std::int64_t>(n);
        std::vector<double> x = with(nan);
        simd::log_sigmoid(x.data(), count);
        EXPECT_TRUE(std::isnan(x[at]));
        x = with(nan);
        simd::soft_cap(15, x.data(), count);
        EXPECT_TRUE(std::isnan(x[at]));
        std::vector<float> out(n);
        x = with(nan);
        simd::exp_shifted(2.0F, 1, x.data(), out.data(), count);
        EXPECT_TRUE(std::isnan(out[at]));
        x = with(-infinity);
        simd::log_sigmoid(x.data(), count);
        EXPECT_EQ(x[at], -infinity);
        simd::exp_shifted(2.0F, 1, x.data(), out.data(), count);
        EXPECT_EQ(out[at], 0);
        x = with(infinity);
        simd::log_sigmoid(x.data(), count);
        EXPECT_EQ(x[at], 0);
        x = with(-infinity);
        simd::soft_cap(15, x.data(), count);
        EXPECT_EQ(x[at], -15);
      }
    }
  });
}

}  // namespace
}  // namespace tfla::test
