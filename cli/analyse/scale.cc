// tfla analyse scale: tables and JSON.
#include "cli/analyse/scale.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace tfla::cli {
namespace {

using scale::Beneath;
using scale::Collective;
using scale::Operation;

constexpr double giga = 1e9, milli = 1e-3, micro = 1e-6;

const char* name(scale::Strategy strategy) {
  switch (strategy) {
    case scale::Strategy::ddp: return "ddp";
    case scale::Strategy::fsdp: return "fsdp";
    case scale::Strategy::context: return "context";
    case scale::Strategy::context_fsdp: break;
  }
  return "context-fsdp";
}

const char* name(Operation operation) {
  switch (operation) {
    case Operation::all_reduce: return "all-reduce";
    case Operation::all_gather: return "all-gather";
    case Operation::reduce_scatter: break;
  }
  return "reduce-scatter";
}

const char* name(Beneath beneath) {
  switch (beneath) {
    case Beneath::nothing: return "nothing";
    case Beneath::forward: return "forward";
    case Beneath::backward: return "backward";
    case Beneath::last_backward: break;
  }
  return "last backward";
}

double tokens_per_second(const ScaleReport& report, const ScaleRun& run) {
  return static_cast<double>(run.training.gpus) * report.tokens / run.step.seconds();
}

// Of a GPU among others, over one alone; the second where nothing hides beneath computation.
double efficiency(const ScaleReport& report, const ScaleRun& run) {
  return report.measured.step_seconds / run.step.seconds();
}
double efficiency_without_overlap(const ScaleReport& report, const ScaleRun& run) {
  return report.measured.step_seconds / (run.step.computation + run.step.communication);
}

std::string fixed(double value, int digits = 2) { return fmt::format("{:.{}f}", value, digits); }
std::string gigabytes(std::int64_t bytes) { return fixed(static_cast<double>(bytes) / giga); }

std::vector<std::string> run_cells(const ScaleRun& run) {
  return {name(run.training.strategy), fmt::format("{}", run.training.gpus)};
}

std::string description(const ScaleReport& report) {
  const scale::Network& network = report.network;
  return fmt::format(
      "{}, {} parameters: {:.0f} tokens of a GPU in {:.4f} s ({}); nodes of {}, {:.0f} GB/s inside, {:.0f} GB/s per "
      "GPU "
      "between them, {:.0f} % of what can overlap does",
      report.name, scale::count(scale::all_parameters(report.model)), report.tokens, report.measured.step_seconds,
      report.source, network.node_gpus, network.node_bandwidth / giga, network.bandwidth / giga, 100 * network.overlap);
}

Sheet step_sheet(const ScaleReport& report) {
  Sheet sheet{.name = "scale_steps",
              .columns = {"strategy", "gpus", "context_ranks", "sent_gb", "network_ms", "hidden_ms", "step_ms",
                          "tokens_per_second", "efficiency_percent", "no_overlap_percent"},
              .title = description(report)};
  for (const ScaleRun& run : report.runs) {
    std::vector<std::string> cells = run_cells(run);
    cells.insert(cells.end(),
                 {fmt::format("{}", run.training.context_ranks), fixed(run.step.sent / giga, 3),
                  fixed(run.step.communication / milli), fixed(run.step.hidden / milli),
                  fixed(run.step.seconds() / milli), fixed(tokens_per_second(report, run), 0),
                  fixed(100 * efficiency(report, run), 1), fixed(100 * efficiency_without_overlap(report, run), 1)});
    sheet.rows.push_back(cells);
  }
  return sheet;
}

Sheet collective_sheet(const ScaleReport& report) {
  Sheet sheet{
      .name = "scale_collectives",
      .columns = {"strategy", "gpus", "operation", "what", "beneath", "ranks", "calls", "bytes", "sent_mb", "call_us"},
      .title = "Collectives of a step: what each GPU hands to a call, and sends"};
  constexpr double mega = 1e6;
  for (const ScaleRun& run : report.runs) {
    for (const Collective& collective : run.collectives) {
      std::vector<std::string> cells = run_cells(run);
      cells.insert(cells.end(), {name(collective.operation), collective.what, name(collective.beneath),
                                 fmt::format("{}", collective.ranks), fmt::format("{}", collective.calls),
                                 fmt::format("{}", collective.bytes), fixed(scale::sent(collective) / mega),
                                 fixed(scale::seconds(collective, report.network) / micro, 1)});
      sheet.rows.push_back(cells);
    }
  }
  return sheet;
}

Sheet memory_sheet(const ScaleReport& report) {
  Sheet sheet{.name = "scale_memory",
              .columns = {"strategy", "gpus", "parameters_gb", "gradients_gb", "optimizer_gb", "buffers_gb", "sum_gb"},
              .title = "Memory of a GPU without activations"};
  for (const ScaleRun& run : report.runs) {
    const scale::Memory& memory = run.memory;
    std::vector<std::string> cells = run_cells(run);
    for (const std::int64_t bytes : {memory.parameters, memory.gradients, memory.optimizer, memory.buffers,
                                     memory.parameters + memory.gradients + memory.optimizer + memory.buffers}) {
      cells.push_back(gigabytes(bytes));
    }
    sheet.rows.push_back(cells);
  }
  return sheet;
}

nlohmann::ordered_json to_json(const ScaleReport& report, const ScaleRun& run) {
  nlohmann::ordered_json collectives = nlohmann::ordered_json::array();
  for (const Collective& collective : run.collectives) {
    collectives.push_back({{"operation", name(collective.operation)},
                           {"what", collective.what},
                           {"beneath", name(collective.beneath)},
                           {"ranks", collective.ranks},
                           {"calls", collective.calls},
                           {"bytes", collective.bytes},
                           {"sent_bytes", scale::sent(collective)},
                           {"seconds", scale::seconds(collective, report.network)}});
  }
  return {{"strategy", name(run.training.strategy)},
          {"gpus", run.training.gpus},
          {"context_ranks", run.training.context_ranks},
          {"micro_batch", run.training.micro_batch},
          {"micro_batches", run.training.micro_batches},
          {"collectives", collectives},
          {"sent_bytes", run.step.sent},
          {"communication_seconds", run.step.communication},
          {"hidden_seconds", run.step.hidden},
          {"computation_seconds", run.step.computation},
          {"step_seconds", run.step.seconds()},
          {"tokens_per_second", tokens_per_second(report, run)},
          {"efficiency", efficiency(report, run)},
          {"efficiency_without_overlap", efficiency_without_overlap(report, run)},
          {"memory_bytes",
           {{"parameters", run.memory.parameters},
            {"gradients", run.memory.gradients},
            {"optimizer", run.memory.optimizer},
            {"buffers", run.memory.buffers}}}};
}

}  // namespace

