// Random calls of the convolution, and the reference's judgement of them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <string>
#include <vector>

#include "reference/conv.h"
#include "testkit/tensor.h"
#include "tests/support/support.h"
#include "tfla/tfla.h"

namespace tfla::test {

// How a [B,T,D] tensor lies in memory: channels side by side, tokens side by side, or neither.
enum class ConvLayout : std::uint8_t { channels, tokens, apart };

struct ConvCase {
  std::int64_t batch = 2, tokens = 5, channels = 3, width = 4;
  DType dtype = DType::float32, weight_dtype = DType::float32, state_dtype = DType::float32;
  ConvLayout layout = ConvLayout::channels;
  bool silu = true, bias = true, state = false;
  std::vector<std::int64_t> cu_seqlens = {}, seq_idx = {};
  int threads = 0;
  Device device = Device::cpu;
};

[[nodiscard]] std::string label(const ConvCase& c);

// Where a case runs: on a GPU by portable kernels, which all are.
[[nodiscard]] Execution execution_of(const ConvCase& c);

// What a case has besides its sizes.
enum class ConvKind : std::uint8_t { plain, activated, stateful, packed, numbered };
inline constexpr ConvKind conv_kinds[] = {ConvKind::plain, ConvKind::activated, ConvKind::stateful, ConvKind::packed,
                                          ConvKind::numbered};
inline constexpr DType conv_dtypes[] = {DType::float32, DType::float64, DType::bfloat16, DType::float16};
[[nodiscard]] ConvCase conv_case(ConvKind kind, ConvCase c);
// Every kind, dtype, layout, width and length.
[[nodiscard]] std::vector<ConvCase> conv_cases();

// Tests that run on every device that there is.
class ConvOnDevice : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override;
  [[nodiscard]] static ConvCase here(ConvCase c);
};
#ifdef TFLA_TEST_CUDA
#define TFLA_CONV_ON_GPU(Suite) \
  INSTANTIATE_TEST_SUITE_P(Cuda, Suite, ::testing::Values(Device::cuda), [](const auto&) { return "cuda"; });
#else
#define TFLA_CONV_ON_GPU(Suite)
#endif
#define TFLA_CONV_ON_DEVICES(Suite) \
  TFLA_CONV_ON_GPU(Suite)           \
  INSTANTIATE_TEST_SUITE_P(ConvSmall, Suite, ::testing::Values(Device::cpu), [](const auto&) { return "cpu"; })

// Integers where the device of the last problem sees them.
[[nodiscard]] testkit::Tensor index_tensor(DType dtype, std::initializer_list<std::int64_t> shape,
                                           const std::vector<std::int64_t>& values);

// The tensors of a call, with inputs drawn and outputs poisoned.
class ConvProblem {
 public:
  explicit ConvProblem(const ConvCase& c);

  ConvCase description;
  ConvForward forward;
  ConvBackward backward;

  void poison();
  [[nodiscard]] bool margins_intact() const;
  [[nodiscard]] reference::ConvCall call() const;
  // Runs both on poisoned outputs: "y", "last_state", "dx", "dweight", "dbias", "dinitial_state".
  [[nodiscard]] Snapshot run();
  // All that a call might write.
  [[nodiscard]] Snapshot contents() const;

 private:
  testkit::Tensor tokens_tensor(DType dtype) const;
  void draw(const TensorView& view, double scale);

  testkit::Tensor x_, weight_, bias_, initial_, dlast_, dy_, packing_, numbers_;
  testkit::Tensor y_, last_, dx_, dweight_, dbias_, dinitial_;
  std::uint32_t seed_ = 1;
};

// Every tensor within a few roundings of the terms it is a sum of.
[[nodiscard]] ::testing::AssertionResult within_bounds(const ConvCase& c, const Snapshot& actual,
                                                       const reference::ConvResult& expected);

}  // namespace tfla::test
