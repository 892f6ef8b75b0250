// A call to test: regime, shape, options, layout, device.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/regimes.h"
#include "tfla/plan.h"

namespace tfla::testkit {

using reference::Regime;

// Where q, k, v and h lie in memory. fused: q, k, v are slices of one projection [B,T,Hqk*(2 dqk)+H*dhv], dq, dk, dv
// alike.
enum class Layout : std::uint8_t { bthd, bhtd, fused };

struct Case {
  Regime regime = Regime::randn;
  MlstmShape shape;                      // `sequences` and `longest` are derived; leave them
  std::vector<std::int64_t> cu_seqlens;  // empty: a dense batch. May end before `tokens`: the rest is padding
  std::int64_t index_stride = 1;         // of cu_seqlens, with other numbers between its own
  MlstmOptions options;
  Layout layout = Layout::bthd;
  bool initial_state = false;    // also asks for its gradient
  bool in_place = false;         // forward's last state takes the place of that
  bool last_state = true;        // forward is asked for it
  bool last_state_grad = false;  // feeds a gradient into the last state
  std::uint64_t seed = 1;
  Device device = Device::cpu;  // where the tensors lie, and the call is to run
};

}  // namespace tfla::testkit
