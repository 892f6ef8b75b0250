#include "cpu/formulations/chunkwise_forward.h"

#include "cpu/threads.h"

namespace tfla::cpu {

namespace {

// Heads [first, first + abreast) of a span, tile by tile in turn. Their rows lie side by side, so the pages that one of
// them had to look up serve the others too.
template <class Real>
void span_outputs(const Problem& problem, const Span& span, std::int64_t first, const ForwardScratch<Real>& scratch,
                  const typename ForwardScratch<Real>::Worker& worker, const ForwardOutputs& outputs) {
  const Plan& plan = problem.plan;
  const Sequence& sequence = span.sequence;
  const Columns columns = all_columns(plan.shape);
  const auto abreast = static_cast<std::size_t>(plan.abreast);
  std::array<State<Real>, most_abreast> states;
  for (std::size_t x = 0; x < abreast; ++x) {
    const std::int64_t head = first + static_cast<std::int64_t>(x);
    states[x] = state_in(worker.heads[x].state, plan.shape, columns);
    if (plan.fused()) {
      start_norm(problem, sequence, head, worker.heads[x].norm);
      load_state(problem.initial_state.C, problem.initial_state.n, sequence.index, head, columns, states[x]);
    } else {
      copy_state(state_at_span(problem, span, head, scratch.span_states), states[x]);
    }
  }
  const bool last = span.end == sequence.length;
  for (std::int64_t token = span.begin; token < span.end;) {
    const std::int64_t end = tile_end(plan, token, sequence.length);
    const bool state_is_used = end < span.end || (last && outputs.last_state.C.given());
    for (std::size_t x = 0; x < abreast; ++x) {
      const Tile tile{sequence, first + static_cast<std::int64_t>(x), token, end};
      const GateVectors<Real> gates = scratch.gates.at(problem, sequence, tile.head, token);
      if (plan.fused()) {
        denominators(problem, scratch.gates, sequence, tile.head, token, end, worker.heads[x].norm);
      }
      const bool shares = x > 0 && tile.head % problem.group() != 0;  // queries and keys with the head before
      const TileKeys<Real> keys = shares ? load_values(problem, tile, worker.operands, columns)
                                         : load_keys(problem, tile, worker.operands, columns);
      tile_outputs(problem, tile, keys, gates, states[x], worker.tile, outputs, shares);
      if (state_is_used) advance(keys, gates, states[x], states[x]);
    }
    token = end;
  }
  for (std::size_t x = 0; last && x < abreast; ++x) {
    store_state(states[x], outputs.last_state.C, outputs.last_state.n, sequence.index,
                first + static_cast<std::int64_t>(x));
  }
}

}  // namespace

template <class Real>
ForwardScratch<Real>::Worker::Worker(Arena& arena, const Plan& plan) : operands(arena, plan), tile(arena, plan) {
  for (std::size_t x = 0; x < static_cast<std::size_t>(plan.abreast); ++x) {
    heads[x].state = arena.take<Real>(state_size(plan.shape));
    heads[x].norm = NormBuffers<Real>(arena, plan);
  }
}

template <class Real>
ForwardScratch<Real>::ForwardScratch(Arena& arena, const Plan& plan) : gates(arena, plan) {
  if (!plan.fused()) span_states = arena.take<Real>(span_numbers(plan) * plan.shape.heads * state_size(plan.shape));
  workers = Workers<Worker>(arena, plan);
}

template <class Real>
void run_forward(const Problem& problem, const ForwardOutputs& outputs, const ForwardScratch<Real>& scratch) {
  const Plan& plan = problem.plan;
  const std::int64_t heads = problem.heads();
  parallel_for(plan.shape.sequences * heads, plan.threads, [&](std::int64_t unit, int index) {
    const Sequence sequence = problem.sequence(unit / heads);
    if (plan.fused()) {
      gates(problem, scratch.gates, sequence, unit % heads);  // denominators follow tile by tile
    } else {
      gates_and_denominators(problem, scratch.gates, sequence, unit % heads,
                             scratch.workers.at(plan, index).heads[0].norm);
    }
  });
  if (!plan.fused()) {
    const std::int64_t count = panels(plan);
    parallel_for(plan.shape.sequences * heads * count, plan.threads, [&](std::int64_t unit, int index) {
      const auto worker = scratch.workers.at(plan, index);
      states_at_spans(problem, scratch.gates, problem.sequence(unit / (heads * count)), unit / count % heads,
                      panel_columns(plan.shape, unit % count), worker.operands, scratch.span_states);
    });
  }
  const std::int64_t groups = heads / plan.abreast;
  parallel_for(span_numbers(plan) * groups, plan.threads, [&](std::int64_t unit, int index) {
    const Span span = find_span(problem, unit / groups);
    // An empty sequence still passes its state on.
    if (span.begin == span.end && span.number != first_span(plan, span.sequence)) return;
    span_outputs(problem, span, unit % groups * plan.abreast, scratch, scratch.workers.at(plan, index), outputs);
  });
  store_max_states<Real>(problem, scratch.gates.m_last, outputs.last_state.m);
}

#define TFLA_INSTANTIATE(Real)          \
  template struct ForwardScratch<Real>; \
  template void run_forward(const Problem&, const ForwardOutputs&, const ForwardScratch<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu
