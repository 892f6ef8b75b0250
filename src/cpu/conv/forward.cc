#include <algorithm>
#include <cstdint>

#include "cpu/conv/passes.h"
#include "cpu/kernels/conv.h"
#include "cpu/threads.h"

namespace tfla::cpu::conv {

namespace {

template <class Real>
void forward_tile(const ConvForward& args, const ConvPlan& plan, const Run& run, Rows rows, Panel panel,
                  const Worker<Real>& worker) {
  const bool along = plan.shape.along_tokens, direct = is_direct<Real>(plan, args.y);
  const Tile<const Real> x = inputs_of(plan, args.x, args.initial_state, run, rows, panel, worker.x);
  const Tile<Real> y = direct ? direct_tile<Real>(args.y, rows, panel) : worker.out;
  correlate({.x = x.data,
             .x_outer = x.outer(plan),
             .x_tap = x.token,
             .weight = worker.weight,
             .weight_tap = plan.panel,
             .bias = worker.given_bias,
             .out = y.data,
             .out_outer = y.outer(plan),
             .outer = along ? panel.count : rows.count(),
             .inner = along ? rows.count() : panel.count,
             .width = plan.shape.width,
             .along_tokens = along},
            plan.options.activation == ConvActivation::silu);
  if (!direct) store_tile(plan, y, args.y, rows, panel);
}

// The last W-1 inputs of a sequence. In place row i comes from row i + length, which is not written before it is read.
void store_last_state(const ConvForward& args, const ConvPlan& plan, std::int64_t sequence) {
  const std::int64_t reach = plan.shape.width - 1, channels = plan.shape.channels;
  const Run run = Packing{plan.shape, args.cu_seqlens}.whole(sequence);
  const MutableTensorView& last = args.last_state;
  for (std::int64_t i = 0; i < reach; ++i) {
    const std::int64_t token = run.last - reach + i, at = sequence * last.strides[0] + i * last.strides[1];
    const TensorView& from = token >= run.first ? args.x : args.initial_state;
    if (!from.given()) {
      clear_line(last, at, last.strides[2], channels);
    } else {
      const std::int64_t row = token >= run.first ? run.batch : sequence;
      const std::int64_t place = token >= run.first ? token : token - run.first + reach;
      copy_line(from, row * from.strides[0] + place * from.strides[1], from.strides[2], last, at, last.strides[2],
                channels);
    }
  }
}

}  // namespace

template <class Real>
void run_forward(const ConvForward& args, const ConvPlan& plan, const Scratch<Real>& scratch) {
  const Packing packing{plan.shape, args.cu_seqlens, args.seq_idx};
  const std::int64_t panels = plan.panels(), tokens = plan.shape.batch * plan.shape.tokens;
  parallel_for(plan.spans() * panels, plan.threads, [&](std::int64_t unit, int index) {
    const Panel panel = panel_of(plan, unit % panels);
    const std::int64_t first = unit / panels * plan.span;
    Worker<Real> worker = scratch.workers.at(plan, index);
    worker.take_weights(plan, args.weight, args.bias, panel);
    packing.for_runs(first, std::min(first + plan.span, tokens), [&](const Run& run) {
      if (run.padding) return clear_rows(plan, args.y, {run.batch, run.begin, run.end}, panel);
      for (std::int64_t t = run.begin; t < run.end; t += plan.tile)
        forward_tile(args, plan, run, {run.batch, t, std::min(t + plan.tile, run.end)}, panel, worker);
    });
  });
  if (!args.last_state.given()) return;
  parallel_for(plan.shape.sequences, plan.threads,
               [&](std::int64_t sequence, int) { store_last_state(args, plan, sequence); });
}

template void run_forward(const ConvForward&, const ConvPlan&, const Scratch<float>&);
template void run_forward(const ConvForward&, const ConvPlan&, const Scratch<double>&);

}  // namespace tfla::cpu::conv
