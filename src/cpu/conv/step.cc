#include <algorithm>
#include <cstdint>

#include "cpu/conv/passes.h"
#include "cpu/kernels/conv.h"
#include "cpu/threads.h"

namespace tfla::cpu::conv {

namespace {

// Where the inputs of one sequence lie in its state, and where new ones go.
struct History {
  const MutableTensorView& state;  // [S,L,D]
  std::int64_t slot;
  std::int64_t begin;  // of a ring: the row of the first new input
  bool ring;

  [[nodiscard]] std::int64_t length() const { return state.shape[1]; }
  // The row of the input that lies `back` before the first new one.
  [[nodiscard]] std::int64_t before(std::int64_t back) const {
    return ring ? (begin - back + length()) % length() : length() - back;
  }
  [[nodiscard]] std::int64_t at(std::int64_t row, Panel panel) const {
    return slot * state.strides[0] + row * state.strides[1] + panel.first * state.strides[2];
  }
};

// Of more inputs than the state holds only the last are kept.
void update(const ConvStep& args, const History& history, std::int64_t batch, Panel panel) {
  const std::int64_t tokens = args.x.shape[1], length = history.length(), stride = history.state.strides[2];
  const std::int64_t kept = std::min(tokens, length);
  if (!history.ring) {
    for (std::int64_t row = 0; row < length - kept; ++row)
      move_line(history.state, history.at(row + kept, panel), history.at(row, panel), stride, panel.count);
  }
  for (std::int64_t t = tokens - kept; t < tokens; ++t) {
    const std::int64_t row = history.ring ? (history.begin + t) % length : length - tokens + t;
    copy_line(args.x, Rows{batch, t, t + 1}.offset(args.x, panel), args.x.strides[2], history.state,
              history.at(row, panel), stride, panel.count);
  }
}

template <class Real>
void step_panel(const ConvStep& args, const ConvPlan& plan, const History& history, std::int64_t batch, Panel panel,
                const Worker<Real>& worker) {
  const std::int64_t reach = plan.shape.width - 1, tokens = plan.shape.tokens;
  const bool along = plan.shape.along_tokens;
  for (std::int64_t back = reach; back > 0; --back) {
    const std::int64_t row = history.before(back);
    load_tile(plan, history.state, {history.slot, row, row + 1}, panel, worker.x.at(reach - back));
  }
  const Rows rows{batch, 0, tokens};
  load_tile(plan, args.x, rows, panel, worker.x.at(reach));
  correlate({.x = worker.x.data,
             .x_outer = worker.x.outer(plan),
             .x_tap = worker.x.token,
             .weight = worker.weight,
             .weight_tap = plan.panel,
             .bias = worker.given_bias,
             .out = worker.out.data,
             .out_outer = worker.out.outer(plan),
             .outer = along ? panel.count : tokens,
             .inner = along ? tokens : panel.count,
             .width = plan.shape.width,
             .along_tokens = along},
            plan.options.activation == ConvActivation::silu);
  store_tile(plan, worker.out, args.y, rows, panel);
  if (history.length() > 0) update(args, history, batch, panel);
}

}  // namespace

template <class Real>
void run_step(const ConvStep& args, const ConvPlan& plan, const Scratch<Real>& scratch) {
  const std::int64_t panels = plan.panels();
  const bool ring = args.cache_seqlens.given() && args.state.shape[1] > 0;
  parallel_for(plan.shape.batch * panels, plan.threads, [&](std::int64_t unit, int index) {
    const Panel panel = panel_of(plan, unit % panels);
    const std::int64_t batch = unit / panels;
    const std::int64_t slot = args.slots.given() ? read_index(args.slots, batch) : batch;
    if (slot == padding_slot) return clear_rows(plan, args.y, {batch, 0, plan.shape.tokens}, panel);
    Worker<Real> worker = scratch.workers.at(plan, index);
    worker.take_weights(plan, args.weight, args.bias, panel);
    const std::int64_t begin = ring ? read_index(args.cache_seqlens, batch) % args.state.shape[1] : 0;
    step_panel(args, plan, {args.state, slot, begin, ring}, batch, panel, worker);
  });
}

template void run_step(const ConvStep&, const ConvPlan&, const Scratch<float>&);
template void run_step(const ConvStep&, const ConvPlan&, const Scratch<double>&);

}  // namespace tfla::cpu::conv
