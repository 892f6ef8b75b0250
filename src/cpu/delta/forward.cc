#include "cpu/delta/forward.h"

#include <algorithm>

#include "cpu/threads.h"

namespace tfla::cpu::delta {

namespace {

// h = (scale qbar Q) C + P w
template <class Real>
void tile_outputs(const Problem& problem, const Tile& tile, Columns columns, const TileKeys<Real>& keys,
                  const State<Real>& state, const typename ForwardScratch<Real>::Worker& worker,
                  const Matrix<const Real>& w, const MutableTensorView& h) {
  const auto scale = static_cast<Real>(problem.scale());
  const Matrix<Real> Q = load_queries(problem, tile, worker.tile);
  const Matrix<Real> P = spread(worker.tile.P, tile.size(), tile.size());
  const Matrix<Real> out = spread(worker.h, tile.size(), columns.width);
  gated_scores(scale, Matrix<const Real>(Q), keys, P);
  multiply(Product<Real>{.out = out, .a = P, .b = w, .a_part = Part::lower});
  if (!state.zero) product(out, scaled_rows<Real>(scale, keys.gates->qbar, Q, keys.scaled), state.C, 1);
  MutableTensorView panel = h;
  panel.data = static_cast<std::byte*>(h.data) + columns.first * item_size(h.dtype);
  store_tile<Real>(out, nullptr, panel, tile, tile.head);
}

template <class Real>
void sequence_outputs(const Problem& problem, const Sequence& sequence, std::int64_t head, Columns columns,
                      typename ForwardScratch<Real>::Worker worker, const MutableTensorView& h,
                      const MutableTensorView& last_state) {
  State<Real> state{.C = spread(worker.state, problem.plan.shape.dqk, columns.width)};
  load_state(problem.initial_state, sequence.index, head, columns, state);
  for (std::int64_t token = 0; token < sequence.length;) {
    const Tile tile{sequence, head, token, problem.tile_end(token, sequence.length)};
    const TileKeys<Real> keys = load_keys(problem, tile, worker.tile);
    (void)load_tile<Real>(problem.v, tile, head, worker.r, columns.first, columns.width);
    const Matrix<Real> r = spread(worker.r, tile.size(), columns.width);
    const Matrix<Real> w = spread(worker.w, tile.size(), columns.width);
    residuals(keys, state, r, w);
    tile_outputs<Real>(problem, tile, columns, keys, state, worker, w, h);
    if (tile.end < sequence.length || last_state.given()) advance<Real>(keys, w, state, state);
    token = tile.end;
  }
  store_state(state, last_state, sequence.index, head, columns);
}

}  // namespace

template <class Real>
ForwardScratch<Real>::Worker::Worker(Arena& arena, const DeltaPlan& plan) : tile(arena, plan) {
  for (Real** rows : {&r, &w, &h}) *rows = arena.take<Real>(spread_size(plan.tile, plan.panel));
  state = arena.take<Real>(spread_size(plan.shape.dqk, plan.panel));
}

template <class Real>
void run_forward(const Problem& problem, const MutableTensorView& h, const MutableTensorView& last_state,
                 const ForwardScratch<Real>& scratch) {
  const DeltaPlan& plan = problem.plan;
  const std::int64_t dhv = plan.shape.dhv, panels = (dhv + plan.panel - 1) / plan.panel;
  const std::int64_t per_sequence = plan.shape.heads * panels;
  parallel_for(plan.shape.sequences * per_sequence, plan.threads, [&](std::int64_t unit, int index) {
    const std::int64_t first = unit % panels * plan.panel;
    sequence_outputs<Real>(problem, problem.sequence(unit / per_sequence), unit / panels % plan.shape.heads,
                           {first, std::min(plan.panel, dhv - first)}, scratch.workers.at(plan, index), h, last_state);
  });
}

#define TFLA_INSTANTIATE(Real)                                                                  \
  template struct ForwardScratch<Real>;                                                         \
  template void run_forward(const Problem&, const MutableTensorView&, const MutableTensorView&, \
                            const ForwardScratch<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu::delta
