#include <algorithm>
#include <cstdint>

#include "cpu/conv/passes.h"
#include "cpu/gate_tensor.h"
#include "cpu/kernels/conv.h"
#include "cpu/threads.h"

namespace tfla::cpu::conv {

namespace {

template <class Real>
struct Gradients {
  const ConvBackward& args;
  const ConvPlan& plan;
  const Worker<Real>& worker;
  Panel panel;

  [[nodiscard]] std::int64_t reach() const { return plan.shape.width - 1; }
  [[nodiscard]] bool along() const { return plan.shape.along_tokens; }

  // The gradients before the activation of the tokens from rows.begin to W-1 behind rows.end, into worker.dz; 0 outside
  // of the sequence. Returns the inputs, from W-1 before the first of those tokens that is in the sequence.
  Tile<const Real> make_dz(const Run& run, Rows rows) const {
    const std::int64_t begin = std::max(rows.begin, run.first), behind = rows.end + reach();
    const std::int64_t end = std::max(std::min(behind, run.last), begin);
    const Rows inside{run.batch, begin, end};
    clear_tile(plan, worker.dz, begin - rows.begin, panel);
    clear_tile(plan, worker.dz.at(end - rows.begin), behind - end, panel);
    const Tile<Real> dz = worker.dz.at(begin - rows.begin);
    const Tile<const Real> x = inputs_of(plan, args.x, args.initial_state, run, inside, panel, worker.x);
    if (plan.options.activation == ConvActivation::none) {
      load_tile(plan, args.dy, inside, panel, dz);
      return x;
    }
    const Tile<const Real> dy = tile_of(plan, args.dy, inside, panel, worker.out);
    correlate_slope({.x = x.data,
                     .x_outer = x.outer(plan),
                     .x_tap = x.token,
                     .weight = worker.weight,
                     .weight_tap = plan.panel,
                     .bias = worker.given_bias,
                     .out = dz.data,
                     .out_outer = dz.outer(plan),
                     .outer = along() ? panel.count : inside.count(),
                     .inner = along() ? inside.count() : panel.count,
                     .width = plan.shape.width,
                     .along_tokens = along()},
                    dy.data, dy.outer(plan));
    return x;
  }

  // What the last state says of the inputs it holds.
  void add_dlast(const Run& run, Rows rows, const Tile<Real>& dx) const {
    const TensorView& dlast = args.dlast_state;
    for (std::int64_t t = std::max(rows.begin, run.last - reach()); t < rows.end; ++t) {
      const std::int64_t row = t - run.last + reach();
      for (std::int64_t c = 0; c < panel.count; ++c) {
        const std::int64_t at =
            run.sequence * dlast.strides[0] + row * dlast.strides[1] + (panel.first + c) * dlast.strides[2];
        dx.data[(t - rows.begin) * dx.token + c * dx.channel] += static_cast<Real>(read_gate(dlast, at));
      }
    }
  }

  // From worker.dz the gradients of the inputs rows.begin to rows.end, which lie in `to` from row `at.begin` on.
  void store_dx(const Run& run, Rows rows, const MutableTensorView& to, Rows at) const {
    const bool of_last = args.dlast_state.given() && rows.end > run.last - reach();
    const bool direct = !of_last && is_direct<Real>(plan, to);
    const Tile<Real> dx = direct ? direct_tile<Real>(to, at, panel) : worker.out;
    correlate({.x = worker.dz.data,
               .x_outer = worker.dz.outer(plan),
               .x_tap = worker.dz.token,
               .weight = worker.weight + reach() * plan.panel,
               .weight_tap = -plan.panel,
               .bias = nullptr,
               .out = dx.data,
               .out_outer = dx.outer(plan),
               .outer = along() ? panel.count : rows.count(),
               .inner = along() ? rows.count() : panel.count,
               .width = plan.shape.width,
               .along_tokens = along()},
              false);
    if (of_last) add_dlast(run, rows, dx);
    if (!direct) store_tile(plan, dx, to, at, panel);
  }

