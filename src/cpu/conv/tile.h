// Tiles of the convolution: some tokens and channels, where they lie in a tensor or in the work space of a thread.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/arena.h"
#include "cpu/conv/lines.h"
#include "cpu/conv/runs.h"
#include "tfla/conv.h"

namespace tfla::cpu::conv {

// Channels [first, first + count).
struct Panel {
  std::int64_t first, count;
};

// Strides of a tile: one of them is 1, that of the tokens where the plan goes along them.
template <class Real>
struct Tile {
  Real* data;
  std::int64_t token, channel;

  [[nodiscard]] Tile at(std::int64_t tokens) const { return {data + tokens * token, token, channel}; }
  [[nodiscard]] std::int64_t outer(const ConvPlan& plan) const { return plan.shape.along_tokens ? channel : token; }
};

// Tokens of a [B,T,D] tensor, or rows of a [N,W-1,D] state: of row `batch`, from `begin` to `end`.
struct Rows {
  std::int64_t batch, begin, end;
  [[nodiscard]] std::int64_t count() const { return end - begin; }
  [[nodiscard]] std::int64_t offset(const TensorView& view, Panel panel) const {
    return batch * view.strides[0] + begin * view.strides[1] + panel.first * view.strides[2];
  }
};

// The work space of a thread.
template <class Real>
struct Worker {
  Tile<Real> x;    // the inputs of a tile with those before it, and in backward those behind it
  Tile<Real> dz;   // backward: gradients before the activation, with those behind the tile
  Tile<Real> out;  // what a tile makes
  Real* weight;    // [W,panel]
  Real* bias;      // [panel]
  const Real* given_bias = nullptr;

  Worker(Arena& arena, const ConvPlan& plan);
  void take_weights(const ConvPlan& plan, const TensorView& weights, const TensorView& biases, Panel panel);
};

template <class Real>
void load_tile(const ConvPlan& plan, const TensorView& view, Rows rows, Panel panel, const Tile<Real>& to);
template <class Real>
void store_tile(const ConvPlan& plan, const Tile<Real>& from, const MutableTensorView& view, Rows rows, Panel panel);
void clear_rows(const ConvPlan& plan, const MutableTensorView& view, Rows rows, Panel panel);
template <class Real>
void clear_tile(const ConvPlan& plan, const Tile<Real>& tile, std::int64_t tokens, Panel panel);

// Where kernels can work on the tensor itself: its elements are Real, and lie side by side as the plan says.
template <class Real>
[[nodiscard]] bool is_direct(const ConvPlan& plan, const TensorView& view) {
  return view.dtype == (std::is_same_v<Real, double> ? DType::float64 : DType::float32) &&
         view.strides[plan.shape.along_tokens ? 1 : 2] == 1;
}

template <class Real, class View>
[[nodiscard]] auto direct_tile(const View& view, Rows rows, Panel panel) {
  using Element = std::conditional_t<std::is_same_v<View, TensorView>, const Real, Real>;
  return Tile<Element>{static_cast<Element*>(view.data) + rows.offset(view, panel), view.strides[1], view.strides[2]};
}

// The rows in the tensor itself, or else in `buffer`.
template <class Real>
[[nodiscard]] Tile<const Real> tile_of(const ConvPlan& plan, const TensorView& view, Rows rows, Panel panel,
                                       const Tile<Real>& buffer) {
  if (is_direct<Real>(plan, view)) return direct_tile<Real>(view, rows, panel);
  load_tile(plan, view, rows, panel, buffer);
  return {buffer.data, buffer.token, buffer.channel};
}

// The same of inputs from W-1 before the run's token `begin` on; those before the sequence are its state, or 0.
template <class Real>
[[nodiscard]] Tile<const Real> inputs_of(const ConvPlan& plan, const TensorView& x, const TensorView& initial_state,
                                         const Run& run, Rows rows, Panel panel, const Tile<Real>& buffer);

}  // namespace tfla::cpu::conv
