// Random calls of the convolution, and the reference's judgement of them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
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
};

[[nodiscard]] std::string label(const ConvCase& c);

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
