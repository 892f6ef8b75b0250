#include "cli/check/delta.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/support/json.h"
#include "cli/support/options.h"
#include "cli/support/progress.h"
#include "cli/support/table.h"
#include "testkit/operators/delta_judge.h"

namespace tfla::cli {
namespace {

using testkit::Decay;
using testkit::DeltaCase;
using testkit::DeltaError;
using testkit::DeltaRegime;

struct Variant {
  const char* name;
  Decay decay;
  WriteGate write;
  bool normalize_qk;
};
constexpr Variant variants[] = {{"no decay", Decay::none, WriteGate::plain, false},
                                {"decay", Decay::log, WriteGate::sigmoid, true},
                                {"fused gates", Decay::biased, WriteGate::twice_sigmoid, true}};

// The error that is nearest to (or furthest beyond) its bound.
struct Worst {
  DeltaError found;
  DeltaRegime regime = DeltaRegime::ordinary;
  bool any = false;

  void take(const DeltaError& error, DeltaRegime in) {
    // Not-a-number is beyond every bound.
    const bool worse = !any || !error.ok() || error.error * found.allowed > found.error * error.allowed;
    if (worse && (!any || found.ok())) *this = {error, in, true};
  }
};

struct Row {
  const Variant* variant;
  DType dtype;
  Worst values = {}, gradients = {};

  [[nodiscard]] bool ok() const { return values.found.ok() && gradients.found.ok(); }
};

template <class Args>
testkit::DeltaResults results(const Args& args) {
  testkit::DeltaResults all;
  for (const auto& [name, view] : testkit::outputs(args)) all[name] = testkit::gather(view);
  return all;
}

void check_regime(Row& row, DeltaRegime regime, const DeltaCheck& options, nlohmann::ordered_json& log) {
  DeltaCase description;
  description.regime = regime;
  description.shape = options.shape;
  set_dtype(description.shape, row.dtype);
  description.g_dtype = description.shape.gate_dtype;
  description.decay = row.variant->decay;
  description.options = {.write = row.variant->write, .normalize_qk = row.variant->normalize_qk};
  description.initial_state = description.last_state_grad = true;
  description.seed = options.seed;
  testkit::DeltaProblem problem(description);
  const testkit::DeltaJudge judge(problem);
  constexpr std::int64_t odd_chunk = 48;
  for (const std::int64_t chunk : {options.chunk, options.chunk == 0 ? odd_chunk : options.chunk}) {
    problem.poison();
    problem.forward.options.chunk_size = problem.backward.options.chunk_size = chunk;
    delta_forward(problem.forward, options.execution);
    delta_backward(problem.backward, options.execution);
    const auto take = [&](Worst& worst, const testkit::DeltaResults& found) {
      for (const DeltaError& error : judge.errors(found)) {
        worst.take(error, regime);
        log.push_back({{"variant", row.variant->name},
                       {"dtype", tfla::name(row.dtype)},
                       {"chunk", chunk},
                       {"regime", testkit::name(regime)},
                       {"tensor", error.tensor},
                       {"error", error.error},
                       {"bound", error.allowed},
                       {"size", error.size},
                       {"not_finite", error.not_finite}});
      }
    };
    take(row.values, results(problem.forward));
    take(row.gradients, results(problem.backward));
  }
}

// Relative to the size of the tensor; where that is nothing, to its bound alone.
void add_worst(std::vector<Cell>& cells, const Worst& worst) {
  const DeltaError& found = worst.found;
  const double size = found.size > 0 ? found.size : 1;
  cells.push_back({format_error(found.error / size), found.ok() ? Tone::plain : Tone::bad});
  cells.push_back({format_error(found.allowed / size), Tone::faint});
  cells.push_back({fmt::format("{}, {}", found.tensor, testkit::name(worst.regime))});
}

std::string to_text(const std::vector<Row>& rows, bool color) {
  Table table({{"variant", Align::left},
               {"dtype", Align::left},
               {"forward"},
               {"bound"},
               {"worst in", Align::left},
               {"gradients"},
               {"bound"},
               {"worst in", Align::left},
               {"", Align::left}});
  for (const Row& row : rows) {
    if (&row != &rows.front() && row.variant == variants) table.rule();
    std::vector<Cell> cells = {{row.variant->name}, {tfla::name(row.dtype)}};
    add_worst(cells, row.values);
    add_worst(cells, row.gradients);
    cells.push_back(row.ok() ? Cell{"ok", Tone::good} : Cell{"FAIL", Tone::bad});
    table.row(std::move(cells));
  }
  return table.text(color);
}

}  // namespace

int check_delta(const DeltaCheck& options) {
  // The plan finds what cannot be computed before tensors are made for it.
  const int threads = delta_plan(Operation::backward, options.shape, {}, options.execution).threads;
  JsonFile file(options.json);
  nlohmann::ordered_json errors = nlohmann::ordered_json::array();
  std::vector<Row> rows;
  Progress progress("tfla check", static_cast<std::int64_t>(options.dtypes.size() * std::size(variants)));
  std::size_t broken = 0;
  for (DType dtype : options.dtypes) {
    for (const Variant& variant : variants) {
      progress.start(fmt::format("{} {}", tfla::name(dtype), variant.name));
      Row row{.variant = &variant, .dtype = dtype};
      for (DeltaRegime regime : testkit::all_delta_regimes) check_regime(row, regime, options, errors);
      broken += row.ok() ? 0 : 1;
      rows.push_back(std::move(row));
      progress.done();
    }
  }
  const DeltaShape& shape = options.shape;
  fmt::print("tfla {} on {}, {} thread{}; the delta rule, B {}, T {}, H {}, dqk {}, dhv {}\n\n{}\n", version(),
             cpu_model(), threads, threads == 1 ? "" : "s", shape.batch, shape.tokens, shape.heads, shape.dqk,
             shape.dhv, to_text(rows, use_color(stdout)));
  if (broken == 0) {
    fmt::print("All {} errors are within their bounds.\n", errors.size());
  } else {
    fmt::print("{} of {} rows break a bound.\n", broken, rows.size());
  }
  nlohmann::ordered_json report = describe_run(Device::cpu, threads);
  report["operator"] = "delta";
  report["shape"] = {shape.batch, shape.tokens, shape.heads, shape.dqk, shape.dhv};
  report["ok"] = broken == 0;
  report["errors"] = errors;
  file.write(report);
  return broken == 0 ? 0 : 1;
}

}  // namespace tfla::cli
