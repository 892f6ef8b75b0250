// The tables and the JSON of `tfla bench`.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "cli/bench/bench.h"
#include "cli/support/json.h"
#include "cli/support/table.h"
#include "core/names.h"

namespace tfla::cli {
namespace {

const char* operation_name(const SequenceRow& row) { return row.training ? "training" : "forward"; }

double useful_flops(const SequenceRow& row) {
  double flops = 0;
  for (const Plan& plan : row.plans) flops += plan.useful_flops;
  return flops;
}

std::string format_spread(const Timing& timing) { return fmt::format("{:.0f} %", 100 * timing.spread()); }

std::string sequence_table(const BenchResult& result, bool color) {
  std::vector<Column> columns = {{"operation", Align::left},
                                 {"gate", Align::left},
                                 {"dtype", Align::left},
                                 {"formulation", Align::left},
                                 {"T"},
                                 {"time"},
                                 {"spread"},
                                 {"tokens/s"},
                                 {"GFLOP/s"}};
  if (result.products) columns.push_back({"of product"});
  columns.insert(columns.end(), {{"scratch MB"}, {"error of H"}});
  Table table(columns);
  const SequenceRow* before = nullptr;
  for (const SequenceRow& row : result.sequences) {
    const MlstmShape& shape = row.plans.front().shape;
    if (before != nullptr && (before->training != row.training || before->gate != row.gate ||
                              before->plans.front().shape.dtype != shape.dtype)) {
      table.rule();
    }
    before = &row;
    const double rate = useful_flops(row) / row.timing.median;
    std::vector<Cell> cells = {{operation_name(row)},
                               {name(row.gate)},
                               {tfla::name(shape.dtype)},
                               {name(row.formulation)},
                               {fmt::format("{}", shape.tokens)},
                               {format_seconds(row.timing.median)},
                               {format_spread(row.timing), Tone::faint},
                               {format_count(static_cast<double>(shape.batch * shape.tokens) / row.timing.median)},
                               {fmt::format("{:.1f}", rate / 1e9)}};
    if (result.products) cells.push_back({fmt::format("{:.0f} %", 100 * rate / result.products->flops_per_second)});
    cells.push_back({format_megabytes(static_cast<double>(row.scratch_bytes))});
    cells.push_back({format_error(row.error_h)});
    table.row(std::move(cells));
  }
  return table.text(color);
}

// The formulations side by side: time, and its ratio to the time at the T before.
std::string growth_table(const BenchResult& result, bool color) {
  using Group = std::tuple<bool, DType, InputGate, std::int64_t>;
  std::map<Group, std::map<Formulation, double>> times;
  std::map<Formulation, bool> present;
  for (const SequenceRow& row : result.sequences) {
    const MlstmShape& shape = row.plans.front().shape;
    times[{row.training, shape.dtype, row.gate, shape.tokens}][row.formulation] = row.timing.median;
    present[row.formulation] = true;
  }
  std::vector<Column> columns = {{"operation", Align::left}, {"gate", Align::left}, {"dtype", Align::left}, {"T"}};
  for (const auto& item : present) columns.insert(columns.end(), {{name(item.first)}, {"growth"}});
  Table table(columns);
  std::map<Formulation, double> previous;
  const Group* before = nullptr;
  for (const auto& [group, by_formulation] : times) {
    const auto& [training, dtype, gate, tokens] = group;
    if (before != nullptr && std::tuple(std::get<0>(*before), std::get<1>(*before), std::get<2>(*before)) !=
                                 std::tuple(training, dtype, gate)) {
      previous.clear();
      table.rule();
    }
    before = &group;
    std::vector<Cell> cells = {
        {training ? "training" : "forward"}, {name(gate)}, {tfla::name(dtype)}, {fmt::format("{}", tokens)}};
    for (const auto& item : present) {
      const auto time = by_formulation.find(item.first);
      const auto last = previous.find(item.first);
      const bool timed = time != by_formulation.end();
      cells.push_back({timed ? format_seconds(time->second) : ""});
      cells.push_back({timed && last != previous.end() ? fmt::format("x {:.2f}", time->second / last->second) : ""});
    }
    previous = by_formulation;
    table.row(std::move(cells));
  }
  return table.text(color);
}

std::string step_table(const BenchResult& result, bool color) {
  Table table({{"operation", Align::left},
               {"gate", Align::left},
               {"dtype", Align::left},
               {"batch"},
               {"T"},
               {"state MB"},
               {"time"},
               {"spread"},
               {"tokens/s"},
               {"state GB/s"},
               {"copy GB/s"},
               {"of copy"}});
  const StepRow* before = nullptr;
  for (const StepRow& row : result.steps) {
    const MlstmShape& shape = row.plan.shape;
    if (before != nullptr && (before->gate != row.gate || before->plan.shape.dtype != shape.dtype)) table.rule();
    before = &row;
    const double rate = row.traffic / row.timing.median;
    const double copy_rate = row.copy_traffic / row.copy.median;
    table.row({{"step"},
               {name(row.gate)},
               {tfla::name(shape.dtype)},
               {fmt::format("{}", shape.batch)},
               {fmt::format("{}", shape.tokens)},
               {format_megabytes(row.traffic / 2)},
               {format_seconds(row.timing.median)},
               {format_spread(row.timing), Tone::faint},
               {format_count(static_cast<double>(shape.batch * shape.tokens) / row.timing.median)},
               {fmt::format("{:.1f}", rate / 1e9)},
               {fmt::format("{:.1f}", copy_rate / 1e9)},
               {fmt::format("{:.0f} %", 100 * rate / copy_rate)}});
  }
  return table.text(color);
}

// Quiet machines repeat themselves within a few percent.
bool disturbed(const BenchResult& result) {
  constexpr double most_spread = 0.2;
  const auto wide = [](const Timing& timing) { return timing.spread() > most_spread; };
  return std::any_of(result.sequences.begin(), result.sequences.end(),
                     [&](const auto& row) { return wide(row.timing); }) ||
         std::any_of(result.steps.begin(), result.steps.end(),
                     [&](const auto& row) { return wide(row.timing) || wide(row.copy); });
}

nlohmann::ordered_json row_json(const SequenceRow& row) {
  nlohmann::ordered_json plans = nlohmann::ordered_json::array();
  for (const Plan& plan : row.plans) plans.push_back(to_json(plan));
  const MlstmShape& shape = row.plans.front().shape;
  nlohmann::ordered_json json = {{"operation", operation_name(row)},
                                 {"gate", name(row.gate)},
                                 {"dtype", tfla::name(shape.dtype)},
                                 {"formulation", name(row.formulation)},
                                 {"batch", shape.batch},
                                 {"tokens", shape.tokens},
                                 {"heads", shape.heads},
                                 {"dqk", shape.dqk},
                                 {"dhv", shape.dhv},
                                 {"seconds", to_json(row.timing)},
                                 {"useful_flops", useful_flops(row)},
                                 {"useful_flops_per_second", useful_flops(row) / row.timing.median},
                                 {"scratch_bytes", row.scratch_bytes},
                                 {"tensor_bytes", row.tensor_bytes},
                                 {"error_h", row.error_h},
                                 {"plans", plans}};
  if (row.burst.samples > 0) json["burst_seconds"] = to_json(row.burst);
  return json;
}

nlohmann::ordered_json row_json(const StepRow& row) {
  const MlstmShape& shape = row.plan.shape;
  return {{"operation", "step"},
          {"gate", name(row.gate)},
          {"dtype", tfla::name(shape.dtype)},
          {"batch", shape.batch},
          {"tokens", shape.tokens},
          {"heads", shape.heads},
          {"dqk", shape.dqk},
          {"dhv", shape.dhv},
          {"seconds", to_json(row.timing)},
          {"copy_seconds", to_json(row.copy)},
          {"state_bytes_per_second", row.traffic / row.timing.median},
          {"copy_bytes_per_second", row.copy_traffic / row.copy.median},
          {"plan", to_json(row.plan)}};
}

}  // namespace

std::string to_text(const BenchResult& result, bool color) {
  std::string out;
  if (!result.sequences.empty()) {
    out += sequence_table(result, color);
    out += "\nGrowth is the time divided by the time at the T before it.\n";
    out += growth_table(result, color);
  }
  if (!result.steps.empty()) {
    if (!out.empty()) out += "\n";
    out += step_table(result, color);
  }
  if (result.products) {
    out += fmt::format("\nMatrix products of size {} in float32 by {}: {:.1f} GFLOP/s on all threads.\n",
                       result.products->size, result.products->blas, result.products->flops_per_second / 1e9);
  }
  if (disturbed(result)) {
    out += "\nSome spreads are above 20 %: something else was running, and those times are longer than they need be.\n";
  }
  return out;
}

nlohmann::ordered_json to_json(const BenchResult& result) {
  nlohmann::ordered_json out;
  if (result.products) {
    out["product"] = {{"blas", result.products->blas},
                      {"size", result.products->size},
                      {"flops_per_second", result.products->flops_per_second}};
  }
  out["sequences"] = nlohmann::ordered_json::array();
  for (const SequenceRow& row : result.sequences) out["sequences"].push_back(row_json(row));
  out["steps"] = nlohmann::ordered_json::array();
  for (const StepRow& row : result.steps) out["steps"].push_back(row_json(row));
  return out;
}

}  // namespace tfla::cli
