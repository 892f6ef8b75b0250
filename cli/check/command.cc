// tfla check: is this build right on this machine? Forward and backward of every variant against float64.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <array>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/check/delta.h"
#include "cli/check/random.h"
#include "cli/commands.h"
#include "cli/support/json.h"
#include "cli/support/options.h"
#include "cli/support/progress.h"
#include "cli/support/table.h"
#include "core/gate_family.h"
#include "core/names.h"
#include "testkit/bounds.h"

namespace tfla::cli {
namespace {

using reference::Regime;
using testkit::TensorError;

constexpr const char* examples =
    "Errors are ||x - ref|| / ||ref|| against a float64 recurrence on the same rounded inputs, for every output "
    "tensor\n"
    "and every gate regime; a row shows the error that comes nearest to its bound. Exit code 1: a bound is broken.\n"
    "\n"
    "Examples:\n"
    "  tfla check                                  every variant and dtype, under a minute on two cores\n"
    "  tfla check --quick                          the same on shorter sequences\n"
    "  tfla check --shape 1,1024,4,128,256 --dtype float32 --json check.json\n"
    "  tfla check --operator delta                 the delta rule\n"
    "  tfla check --random 500 --seed 1000         500 random calls; an error must be explained by roundings";

struct Variant {
  InputGate gate;
  Normalizer normalizer;
};

// Every gate with its own normalizer, those of the paper with the other one too.
std::vector<Variant> all_variants() {
  std::vector<Variant> all;
  for (const GateRow& row : gate_table) {
    const bool of_the_paper = row.family.forget == GateLog::log_sigmoid;
    all.push_back({row.gate, row.family.normalized ? Normalizer::max : Normalizer::none});
    if (of_the_paper) all.push_back({row.gate, row.family.normalized ? Normalizer::none : Normalizer::max});
  }
  return all;
}

struct CheckOptions {
  CommonOptions common;
  Operator subject = Operator::mlstm;
  std::vector<DType> dtypes = parse_dtypes("--dtype", "all");
  MlstmShape shape = parse_shape("--shape", "1,300,2,64,96");
  bool shape_given = false;
  bool quick = false;
  std::uint64_t seed = 1;
  std::int64_t random = 0;  // calls
  std::string json;
};

// The error that is nearest to (or furthest beyond) its bound.
struct Worst {
  TensorError error;
  double bound = 0;
  Regime regime = Regime::randn;
  bool any = false;

  // A NaN anywhere makes the relative error infinite, so the comparison is safe.
  [[nodiscard]] bool ok() const { return error.relative <= bound; }
};

struct Row {
  Variant variant;
  DType dtype;
  Formulation formulation;
  Worst forward;
  Worst backward;

