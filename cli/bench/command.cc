// tfla bench: how fast is it on this machine?
#include "cli/bench/bench.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/support/blas.h"
#include "cli/support/json.h"
#include "cli/support/table.h"
#include "plan/backend.h"

namespace tfla::cli {
namespace {

constexpr const char* examples =
    "Forward and training rows use B,T,H,dqk,dhv = 1,T,4,128,256 unless --shape says otherwise. Step rows use batch "
    "1,\n"
    "4, 16 and 64 with 8 heads of 256,512; with --op step, --shape gives the one shape to time (T tokens a call).\n"
    "\n"
    "Examples:\n"
    "  tfla bench --quick                                              a minute: every formulation, growth with T\n"
    "  tfla bench --op forward --tokens 2048,8192,32768 --formulation chunkwise --gemm\n"
    "  tfla bench --op step --threads 2 --json step.json               decoding against the copy bandwidth\n"
    "  tfla bench --operator delta --shape 1,2048,4,128,128            the delta rule\n"
    "  tfla bench --device cuda --dtype bfloat16 --formulation chunkwise --shape 8,8192,16,128,256";

void parse_operation(BenchOptions& options, const std::string& option, const std::string& text) {
  const std::size_t choice = parse_word(option, text, {"forward", "training", "step", "all"});
  options.forward = choice == 0 || choice == 3;
  options.training = choice == 1 || choice == 3;
  options.step = choice == 2 || choice == 3;
}

int bench(BenchOptions options) {
  constexpr double usual_min_time = 0.5;
  constexpr double quick_min_time = 0.1;
  const bool on_gpu = options.common.execution.device == Device::cuda;
  if (on_gpu) backend(Device::cuda).check_available();
  if (on_gpu && options.gemm) throw UsageError("tfla: --gemm times the BLAS of the CPU; it takes --device cpu");
  if (options.gemm) check_blas();
  if (options.times.all == 0) options.times.all = options.quick ? quick_min_time : usual_min_time;
  const int threads = resolved_threads(options.common.execution);
  JsonFile file(options.json);
  const std::string where = on_gpu ? gpu_instruments().device_name()
                                   : fmt::format("{}, {} thread{}", cpu_model(), threads, threads == 1 ? "" : "s");
  const auto show = [&](const auto& result) {
    fmt::print("tfla {} on {}\n\n{}", version(), where, to_text(result, use_color(stdout)));
    nlohmann::ordered_json report = describe_run(options.common.execution.device, threads);
    report.update(to_json(result));
    file.write(report);
  };
  if (options.subject == Operator::delta)
    show(run_delta_bench(options));
  else
    show(run_bench(options));
  return 0;
}

}  // namespace

Command add_bench(CLI::App& program) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* app = program.add_subcommand("bench", "time forward, training and decoding; print a table, write JSON");
  app->footer(examples);
  BenchOptions& o = *options;
  const auto add = [&](const char* option, const char* kind, const char* help, auto read) {
    add_text_option(*app, option, kind, help, read);
  };
  using Text = const std::string&;
  app->add_flag("--quick", o.quick, "shorter sequences and fewer samples: at most a minute on two cores");
  add_operator_option(*app, o.subject);
  add("--shape", "B,T,H,dqk,dhv", "batch, tokens, heads, head dimensions",
      [&o](Text option, Text text) { o.shape = parse_shape(option, text); });
  add("--tokens", "T,T,...", "sequence lengths to time instead of the T of --shape",
      [&o](Text option, Text text) { o.tokens = parse_integers(option, text); });
  add("--dtype", "NAME,...", "float32 (default), float64, bfloat16, float16, or all",
      [&o](Text option, Text text) { o.dtypes = parse_dtypes(option, text); });
  add("--gate", "exp,sig", "input gates (default all)",
      [&o](Text option, Text text) { o.gates = parse_gates(option, text); });
  add("--op", "NAME", "forward, training (forward and backward), step, or all (default)",
      [&o](Text option, Text text) { parse_operation(o, option, text); });
  add("--formulation", "NAME,...", "chunkwise, parallel, recurrent (default all; recurrent has no training)",
      [&o](Text option, Text text) { o.formulations = parse_formulations(option, text); });
  add("--min-time", "SECONDS", "time spent on each row (default 0.5; quick 0.1)",
      [&o](Text option, Text text) { o.times.all = parse_seconds(option, text); });
  add("--sample-time", "SECONDS", "a sample is so many calls as take that long (default 0.005)",
      [&o](Text option, Text text) { o.times.sample = parse_seconds(option, text); });
  app->add_flag("--gemm", o.gemm, "also time one large float32 matrix product of OpenBLAS on every thread");
  add_common_options(*app, o.common);
  add("--json", "FILE", "write every row to this file", [&o](Text, Text text) { o.json = text; });
  return {app, [options, app] {
            if (options->subject == Operator::delta) refuse_of_mlstm(*app, {"--gate", "--formulation", "--gemm"});
            return bench(*options);
          }};
}

}  // namespace tfla::cli
