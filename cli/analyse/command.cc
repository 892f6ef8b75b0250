// tfla analyse: the paper's analysis (appendices D, F, G), computed; and what training on several GPUs takes.
#include "cli/analyse/analyse.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/support/ceilings.h"
#include "cli/support/json.h"
#include "cli/support/options.h"
#include "cli/support/timing.h"

namespace tfla::cli {
namespace {

constexpr const char* examples =
    "Every subject takes --out FOLDER and writes its numbers there as CSV; see tfla analyse chunk --help and so on.\n"
    "\n"
    "Examples:\n"
    "  tfla analyse flops --shape 1,8192,1,128,256               the tables of appendix F for one head\n"
    "  tfla analyse chunk --shape 1,8192,16,128,256 --state-bytes 2 --accelerator H200\n"
    "  tfla analyse roofline --accelerator H100,here             with this machine's measured ceilings\n"
    "  tfla analyse transfer --out curves                        gains before and after the norm layer\n"
    "  tfla analyse scale --model 160m --gpus 8,64               what training on several GPUs sends";

constexpr const char* here = "here";

// This machine's ceilings: one large product on every thread, a copy far larger than the caches.
analysis::Accelerator measure_here() {
  constexpr double min_time = 0.3;
  constexpr std::size_t bytes = std::size_t{256} << 20;
  const int threads = resolved_threads({});
  const Copy copy(bytes, threads, Device::cpu);
  const double seconds = measure({[&copy] { copy(); }}, {min_time}).front().median;
  return {.name = here,
          .year = 0,
          .flops = measure_products(threads, min_time).flops_per_second,
          .bandwidth = copy.traffic() / seconds,
          .source = fmt::format("measured: {} float32 with {} threads", cpu_model(), threads)};
}

std::vector<analysis::Accelerator> parse_machines(const std::string& option, const std::string& text) {
  std::vector<std::string> names;
  for (const analysis::Accelerator& machine : analysis::accelerators()) names.push_back(machine.name);
  names.emplace_back(here);
  std::vector<analysis::Accelerator> machines;
  for (const std::size_t choice : parse_words(option, text, names)) {
    analysis::Accelerator machine;
    machine.name = here;  // measured when its turn comes
    if (names[choice] != here) machine = analysis::accelerator(names[choice]);
    machines.push_back(machine);
  }
  return machines;
}

void parse_size(AnalyseOptions& options, const std::string& option, const std::string& text) {
  const MlstmShape shape = parse_shape(option, text);
  if (shape.batch < 1 || shape.tokens < 1) {
    throw UsageError(fmt::format("tfla: {} was '{}'; B and T must be at least 1", option, text));
  }
  options.workload = {.batch = static_cast<double>(shape.batch),
                      .heads = static_cast<double>(shape.heads),
                      .tokens = static_cast<double>(shape.tokens)};
  options.dims = {.dqk = static_cast<double>(shape.dqk), .dhv = static_cast<double>(shape.dhv)};
}

std::vector<Sheet> analyse_scale(const AnalyseOptions& options) { return to_sheets(make_scale_report(options.scale)); }

struct Subject {
  const char* name;
  const char* help;
  std::vector<Sheet> (*make)(const AnalyseOptions&);
};
constexpr Subject subjects[] = {
    {"flops", "operations of every term, formulation and gate; forward and backward", analyse_flops},
    {"bytes", "memory operations of every term, formulation and gate; forward and backward", analyse_bytes},
    {"runtime", "theoretical time over chunk sizes on each machine", analyse_runtime},
    {"intensity", "arithmetic intensity over chunk sizes", analyse_intensity},
    {"roofline", "what each machine allows at that intensity", analyse_roofline},
    {"chunk", "the chunk size with the fewest operations and with the least time", analyse_chunk},
    {"transfer", "gain of the mLSTM before and after the norm layer over its gates", analyse_transfer},
    {"scale", "what GPUs that train a language model send each other, and the time of a step", analyse_scale},
};

bool takes_machines(const Subject& subject) {
  const std::string_view name = subject.name;
  return name == "runtime" || name == "roofline" || name == "chunk";
}

void add_subject_options(CLI::App& app, const Subject& subject, AnalyseOptions& o) {
  const auto add = [&](const char* option, const char* kind, const char* help, auto read) {
    add_text_option(app, option, kind, help, read);
  };
  using Text = const std::string&;
  add("--out", "FOLDER", "write CSV files there; made if it is missing", [&o](Text option, Text text) {
    if (text.empty()) throw UsageError(fmt::format("tfla: {} was empty; it must be a folder", option));
    o.out = text;
  });
  if (subject.make == analyse_scale) {
    add_scale_options(app, o.scale);
    return;
  }
  if (subject.make == analyse_transfer) {
    add("--step", "X", "distance of grid points in both gates, 0.1 to 4 (default 0.5)",
        [&o](Text option, Text text) { o.step = parse_real(option, text, 0.1, 4); });
    add("--threads", "N", "threads to use (default 0: as many as OpenMP would)", [&o](Text option, Text text) {
      constexpr std::int64_t most_threads = 4096;
      o.threads = static_cast<int>(parse_integer(option, text, 0, most_threads));
    });
    return;
  }
  add("--shape", "B,T,H,dqk,dhv", "batch, tokens, heads, head dimensions (default the paper's 8,8192,8,256,512)",
      [&o](Text option, Text text) { parse_size(o, option, text); });
  add("--state-bytes", "N", "bytes of a state's element: 1 to 8 (default 4)",
      [&o](Text option, Text text) { o.state_bytes = static_cast<double>(parse_integer(option, text, 1, 8)); });
  add("--causal", "F", "share of a square that is computed, 0.5 to 1 (default 0.5)",
      [&o](Text option, Text text) { o.causal = parse_real(option, text, 0.5, 1); });
  if (subject.make == analyse_flops || subject.make == analyse_bytes) {
    add("--chunk", "N", "chunk size of the tables (default 256)", [&o](Text option, Text text) {
      o.chunk = static_cast<double>(parse_integer(option, text, 1, std::numeric_limits<std::int64_t>::max()));
    });
  } else if (subject.make != analyse_chunk) {
    add("--pass", "NAME", "forward (default), as in the paper's appendix G, or backward", [&o](Text option, Text text) {
      o.pass =
          parse_word(option, text, {"forward", "backward"}) == 0 ? analysis::Pass::forward : analysis::Pass::backward;
    });
    add("--gate", "exp|sig", "input gate (default sig, as there)", [&o](Text option, Text text) {
      o.gate = parse_word(option, text, {"exp", "sig"}) == 0 ? InputGate::exponential : InputGate::sigmoid;
    });
  }
  if (takes_machines(subject)) {
    add("--accelerator", "NAME,...", "V100, A100, H100, B200, H200, here (this machine, measured), or all",
        [&o](Text option, Text text) { o.machines = parse_machines(option, text); });
  }
}

int analyse(const Subject& subject, AnalyseOptions options) {
  if (options.machines.empty()) options.machines = analysis::accelerators();
  SheetFolder folder(options.out);
  for (analysis::Accelerator& machine : options.machines) {
    if (machine.name == here) machine = measure_here();
  }
  const std::vector<Sheet> sheets = subject.make(options);
  folder.write(sheets);
  if (options.scale.json) {
    fmt::print("{}\n", to_json(make_scale_report(options.scale)).dump(2));
  } else {
    fmt::print("{}", to_text(sheets));
  }
  return 0;
}

}  // namespace

Command add_analyse(CLI::App& program) {
  CLI::App* app =
      program.add_subcommand("analyse", "the paper's analysis: counts, rooflines, chunk sizes, gains; several GPUs");
  app->footer(examples);
  app->require_subcommand(0, 1);
  auto options = std::make_shared<AnalyseOptions>();
  std::vector<CLI::App*> commands;
  for (const Subject& subject : subjects) {
    commands.push_back(app->add_subcommand(subject.name, subject.help));
    add_subject_options(*commands.back(), subject, *options);
  }
  return {
      app, [commands, options]() -> int {
        std::vector<std::string> names;
        for (std::size_t x = 0; x < commands.size(); ++x) {
          if (commands[x]->parsed()) return analyse(subjects[x], *options);
          names.emplace_back(subjects[x].name);
        }
        throw UsageError(fmt::format("tfla: analyse was given no subject; it takes one of {}", fmt::join(names, ", ")));
      }};
}

}  // namespace tfla::cli
