// tfla explain: what a call would do, without doing it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/commands.h"
#include "cli/support/json.h"
#include "cli/support/options.h"

namespace tfla::cli {
namespace {

constexpr const char* examples =
    "Examples:\n"
    "  tfla explain --shape 1,8192,4,128,256 --op training       forward and backward\n"
    "  tfla explain --shape 8,1,8,256,512 --op step --threads 2  one token for each of 8 sequences\n"
    "  tfla explain --shape 8,8192,16,128,256 --dtype bfloat16 --op training --gpu H200\n"
    "                                                            on a GPU that need not be there\n"
    "  tfla explain --operator delta --shape 1,2048,4,128,128    the delta rule\n"
    "  tfla explain --shape 1,2048,8,64,64 --qk-heads 2 --json   for a program to read";

struct ExplainOptions {
  CommonOptions common;
  Operator subject = Operator::mlstm;
  MlstmShape shape;
  std::int64_t qk_heads = 0;  // 0: as many as heads
  DType dtype = DType::float32;
  std::vector<Operation> operations = {Operation::forward};
  MlstmOptions mlstm;
  bool json = false;
};

// Most options take a list elsewhere; here exactly one value makes sense.
template <class Value>
Value only(const std::string& option, const std::string& text, const std::vector<Value>& values) {
  if (values.size() != 1) throw UsageError(fmt::format("tfla: {} was '{}'; explain takes one value", option, text));
  return values.front();
}

std::vector<Operation> parse_operations(const std::string& option, const std::string& text) {
  const std::vector<std::vector<Operation>> choices = {
      {Operation::forward}, {Operation::backward}, {Operation::forward, Operation::backward}, {Operation::step}};
  return choices[parse_word(option, text, {"forward", "backward", "training", "step"})];
}

std::vector<std::string> known_names() {
  std::vector<std::string> names;
  for (const KnownGpu& gpu : known_gpus()) names.emplace_back(gpu.name);
  return names;
}

std::string gpu_names() { return fmt::format("{}", fmt::join(known_names(), ", ")); }

void plan_for_gpu(Execution& execution, const std::string& option, const std::string& text) {
  execution.device = Device::cuda;
  execution.gpu = known_gpus()[parse_word(option, text, known_names())].facts;
}

template <class AnyPlan>
void print(const std::vector<AnyPlan>& plans, bool json) {
  if (json) {
    nlohmann::ordered_json out = nlohmann::ordered_json::array();
    for (const AnyPlan& item : plans) out.push_back(to_json(item));
    fmt::print("{}\n", out.dump(2));
    return;
  }
  for (std::size_t x = 0; x < plans.size(); ++x) fmt::print("{}{}", x == 0 ? "" : "\n", describe(plans[x]));
}

int explain(ExplainOptions options) {
  if (options.qk_heads != 0) options.shape.qk_heads = options.qk_heads;
  set_dtype(options.shape, options.dtype);
  options.mlstm.chunk_size = options.common.chunk;
  const auto plans = [&](const auto& plan_of) {
    std::vector<decltype(plan_of(Operation::forward))> all;
    for (Operation operation : options.operations) all.push_back(plan_of(operation));
    print(all, options.json);
  };
  if (options.subject == Operator::delta) {
    plans([&](Operation operation) {
      return delta_plan(operation, options.shape, {.chunk_size = options.common.chunk}, options.common.execution);
    });
  } else {
    plans([&](Operation operation) { return plan(operation, options.shape, options.mlstm, options.common.execution); });
  }
  return 0;
}

}  // namespace

Command add_explain(CLI::App& program) {
  auto options = std::make_shared<ExplainOptions>();
  CLI::App* app = program.add_subcommand("explain", "print the plan of a call: kernels, chunks, scratch, FLOPs, bytes");
  app->footer(examples);
  const auto add = [&](const char* option, const char* kind, const std::string& help, auto read) {
    return add_text_option(*app, option, kind, help, read);
  };
  ExplainOptions& o = *options;
  using Text = const std::string&;
  add_operator_option(*app, o.subject);
  add("--shape", "B,T,H,dqk,dhv", "batch, tokens, heads, head dimensions", [&o](Text option, Text text) {
    o.shape = parse_shape(option, text);
  })->required();
  add("--qk-heads", "N", "query/key heads, each shared by H / N heads (default H)", [&o](Text option, Text text) {
    o.qk_heads = parse_integer(option, text, 1, std::numeric_limits<std::int64_t>::max());
  });
  add("--op", "NAME", "forward (default), backward, training or step",
      [&o](Text option, Text text) { o.operations = parse_operations(option, text); });
  add("--dtype", "NAME", "float32 (default), float64, bfloat16 or float16",
      [&o](Text option, Text text) { o.dtype = only(option, text, parse_dtypes(option, text)); });
  add("--gate", "exp|sig", "input gate (default exp)",
      [&o](Text option, Text text) { o.mlstm.gate = only(option, text, parse_gates(option, text)); });
  add("--formulation", "NAME", "chunkwise (default), parallel or recurrent",
      [&o](Text option, Text text) { o.mlstm.formulation = only(option, text, parse_formulations(option, text)); });
  add("--keep", "NAME", "cuda: what forward leaves for backward: nothing (default), denominators or states",
      [&o](Text option, Text text) {
        o.mlstm.keep = static_cast<Keep>(parse_word(option, text, {"nothing", "denominators", "states"}));
      });
  add_common_options(*app, o.common);
  add("--gpu", "NAME", "device cuda: plan for this GPU, which need not be there: " + gpu_names(),
      [&o](Text option, Text text) { plan_for_gpu(o.common.execution, option, text); });
  app->add_flag("--json", o.json, "print JSON instead of a page");
  return {app, [options, app] {
            if (options->subject == Operator::delta) refuse_of_mlstm(*app, {"--gate", "--formulation", "--keep"});
            return explain(*options);
          }};
}

}  // namespace tfla::cli
