#include "cpu/conv/tile.h"

#include <algorithm>

#include "plan/arithmetic.h"

namespace tfla::cpu::conv {

namespace {

// Calls line(offset in the tensor, its stride there, pointer into the tile, elements) for all lines along the inner
// axis.
template <class Element, class Line>
void for_lines(const ConvPlan& plan, const TensorView& view, Rows rows, Panel panel, const Tile<Element>& tile,
               const Line& line) {
  const bool along = plan.shape.along_tokens;
  const std::int64_t at = rows.offset(view, panel), lines = along ? panel.count : rows.count();
  const std::int64_t elements = along ? rows.count() : panel.count, outer = tile.outer(plan);
  const int outer_axis = along ? 2 : 1, inner_axis = along ? 1 : 2;
  for (std::int64_t o = 0; o < lines; ++o) {
    line(at + o * view.strides[outer_axis], view.strides[inner_axis], tile.data + o * outer, elements);
  }
}

}  // namespace

template <class Real>
Worker<Real>::Worker(Arena& arena, const ConvPlan& plan) {
  const bool along = plan.shape.along_tokens, backward = plan.operation == Operation::backward;
  const std::int64_t reach = plan.shape.width - 1, rows = std::max(plan.tile, reach);
  const std::int64_t longest = round_up(rows + 2 * reach, 16), panel = round_up(plan.panel, 16);
  const auto tile = [&](std::int64_t tokens) {
    return Tile<Real>{arena.take<Real>(along ? panel * longest : tokens * panel), along ? 1 : panel,
                      along ? longest : 1};
  };
  x = tile(longest);
  out = tile(rows + reach);
  dz = backward ? tile(rows + reach) : Tile<Real>{};
  weight = arena.take<Real>(plan.shape.width * panel);
  bias = arena.take<Real>(panel);
}

template <class Real>
void Worker<Real>::take_weights(const ConvPlan& plan, const TensorView& weights, const TensorView& biases,
                                Panel panel) {
  for (std::int64_t k = 0; k < plan.shape.width; ++k) {
    load_line(weights, panel.first * weights.strides[0] + k * weights.strides[1], weights.strides[0],
              weight + k * plan.panel, panel.count);
  }
  given_bias = biases.given() ? bias : nullptr;
  if (biases.given()) load_line(biases, panel.first * biases.strides[0], biases.strides[0], bias, panel.count);
}

template <class Real>
void load_tile(const ConvPlan& plan, const TensorView& view, Rows rows, Panel panel, const Tile<Real>& to) {
  for_lines(plan, view, rows, panel, to, [&](std::int64_t at, std::int64_t stride, Real* line, std::int64_t n) {
    load_line(view, at, stride, line, n);
  });
}

template <class Real>
void store_tile(const ConvPlan& plan, const Tile<Real>& from, const MutableTensorView& view, Rows rows, Panel panel) {
  for_lines(plan, view, rows, panel, from, [&](std::int64_t at, std::int64_t stride, const Real* line, std::int64_t n) {
    store_line(line, view, at, stride, n);
  });
}

void clear_rows(const ConvPlan& plan, const MutableTensorView& view, Rows rows, Panel panel) {
  for_lines(
      plan, view, rows, panel, Tile<float>{nullptr, 0, 0},
      [&](std::int64_t at, std::int64_t stride, const float*, std::int64_t n) { clear_line(view, at, stride, n); });
}

template <class Real>
void clear_tile(const ConvPlan& plan, const Tile<Real>& tile, std::int64_t tokens, Panel panel) {
  const bool along = plan.shape.along_tokens;
  const std::int64_t lines = along ? panel.count : tokens, elements = along ? tokens : panel.count;
  for (std::int64_t o = 0; o < lines; ++o) std::fill_n(tile.data + o * tile.outer(plan), elements, Real{0});
}

template <class Real>
Tile<const Real> inputs_of(const ConvPlan& plan, const TensorView& x, const TensorView& initial_state, const Run& run,
                           Rows rows, Panel panel, const Tile<Real>& buffer) {
  const std::int64_t reach = plan.shape.width - 1, begin = rows.begin - reach;
  const std::int64_t before = std::max<std::int64_t>(run.first - begin, 0);  // tokens that lie before the sequence
  if (before == 0) return tile_of(plan, x, {rows.batch, begin, rows.end}, panel, buffer);
  if (initial_state.given()) {
    load_tile(plan, initial_state, {run.sequence, reach - before, reach}, panel, buffer);
  } else {
    clear_tile(plan, buffer, before, panel);
  }
  load_tile(plan, x, {rows.batch, run.first, rows.end}, panel, buffer.at(before));
  return {buffer.data, buffer.token, buffer.channel};
}

#define TFLA_INSTANTIATE(Real)                                                                                        \
  template struct Worker<Real>;                                                                                       \
  template void load_tile(const ConvPlan&, const TensorView&, Rows, Panel, const Tile<Real>&);                        \
  template void store_tile(const ConvPlan&, const Tile<Real>&, const MutableTensorView&, Rows, Panel);                \
  template void clear_tile(const ConvPlan&, const Tile<Real>&, std::int64_t, Panel);                                  \
  template Tile<const Real> inputs_of(const ConvPlan&, const TensorView&, const TensorView&, const Run&, Rows, Panel, \
                                      const Tile<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu::conv
