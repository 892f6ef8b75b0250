// Segments of a sequence make up for CTAs that are too few to keep a GPU busy, as long as each has a few chunks.
#include <algorithm>
#include <limits>

#include "plan/arithmetic.h"
#include "plan/cuda_plan.h"
#include "plan/hopper_sizes.h"

namespace tfla {

namespace {

constexpr std::int64_t fewest_chunks = 4, most_pieces = 64;

std::int64_t multiprocessors(const Plan& plan) { return plan.gpu.multiprocessors; }

// Tiles of a state in segment_totals, each of which has a multiprocessor for itself.
std::int64_t tiles_of_totals(const Plan& plan) {
  const bool passes = plan.operation == Operation::forward;
  const std::int64_t dqk = passes ? std::min<std::int64_t>(plan.shape.dqk, hopper::dqk_of_a_pass) : plan.shape.dqk;
  return hopper::state_tiles(dqk, plan.shape.dhv);
}

// Time of a number of segments and pieces, in chunks that one multiprocessor sums up. Measured on an H200.
struct SegmentTime {
  static constexpr double outputs = 1.2;         // of a chunk of forward
  static constexpr double reverse = 2;           // of a chunk of grad_states, with dV or without
  static constexpr double reverse_v = 1.2;       // of a chunk of grad_v_reverse
  static constexpr double transposed = 2.2;      // of a chunk of grad_q_forward, and of grad_k_reverse
  static constexpr double start_of_a_piece = 8;  // and its end
  static constexpr double scan = 4;
  static constexpr double scanned_total = 0.03;
};

}  // namespace

// The kernel states has a CTA per sequence, head and 64 x 128 tile of the state, four to a multiprocessor.
void choose_segments(Plan& plan, std::int64_t chunks) {
  constexpr std::int64_t ctas = 4;
  const std::int64_t tiles = ceil_div(plan.shape.dqk, 64) * ceil_div(plan.shape.dhv, 128);
  const std::int64_t all = std::max<std::int64_t>(kernel_sequences(plan) * plan.shape.heads * tiles, 1);
  plan.segments =
      std::clamp<std::int64_t>(std::min(ctas * multiprocessors(plan) / all, chunks / fewest_chunks), 1, most_pieces);
}

// On Hopper a CTA has a multiprocessor for itself. segment_totals sums up each piece of a segment in a CTA of its own;
// the last segment needs no total.
void choose_hopper_segments(Plan& plan, std::int64_t chunks, BackwardWalk walk) {
  const bool forward = plan.operation == Operation::forward;
  const std::int64_t totals = tiles_of_totals(plan);
  if (plan.shape.packed) {
    // One of packed sequences may be nearly all there is. Their segments have no pieces.
    const std::int64_t all = std::max<std::int64_t>(ceil_div(plan.shape.heads, plan.slices) * totals, 1);
    plan.segments =
        std::clamp<std::int64_t>(std::min(multiprocessors(plan) / all, chunks / fewest_chunks), 1, most_pieces);
    return;
  }
  const std::int64_t most_segments = std::clamp<std::int64_t>(chunks / fewest_chunks, 1, most_pieces);
  const std::int64_t heads = plan.shape.sequences * std::max<std::int64_t>(ceil_div(plan.shape.heads, plan.slices), 1);
  const std::int64_t summing = heads * totals;
  const std::int64_t by_columns = heads * hopper::forward_tiles(plan.shape.dhv);
  const std::int64_t by_transposed_columns = heads * hopper::forward_tiles(plan.shape.dqk);
  const auto turns = [&](std::int64_t ctas) { return static_cast<double>(ceil_div(ctas, multiprocessors(plan))); };
  const auto length = [&](std::int64_t parts) { return static_cast<double>(ceil_div(chunks, parts)); };
  // Of one chunk in every segment.
  const auto chunk_time = [&](std::int64_t segments) {
    if (forward) return turns(by_columns * segments) * SegmentTime::outputs;
    switch (walk) {
      case BackwardWalk::states_and_v: return turns(by_columns * segments) * SegmentTime::reverse;
      case BackwardWalk::q_v_k:
        return turns(by_columns * segments) * SegmentTime::reverse_v +
               2 * turns(by_transposed_columns * segments) * SegmentTime::transposed;
      default: return turns(summing * segments) * SegmentTime::reverse;
    }
  };
  double least = std::numeric_limits<double>::infinity();
  for (std::int64_t segments = 1; segments <= most_segments; ++segments) {
    const double work = (length(segments) + 1) * chunk_time(segments);
    const std::int64_t most = segments == 1 ? 1 : std::max<std::int64_t>(most_segments / segments, 1);
    for (std::int64_t pieces = 1; pieces <= most; ++pieces) {
      const std::int64_t sums = summing * (segments - 1) * pieces;
      const double before = segments == 1
                                ? 0
                                : turns(sums) * (length(segments * pieces) + SegmentTime::start_of_a_piece) +
                                      SegmentTime::scan + SegmentTime::scanned_total * static_cast<double>(sums);
      if (work + before >= least) continue;
      least = work + before;
      plan.segments = segments;
      plan.pieces = pieces;
    }
  }
}

}  // namespace tfla
