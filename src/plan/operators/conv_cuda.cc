#include "plan/operators/conv_cuda.h"

#include <algorithm>

#include "plan/operators/conv_plan.h"

namespace tfla {

namespace {

// Threads that hide the latency of memory, with some to spare for those that come last.
constexpr std::int64_t threads_of_multiprocessor = 1024;

// Tokens of a span. Where they are a thread's own, its first inputs, those of the W-1 tokens before them, are read
// twice; and sums over more than these would not be float32's.
constexpr std::int64_t least_span = 16, most_span = 128;
// Of 32 lanes.
constexpr std::int64_t most_span_of_lanes = 512;

// Tokens that a lane takes side by side: more would keep lanes apart in memory. Windows of many taps are as long
// themselves.
constexpr std::int64_t lane_tile = 4, lane_tile_of_many_taps = 32;

// Channels in registers at a time: 16 bytes of a row. Backward keeps so much of each that four are enough.
std::int64_t choose_panel(const ConvPlan& plan) {
  const ConvShape& shape = plan.shape;
  const std::int64_t item = item_size(shape.dtype);
  const bool pieces = shape.aligned && !shape.along_tokens && shape.channels * item % 16 == 0;
  if (plan.operation == Operation::step || !pieces || shape.width > conv_few_taps) return 1;
  return std::min<std::int64_t>(16 / item, plan.operation == Operation::backward ? 4 : 8);
}

// The longest spans that leave enough threads.
void choose_ranges(ConvPlan& plan) {
  const ConvShape& shape = plan.shape;
  plan.threads = 1;
  plan.panel = choose_panel(plan);
  if (plan.operation == Operation::step) {
    plan.tile = plan.span = std::max<std::int64_t>(shape.tokens, 1);
    return;
  }
  const std::int64_t lanes = conv_lanes(shape);
  const std::int64_t lane = shape.width > conv_few_taps ? lane_tile_of_many_taps : lane_tile;
  const std::int64_t least = shape.along_tokens ? lanes * lane : least_span;
  const std::int64_t wanted = threads_of_multiprocessor * plan.gpu.multiprocessors;
  plan.span = shape.along_tokens ? std::max(most_span_of_lanes, least) : most_span;
  while (plan.span > least && plan.spans() * plan.panels() * lanes < wanted) plan.span /= 2;
  plan.tile = shape.along_tokens ? lane : plan.span;
}

}  // namespace

const char* name(ConvKernel kernel) {
  switch (kernel) {
    case ConvKernel::forward: return "forward";
    case ConvKernel::last_state: return "last_state";
    case ConvKernel::gradients: return "gradients";
    case ConvKernel::initial_state: return "initial_state";
    case ConvKernel::sum_spans: return "sum_spans";
    case ConvKernel::step: return "step";
  }
  return "";
}

void plan_conv_cuda(ConvPlan& plan) {
  choose_ranges(plan);
  const auto add = [&plan](ConvKernel kernel, bool wanted = true) {
    if (wanted) plan.launches.add({.kernel = static_cast<std::uint8_t>(kernel)});
  };
  const bool has_states = plan.shape.width > 1;
  switch (plan.operation) {
    case Operation::forward:
      add(ConvKernel::forward);
      add(ConvKernel::last_state, has_states && plan.given.last_state);
      break;
    case Operation::backward:
      add(ConvKernel::gradients);
      add(ConvKernel::initial_state, has_states && plan.given.dinitial_state);
      add(ConvKernel::sum_spans);
      break;
    case Operation::step: add(ConvKernel::step); break;
  }
  Arena arena;
  if (plan.compute == DType::float64) {
    (void)ConvScratch<double>(arena, plan);
  } else {
    (void)ConvScratch<float>(arena, plan);
  }
  plan.scratch_bytes = arena.used();
}

}  // namespace tfla
