// What is chosen for the CPU: tiles, chunks, spans, panels, and the pass that runs.
#include "plan/cpu_plan.h"

#include <algorithm>
#include <cmath>

#include "plan/arithmetic.h"
#include "plan/cost/cpu_time.h"
#include "plan/cost/plan_cost.h"
#include "plan/cpu_sizes.h"

namespace tfla {

namespace {

using cpu::Pass;

// Stored states may take this share of the memory of the call's own tensors.
constexpr double state_share = 0.215;

// Tokens of a tile, by the cost model.
std::int64_t choose_tile(const MlstmShape& shape) {
  return best_cpu_tile({.dqk = static_cast<double>(shape.dqk), .dhv = static_cast<double>(shape.dhv)});
}

// Even parts of a chunk, none longer than `tile`. They stay whole numbers of 16 tokens, a vector of floats, where the
// chunk is one.
std::int64_t split_chunk(std::int64_t chunk, std::int64_t tile) {
  constexpr std::int64_t step = 16;
  const std::int64_t even = ceil_div(chunk, ceil_div(chunk, tile));
  return chunk % step == 0 ? round_up(even, step) : even;
}

// Whether one thread works through a whole sequence with the state in its cache (fused), or spans of it go to
// several threads, at the price of a pass over the states first. Results are the same bit for bit.
std::int64_t choose_span(const Plan& plan) {
  const MlstmShape& shape = plan.shape;
  const bool backward = plan.operation == Operation::backward;
  const auto threads = static_cast<double>(plan.threads);
  const double total =
      static_cast<double>(shape.batch) * static_cast<double>(shape.tokens) * static_cast<double>(shape.heads);
  const std::int64_t units = shape.sequences * (backward ? shape.qk_heads : shape.heads);
  const std::int64_t whole = std::max<std::int64_t>(shape.longest, 1);
  if (units == 0 || plan.threads == 1) return whole;

  // In tokens of one head, the measure being the work of a fused pass over one of them.
  const double unit = static_cast<double>(whole) * (backward ? static_cast<double>(shape.heads / shape.qk_heads) : 1.0);
  const double rounds = !shape.packed ? static_cast<double>(ceil_div(units, plan.threads)) : 1.0;
  const double fused = std::max(total / threads, rounds * unit);
  const double states = backward ? 0.35 : 0.40;  // share of the extra passes in a fused pass
  const auto panels = static_cast<double>(cpu::panels(plan));
  const double staged = std::max(total / threads, static_cast<double>(whole) / panels) * states + total / threads;
  if (staged >= fused) return whole;

  const double one_per_sequence =
      static_cast<double>(shape.sequences * shape.heads) * state_bytes(plan) * (backward ? 2 : 1);
  const auto affordable =
      static_cast<std::int64_t>(state_share * tensor_bytes(plan.operation, shape) / one_per_sequence);
  const std::int64_t wanted = ceil_div(4 * static_cast<std::int64_t>(plan.threads), units);
  const std::int64_t spans = std::min(wanted, affordable);
  if (spans < 2) return whole;
  return round_up(ceil_div(whole, spans), plan.chunk);
}

// Heads that a thread of a fused forward pass takes through each tile in turn: as many as leave every thread as much to
// do as before, and whose states fit into the second-level cache beside a tile. Of packed sequences one may be nearly
// all there is. Backward would have to store the states of all of them.
std::int64_t choose_abreast(const Plan& plan) {
  constexpr double cache = 512 * 1024;
  const MlstmShape& shape = plan.shape;
  if (!plan.fused() || plan.operation != Operation::forward) return 1;
  const std::int64_t units = shape.heads * (shape.packed ? 1 : shape.sequences);
  for (std::int64_t heads = cpu::most_abreast; heads > 1; --heads) {
    const bool even =
        shape.heads % heads == 0 && ceil_div(units / heads, plan.threads) * heads <= ceil_div(units, plan.threads);
    if (even && static_cast<double>(heads) * state_bytes(plan) <= cache) return heads;
  }
  return 1;
}

// Backward rebuilds the states inside a chunk, so by the cost model (cpu_seconds) the best chunk is the smallest whose
// stored states keep within their share of memory. Chunks of k tiles store span / k + k - 1 states: fewest at the
// square root, beyond which there is nothing to gain.
std::int64_t choose_backward_chunk(const Plan& plan) {
  const std::int64_t tiles = ceil_div(std::max<std::int64_t>(plan.span, 1), plan.tile);
  const double budget = state_share * tensor_bytes(plan.operation, plan.shape) / plan.threads;
  const auto most = static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(tiles))));
  std::int64_t best = 1;
  std::int64_t fewest = tiles;
  for (std::int64_t k = 1; k <= most; ++k) {
    const std::int64_t stored = ceil_div(tiles, k) + k - 1;
    if (static_cast<double>(stored) * state_bytes(plan) <= budget) return k * plan.tile;
    if (stored < fewest) {
      fewest = stored;
      best = k;
    }
  }
  return best * plan.tile;
}

