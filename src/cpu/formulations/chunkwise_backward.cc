#include "cpu/formulations/chunkwise_backward.h"

#include "cpu/kernels/simd.h"
#include "cpu/threads.h"

namespace tfla::cpu {

namespace {

std::int64_t chunks_of_span(const Plan& plan) { return (plan.span + plan.chunk - 1) / plan.chunk; }
std::int64_t tiles_of_chunk(const Plan& plan) { return (plan.chunk + plan.tile - 1) / plan.tile; }

template <class Real>
class SpanGradients {
 public:
  using Scratch = BackwardScratch<Real>;
  using Worker = typename Scratch::Worker;

  SpanGradients(const Problem& problem, const BackwardTensors& tensors, const Scratch& scratch, const Worker& worker,
                const Span& span)
      : problem_(problem), tensors_(tensors), scratch_(scratch), worker_(worker), span_(span) {}

  // All heads that share one query/key head: their dq and dk add up, in head order.
  void run(std::int64_t qk_head) const {
    const std::int64_t group = problem_.group();
    for (std::int64_t member = 0; member < group; ++member) {
      const std::int64_t head = qk_head * group + member;
      store_states(head);
      reverse(head, member == 0);
    }
    if (group == 1) return;
    const Tile whole{span_.sequence, qk_head, span_.begin, span_.end};
    store_tile<Real>(dense(worker_.dq_sum, whole.size(), dqk()), nullptr, tensors_.dq, whole, qk_head);
    store_tile<Real>(dense(worker_.dk_sum, whole.size(), dqk()), nullptr, tensors_.dk, whole, qk_head);
  }

  // deta of every row of the span, which reverse-time states read when the normalizer gradient is exact.
  void make_deta(std::int64_t head) const {
    const Columns columns = all_columns(problem_.plan.shape);
    State<Real> state = state_in(worker_.stored, problem_.plan.shape, columns);
    copy_state(state_at_span(problem_, span_, head, scratch_.span_states), state);
    for (std::int64_t token = span_.begin; token < span_.end;) {
      const Tile tile{span_.sequence, head, token, tile_end(problem_.plan, token, span_.end)};
      const GateVectors<Real> gates = gates_at(head, token);
      TileGradients<Real>(problem_, tensors_.dh, tile, gates, worker_.tile).row_gradients(state);
      const std::int64_t offset = head * problem_.tokens() + span_.sequence.packed + token;
      std::copy_n(worker_.tile.deta, tile.size(), scratch_.deta + offset);
      if (tile.end < span_.end) advance(load_keys(problem_, tile, worker_.tile.operands, columns), gates, state, state);
      token = tile.end;
    }
  }

 private:
  [[nodiscard]] std::int64_t dqk() const { return problem_.plan.shape.dqk; }

  [[nodiscard]] GateVectors<Real> gates_at(std::int64_t head, std::int64_t token) const {
    return scratch_.gates.at(problem_, span_.sequence, head, token);
  }

  [[nodiscard]] State<Real> whole_state(Real* memory, std::int64_t token) const {
    const MlstmShape& shape = problem_.plan.shape;
    State<Real> state = state_in(memory, shape, all_columns(shape));
    state.zero = token == 0 && !problem_.has_initial_state();
    return state;
  }
  [[nodiscard]] State<Real> chunk_state(std::int64_t token) const {
    const std::int64_t chunk = (token - span_.begin) / problem_.plan.chunk;
    return whole_state(worker_.stored + chunk * state_size(problem_.plan.shape), token);
  }
  [[nodiscard]] State<Real> tile_state(std::int64_t chunk_begin, std::int64_t token) const {
    const std::int64_t tile = (token - chunk_begin) / problem_.plan.tile;
    if (tile == 0) return chunk_state(chunk_begin);
    return whole_state(worker_.inner + (tile - 1) * state_size(problem_.plan.shape), token);
  }

  void advance_over(std::int64_t head, std::int64_t begin, std::int64_t end, const State<Real>& from, State<Real>& to,
                    const State<Real>& stored = {}) const {
    const Tile tile{span_.sequence, head, begin, end};
    advance(load_keys(problem_, tile, worker_.tile.operands, all_columns(problem_.plan.shape)), gates_at(head, begin),
            from, to, stored);
  }

  // Forward in time: the state at every chunk start of the span, and denominators on the way where stages are fused.
  // The state stays in the cache; the copies that reverse() reads much later do not pass through it.
  void store_states(std::int64_t head) const {
    const Plan& plan = problem_.plan;
    State<Real> first = chunk_state(span_.begin);
    if (plan.fused()) {
      start_norm(problem_, span_.sequence, head, worker_.norm);
      load_state(problem_.initial_state.C, problem_.initial_state.n, span_.sequence.index, head,
                 all_columns(plan.shape), first);
    } else {
      copy_state(state_at_span(problem_, span_, head, scratch_.span_states), first);
    }
    State<Real> state = state_in(worker_.carried, plan.shape, all_columns(plan.shape));
    copy_state(first, state);
    for (std::int64_t token = span_.begin; token < span_.end;) {
      const std::int64_t end = tile_end(plan, token, span_.end);
      if (plan.fused()) denominators(problem_, scratch_.gates, span_.sequence, head, token, end, worker_.norm);
      const std::int64_t chunk_end = (token / plan.chunk + 1) * plan.chunk;
      if (chunk_end < span_.end) {
        advance_over(head, token, end, state, state, end == chunk_end ? chunk_state(chunk_end) : State<Real>{});
      }
      token = end;
    }
  }

  // The state at every tile start of one chunk.
  void rebuild_inner_states(std::int64_t head, std::int64_t begin, std::int64_t end) const {
    for (std::int64_t token = begin; tile_end(problem_.plan, token, end) < end;) {
      const std::int64_t next = tile_end(problem_.plan, token, end);
      State<Real> state = tile_state(begin, next);
      advance_over(head, token, next, tile_state(begin, token), state);
      token = next;
    }
  }

  void reverse(std::int64_t head, bool first_of_group) const {
    const Plan& plan = problem_.plan;
    const std::int64_t sequence = span_.sequence.index;
    const Columns columns = all_columns(plan.shape);
    State<Real> dstate = state_in(worker_.carried, plan.shape, columns);
    if (span_.end == span_.sequence.length) {
      load_state(tensors_.dlast_state.C, tensors_.dlast_state.n, sequence, head, columns, dstate);
    } else {
      State<Real> end =
          state_in(state_of_span(plan.shape, scratch_.span_dstates, span_.number, head), plan.shape, columns);
      end.zero = false;
      copy_state(end, dstate);
    }
    const bool wants_initial = tensors_.dinitial_state.C.given() || tensors_.dinitial_state.n.given();
    for (std::int64_t end = span_.end; end > span_.begin;) {
      const std::int64_t begin = (end - 1) / plan.chunk * plan.chunk;
      rebuild_inner_states(head, begin, end);
      for (std::int64_t tile_stop = end; tile_stop > begin;) {
        const Tile tile{span_.sequence, head, tile_begin(plan, tile_stop), tile_stop};
        const GateVectors<Real> gates = gates_at(head, tile.begin);
        const TileGradients<Real> work(problem_, tensors_.dh, tile, gates, worker_.tile);
        const State<Real> state = tile_state(begin, tile.begin);
        work.row_gradients(state);
        work.finish(state, dstate);
        store(tile, work, first_of_group);
        const bool dstate_is_used = tile.begin > span_.begin || (tile.begin == 0 && wants_initial);
        if (dstate_is_used) work.retreat_state(dstate);
        tile_stop = tile.begin;
      }
      end = begin;
    }
    if (span_.begin == 0) {
      store_state(dstate, tensors_.dinitial_state.C, tensors_.dinitial_state.n, sequence, head);
    }
  }

  void store(const Tile& tile, const TileGradients<Real>& work, bool first_of_group) const {
    store_tile<Real>(work.dV, nullptr, tensors_.dv, tile, tile.head);
    store_gate_gradients(problem_, tile.sequence, tile.head, tile.begin, tile.size(), worker_.tile.dlogi,
                         worker_.tile.dlogf, tensors_.di, tensors_.df);
    if (problem_.group() == 1) {
      store_tile<Real>(work.dQ, nullptr, tensors_.dq, tile, tile.head);
      store_tile<Real>(work.dK, nullptr, tensors_.dk, tile, tile.head);
      return;
    }
    const std::int64_t offset = (tile.begin - span_.begin) * dqk();
    const std::int64_t count = tile.size() * dqk();
    if (first_of_group) {
      std::copy_n(work.dQ.data, count, worker_.dq_sum + offset);
      std::copy_n(work.dK.data, count, worker_.dk_sum + offset);
    } else {
      simd::add(Real{1}, work.dQ.data, worker_.dq_sum + offset, count);
      simd::add(Real{1}, work.dK.data, worker_.dk_sum + offset, count);
    }
  }

  const Problem& problem_;
  const BackwardTensors& tensors_;
  const Scratch& scratch_;
  const Worker& worker_;
  const Span& span_;
};

// Reverse-time twin of states_at_spans: the gradient of the state at the end of every span but the last.
template <class Real>
void dstates_at_spans(const Problem& problem, const BackwardTensors& tensors, const BackwardScratch<Real>& scratch,
                      const GradientBuffers<Real>& buffers, const Sequence& sequence, std::int64_t head,
                      Columns columns) {
  const Plan& plan = problem.plan;
  if (sequence.length <= plan.span) return;
  const std::int64_t first = first_span(plan, sequence);
  const std::int64_t last = (sequence.length - 1) / plan.span;
  const auto dstate_at = [&](std::int64_t span) {
    return state_in(state_of_span(plan.shape, scratch.span_dstates, first + span, head), plan.shape, columns);
  };
  State<Real> later = dstate_at(last);
  load_state(tensors.dlast_state.C, tensors.dlast_state.n, sequence.index, head, columns, later);
  for (std::int64_t span = last - 1; span >= 0; --span) {
    State<Real> dstate = dstate_at(span);
    copy_state(later, dstate);
    std::int64_t end = std::min((span + 2) * plan.span, sequence.length);
    while (end > (span + 1) * plan.span) {
      const Tile tile{sequence, head, tile_begin(plan, end), end};
      const GateVectors<Real> gates = scratch.gates.at(problem, sequence, head, tile.begin);
      const std::int64_t offset = head * problem.tokens() + sequence.packed + tile.begin;
      const Matrix<const Real> Q = load_tile(problem.q, tile, head / problem.group(), buffers.q, 0, plan.shape.dqk);
      const Matrix<Real> Qb = dense(buffers.qb, tile.size(), plan.shape.dqk);
      const Matrix<Real> dHt = load_output_gradients(problem, tensors.dh, tile, gates.inverse, buffers.epilogue,
                                                     buffers.dht, columns.first, columns.width);
      scale_rows(static_cast<Real>(problem.settings.scale), gates.qbar, Q, Qb);
      retreat<Real>(gates.qbar[tile.size() - 1], Qb, dHt, problem.settings.exact ? scratch.deta + offset : nullptr,
                    dstate);
      end = tile.begin;
    }
    later = dstate;
  }
}

}  // namespace

template <class Real>
BackwardScratch<Real>::Worker::Worker(Arena& arena, const Plan& plan) : tile(arena, plan) {
  const std::int64_t state = state_size(plan.shape);
  norm = NormBuffers<Real>(arena, plan);
  stored = arena.take<Real>(chunks_of_span(plan) * state);
  inner = arena.take<Real>((tiles_of_chunk(plan) - 1) * state);
  carried = arena.take<Real>(state);
  if (plan.shape.heads != plan.shape.qk_heads) {
    dq_sum = arena.take<Real>(plan.span * plan.shape.dqk);
    dk_sum = arena.take<Real>(plan.span * plan.shape.dqk);
  }
}

template <class Real>
BackwardScratch<Real>::BackwardScratch(Arena& arena, const Plan& plan) : gates(arena, plan) {
  if (!plan.fused()) {
    const std::int64_t states = span_numbers(plan) * plan.shape.heads * state_size(plan.shape);
    const std::int64_t tokens = plan.shape.batch * plan.shape.tokens * plan.shape.heads;
    span_states = arena.take<Real>(states);
    span_dstates = arena.take<Real>(states);
    deta = arena.take<Real>(tokens);
  }
  workers = Workers<Worker>(arena, plan);
}

template <class Real>
void run_backward(const Problem& problem, const BackwardTensors& tensors, const BackwardScratch<Real>& scratch) {
  const Plan& plan = problem.plan;
  const std::int64_t heads = problem.heads();
  const std::int64_t sequences = plan.shape.sequences;
  const auto for_spans = [&](std::int64_t per_span, const auto& work) {
    parallel_for(span_numbers(plan) * per_span, plan.threads, [&](std::int64_t unit, int index) {
      const Span span = find_span(problem, unit / per_span);
      // An empty sequence still passes its state's gradient on.
      if (span.begin == span.end && span.number != first_span(plan, span.sequence)) return;
      const auto worker = scratch.workers.at(plan, index);
      work(SpanGradients<Real>(problem, tensors, scratch, worker, span), unit % per_span);
    });
  };

  parallel_for(sequences * heads, plan.threads, [&](std::int64_t unit, int index) {
    const Sequence sequence = problem.sequence(unit / heads);
    if (plan.fused()) {
      gates(problem, scratch.gates, sequence, unit % heads);  // denominators follow tile by tile
    } else {
      gates_and_denominators(problem, scratch.gates, sequence, unit % heads, scratch.workers.at(plan, index).norm);
    }
  });
  if (!plan.fused()) {
    const std::int64_t count = panels(plan);
    const auto for_panels = [&](const auto& work) {
      parallel_for(sequences * heads * count, plan.threads, [&](std::int64_t unit, int index) {
        work(problem.sequence(unit / (heads * count)), unit / count % heads, panel_columns(plan.shape, unit % count),
             scratch.workers.at(plan, index).tile);
      });
    };
    for_panels([&](const Sequence& sequence, std::int64_t head, Columns columns, const GradientBuffers<Real>& buffers) {
      states_at_spans(problem, scratch.gates, sequence, head, columns, buffers.operands, scratch.span_states);
    });
    if (problem.settings.exact) {
      for_spans(heads, [](const SpanGradients<Real>& span, std::int64_t head) { span.make_deta(head); });
    }
    for_panels([&](const Sequence& sequence, std::int64_t head, Columns columns, const GradientBuffers<Real>& buffers) {
      dstates_at_spans(problem, tensors, scratch, buffers, sequence, head, columns);
    });
  }
  for_spans(plan.shape.qk_heads, [](const SpanGradients<Real>& span, std::int64_t qk_head) { span.run(qk_head); });
}

#define TFLA_INSTANTIATE(Real)           \
  template struct BackwardScratch<Real>; \
  template void run_backward(const Problem&, const BackwardTensors&, const BackwardScratch<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu
