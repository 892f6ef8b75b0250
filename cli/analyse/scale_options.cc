// Options of tfla analyse scale, and the runs that they ask for.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>

#include "cli/analyse/scale.h"
#include "cli/support/options.h"

namespace tfla::cli {
namespace {

using scale::Strategy;

constexpr const char* examples =
    "Bytes are those of a step of tfla.lm; times follow from the network that the options describe and from the time\n"
    "of a step on one GPU. docs/lm_scale.md has the formulas.\n"
    "\n"
    "Examples:\n"
    "  tfla analyse scale --model 160m                           8 and 64 H200, from a measured step of one\n"
    "  tfla analyse scale --gpus 64 --strategy fsdp --network 25 --overlap 0.8\n"
    "  tfla analyse scale --model 7b --strategy fsdp,context-fsdp --step-seconds 4.5 --kernel-seconds 0.2\n"
    "  tfla analyse scale --layers 12 --dim 1536 --heads 6 --step-seconds 0.4 --strategy ddp --json";

// tfla.lm's presets (python/tfla/lm/config.py); a test compares them.
struct Preset {
  const char* name;
  std::int64_t layers, dim, heads;
};
constexpr Preset presets[] = {
    {"tiny", 4, 128, 2}, {"160m", 12, 768, 6}, {"400m", 24, 1024, 8}, {"1.4b", 24, 2048, 8}, {"7b", 32, 4096, 8}};
constexpr std::int64_t preset_vocab = 50304;

// Steps of mLSTMexp and the operator's part of them on one H200; a test compares them with their source.
struct Timed {
  const char* preset;
  std::int64_t batch;
  double step_seconds, kernel_seconds;
};
constexpr Timed timed[] = {{"160m", 8, 0.1232167, 0.0117761},
                           {"400m", 8, 0.3045109, 0.0271835},
                           {"1.4b", 4, 0.5000814, 0.0363242},
                           {"1.4b", 8, 0.9758880, 0.0556429}};
constexpr std::int64_t timed_context = 8192;
constexpr const char* timed_source = "docs/experiments/language_models.json, NVIDIA H200";

constexpr std::int64_t most_gpus = 1 << 20, most_sequences = 1 << 12, most_tokens = 1 << 30;
constexpr double giga = 1e9, micro = 1e-6;

std::int64_t factored(const char* option, double factor, const scale::Model& model) {
  const auto dim = static_cast<std::int64_t>(std::nearbyint(factor * static_cast<double>(model.dim)));
  if (dim < 1 || dim % model.heads != 0) {
    throw UsageError(fmt::format("tfla: {} makes {} of --dim {}; it must be a positive multiple of --heads, {}", option,
                                 dim, model.dim, model.heads));
  }
  return dim;
}

scale::Model make_model(const ScaleOptions& options) {
  const Preset& preset = *std::find_if(std::begin(presets), std::end(presets),
                                       [&](const Preset& row) { return row.name == options.preset; });
  const auto either = [](std::int64_t given, std::int64_t otherwise) { return given != 0 ? given : otherwise; };
  scale::Model model = options.fields;
  model.layers = either(model.layers, preset.layers);
  model.dim = either(model.dim, preset.dim);
  model.heads = either(model.heads, preset.heads);
  model.vocab = either(model.vocab, preset_vocab);
  model.ffn_dim = either(model.ffn_dim, scale::feed_forward_dim(model.dim));
  model.qk_dim = factored("--qk-factor", options.qk_factor, model);
  model.v_dim = factored("--v-factor", options.v_factor, model);
  return model;
}

bool shares_sequences(Strategy strategy) { return strategy == Strategy::context || strategy == Strategy::context_fsdp; }

// Neighbours share a sequence, so a group lies inside a node or is made of whole ones.
std::int64_t context_ranks(const ScaleOptions& options, Strategy strategy, std::int64_t gpus) {
  if (!shares_sequences(strategy)) return 1;
  const std::int64_t in_node = std::min(gpus, options.network.node_gpus);
  if (options.context_parallel == 0) return in_node;
  const std::int64_t ranks = options.context_parallel;
  if (gpus % ranks != 0 || (in_node % ranks != 0 && ranks % in_node != 0)) {
    throw UsageError(fmt::format(
        "tfla: --context-parallel is {} with --gpus {}; it must divide them, and divide or be divided by {} of a node",
        ranks, gpus, in_node));
  }
  return ranks;
}

scale::Training make_training(const ScaleOptions& options, Strategy strategy, std::int64_t gpus) {
  if (gpus > options.network.node_gpus && gpus % options.network.node_gpus != 0) {
    throw UsageError(fmt::format("tfla: --gpus has {}; more than a node has ({}) must be a multiple of it", gpus,
                                 options.network.node_gpus));
  }
  const std::int64_t micro_batch = options.micro_batch != 0 ? options.micro_batch : options.batch;
  if (options.batch % micro_batch != 0) {
    throw UsageError(fmt::format("tfla: --micro-batch is {}; it must divide --batch, {}", micro_batch, options.batch));
  }
  return {.strategy = strategy,
          .gpus = gpus,
          .context_ranks = context_ranks(options, strategy, gpus),
          .micro_batch = micro_batch,
          .micro_batches = options.batch / micro_batch,
          .item_bytes = options.item_bytes,
          .checkpoint_activations = options.checkpoint_activations};
}

// The given time of a step, or a measured one: micro-batches take it one after the other.
void find_times(const ScaleOptions& options, ScaleReport& report) {
  const scale::Training& training = report.runs.front().training;
  report.measured = options.measured;
  report.source = "--step-seconds";
  const bool shared = std::any_of(options.strategies.begin(), options.strategies.end(), shares_sequences);
  if (options.measured.step_seconds == 0) {
    const auto found = std::find_if(std::begin(timed), std::end(timed), [&](const Timed& row) {
      return row.preset == options.preset && row.batch == training.micro_batch;
    });
    if (found == std::end(timed) || options.changed || options.context != timed_context ||
        options.checkpoint_activations) {
      throw UsageError(fmt::format(
          "tfla: --step-seconds is missing; no step of this model is measured at {} sequences of {} tokens at a time",
          training.micro_batch, options.context));
    }
    const auto times = static_cast<double>(training.micro_batches);
    report.measured.step_seconds = times * found->step_seconds;
    report.source = timed_source;
    if (options.measured.kernel_seconds == 0) report.measured.kernel_seconds = times * found->kernel_seconds;
  }
  if (shared && report.measured.kernel_seconds == 0) {
    throw UsageError(
        "tfla: --kernel-seconds is missing; context parallel runs the operator twice, so it takes its part of "
        "--step-seconds");
  }
  if (report.measured.kernel_seconds > report.measured.step_seconds) {
    throw UsageError(fmt::format("tfla: --kernel-seconds is {}; it must be at most the seconds of a step, {}",
                                 report.measured.kernel_seconds, report.measured.step_seconds));
  }
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : presets) names.emplace_back(preset.name);
  return names;
}

using Text = const std::string&;

void add_model_options(CLI::App& app, ScaleOptions& o) {
  add_text_option(app, "--model", "NAME", "a preset of tfla.lm: tiny, 160m, 400m, 1.4b (default) or 7b",
                  [&o](Text option, Text text) { o.preset = presets[parse_word(option, text, preset_names())].name; });
  const auto add = [&](const char* option, const char* help, std::int64_t& field, std::int64_t most) {
    add_text_option(app, option, "N", help, [&o, &field, most](Text name, Text text) {
      field = parse_integer(name, text, 1, most);
      o.changed = true;
    });
  };
  constexpr std::int64_t most_layers = 1 << 12, most_dim = 1 << 17, most_ffn = 1 << 20;
  add("--layers", "blocks, in the place of the model's; so are the next ones", o.fields.layers, most_layers);
  add("--dim", "width of the residual stream", o.fields.dim, most_dim);
  add("--heads", "heads of the mLSTM", o.fields.heads, most_dim);
  add("--vocab", "tokens of the vocabulary (default 50304)", o.fields.vocab, std::int64_t{1} << 31);
  add("--ffn-dim", "width of the feed-forward layer (default 8/3 of dim)", o.fields.ffn_dim, most_ffn);
  const auto add_factor = [&](const char* option, const char* help, double& factor) {
    add_text_option(app, option, "X", help, [&o, &factor](Text name, Text text) {
      factor = parse_real(name, text, 0, 64);
      o.changed = true;
    });
  };
  add_factor("--qk-factor", "all query/key heads together, as a multiple of dim (default 0.5)", o.qk_factor);
  add_factor("--v-factor", "all value heads together, as a multiple of dim (default 1)", o.v_factor);
}

void add_training_options(CLI::App& app, ScaleOptions& o) {
  add_text_option(app, "--gpus", "N,...", "GPUs (default 8,64)", [&o](Text option, Text text) {
    o.gpus = parse_integers(option, text);
    for (const std::int64_t gpus : o.gpus) (void)parse_integer(option, fmt::format("{}", gpus), 1, most_gpus);
  });
  add_text_option(app, "--strategy", "NAME,...",
                  "ddp, fsdp, context (with ddp), context-fsdp, or all (default the first three)",
                  [&o](Text option, Text text) {
                    o.strategies.clear();
                    for (const std::size_t x : parse_words(option, text, {"ddp", "fsdp", "context", "context-fsdp"})) {
                      o.strategies.push_back(static_cast<Strategy>(x));
                    }
                  });
  const auto add = [&](const char* option, const char* help, std::int64_t& field, std::int64_t most) {
    add_text_option(app, option, "N", help,
                    [&field, most](Text name, Text text) { field = parse_integer(name, text, 1, most); });
  };
  add("--context-parallel", "GPUs that share a sequence (default those of a node)", o.context_parallel, most_gpus);
  add("--batch", "sequences of a GPU in a step (default 8)", o.batch, most_sequences);
  add("--micro-batch", "of these at a time (default all)", o.micro_batch, most_sequences);
  add("--context", "tokens of each on a GPU (default 8192)", o.context, most_tokens);
  add_text_option(app, "--dtype", "NAME", "of parameters and gradients as they travel: float32 (default) or bfloat16",
                  [&o](Text option, Text text) {
                    o.item_bytes = parse_word(option, text, {"float32", "bfloat16"}) == 0 ? 4 : 2;
                  });
  app.add_flag("--checkpoint-activations", o.checkpoint_activations, "activations are computed again in backward");
  add_text_option(app, "--step-seconds", "X", "of a step on one GPU (default a measured one, where there is one)",
                  [&o](Text option, Text text) { o.measured.step_seconds = parse_seconds(option, text); });
  add_text_option(app, "--kernel-seconds", "X", "the operator's part of it, which context parallel does twice",
                  [&o](Text option, Text text) { o.measured.kernel_seconds = parse_seconds(option, text); });
}

void add_network_options(CLI::App& app, ScaleOptions& o) {
  scale::Network& network = o.network;
  add_text_option(app, "--node", "N", "GPUs of a node (default 8)", [&network](Text option, Text text) {
    network.node_gpus = parse_integer(option, text, 1, most_gpus);
  });
  const auto add = [&](const char* option, const char* kind, const char* help, double& field, double least, double most,
                       double unit) {
    add_text_option(app, option, kind, help, [&field, least, most, unit](Text name, Text text) {
      field = unit * parse_real(name, text, least, most);
    });
  };
  constexpr double slowest = 1e-3, fastest = 1e6, longest = 1e6;
  add("--nvlink", "GB/S", "of a GPU in each direction, inside a node (default 450)", network.node_bandwidth, slowest,
      fastest, giga);
  add("--network", "GB/S", "of a GPU in each direction, between nodes (default 50)", network.bandwidth, slowest,
      fastest, giga);
  add("--call-latency", "US", "microseconds of a collective (default 8.4)", network.call_seconds, 0, longest, micro);
  add("--nvlink-latency", "US", "of a step of its ring (default 3.4)", network.node_step_seconds, 0, longest, micro);
  add("--network-latency", "US", "of one between nodes (default 14)", network.step_seconds, 0, longest, micro);
  add("--overlap", "F", "share of a collective that computation hides where it can, 0 to 1 (default 1)",
      network.overlap, 0, 1, 1);
}

}  // namespace

void add_scale_options(CLI::App& app, ScaleOptions& options) {
  app.footer(examples);
  add_model_options(app, options);
  add_training_options(app, options);
  add_network_options(app, options);
  app.add_flag("--json", options.json, "print JSON");
}

ScaleReport make_scale_report(const ScaleOptions& options) {
  ScaleReport report{.name = options.changed ? "the model" : options.preset,
                     .model = make_model(options),
                     .tokens = static_cast<double>(options.batch) * static_cast<double>(options.context),
                     .measured = {},
                     .source = {},
                     .network = options.network,
                     .runs = {}};
  for (const Strategy strategy : options.strategies) {
    for (const std::int64_t gpus : options.gpus) {
      report.runs.push_back({make_training(options, strategy, gpus), {}, {}, {}});
    }
  }
  find_times(options, report);
  for (ScaleRun& run : report.runs) {
    run.collectives = scale::collectives(report.model, run.training);
    run.step = scale::step(run.collectives, run.training, report.measured, report.network);
    run.memory = scale::memory(report.model, run.training);
  }
  return report;
}

}  // namespace tfla::cli