void choose_ranges(Plan& plan) {
  const std::int64_t wanted = plan.options.chunk_size;
  const std::int64_t longest = std::max<std::int64_t>(plan.shape.longest, 1);
  if (plan.formulation == Formulation::parallel) {
    plan.tile = plan.chunk = plan.span = longest;
    return;
  }
  const bool chosen = wanted > 0;
  plan.chunk = chosen ? std::min(wanted, longest) : std::min(choose_tile(plan.shape), longest);
  plan.tile = split_chunk(plan.chunk, choose_tile(plan.shape));
  plan.span = choose_span(plan);
  plan.abreast = choose_abreast(plan);
  if (chosen || plan.operation != Operation::backward) return;
  plan.chunk = std::min(choose_backward_chunk(plan), longest);
  if (!plan.fused()) plan.span = round_up(plan.span, plan.chunk);
}

// Columns of the state for step. One token: all of them, unless there are too few heads to go round. Several tokens: as
// many as stay in the second-level cache between tokens.
std::int64_t choose_panel(const Plan& plan) {
  const MlstmShape& shape = plan.shape;
  constexpr double cache = 256 * 1024;
  std::int64_t panel = shape.dhv;
  if (shape.longest > 1) {
    const auto fitting = static_cast<std::int64_t>(cache / (state_bytes(plan) / static_cast<double>(shape.dhv)));
    panel = std::min(panel, std::max<std::int64_t>(fitting / 64 * 64, 64));
  }
  if (shape.sequences * shape.heads < 2 * plan.threads) panel = std::min<std::int64_t>(panel, 128);
  return panel;
}

Pass pass_of(const Plan& plan) {
  if (plan.operation == Operation::step) return Pass::step;
  const bool forward = plan.operation == Operation::forward;
  switch (plan.formulation) {
    case Formulation::recurrent: return Pass::forward_recurrent;
    case Formulation::parallel: return forward ? Pass::forward_parallel : Pass::backward_parallel;
    case Formulation::chunkwise: break;
  }
  if (forward) return plan.fused() ? Pass::forward_fused : Pass::forward_by_spans;
  return plan.fused() ? Pass::backward_fused : Pass::backward_by_spans;
}

}  // namespace

double state_bytes(const Plan& plan) {
  const double item = plan.compute == DType::float64 ? 8 : 4;
  return static_cast<double>(cpu::state_size(plan.shape)) * item;
}

void choose_recurrent_ranges(Plan& plan) {
  plan.tile = plan.chunk = 1;
  plan.span = std::max<std::int64_t>(plan.shape.longest, 1);
  plan.panel = choose_panel(plan);
}

void plan_cpu(Plan& plan) {
  plan.formulation == Formulation::recurrent ? choose_recurrent_ranges(plan) : choose_ranges(plan);
  plan.launches.add({.kernel = static_cast<std::uint8_t>(pass_of(plan))});
}

std::string_view describe_pass(const Launch& launch) {
  switch (static_cast<Pass>(launch.kernel)) {
    case Pass::forward_fused: return "gates, states + outputs (fused)";
    case Pass::forward_by_spans: return "gates, states, outputs";
    case Pass::forward_parallel: return "gates, squares of 64 x 64 tokens";
    case Pass::forward_recurrent: return "step over every token";
    case Pass::backward_fused: return "gates, states, dstates + gradients (fused)";
    case Pass::backward_by_spans: return "gates, states, dstates, gradients";
    case Pass::backward_parallel: return "gates, row gradients, column gradients";
    case Pass::step: return "step";
  }
  return "";
}

}  // namespace tfla
