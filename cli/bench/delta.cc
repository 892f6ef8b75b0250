// `tfla bench --operator delta`: the delta rule.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/bench/bench.h"
#include "cli/support/json.h"
#include "cli/support/progress.h"
#include "cli/support/table.h"
#include "cli/support/workload.h"

namespace tfla::cli {
namespace {

using Kind = DeltaWorkload::Kind;

DeltaRow time_sequence(const DeltaShape& shape, bool training, const BenchOptions& options) {
  const DeltaWorkload workload(shape, training ? Kind::training : Kind::forward);
  const DeltaForward forward_args = workload.forward(options.common.chunk);
  const DeltaBackward backward_args = workload.backward(options.common.chunk);
  DeltaRow row{.operation = training ? "training" : "forward",
               .plans = {delta_plan(forward_args, options.common.execution)}};
  if (training) row.plans.push_back(delta_plan(backward_args, options.common.execution));
  const Buffer scratch(std::max(row.plans.front().scratch_bytes, row.plans.back().scratch_bytes), Device::cpu,
                       Pages::huge);
  const auto call = [&] {
    delta_forward(forward_args, row.plans.front(), scratch.span());
    if (training) delta_backward(backward_args, row.plans.back(), scratch.span());
  };
  row.timing = measure({call}, options.times).front();
  return row;
}

DeltaRow time_step(const DeltaShape& shape, const BenchOptions& options) {
  const DeltaWorkload workload(shape, Kind::step);
  const DeltaStep args = workload.step();
  DeltaRow row{.operation = "step", .plans = {delta_plan(args, options.common.execution)}};
  const Buffer scratch(row.plans.front().scratch_bytes);
  const Copy copy(workload.state_bytes(), row.plans.front().threads, Device::cpu);
  const std::vector<Timing> timings =
      measure({[&] { delta_step(args, row.plans.front(), scratch.span()); }, [&copy] { copy(); }}, options.times);
  row.timing = timings[0];
  row.copy = timings[1];
  row.copy_traffic = copy.traffic();
  return row;
}

double useful_flops(const DeltaRow& row) {
  double flops = 0;
  for (const DeltaPlan& plan : row.plans) flops += plan.useful_flops;
  return flops;
}

bool is_step(const DeltaRow& row) { return row.plans.front().operation == Operation::step; }

// A step reads and writes as many bytes as a copy of its state does: the time of the copy, by the time of the step.
double of_copy(const DeltaRow& row) { return row.copy.median / row.timing.median; }

}  // namespace

std::vector<DeltaRow> run_delta_bench(const BenchOptions& options) {
  const bool sequences = options.forward || options.training;
  const std::vector<DeltaShape> shapes = sequences ? sequence_shapes(options) : std::vector<DeltaShape>();
  const std::vector<DeltaShape> steps = options.step ? step_shapes(options) : std::vector<DeltaShape>();
  for (const DeltaShape& shape : shapes)  // finds what cannot be computed before tensors are made for it
    (void)delta_plan(Operation::backward, shape, {}, options.common.execution);
  for (const DeltaShape& shape : steps) (void)delta_plan(Operation::step, shape, {}, options.common.execution);
  const std::size_t kinds = (options.forward ? 1 : 0) + (options.training ? 1 : 0);
  Progress progress("tfla bench",
                    static_cast<std::int64_t>(options.dtypes.size() * (shapes.size() * kinds + steps.size())));
  std::vector<DeltaRow> rows;
  const auto timed = [&](const char* operation, const DeltaShape& shape, const auto& time) {
    progress.start(fmt::format("{} {} B {} T {}", operation, tfla::name(shape.dtype), shape.batch, shape.tokens));
    rows.push_back(time());
    progress.done();
  };
  for (DType dtype : options.dtypes) {
    for (const bool training : {false, true}) {
      if (training ? !options.training : !options.forward) continue;
      for (DeltaShape shape : shapes) {
        set_dtype(shape, dtype);
        timed(training ? "training" : "forward", shape, [&] { return time_sequence(shape, training, options); });
      }
    }
    for (DeltaShape shape : steps) {
      set_dtype(shape, dtype);
      timed("step", shape, [&] { return time_step(shape, options); });
    }
  }
  return rows;
}

std::string to_text(const std::vector<DeltaRow>& rows, bool color) {
  Table table({{"operation", Align::left},
               {"dtype", Align::left},
               {"B"},
               {"T"},
               {"time"},
               {"spread"},
               {"tokens/s"},
               {"GFLOP/s"},
               {"scratch MB"},
               {"of copy"}});
  const DeltaRow* before = nullptr;
  for (const DeltaRow& row : rows) {
    if (before != nullptr && before->operation != row.operation) table.rule();
    before = &row;
    const DeltaShape& shape = row.plans.front().shape;
    std::size_t scratch = 0;
    for (const DeltaPlan& plan : row.plans) scratch = std::max(scratch, plan.scratch_bytes);
    table.row({{row.operation},
               {tfla::name(shape.dtype)},
               {fmt::format("{}", shape.batch)},
               {fmt::format("{}", shape.tokens)},
               {format_seconds(row.timing.median)},
               {fmt::format("{:.0f} %", 100 * row.timing.spread()), Tone::faint},
               {format_count(static_cast<double>(shape.batch * shape.tokens) / row.timing.median)},
               {fmt::format("{:.1f}", useful_flops(row) / row.timing.median / 1e9)},
               {format_megabytes(static_cast<double>(scratch))},
               {is_step(row) ? fmt::format("{:.0f} %", 100 * of_copy(row)) : ""}});
  }
  return table.text(color);
}

nlohmann::ordered_json to_json(const std::vector<DeltaRow>& rows) {
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const DeltaRow& row : rows) {
    nlohmann::ordered_json plans = nlohmann::ordered_json::array();
    for (const DeltaPlan& plan : row.plans) plans.push_back(to_json(plan));
    nlohmann::ordered_json entry = {{"operation", row.operation},
                                    {"seconds", to_json(row.timing)},
                                    {"useful_flops_per_second", useful_flops(row) / row.timing.median},
                                    {"plans", plans}};
    if (is_step(row)) {
      entry["copy_seconds"] = to_json(row.copy);
      entry["copy_bytes_per_second"] = row.copy_traffic / row.copy.median;
    }
    out.push_back(std::move(entry));
  }
  return {{"operator", "delta"}, {"rows", out}};
}

}  // namespace tfla::cli