  void tile(const Run& run, Rows rows, double* sums) const {
    const Tile<const Real> x = make_dz(run, rows);
    add_tap_sums({.x = x.data,
                  .x_outer = x.outer(plan),
                  .x_tap = x.token,
                  .dz = worker.dz.data,
                  .dz_outer = worker.dz.outer(plan),
                  .sums = sums,
                  .sums_tap = plan.shape.channels,
                  .outer = along() ? panel.count : rows.count(),
                  .inner = along() ? rows.count() : panel.count,
                  .width = plan.shape.width,
                  .along_tokens = along()});
    store_dx(run, rows, args.dx, rows);
  }

  void initial_state(const Run& run) const {
    const Rows before{run.batch, run.first - reach(), run.first};
    static_cast<void>(make_dz(run, before));
    store_dx(run, before, args.dinitial_state, {run.sequence, 0, reach()});
  }
};

// Sums over all spans, in their order.
template <class Real>
void store_sums(const ConvBackward& args, const ConvPlan& plan, const double* sums, Panel panel) {
  const std::int64_t width = plan.shape.width, channels = plan.shape.channels;
  for (std::int64_t k = 0; k <= width; ++k) {
    const MutableTensorView& to = k < width ? args.dweight : args.dbias;
    if (!to.given()) continue;
    for (std::int64_t c = panel.first; c < panel.first + panel.count; ++c) {
      double sum = 0;
      for (std::int64_t span = 0; span < plan.spans(); ++span) sum += sums[(span * (width + 1) + k) * channels + c];
      write_gate(to, c * to.strides[0] + (k < width ? k * to.strides[1] : 0), sum);
    }
  }
}

}  // namespace

template <class Real>
void run_backward(const ConvBackward& args, const ConvPlan& plan, const Scratch<Real>& scratch) {
  const Packing packing{plan.shape, args.cu_seqlens, args.seq_idx};
  const std::int64_t panels = plan.panels(), channels = plan.shape.channels, rows = plan.shape.width + 1;
  const std::int64_t tokens = plan.shape.batch * plan.shape.tokens;
  parallel_for(plan.spans() * panels, plan.threads, [&](std::int64_t unit, int index) {
    const Panel panel = panel_of(plan, unit % panels);
    const std::int64_t first = unit / panels * plan.span;
    Worker<Real> worker = scratch.workers.at(plan, index);
    worker.take_weights(plan, args.weight, args.bias, panel);
    double* sums = scratch.sums + unit / panels * rows * channels + panel.first;
    for (std::int64_t k = 0; k < rows; ++k) std::fill_n(sums + k * channels, panel.count, 0.0);
    const Gradients<Real> gradients{args, plan, worker, panel};
    packing.for_runs(first, std::min(first + plan.span, tokens), [&](const Run& run) {
      if (run.padding) return clear_rows(plan, args.dx, {run.batch, run.begin, run.end}, panel);
      for (std::int64_t t = run.begin; t < run.end; t += plan.tile)
        gradients.tile(run, {run.batch, t, std::min(t + plan.tile, run.end)}, sums);
    });
  });
  parallel_for(panels, plan.threads,
               [&](std::int64_t panel, int) { store_sums<Real>(args, plan, scratch.sums, panel_of(plan, panel)); });
  if (!args.dinitial_state.given() || plan.shape.width == 1) return;
  parallel_for(plan.shape.sequences * panels, plan.threads, [&](std::int64_t unit, int index) {
    const Panel panel = panel_of(plan, unit % panels);
    Worker<Real> worker = scratch.workers.at(plan, index);
    worker.take_weights(plan, args.weight, args.bias, panel);
    Gradients<Real>{args, plan, worker, panel}.initial_state(packing.whole(unit / panels));
  });
}

template void run_backward(const ConvBackward&, const ConvPlan&, const Scratch<float>&);
template void run_backward(const ConvBackward&, const ConvPlan&, const Scratch<double>&);

}  // namespace tfla::cpu::conv
