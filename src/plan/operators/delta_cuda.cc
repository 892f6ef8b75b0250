#include "plan/operators/delta_cuda.h"

#include <algorithm>

#include "plan/cost/plan_cost.h"
#include "plan/kernel_table.h"
#include "plan/operators/delta_plan.h"

namespace tfla {

namespace {

// What the scratch of backward may take of the memory of the call's tensors, where heads can be taken in turn.
constexpr double scratch_share = 4;

void add(DeltaPlan& plan, DeltaKernel kernel) { plan.launches.add({.kernel = static_cast<std::uint8_t>(kernel)}); }

std::size_t scratch_of(const DeltaPlan& plan) {
  Arena arena;
  if (plan.compute == DType::float64) {
    (void)DeltaScratch<double>(arena, plan);
  } else {
    (void)DeltaScratch<float>(arena, plan);
  }
  return arena.used();
}

// As few as memory asks for, and no more than leave two CTAs to every multiprocessor.
void choose_slices(DeltaPlan& plan) {
  const DeltaShape& shape = plan.shape;
  const double budget = scratch_share * tensor_bytes(plan.operation, shape);
  const double panels = static_cast<double>(ceil_div(shape.dhv, plan.panel)) * static_cast<double>(shape.sequences) *
                        static_cast<double>(shape.heads);
  while (plan.slices<shape.qk_heads&& static_cast<double>(scratch_of(plan))> budget &&
         panels / static_cast<double>(2 * plan.slices) >= 2.0 * plan.gpu.multiprocessors)
    plan.slices = std::min(2 * plan.slices, shape.qk_heads);
}

// Sums and operands stay in registers and shared memory: heads of 16 bits, to 128 numbers of a key. Float16 would
// overflow, since nothing bounds the squares.
bool stays_on_chip(const DeltaPlan& plan, bool portable) {
  const DeltaShape& shape = plan.shape;
  constexpr double most_int = 0x7FFFFFFF;
  const auto batch = static_cast<double>(shape.batch), tokens = static_cast<double>(shape.tokens);
  const double tiles = batch * (tokens / hopper::delta_tile + 1) + static_cast<double>(shape.sequences);
  const double panels = static_cast<double>(shape.sequences) * static_cast<double>(ceil_div(shape.dhv, 64));
  return !portable && plan.operation != Operation::step && plan.gpu.capability == 90 &&
         plan.gpu.shared_bytes >= most_shared_bytes(Needs::sm90a) && shape.aligned && shape.dtype == DType::bfloat16 &&
         shape.dqk <= hopper::delta_most_dqk && shape.dqk % 8 == 0 && shape.dhv % 8 == 0 && shape.tokens > 0 &&
         shape.sequences > 0 && batch * tokens < most_int && tiles * static_cast<double>(shape.heads) < most_int &&
         panels * static_cast<double>(shape.heads) < most_int;
}

// Columns of a state that a CTA has. Half as many take as long where they find a multiprocessor of their own.
std::int64_t on_chip_panel(const DeltaPlan& plan) {
  constexpr std::int64_t whole = 128, half = 64;
  const std::int64_t halves = plan.shape.sequences * plan.shape.heads * ceil_div(plan.shape.dhv, half);
  return plan.shape.dhv <= half || halves <= plan.gpu.multiprocessors ? half : whole;
}

}  // namespace

bool launches(const DeltaPlan& plan, DeltaKernel kernel) {
  return std::any_of(plan.launches.begin(), plan.launches.end(),
                     [&](const Launch& launch) { return launch.kernel == static_cast<std::uint8_t>(kernel); });
}

const char* name(DeltaKernel kernel) {
  switch (kernel) {
    case DeltaKernel::norms: return "norms";
    case DeltaKernel::padding: return "padding";
    case DeltaKernel::forward: return "forward";
    case DeltaKernel::solve: return "solve";
    case DeltaKernel::forward_on_chip: return "forward_on_chip";
    case DeltaKernel::states_on_chip: return "states_on_chip";
    case DeltaKernel::grad_states_on_chip: return "grad_states_on_chip";
    case DeltaKernel::states: return "states";
    case DeltaKernel::grad_states: return "grad_states";
    case DeltaKernel::gradients: return "gradients";
    case DeltaKernel::sum_heads: return "sum_heads";
    case DeltaKernel::sum_tokens: return "sum_tokens";
    case DeltaKernel::step: return "step";
  }
  return "";
}

void choose_cuda_ranges(DeltaPlan& plan, bool portable) {
  const std::int64_t longest = std::max<std::int64_t>(plan.shape.longest, 1), block = delta_block(plan.compute);
  constexpr std::int64_t step_columns = 32;
  plan.threads = 1;
  if (plan.operation == Operation::step) {
    plan.tile = plan.chunk = 1;
    plan.panel = step_columns;
    return;
  }
  if (stays_on_chip(plan, portable)) {
    plan.tile = plan.chunk = hopper::delta_tile;
    plan.panel = on_chip_panel(plan);
    return;
  }
  // States lie a tile apart, so that all tiles of backward run side by side.
  const std::int64_t wanted = plan.options.chunk_size > 0 ? plan.options.chunk_size : block;
  const std::int64_t chunk = std::min(wanted, longest);
  plan.tile = plan.chunk = ceil_div(chunk, ceil_div(chunk, block));
  plan.panel = block;
}

void plan_delta_cuda(DeltaPlan& plan, bool portable) {
  if (plan.operation == Operation::step) return add(plan, DeltaKernel::step);
  if (plan.shape.packed) add(plan, DeltaKernel::padding);
  if (plan.options.normalize_qk) add(plan, DeltaKernel::norms);
  const bool on_chip = stays_on_chip(plan, portable);
  if (on_chip) add(plan, DeltaKernel::solve);
  if (plan.operation == Operation::forward) {
    add(plan, on_chip ? DeltaKernel::forward_on_chip : DeltaKernel::forward);
  } else {
    for (const DeltaKernel kernel : {on_chip ? DeltaKernel::states_on_chip : DeltaKernel::states,
                                     on_chip ? DeltaKernel::grad_states_on_chip : DeltaKernel::grad_states,
                                     DeltaKernel::gradients, DeltaKernel::sum_heads, DeltaKernel::sum_tokens})
      add(plan, kernel);
    choose_slices(plan);
  }
  plan.scratch_bytes = scratch_of(plan);
}

}  // namespace tfla
