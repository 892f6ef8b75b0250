// What the tests share: snapshots of outputs, bitwise and relative comparisons, slices of views.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <iosfwd>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "testkit/bounds.h"
#include "tfla/tfla.h"

namespace tfla::test {

using Values = std::vector<double>;

// The outputs of a call by name ("h", "C", ... "dn0"), each in row-major order of its logical shape.
using Snapshot = std::map<std::string, Values>;

[[nodiscard]] std::vector<std::pair<std::string, MutableTensorView>> outputs(const MlstmForward& args);
[[nodiscard]] std::vector<std::pair<std::string, MutableTensorView>> outputs(const MlstmBackward& args);
[[nodiscard]] std::vector<std::pair<std::string, MutableTensorView>> outputs(const MlstmStep& args);

template <class Args>
[[nodiscard]] Snapshot snapshot(const Args& args);

// Runs the call of a problem on poisoned outputs.
[[nodiscard]] Snapshot run_forward(testkit::Problem& problem, const Execution& execution = {});
[[nodiscard]] Snapshot run_backward(testkit::Problem& problem, const Execution& execution = {});
[[nodiscard]] Snapshot run_both(testkit::Problem& problem, const Execution& execution = {});

// Every tensor equal bit for bit (NaN equals NaN).
[[nodiscard]] ::testing::AssertionResult same_bits(const Snapshot& actual, const Snapshot& expected);
[[nodiscard]] ::testing::AssertionResult same_bits(const Values& actual, const Values& expected);

// Every tensor within the project's bound on the relative error; C and n are compared in the scale of expected m.
[[nodiscard]] ::testing::AssertionResult close(const Snapshot& actual, const Snapshot& expected,
                                               const testkit::Case& description);
// Relative error, worst element and NaN of one pair, against a bound of the caller's.
[[nodiscard]] ::testing::AssertionResult close(const Values& actual, const Values& expected, double allowed);

// What the judge found, against the project's bounds.
[[nodiscard]] ::testing::AssertionResult within_bounds(const std::vector<testkit::TensorError>& errors,
                                                       const testkit::Case& description);

// The elements [begin, begin + count) along an axis. A view that is not given stays so.
template <class Data>
[[nodiscard]] BasicTensorView<Data> slice(BasicTensorView<Data> view, int axis, std::int64_t begin, std::int64_t count);

// `values` of a tensor with its entries along `axis` taken in another order.
[[nodiscard]] Values taken(const Values& values, const TensorView& shaped_like, int axis,
                           const std::vector<std::int64_t>& order);

// Writes into an input of a problem: the views are read-only, the memory behind them is not.
void overwrite(const TensorView& view, const Values& values);

// Why a device cannot be used here; empty where it can.
[[nodiscard]] std::string why_unavailable(Device device);

// A name for GoogleTest: letters, digits and underscores.
[[nodiscard]] std::string label(const testkit::Case& description);

}  // namespace tfla::test

namespace tfla::testkit {

// Found by GoogleTest, which would list the bytes of the struct instead.
void PrintTo(const Case& description, std::ostream* out);

}  // namespace tfla::testkit