  [[nodiscard]] bool ok() const { return forward.ok() && (!backward.any || backward.ok()); }
};

struct Checked {
  std::vector<Row> rows;
  nlohmann::ordered_json errors = nlohmann::ordered_json::array();
};

std::string variant_name(const Variant& variant) {
  return fmt::format("{}/{}", name(variant.gate), name(variant.normalizer));
}

// A chunk that divides nothing, so that states cross many uneven boundaries, besides the plan's own choice.
std::vector<std::int64_t> chunk_sizes(const CheckOptions& options, Formulation formulation) {
  constexpr std::int64_t odd_chunk = 48;
  if (formulation != Formulation::chunkwise || options.common.chunk != 0) return {options.common.chunk};
  return {0, odd_chunk};
}

void take(Worst& worst, const std::vector<TensorError>& errors, const testkit::Case& description,
          const nlohmann::ordered_json& context, nlohmann::ordered_json& log) {
  for (const TensorError& error : errors) {
    const double bound = testkit::allowed_error(error, description);
    nlohmann::ordered_json entry = context;
    entry["tensor"] = error.tensor;
    entry["relative_error"] = error.relative;  // JSON has no infinity: null says that something was not finite
    entry["bound"] = bound;
    entry["not_finite"] = error.not_finite;
    log.push_back(std::move(entry));
    if (!worst.any || error.relative / bound > worst.error.relative / worst.bound)
      worst = {error, bound, description.regime, true};
  }
}

void check_formulation(Row& row, testkit::Case description, testkit::Problem& problem, const testkit::Judge& judge,
                       const CheckOptions& options, nlohmann::ordered_json& log) {
  for (std::int64_t chunk : chunk_sizes(options, row.formulation)) {
    const nlohmann::ordered_json context = {{"variant", variant_name(row.variant)},
                                            {"dtype", tfla::name(row.dtype)},
                                            {"formulation", name(row.formulation)},
                                            {"chunk", chunk},
                                            {"regime", reference::name(description.regime)}};
    problem.poison();
    for (MlstmOptions* mlstm : {&problem.forward().options, &problem.backward().options}) {
      mlstm->formulation = row.formulation;
      mlstm->chunk_size = chunk;
    }
    description.options = problem.forward().options;
    forward(problem.forward(), options.common.execution);
    take(row.forward, judge.forward_errors(), description, context, log);
    if (row.formulation == Formulation::recurrent) continue;
    backward(problem.backward(), options.common.execution);
    take(row.backward, judge.backward_errors(), description, context, log);
  }
}

Checked check_all(const CheckOptions& options) {
  constexpr std::array formulations = {Formulation::chunkwise, Formulation::parallel, Formulation::recurrent};
  const std::vector<Variant> variants = all_variants();
  const std::size_t pieces = options.dtypes.size() * variants.size() * std::size(reference::all_regimes);
  Progress progress("tfla check", static_cast<std::int64_t>(pieces));
  Checked checked;
  for (DType dtype : options.dtypes) {
    for (const Variant& variant : variants) {
      const std::size_t first = checked.rows.size();
      for (Formulation formulation : formulations) checked.rows.push_back({variant, dtype, formulation, {}, {}});
      for (Regime regime : reference::all_regimes) {
        progress.start(fmt::format("{} {} {}", tfla::name(dtype), variant_name(variant), reference::name(regime)));
        testkit::Case description;
        description.regime = regime;
        description.shape = options.shape;
        set_dtype(description.shape, dtype);
        description.options.gate = variant.gate;
        description.options.normalizer = variant.normalizer;
        description.initial_state = true;
        description.last_state_grad = true;
        description.seed = options.seed;
        description.device = options.common.execution.device;
        testkit::Problem problem(description);
        const testkit::Judge judge(problem, true);
        for (std::size_t x = first; x < checked.rows.size(); ++x) {
          check_formulation(checked.rows[x], description, problem, judge, options, checked.errors);
        }
        progress.done();
      }
    }
  }
  return checked;
}

void add_worst(std::vector<Cell>& cells, const Worst& worst) {
  if (!worst.any) {
    cells.insert(cells.end(), {{""}, {""}, {""}});
    return;
  }
  cells.push_back({format_error(worst.error.relative), worst.ok() ? Tone::plain : Tone::bad});
  cells.push_back({format_error(worst.bound), Tone::faint});
  cells.push_back({fmt::format("{}, {}", worst.error.tensor, reference::name(worst.regime))});
}

std::string to_text(const std::vector<Row>& rows, bool color) {
  Table table({{"variant", Align::left},
               {"dtype", Align::left},
               {"formulation", Align::left},
               {"forward"},
               {"bound"},
               {"worst in", Align::left},
               {"gradients"},
               {"bound"},
               {"worst in", Align::left},
               {"", Align::left}});
  const Row* before = nullptr;
  for (const Row& row : rows) {
    if (before != nullptr && before->dtype != row.dtype) table.rule();
    before = &row;
    std::vector<Cell> cells = {{variant_name(row.variant)}, {tfla::name(row.dtype)}, {name(row.formulation)}};
    add_worst(cells, row.forward);
    add_worst(cells, row.backward);
    cells.push_back(row.ok() ? Cell{"ok", Tone::good} : Cell{"FAIL", Tone::bad});
    table.row(std::move(cells));
  }
  return table.text(color);
}

int check(CheckOptions options) {
  if (options.random > 0) return check_random(options.random, options.seed, options.common.execution, options.json);
  // The shape for which the bounds of 16-bit products were measured: on fewer tokens a single row with a denominator
  // near zero can decide the error.
  if (options.common.execution.device == Device::cuda && !options.shape_given)
    options.shape = parse_shape("--shape", "1,1024,4,128,256");
  constexpr std::int64_t quick_tokens = 130;
  if (options.quick && !options.shape_given) set_tokens(options.shape, quick_tokens);
  if (options.subject == Operator::delta)
    return check_delta(
        {options.shape, options.dtypes, options.common.chunk, options.seed, options.common.execution, options.json});
  // The plan finds what cannot be computed, sizes that overflow, say, before tensors are made for it.
  const int threads = plan(Operation::backward, options.shape, MlstmOptions{}, options.common.execution).threads;
  JsonFile file(options.json);
  const Checked checked = check_all(options);
  std::size_t broken = 0;
  for (const Row& row : checked.rows) broken += row.ok() ? 0 : 1;
  const MlstmShape& shape = options.shape;
  fmt::print("tfla {} on {}, {} thread{}; B {}, T {}, H {}, dqk {}, dhv {}\n\n{}\n", version(), cpu_model(), threads,
             threads == 1 ? "" : "s", shape.batch, shape.tokens, shape.heads, shape.dqk, shape.dhv,
             to_text(checked.rows, use_color(stdout)));
  if (broken == 0) {
    fmt::print("All {} errors are within their bounds.\n", checked.errors.size());
  } else {
    fmt::print("{} of {} rows break a bound.\n", broken, checked.rows.size());
  }
  nlohmann::ordered_json report = describe_run(options.common.execution.device, threads);
  report["shape"] = {shape.batch, shape.tokens, shape.heads, shape.dqk, shape.dhv};
  report["ok"] = broken == 0;
  report["errors"] = checked.errors;
  file.write(report);
  return broken == 0 ? 0 : 1;
}

}  // namespace

Command add_check(CLI::App& program) {
  auto options = std::make_shared<CheckOptions>();
  CLI::App* app = program.add_subcommand("check", "compare every variant with float64 on this machine");
  app->footer(examples);
  CheckOptions& o = *options;
  const auto add = [&](const char* option, const char* kind, const char* help, auto read) {
    add_text_option(*app, option, kind, help, read);
  };
  using Text = const std::string&;
  app->add_flag("--quick", o.quick, "shorter sequences: a few seconds");
  add_operator_option(*app, o.subject);
  add("--dtype", "NAME,...", "float32, float64, bfloat16, float16, or all (default)",
      [&o](Text option, Text text) { o.dtypes = parse_dtypes(option, text); });
  add("--shape", "B,T,H,dqk,dhv",
      "batch, tokens, heads, head dimensions (default 1,300,2,64,96; on a GPU 1,1024,4,128,256)",
      [&o](Text option, Text text) {
        o.shape = parse_shape(option, text);
        o.shape_given = true;
      });
  add("--seed", "N", "another seed draws other numbers (default 1)", [&o](Text option, Text text) {
    o.seed = static_cast<std::uint64_t>(parse_integer(option, text, 0, std::numeric_limits<std::int64_t>::max()));
  });
  add("--random", "N", "N random calls of all shapes, options and layouts instead, drawn from the seed on",
      [&o](Text option, Text text) { o.random = parse_integer(option, text, 1, 100'000'000); });
  add_common_options(*app, o.common);
  add("--json", "FILE", "write every error to this file", [&o](Text, Text text) { o.json = text; });
  return {app, [options, app] {
            if (options->subject == Operator::delta) refuse_of_mlstm(*app, {"--random"});
            return check(*options);
          }};
}

}  // namespace tfla::cli
