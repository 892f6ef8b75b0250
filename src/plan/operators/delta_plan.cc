#include "plan/operators/delta_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/checks.h"
#include "core/names.h"
#include "plan/arithmetic.h"
#include "plan/backend.h"
#include "plan/cost/plan_cost.h"
#include "plan/cpu_sizes.h"
#include "plan/operators/delta_backend.h"
#include "plan/operators/delta_cuda.h"

namespace tfla {

namespace {

// Tokens of a tile. Products with the state take as long for any; those inside of a tile, and the triangular system,
// grow with it, and below this the products run slower.
constexpr std::int64_t best_tile = 64;

// Columns of a state that are worth a thread.
constexpr std::int64_t least_panel = 32;
constexpr std::int64_t panel_step = 16;

// What states and residuals may take of the memory of the call's own tensors.
constexpr double state_share = 0.25;

double item_bytes(const DeltaPlan& plan) { return plan.compute == DType::float64 ? 8 : 4; }

double state_bytes(const DeltaPlan& plan) {
  return static_cast<double>(plan.shape.dqk * cpu::padded(plan.shape.dhv)) * item_bytes(plan);
}

// Even parts of a chunk, none longer than the best tile.
std::int64_t split_chunk(std::int64_t chunk) { return ceil_div(chunk, ceil_div(chunk, best_tile)); }

// Columns per thread: all of them, unless there are too few heads to go round.
std::int64_t choose_panel(const DeltaPlan& plan, std::int64_t units) {
  const std::int64_t dhv = plan.shape.dhv;
  if (units == 0 || units >= plan.threads) return dhv;
  const std::int64_t panels = ceil_div(plan.threads, units);
  return std::min(dhv, std::max(least_panel, round_up(ceil_div(dhv, panels), panel_step)));
}

// A step reads a panel twice: what it says of the key, then to write. The second time it comes from the cache.
std::int64_t choose_step_panel(const DeltaPlan& plan, std::int64_t units) {
  constexpr double cache = 128 * 1024;
  const auto fitting = static_cast<std::int64_t>(cache / (static_cast<double>(plan.shape.dqk) * item_bytes(plan)));
  const std::int64_t panel = std::max(fitting / panel_step * panel_step, panel_step);
  return std::min(panel, choose_panel(plan, units));
}

// Bytes a thread stores for backward where states lie `chunk` tokens apart.
double stored_bytes(const DeltaPlan& plan, std::int64_t chunk) {
  const auto states = static_cast<double>(ceil_div(plan.shape.longest, chunk) + ceil_div(chunk, plan.tile));
  return states * state_bytes(plan) +
         static_cast<double>(chunk) * static_cast<double>(plan.shape.dhv) * item_bytes(plan);
}

// A sequence that is one chunk needs no pass over its states before gradients begin. Where that takes too much memory,
// chunks are as long as memory allows, or as takes least.
std::int64_t choose_chunk(const DeltaPlan& plan) {
  const std::int64_t longest = std::max<std::int64_t>(plan.shape.longest, 1);
  const double budget = state_share * tensor_bytes(plan.operation, plan.shape) / plan.threads;
  const std::int64_t whole = round_up(longest, plan.tile);
  if (stored_bytes(plan, whole) <= budget) return whole;
  const auto root = static_cast<std::int64_t>(std::sqrt(static_cast<double>(ceil_div(longest, plan.tile))));
  std::int64_t best = std::max<std::int64_t>(root, 1) * plan.tile;
  for (std::int64_t chunk = whole; chunk > best; chunk = round_up(chunk / 2, plan.tile))
    if (stored_bytes(plan, chunk) <= budget) return chunk;
  return best;
}

// No more threads than there is work for: each has scratch of its own.
void use_threads(DeltaPlan& plan, std::int64_t units) {
  plan.threads = static_cast<int>(std::clamp<std::int64_t>(units, 1, plan.threads));
}

void choose_ranges(DeltaPlan& plan) {
  const DeltaShape& shape = plan.shape;
  const std::int64_t longest = std::max<std::int64_t>(shape.longest, 1);
  // More than this would not change anything, and might not fit into 64 bits.
  constexpr std::int64_t many = std::int64_t{1} << 20;
  const std::int64_t sequences = std::min(shape.sequences, many), heads = sequences * std::min(shape.heads, many);
  if (plan.operation == Operation::step) {
    plan.tile = plan.chunk = 1;
    plan.panel = choose_step_panel(plan, heads);
    use_threads(plan, heads * std::min(ceil_div(shape.dhv, plan.panel), many));
    return;
  }
  const std::int64_t wanted = plan.options.chunk_size;
  plan.chunk = std::min(wanted > 0 ? wanted : best_tile, longest);
  plan.tile = split_chunk(plan.chunk);
  if (plan.operation == Operation::forward) {
    plan.panel = choose_panel(plan, heads);
    use_threads(plan, heads * std::min(ceil_div(shape.dhv, plan.panel), many));
    return;
  }
  plan.panel = shape.dhv;
  use_threads(plan, sequences * std::min(shape.qk_heads, many));
  if (wanted == 0) plan.chunk = choose_chunk(plan);
}

// Matrix products of one head: tokens that meet a state, and elements of squares. The first and the last tile of a
// sequence count like the others, and a triangular system like a product with a square.
struct Work {
  double state = 0, square_qk = 0, square_hv = 0;
};

// Backward makes the states and residuals of a chunk once more, and of all but the last chunk before that.
Work work_of(const DeltaPlan& plan) {
  const auto tokens = static_cast<double>(plan.shape.longest);
  if (plan.operation == Operation::step) return {.state = 3 * static_cast<double>(plan.shape.tokens)};
  const auto tile = static_cast<double>(plan.tile);
  const double squares = tokens * tile;
  if (plan.operation == Operation::forward)
    return {.state = 3 * tokens, .square_qk = 2 * squares, .square_hv = 2 * squares};
  const auto before =
      static_cast<double>((ceil_div(std::max<std::int64_t>(plan.shape.longest, 1), plan.chunk) - 1) * plan.chunk);
  const double made_again = tokens + before;
  return {.state = 6 * tokens + 2 * made_again,
          .square_qk = 6 * squares + made_again * tile,
          .square_hv = 4 * squares + made_again * tile};
}

// The same in products as they run: on the chip what is added to a state is in two terms, and so is what meets a
// square, the first of which has a second term of its own.
Work executed(const DeltaPlan& plan, const Work& work) {
  if (!launches(plan, DeltaKernel::forward_on_chip)) return work;
  return {.state = work.state / 3 * 4, .square_qk = work.square_qk, .square_hv = work.square_hv / 2 * 5};
}

void count(DeltaPlan& plan) {
  const DeltaShape& shape = plan.shape;
  const auto dqk = static_cast<double>(shape.dqk), dhv = static_cast<double>(shape.dhv);
  const auto heads = static_cast<double>(shape.heads), batch = static_cast<double>(shape.batch);
  plan.bytes = tensor_bytes(plan.operation, shape);
  if (plan.operation == Operation::step) plan.bytes += 2 * batch * heads * dqk * dhv * item_bytes(plan);
  if (shape.longest == 0) return;
  // Of sequences of different lengths only the longest is known, and all are taken to be like it.
  const double units = heads * batch * static_cast<double>(shape.tokens) / static_cast<double>(shape.longest);
  const auto flops = [&](const Work& work, double share_of_squares) {
    return 2 * units * (work.state * dqk * dhv + share_of_squares * (work.square_qk * dqk + work.square_hv * dhv));
  };
  plan.flops = flops(executed(plan, work_of(plan)), 1);
  plan.useful_flops = flops(work_of(plan), 0.5);
}

// Sizes are counted in 64 bits; a shape whose scratch would come near that is refused, whatever memory there is.
void check_countable(const DeltaPlan& plan) {
  const DeltaShape& shape = plan.shape;
  const double dims = static_cast<double>(shape.dqk) + static_cast<double>(shape.dhv);
  const double tokens = static_cast<double>(shape.longest) + 8 * static_cast<double>(plan.tile + plan.chunk) + 64;
  const double states = static_cast<double>(ceil_div(std::max<std::int64_t>(shape.longest, 1), plan.chunk)) +
                        static_cast<double>(plan.chunk / plan.tile) + 4;
  const bool cuda = plan.device == Device::cuda;
  const double copies =
      cuda ? 3 * static_cast<double>(shape.sequences) * static_cast<double>(shape.heads) : plan.threads;
  const double bytes = copies * (tokens * (dims + static_cast<double>(plan.tile)) * 32 + states * state_bytes(plan)) +
                       static_cast<double>(shape.sequences) * static_cast<double>(shape.heads) * 32;
  if (bytes < 0x1p60) return;
  refuse(
      fmt::format("tfla: q has head dimension {} and v has {} over {} tokens; scratch for that does not fit in memory",
                  shape.dqk, shape.dhv, shape.tokens));
}

std::string describe_pass(const DeltaPlan& plan) {
  if (plan.device == Device::cuda) {
    std::string all;
    for (const Launch& launch : plan.launches)
      all += fmt::format("{}{}", all.empty() ? "" : ", ", name(static_cast<DeltaKernel>(launch.kernel)));
    return all;
  }
  switch (plan.operation) {
    case Operation::forward: return "residuals, outputs, states, tile by tile";
    case Operation::backward: return "states and residuals, then gradients from the last tile to the first";
    case Operation::step: return "step";
  }
  return "";
}

}  // namespace

DeltaPlan make_delta_plan(Operation operation, const DeltaShape& shape, const DeltaOptions& options,
                          const Execution& execution) {
  DeltaPlan plan{.operation = operation,
                 .device = execution.device,
                 .shape = shape,
                 .options = options,
                 .compute = shape.dtype == DType::float64 ? DType::float64 : DType::float32,
                 .threads = execution.threads > 0 ? execution.threads : cpu_threads()};
  const bool cuda = plan.device == Device::cuda;
  if (cuda) plan.gpu = execution.gpu ? *execution.gpu : backend(Device::cuda).facts();
  cuda ? choose_cuda_ranges(plan, execution.portable) : choose_ranges(plan);
  check_countable(plan);
  if (cuda) {
    plan_delta_cuda(plan, execution.portable);
  } else {
    plan.launches.add({.kernel = static_cast<std::uint8_t>(operation)});
    plan.scratch_bytes = cpu_scratch_bytes(plan);
  }
  count(plan);
  return plan;
}

std::string describe(const DeltaPlan& plan) {
  const DeltaShape& shape = plan.shape;
  const double tensors = tensor_bytes(plan.operation, shape);
  std::string page;
  const auto line = [&page](const char* key, const std::string& value) {
    page += fmt::format("{:<16}{}\n", key, value);
  };
  line("operation", fmt::format("{} of the delta rule", name(plan.operation)));
  line("shape", fmt::format("B {}  T {}  N {}  Hqk {}  H {}  dqk {}  dhv {}", shape.batch, shape.tokens,
                            shape.sequences, shape.qk_heads, shape.heads, shape.dqk, shape.dhv));
  line("types", fmt::format("tensors {}, gates {}, arithmetic {}", name(shape.dtype), name(shape.gate_dtype),
                            name(plan.compute)));
  const bool cuda = plan.device == Device::cuda;
  line("device", cuda ? fmt::format("cuda, sm_{}, {} multiprocessors", plan.gpu.capability, plan.gpu.multiprocessors)
                      : fmt::format("cpu, {} thread{}", plan.threads, plan.threads == 1 ? "" : "s"));
  line("kernels", describe_pass(plan));
  if (plan.operation != Operation::step) {
    line("chunk size", fmt::format("{} tokens between stored states", plan.chunk));
    line("tile", fmt::format("{} tokens per set of matrix products and triangular system", plan.tile));
  }
  if (plan.slices > 1) line("slices", fmt::format("{} parts of the heads, one after the other", plan.slices));
  if (cuda || plan.operation != Operation::backward)
    line("panel", fmt::format("{} columns of the state at a time", plan.panel));
  line("scratch", fmt::format("{} bytes ({:.1f} % of the call's tensors)", plan.scratch_bytes,
                              tensors > 0 ? 100.0 * static_cast<double>(plan.scratch_bytes) / tensors : 0.0));
  line("FLOPs", fmt::format("{:.4g} executed, {:.4g} useful", plan.flops, plan.useful_flops));
  line("bytes", fmt::format("{:.4g} moved at least ({:.1f} FLOPs per byte)", plan.bytes,
                            plan.bytes > 0 ? plan.useful_flops / plan.bytes : 0.0));
  return page;
}

}  // namespace tfla
