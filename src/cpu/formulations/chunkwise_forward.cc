#include "cpu/formulations/chunkwise_forward.h"

#include "cpu/threads.h"

namespace tfla::cpu {

namespace {

// h of one tile from the state at its beginning: den H = (scale qbar Q) C + (D . Q K^T) V.
template <class Real>
void tile_outputs(const Problem& problem, const Tile& tile, const TileKeys<Real>& keys, const GateVectors<Real>& gates,
                  const State<Real>& state, const typename ForwardScratch<Real>::Worker& worker,
                  const MutableTensorView& h) {
  const MlstmShape& shape = problem.plan.shape;
  const std::int64_t rows = tile.size();
  const std::int64_t qk_head = tile.head / problem.group();
  const auto scale = static_cast<Real>(problem.settings.scale);
  const Matrix<const Real> Q = load_tile(problem.q, tile, qk_head, worker.q, 0, shape.dqk);
  const Matrix<Real> Qb = dense(worker.qb, rows, shape.dqk);
  const Matrix<Real> D = dense(worker.D, rows, rows);
  const Matrix<Real> S = dense(worker.S, rows, rows);
  const Matrix<Real> H = dense(worker.h, rows, shape.dhv);

  gate_matrix(gates, scale, D);
  gated_scores<Real>(Square::diagonal, Q, keys.K, D, S);
  if (!state.zero) {
    scale_rows(scale, gates.qbar, Q, Qb);
    multiply(Product<Real>{.out = H, .a = Qb, .b = state.C});
  }
  multiply(Product<Real>{
      .out = H, .a = S, .b = keys.V, .beta = state.zero ? Real{0} : Real{1}, .added = H, .a_part = Part::lower});
  store_tile<Real>(H, gates.inverse, h, tile, tile.head);
}

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
      const TileKeys<Real> keys = load_keys(problem, tile, worker.operands, columns);
      tile_outputs(problem, tile, keys, gates, states[x], worker, outputs.h);
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
ForwardScratch<Real>::Worker::Worker(Arena& arena, const Plan& plan) : operands(arena, plan) {
  q = arena.take<Real>(plan.tile * padded(plan.shape.dqk));
  qb = arena.take<Real>(plan.tile * plan.shape.dqk);
  D = arena.take<Real>(plan.tile * plan.tile);
  S = arena.take<Real>(plan.tile * plan.tile);
  h = arena.take<Real>(plan.tile * plan.shape.dhv);
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
void store_max_states(const Problem& problem, const GateVectors<Real>& gates, const MutableTensorView& m) {
  if (!m.given()) return;
  for (std::int64_t s = 0; s < problem.plan.shape.sequences; ++s) {
    for (std::int64_t head = 0; head < problem.heads(); ++head) {
      static_cast<Real*>(m.data)[s * m.strides[0] + head * m.strides[1]] =
          static_cast<Real>(gates.m_last[s * problem.heads() + head]);
    }
  }
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
  store_max_states(problem, scratch.gates, outputs.last_state.m);
}

#define TFLA_INSTANTIATE(Real)                                                                        \
  template struct ForwardScratch<Real>;                                                               \
  template void store_max_states(const Problem&, const GateVectors<Real>&, const MutableTensorView&); \
  template void run_forward(const Problem&, const ForwardOutputs&, const ForwardScratch<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu
