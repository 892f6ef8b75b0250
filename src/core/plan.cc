#include "tfla/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/checks.h"
#include "core/cost/cpu_time.h"
#include "core/cost/cuda_time.h"
#include "core/cost/plan_cost.h"
#include "core/settings.h"
#include "core/validate.h"
#include "cpu/run.h"
#include "cuda/run.h"
#include "plan/cpu_sizes.h"

namespace tfla {

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t round_up(std::int64_t a, std::int64_t multiple) { return ceil_div(a, multiple) * multiple; }

std::int64_t power_of_two_above(std::int64_t a) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(a)));
}

double state_bytes(const Plan& plan) {
  const double item = plan.compute == DType::float64 ? 8 : 4;
  return static_cast<double>(cpu::state_size(plan.shape)) * item;
}

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

// Segments of a sequence make up for blocks that are too few to keep a large GPU busy, as long as each has a few
// chunks.
constexpr std::int64_t multiprocessors = 132, fewest_chunks = 4, most_pieces = 64;

// Stage states has a block per sequence, head and 64 x 128 tile of the state, four to a multiprocessor.
void choose_segments(Plan& plan, std::int64_t chunks) {
  const std::int64_t tiles = ceil_div(plan.shape.dqk, 64) * ceil_div(plan.shape.dhv, 128);
  const std::int64_t blocks = std::max<std::int64_t>(plan.shape.sequences * plan.shape.heads * tiles, 1);
  plan.segments =
      std::clamp<std::int64_t>(std::min(4 * multiprocessors / blocks, chunks / fewest_chunks), 1, most_pieces);
}

// On Hopper a block has a multiprocessor for itself. The states that segments start from are summed up by blocks of
// stage states, each of which takes a piece of a segment; of the last segment no total is needed. The numbers with the
// least time, in chunks of such a sum on one multiprocessor: outputs cost a little more than a sum, in reverse time dC
// twice as much, with dV or without; a block needs the time of some chunks to begin and to end, and sums are scanned.
void choose_hopper_segments(Plan& plan, std::int64_t chunks) {
  const bool forward = plan.operation == Operation::forward;
  if (plan.shape.packed) {
    // Packed sequences may be of any length, and one of them may be nearly all there is. Their segments have no pieces.
    const std::int64_t heads = ceil_div(plan.shape.heads, plan.slices);
    const std::int64_t blocks = std::max<std::int64_t>(heads * cuda::hopper_tiles(plan), 1);
    plan.segments =
        std::clamp<std::int64_t>(std::min(multiprocessors / blocks, chunks / fewest_chunks), 1, most_pieces);
    return;
  }
  const double weight = forward ? 1.2 : 2, piece_start = 8, scan = 4, scanned = 0.03;
  const std::int64_t most_segments = std::clamp<std::int64_t>(chunks / fewest_chunks, 1, most_pieces);
  const std::int64_t heads = plan.shape.sequences * std::max<std::int64_t>(ceil_div(plan.shape.heads, plan.slices), 1);
  const std::int64_t summing = heads * cuda::hopper_tiles(plan);
  const std::int64_t working =
      forward || plan.hopper_reverse ? heads * cuda::hopper_forward_tiles(plan.shape) : summing;
  const auto turns = [](std::int64_t blocks) { return static_cast<double>(ceil_div(blocks, multiprocessors)); };
  const auto length = [&](std::int64_t parts) { return static_cast<double>(ceil_div(chunks, parts)); };
  double least = std::numeric_limits<double>::infinity();
  for (std::int64_t segments = 1; segments <= most_segments; ++segments) {
    const double work = turns(working * segments) * (length(segments) + 1) * weight;
    for (std::int64_t pieces = 1; pieces <= (segments == 1 ? 1 : std::max<std::int64_t>(most_segments / segments, 1));
         ++pieces) {
      const std::int64_t sums = summing * (segments - 1) * pieces;
      const double before = segments == 1 ? 0
                                          : turns(sums) * (length(segments * pieces) + piece_start) + scan +
                                                scanned * static_cast<double>(sums);
      if (work + before >= least) continue;
      least = work + before;
      plan.segments = segments;
      plan.pieces = pieces;
    }
  }
}

// Portable kernels: by the cost model. Those of Hopper compute in tiles of 64 and 128 whatever the chunk is. There it
// says how much memory the states of backward may take: as much as one state every `chunk` tokens. They are 128 tokens
// apart all the same, but only some heads have theirs at a time.
void choose_cuda_ranges(Plan& plan, const MlstmOptions& options, bool hopper_shape) {
  constexpr std::int64_t tile = 64, hopper_chunk = 128, longest_chunk = std::int64_t{1} << 30;
  const analysis::HeadDims dims{static_cast<double>(plan.shape.dqk), static_cast<double>(plan.shape.dhv)};
  const std::int64_t usual = hopper_shape ? hopper_chunk : best_cuda_chunk(plan.shape.dtype, dims);
  const std::int64_t longest = std::clamp<std::int64_t>(plan.shape.longest, 1, longest_chunk);
  plan.tile = tile;
  plan.span = std::max<std::int64_t>(plan.shape.longest, 1);
  plan.chunk = std::min(options.chunk_size > 0 ? options.chunk_size : usual, longest);
  if (plan.formulation == Formulation::parallel) plan.chunk = longest;
  if (hopper_shape) plan.chunk = std::max(power_of_two_above(plan.chunk), hopper_chunk);
  if (plan.hopper && plan.operation == Operation::backward)
    plan.slices =
        std::clamp<std::int64_t>(plan.chunk / hopper_chunk, 1, std::max<std::int64_t>(plan.shape.qk_heads, 1));
  if (plan.hopper)
    choose_hopper_segments(plan, ceil_div(longest, hopper_chunk));
  else
    choose_segments(plan, ceil_div(longest, plan.chunk));
}

void choose_ranges(Plan& plan, const MlstmOptions& options) {
  const std::int64_t longest = std::max<std::int64_t>(plan.shape.longest, 1);
  if (plan.formulation == Formulation::parallel) {
    plan.tile = plan.chunk = plan.span = longest;
    return;
  }
  const bool chosen = options.chunk_size > 0;
  plan.chunk = chosen ? std::min(options.chunk_size, longest) : std::min(choose_tile(plan.shape), longest);
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

// Sizes are counted in 64 bits; a shape whose scratch would come near that is refused, whatever memory there is.
void check_countable(const Plan& plan) {
  const MlstmShape& shape = plan.shape;
  const auto tile = static_cast<double>(plan.tile);
  const double tokens =
      static_cast<double>(shape.batch) * static_cast<double>(shape.tokens) * static_cast<double>(shape.heads);
  const double spans = plan.span == 0 ? 0
                                      : tokens / static_cast<double>(plan.span) +
                                            static_cast<double>(shape.sequences) * static_cast<double>(shape.heads);
  const double per_thread =
      plan.chunk == 0 ? 4 : 4 + static_cast<double>(plan.span / plan.chunk + plan.chunk / plan.tile);
  const double dims = static_cast<double>(shape.dqk) + static_cast<double>(shape.dhv);
  const double bytes = tokens * 128 + (2 * spans + plan.threads * per_thread) * 4 * state_bytes(plan) +
                       plan.threads * (static_cast<double>(plan.span) * 2 + tile * 16 + 64) * (dims + tile) * 8;
  if (bytes < 0x1p60) return;
  refuse(
      fmt::format("tfla: q has head dimension {} and v has {} over {} tokens; scratch for that does not fit in memory",
                  shape.dqk, shape.dhv, shape.tokens));
}

// Whether forward keeps states on Hopper where it is asked to. A longer chunk asks for less memory. Its kernel for
// packed sequences has no registers left to keep wide ones. States of float16 are not stored as the portable kernels
// store them, and backward may take either. Two kernels to a head keep none.
bool keeps_hopper_states(const Plan& plan) {
  constexpr std::int64_t chunk = 128, wide_qk = 128, widest_qk = 256;
  return plan.chunk == chunk && plan.shape.dqk <= (plan.shape.packed ? wide_qk : widest_qk) &&
         plan.shape.dtype == DType::bfloat16;
}

// fits: the tensors are such as the kernels of Hopper take, if their shape is; of step its state.
Plan make_plan(Operation operation, const MlstmShape& shape, const MlstmOptions& options, const Execution& execution,
               bool fits = true) {
  Plan plan{.operation = operation,
            .device = execution.device,
            .formulation = operation == Operation::step ? Formulation::recurrent : options.formulation,
            .shape = shape,
            .options = options,
            .compute = shape.dtype == DType::float64 ? DType::float64 : DType::float32,
            .threads = execution.threads > 0 ? execution.threads : cpu::default_threads()};
  plan.keeps_states = (options.keep_states || options.keep_rows) && plan.device == Device::cuda &&
                      plan.formulation != Formulation::recurrent;
  // What a shape decides holds for forward and backward alike.
  const bool hopper_shape = operation != Operation::step && plan.device == Device::cuda && !execution.portable &&
                            cuda::hopper_takes(shape, options);
  plan.hopper = hopper_shape && fits;
  plan.hopper_gradients = plan.hopper && cuda::hopper_takes_gradients(plan, options);
  plan.norm_gradients = operation == Operation::backward && (resolve(options, shape.dqk).exact || shape.dn_last);
  const bool takes_reverse = plan.hopper_gradients && cuda::hopper_takes_reverse(shape);
  plan.hopper_reverse = takes_reverse && (cuda::hopper_splits_gradients(shape) || plan.norm_gradients);
  // Portable gradients do not read what Hopper's kernels store of float16, and get no gradient of n from them.
  if (plan.norm_gradients || (operation == Operation::backward && shape.dtype == DType::float16))
    plan.hopper = plan.hopper_gradients;
  if (plan.device == Device::cuda && plan.formulation != Formulation::recurrent)
    choose_cuda_ranges(plan, options, hopper_shape);
  // Narrow heads have dV beside dQ and dK, unless the sequence is cut: with dC it comes from narrower blocks, so that
  // fewer segments fill the GPU (docs/hopper.md).
  if (takes_reverse && !plan.hopper_reverse && plan.segments > 1 && !shape.packed) {
    plan.hopper_reverse = true;
    choose_cuda_ranges(plan, options, hopper_shape);
  }
  plan.keeps_rows = plan.keeps_states && (!options.keep_states || (hopper_shape && !keeps_hopper_states(plan)));
  plan.one_launch =
      operation == Operation::step && plan.device == Device::cuda && fits && cuda::one_launch_takes(shape);
  if (plan.formulation == Formulation::recurrent) {
    plan.tile = plan.chunk = 1;
    plan.span = std::max<std::int64_t>(shape.longest, 1);
    plan.panel = choose_panel(plan);
  } else if (plan.device == Device::cpu) {
    choose_ranges(plan, options);
  }
  check_countable(plan);
  plan.scratch_bytes = plan.device == Device::cuda ? cuda::scratch_bytes(plan) : cpu::scratch_bytes(plan);
  if (plan.keeps_states) plan.saved_bytes = cuda::saved_bytes(plan);
  const Cost work = cost(plan);
  plan.flops = work.flops;
  plan.useful_flops = work.useful_flops;
  plan.bytes = work.bytes;
  return plan;
}

const char* text(Operation operation) {
  switch (operation) {
    case Operation::forward: return "forward";
    case Operation::backward: return "backward";
    case Operation::step: return "step";
  }
  return "";
}

const char* text(Formulation formulation) {
  switch (formulation) {
    case Formulation::chunkwise: return "chunkwise";
    case Formulation::parallel: return "parallel";
    case Formulation::recurrent: return "recurrent";
  }
  return "";
}

std::string cuda_kernels(const Plan& plan) {
  if (plan.formulation == Formulation::recurrent) return "step (clusters on sm_90 and newer, else portable)";
  if (plan.operation == Operation::forward)
    return plan.hopper ? "gates (portable), states + outputs (sm_90a)" : "gates, states, outputs (portable)";
  if (!plan.hopper)
    return plan.keeps_states ? "gates, dstates, gradients (portable)"
                             : "gates, states, rows, dstates, gradients (portable)";
  if (!plan.hopper_gradients) return "gates (portable), states, dstates (sm_90a), gradients (portable)";
  if (!plan.hopper_reverse && !plan.norm_gradients && !cuda::hopper_splits_gradients(plan.shape))
    return "gates (portable), states, dstates, gradients (sm_90a)";
  return fmt::format("gates (portable), states, {}, {}keys (sm_90a)",
                     plan.hopper_reverse ? "dstates + values" : "dstates, values",
                     plan.norm_gradients ? "rows, norms, " : "");
}

std::string kernels(const Plan& plan) {
  if (plan.device == Device::cuda) return cuda_kernels(plan);
  if (plan.operation == Operation::step) return "step";
  switch (plan.formulation) {
    case Formulation::recurrent: return "step over every token";
    case Formulation::parallel:
      return plan.operation == Operation::forward ? "gates, squares of 64 x 64 tokens"
                                                  : "gates, row gradients, column gradients";
    case Formulation::chunkwise: break;
  }
  if (plan.operation == Operation::forward)
    return plan.fused() ? "gates, states + outputs (fused)" : "gates, states, outputs";
  return plan.fused() ? "gates, states, dstates + gradients (fused)" : "gates, states, dstates, gradients";
}

}  // namespace

Plan plan(Operation operation, const MlstmShape& shape, const MlstmOptions& options, const Execution& execution) {
  validate_execution(execution);
  validate_options(options, operation);
  validate_shape(shape);
  return make_plan(operation, shape, options, execution);
}

Plan plan(const MlstmForward& args, const Execution& execution) {
  validate_execution(execution);
  const MlstmShape shape = validate(args, execution.device);
  return make_plan(Operation::forward, shape, args.options, execution, cuda::hopper_fits(args));
}

Plan plan(const MlstmBackward& args, const Execution& execution) {
  validate_execution(execution);
  const MlstmShape shape = validate(args, execution.device);
  return make_plan(Operation::backward, shape, args.options, execution, cuda::hopper_fits(args));
}

Plan plan(const MlstmStep& args, const Execution& execution) {
  validate_execution(execution);
  const MlstmShape shape = validate(args, execution.device);
  return make_plan(Operation::step, shape, args.options, execution, cuda::one_launch_fits(args));
}

bool fits(const Plan& plan, const MlstmForward& args) { return !plan.hopper || cuda::hopper_fits(args); }
bool fits(const Plan& plan, const MlstmBackward& args) { return !plan.hopper || cuda::hopper_fits(args); }
bool fits(const Plan& plan, const MlstmStep& args) { return !plan.one_launch || cuda::one_launch_fits(args); }

std::string describe(const Plan& plan) {
  const MlstmShape& shape = plan.shape;
  const double tensors = tensor_bytes(plan.operation, shape);
  std::string page;
  const auto line = [&page](const char* key, const std::string& value) {
    page += fmt::format("{:<16}{}\n", key, value);
  };
  line("operation", fmt::format("{}, {}", text(plan.operation), text(plan.formulation)));
  line("shape", fmt::format("B {}  T {}  N {}  Hqk {}  H {}  dqk {}  dhv {}", shape.batch, shape.tokens,
                            shape.sequences, shape.qk_heads, shape.heads, shape.dqk, shape.dhv));
  line("types", fmt::format("tensors {}, gates {}, arithmetic {}", name(shape.dtype), name(shape.gate_dtype),
                            name(plan.compute)));
  line("device", plan.device == Device::cuda
                     ? "cuda"
                     : fmt::format("cpu, {} thread{}", plan.threads, plan.threads == 1 ? "" : "s"));
  line("kernels", kernels(plan));
  if (plan.formulation == Formulation::recurrent) {
    line("panel", fmt::format("{} columns of the state at a time", plan.panel));
  } else if (plan.formulation == Formulation::chunkwise) {
    line("chunk size", fmt::format("{} tokens between stored states", plan.chunk));
    line("tile", fmt::format("{} tokens per set of matrix products", plan.tile));
    if (plan.slices > 1)
      line("slices", fmt::format("{}: heads in turn, each with states 128 tokens apart, in that memory", plan.slices));
    if (plan.device == Device::cuda)
      line("segments", fmt::format("{} per sequence{}", plan.segments,
                                   plan.pieces > 1 ? fmt::format(", summed up in {} pieces each", plan.pieces) : ""));
    else
      line("span", fmt::format("{} tokens per thread and turn{}{}", plan.span, plan.fused() ? " (whole sequences)" : "",
                               plan.abreast > 1 ? fmt::format(", {} heads abreast", plan.abreast) : ""));
  }
  line("scratch", fmt::format("{} bytes ({:.1f} % of the call's tensors)", plan.scratch_bytes,
                              tensors > 0 ? 100.0 * static_cast<double>(plan.scratch_bytes) / tensors : 0.0));
  if (plan.keeps_states) line("saved", fmt::format("{} bytes, from forward to backward", plan.saved_bytes));
  line("FLOPs", fmt::format("{:.4g} executed, {:.4g} useful", plan.flops, plan.useful_flops));
  line("bytes", fmt::format("{:.4g} moved at least ({:.1f} FLOPs per byte)", plan.bytes,
                            plan.bytes > 0 ? plan.useful_flops / plan.bytes : 0.0));
  return page;
}

}  // namespace tfla
