#include "cli/support/json.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cli/support/options.h"
#include "core/names.h"
#include "plan/backend.h"

namespace tfla::cli {
namespace {

std::string compiler() {
#if defined(__clang__)
  return fmt::format("clang {}", __clang_version__);
#else
  return fmt::format("gcc {}", __VERSION__);
#endif
}

template <class AnyPlan>
void add_shape(nlohmann::ordered_json& json, const AnyPlan& plan) {
  const auto& shape = plan.shape;
  json.update({{"batch", shape.batch},
               {"tokens", shape.tokens},
               {"qk_heads", shape.qk_heads},
               {"heads", shape.heads},
               {"dqk", shape.dqk},
               {"dhv", shape.dhv},
               {"dtype", tfla::name(shape.dtype)},
               {"gate_dtype", tfla::name(shape.gate_dtype)},
               {"compute", tfla::name(plan.compute)},
               {"threads", plan.threads}});
}

template <class AnyPlan>
void add_counts(nlohmann::ordered_json& json, const AnyPlan& plan) {
  json.update({{"flops", plan.flops}, {"useful_flops", plan.useful_flops}, {"bytes", plan.bytes}});
}

}  // namespace

nlohmann::ordered_json to_json(const Plan& plan) {
  std::vector<std::string> launches;
  for (const Launch& launch : plan.launches) launches.push_back(describe(launch, plan.device));
  nlohmann::ordered_json json = {
      {"operation", name(plan.operation)}, {"device", name(plan.device)}, {"formulation", name(plan.formulation)}};
  add_shape(json, plan);
  json.update({{"launches", launches},
               {"tile", plan.tile},
               {"chunk", plan.chunk},
               {"span", plan.span},
               {"fused", plan.fused()},
               {"scratch_bytes", plan.scratch_bytes},
               {"saved_bytes", plan.saved_bytes}});
  add_counts(json, plan);
  return json;
}

nlohmann::ordered_json to_json(const DeltaPlan& plan) {
  nlohmann::ordered_json json = {
      {"operator", "delta"}, {"operation", name(plan.operation)}, {"device", name(plan.device)}};
  add_shape(json, plan);
  json.update(
      {{"tile", plan.tile}, {"chunk", plan.chunk}, {"panel", plan.panel}, {"scratch_bytes", plan.scratch_bytes}});
  add_counts(json, plan);
  return json;
}

nlohmann::ordered_json describe_run(Device device, int threads) {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  nlohmann::ordered_json run = {{"tfla", version()},
                                {"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(now))},
                                {"device", name(device)},
                                {"cpu", cpu_model()},
                                {"cores", std::thread::hardware_concurrency()},
                                {"compiler", compiler()},
                                {"threads", threads}};
  if (device == Device::cuda) run["gpu"] = gpu_instruments().device_name();
  return run;
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

int resolved_threads(const Execution& execution) {
  MlstmShape shape;
  set_tokens(shape, 1);
  return plan(Operation::forward, shape, MlstmOptions{}, execution).threads;
}

JsonFile::JsonFile(std::string path) : path_(std::move(path)) {
  if (path_.empty()) return;
  created_ = !std::filesystem::exists(path_);
  // Appending nothing asks for the permission to write without touching what is there.
  if (!std::ofstream(path_, std::ios::app)) {
    created_ = false;
    throw UsageError(fmt::format("tfla: --json was '{}'; it must be a file that can be written", path_));
  }
}

JsonFile::~JsonFile() {
  if (created_) std::remove(path_.c_str());
}

void JsonFile::write(const nlohmann::ordered_json& content) {
  if (path_.empty()) return;
  std::ofstream file(path_, std::ios::trunc);
  file << content.dump(2) << '\n';
  file.flush();
  if (!file) throw UsageError(fmt::format("tfla: --json was '{}'; writing to it failed", path_));
  created_ = false;
}

}  // namespace tfla::cli