std::vector<Sheet> to_sheets(const ScaleReport& report) {
  return {step_sheet(report), collective_sheet(report), memory_sheet(report)};
}

nlohmann::ordered_json to_json(const ScaleReport& report) {
  const scale::Model& model = report.model;
  const scale::Network& network = report.network;
  nlohmann::ordered_json runs = nlohmann::ordered_json::array();
  for (const ScaleRun& run : report.runs) runs.push_back(to_json(report, run));
  return {{"model",
           {{"layers", model.layers},
            {"dim", model.dim},
            {"heads", model.heads},
            {"vocab", model.vocab},
            {"ffn_dim", model.ffn_dim},
            {"qk_dim", model.qk_dim},
            {"v_dim", model.v_dim},
            {"parameters", scale::count(scale::all_parameters(model))}}},
          {"one_gpu",
           {{"tokens", report.tokens},
            {"step_seconds", report.measured.step_seconds},
            {"kernel_seconds", report.measured.kernel_seconds},
            {"source", report.source}}},
          {"network",
           {{"node_gpus", network.node_gpus},
            {"node_bytes_per_second", network.node_bandwidth},
            {"bytes_per_second", network.bandwidth},
            {"call_seconds", network.call_seconds},
            {"node_step_seconds", network.node_step_seconds},
            {"step_seconds", network.step_seconds},
            {"overlap", network.overlap}}},
          {"runs", runs}};
}

}  // namespace tfla::cli
