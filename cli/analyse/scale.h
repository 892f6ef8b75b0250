// tfla analyse scale: what its options ask for, and the answer.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cli/analyse/sheet.h"
#include "plan/cost/scale.h"

namespace CLI {  // NOLINT(readability-identifier-naming) CLI11's
class App;
}  // namespace CLI

namespace tfla::cli {

// As given on the command line. A 0 is what follows from the other options.
struct ScaleOptions {
  std::string preset = "1.4b";
  scale::Model fields = {};  // in the place of the preset's
  double qk_factor = 0.5;
  double v_factor = 1;
  bool changed = false;  // whether the model is another than the preset
  std::vector<std::int64_t> gpus = {8, 64};
  std::vector<scale::Strategy> strategies = {scale::Strategy::ddp, scale::Strategy::fsdp, scale::Strategy::context};
  std::int64_t context_parallel = 0;
  std::int64_t batch = 8;  // sequences of a GPU in a step
  std::int64_t micro_batch = 0;
  std::int64_t context = 8192;  // tokens of each on a GPU
  std::int64_t item_bytes = 4;
  bool checkpoint_activations = false;
  scale::Measured measured = {};
  scale::Network network = {};
  bool json = false;
};
void add_scale_options(CLI::App& app, ScaleOptions& options);

struct ScaleRun {
  scale::Training training;
  std::vector<scale::Collective> collectives;
  scale::Step step;
  scale::Memory memory;
};
struct ScaleReport {
  std::string name;  // of the model
  scale::Model model;
  double tokens = 0;  // of a GPU in a step
  scale::Measured measured;
  std::string source;  // of these times
  scale::Network network;
  std::vector<ScaleRun> runs;
};
// Refuses what cannot be trained or has no measured time.
[[nodiscard]] ScaleReport make_scale_report(const ScaleOptions& options);

[[nodiscard]] std::vector<Sheet> to_sheets(const ScaleReport& report);
[[nodiscard]] nlohmann::ordered_json to_json(const ScaleReport& report);

}  // namespace tfla::cli
