// Tables of bad and good arguments, run through an operation.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <regex>
#include <string>
#include <vector>

#include "tests/support/support.h"

namespace tfla::test {

template <class Args>
struct BadRow {
  const char* what;
  const char* named;  // regular expression, matched as a whole word: the argument the message must name
  std::function<void(Args&)> spoil;
};

inline void run_operation(const MlstmForward& args, const Execution& execution = {}) { forward(args, execution); }
inline void run_operation(const MlstmBackward& args, const Execution& execution = {}) { backward(args, execution); }
inline void run_operation(const MlstmStep& args, const Execution& execution = {}) { step(args, execution); }
inline void run_operation(const DeltaForward& args, const Execution& execution = {}) { delta_forward(args, execution); }
inline void run_operation(const DeltaBackward& args, const Execution& execution = {}) {
  delta_backward(args, execution);
}
inline void run_operation(const DeltaStep& args, const Execution& execution = {}) { delta_step(args, execution); }
inline void run_operation(const SsdForward& args, const Execution& execution = {}) { ssd_forward(args, execution); }
inline void run_operation(const SsdBackward& args, const Execution& execution = {}) { ssd_backward(args, execution); }
inline void run_operation(const SsdStep& args, const Execution& execution = {}) { ssd_step(args, execution); }

template <class Args>
auto plan_operation(const Args& args, const Execution& execution = {}) {
  if constexpr (requires { delta_plan(args, execution); }) {
    return delta_plan(args, execution);
  } else if constexpr (requires { ssd_plan(args, execution); }) {
    return ssd_plan(args, execution);
  } else {
    return plan(args, execution);
  }
}

// Message of the InvalidArgument that the call throws; empty, with a failure recorded, if it does not.
inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "threw something else: " << error.what();
    return {};
  }
  ADD_FAILURE() << "was accepted";
  return {};
}

inline void expect_sentence(const std::string& message, const std::string& named) {
  if (message.empty()) return;  // refusal() has recorded why
  EXPECT_TRUE(message.starts_with("tfla: ")) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  EXPECT_TRUE(std::regex_search(message, std::regex("\\b(" + named + ")\\b"))) << message << "\nshould name " << named;
}

// Each row is refused by the operation and by plan(args), with the same sentence, and `contents` stay as they were.
template <class Args>
void expect_refused(const Args& good, const std::vector<BadRow<Args>>& rows,
                    const std::function<Snapshot()>& contents) {
  const Snapshot before = contents();
  for (const BadRow<Args>& row : rows) {
    SCOPED_TRACE(row.what);
    Args bad = good;
    row.spoil(bad);
    const std::string message = refusal([&] { run_operation(bad); });
    expect_sentence(message, row.named);
    EXPECT_EQ(refusal([&] { static_cast<void>(plan_operation(bad)); }), message);
    EXPECT_TRUE(same_bits(contents(), before));
  }
}

// The first bytes of another tensor's memory, so that the two overlap.
inline void move_onto(MutableTensorView& view, const TensorView& other) { view.data = const_cast<void*>(other.data); }

template <class View>
void misalign(View& view, std::ptrdiff_t bytes = 1) {
  using Byte = std::conditional_t<std::is_same_v<View, TensorView>, const std::byte, std::byte>;
  view.data = static_cast<Byte*>(view.data) + bytes;
}

}  // namespace tfla::test
