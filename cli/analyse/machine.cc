// tfla analyse runtime, intensity, roofline, chunk: appendix G.
#include <fmt/format.h>

#include <cmath>

#include "cli/analyse/analyse.h"
#include "cli/support/options.h"
#include "core/names.h"
#include "plan/cost/cpu_time.h"

namespace tfla::cli {
namespace {

using analysis::Accelerator;
using analysis::Model;
using analysis::Pass;
using analysis::Polynomial;

constexpr int per_octave = 8;

bool is_power_of_two(double x) { return std::exp2(std::round(std::log2(x))) == x; }

// The counts that the paper's analysis of forward rests on are those of its table of totals; backward it does not
// count.
Polynomial flops_of(const Model& model) {
  return model.pass == Pass::forward ? analysis::printed_flops(model) : analysis::flops(model);
}

struct Call {
  double flops = 0;
  double bytes = 0;
};

Call call(const AnalyseOptions& options, double chunk) {
  const Model model = options.model(options.pass);
  return {analysis::total(flops_of(model), chunk, options.workload),
          analysis::total(analysis::bytes(model), chunk, options.workload)};
}

std::string title(const AnalyseOptions& options, const std::string& what) {
  return fmt::format("{}: {} {}, B {} T {} H {} dqk {} dhv {}, causal factor {}, states of {} bytes", what,
                     options.gate == InputGate::sigmoid ? "mLSTMsig" : "mLSTMexp", pass_name(options.pass),
                     options.workload.batch, options.workload.tokens, options.workload.heads, options.dims.dqk,
                     options.dims.dhv, options.causal, options.state_bytes);
}

// The rows of a curve at powers of two, for a person.
Sheet excerpt(const Sheet& curve, const std::string& text, std::size_t chunk_column) {
  Sheet sheet{.name = {}, .columns = curve.columns, .title = text};
  for (const auto& row : curve.rows) {
    if (is_power_of_two(std::stod(row[chunk_column]))) sheet.rows.push_back(row);
  }
  return sheet;
}

std::vector<double> chunks(const AnalyseOptions& options) {
  constexpr int smallest = 4;
  const int largest = static_cast<int>(std::floor(std::log2(options.workload.tokens)));
  return powers_of_two(std::min(smallest, largest), largest, per_octave);
}

constexpr double widest_head = 2048, head_step = 16;

// Closed forms against a search, for every machine, pass and gate.
Sheet best_sheet(const AnalyseOptions& options) {
  Sheet sheet{.name = "chunk_best",
              .columns = {"machine", "pass", "gate", "flop_optimal", "runtime_optimal", "searched", "overlapped",
                          "paper_formula"},
              .title = fmt::format("Best chunk size, dqk {} dhv {}, causal factor {}, states of {} bytes",
                                   options.dims.dqk, options.dims.dhv, options.causal, options.state_bytes)};
  const auto number = [](double value) { return fmt::format("{:.1f}", value); };
  for (const Accelerator& machine : options.machines) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      for (const InputGate gate : {InputGate::exponential, InputGate::sigmoid}) {
        Model model = options.model(pass);
        model.gate = gate;
        const Polynomial flops = analysis::flops(model);
        const Polynomial bytes = analysis::bytes(model);
        const auto seconds = [&](double x) { return analysis::runtime(flops(x) / x, bytes(x) / x, machine).sum(); };
        constexpr double longest = 1e6;
        const bool in_paper = pass == Pass::forward && gate == InputGate::sigmoid;
        const double paper = analysis::printed_runtime_optimal_chunk(options.dims.dhv, options.pqk(), options.causal,
                                                                     options.state_bytes, machine.intensity());
        sheet.rows.push_back(
            {machine.name, pass_name(pass), name(gate), number(analysis::best_chunk(flops)),
             number(analysis::best_chunk(flops, bytes, machine)), number(analysis::minimize(seconds, 1, longest)),
             number(analysis::best_chunk_overlapped(flops, bytes, machine)), in_paper ? number(paper) : ""});
      }
    }
  }
  return sheet;
}

Sheet flop_optimal_curves() {
  Sheet sheet{.name = "chunk_flop_optimal", .columns = {"pqk", "causal", "dhv", "chunk"}};
  for (const double pqk : {0.5, 1.0}) {
    for (const double causal : {0.5, 0.66, 1.0}) {
      for (double dhv = head_step; dhv <= widest_head; dhv += head_step) {
        sheet.rows.push_back({csv_number(pqk), csv_number(causal), csv_number(dhv),
                              csv_number(analysis::printed_flop_optimal_chunk(dhv, pqk, causal))});
      }
    }
  }
  return sheet;
}

Sheet runtime_optimal_curves(const AnalyseOptions& options) {
  Sheet sheet{.name = "chunk_runtime_optimal", .columns = {"accelerator", "state_bytes", "causal", "dhv", "chunk"}};
  for (const Accelerator& machine : options.machines) {
    for (const double state_bytes : {4.0, 2.0}) {
      for (const double causal : {0.5, 0.66, 1.0}) {
        for (double dhv = head_step; dhv <= widest_head; dhv += head_step) {
          const double chunk =
              analysis::printed_runtime_optimal_chunk(dhv, options.pqk(), causal, state_bytes, machine.intensity());
          sheet.rows.push_back(
              {machine.name, csv_number(state_bytes), csv_number(causal), csv_number(dhv), csv_number(chunk)});
        }
      }
    }
  }
  return sheet;
}

Sheet intensity_curves(const AnalyseOptions& options) {
  Sheet sheet{.name = "chunk_over_intensity", .columns = {"dhv", "intensity", "chunk"}};
  constexpr double largest = 600, step = 5;
  for (const double dhv : {128.0, 256.0, 512.0, 1024.0}) {
    for (double intensity = step; intensity <= largest; intensity += step) {
      sheet.rows.push_back({csv_number(dhv), csv_number(intensity),
                            csv_number(analysis::printed_runtime_optimal_chunk(dhv, options.pqk(), options.causal,
                                                                               options.state_bytes, intensity))});
    }
  }
  return sheet;
}

// What the same closed form gives with the constants of a CPU core, where the tile is the paper's chunk.
Sheet cpu_sheet(const AnalyseOptions& options) {
  Sheet sheet{.name = "chunk_cpu_tiles",
              .columns = {"dqk", "dhv", "tile", "forward_us_per_token", "backward_us_per_token"},
              .title = "This library on a CPU core: the plan's tile and its time per token and head"};
  for (const double dhv : {64.0, 128.0, 256.0, 512.0}) {
    const analysis::HeadDims dims{options.pqk() * dhv, dhv};
    const auto tile = static_cast<double>(best_cpu_tile(dims));
    const auto micros = [&](Pass pass) { return fmt::format("{:.3f}", 1e6 * cpu_seconds(pass, dims, 1, tile, tile)); };
    sheet.rows.push_back(
        {csv_number(dims.dqk), csv_number(dhv), csv_number(tile), micros(Pass::forward), micros(Pass::backward)});
  }
  return sheet;
}

}  // namespace

std::vector<Sheet> analyse_runtime(const AnalyseOptions& options) {
  Sheet curve{.name = "runtime",
              .columns = {"accelerator", "chunk", "flop_ms", "byte_ms", "sum_ms", "overlapped_ms", "flops_per_second",
                          "flops"}};
  for (const Accelerator& machine : options.machines) {
    for (const double chunk : chunks(options)) {
      const Call work = call(options, chunk);
      const analysis::Runtime time = analysis::runtime(work.flops, work.bytes, machine);
      curve.rows.push_back({machine.name, csv_number(chunk), csv_number(1e3 * time.flop_seconds),
                            csv_number(1e3 * time.byte_seconds), csv_number(1e3 * time.sum()),
                            csv_number(1e3 * time.overlapped()), csv_number(work.flops / time.sum()),
                            csv_number(work.flops)});
    }
  }
  return {excerpt(curve, title(options, "Theoretical runtime"), 1), curve};
}

std::vector<Sheet> analyse_intensity(const AnalyseOptions& options) {
  Sheet curve{.name = "intensity", .columns = {"dqk", "dhv", "state_bytes", "chunk", "intensity"}};
  for (const double state_bytes : {4.0, 2.0}) {
    for (const double share : {0.25, 0.5, 1.0, 2.0}) {
      for (const double chunk : chunks(options)) {
        AnalyseOptions point = options;
        point.state_bytes = state_bytes;
        point.dims = {share * options.dims.dqk, share * options.dims.dhv};
        const Call work = call(point, chunk);
        curve.rows.push_back({csv_number(point.dims.dqk), csv_number(point.dims.dhv), csv_number(state_bytes),
                              csv_number(chunk), csv_number(work.flops / work.bytes)});
      }
    }
  }
  Sheet table = excerpt(curve, title(options, "Arithmetic intensity in FLOPs per byte"), 3);
  std::erase_if(table.rows, [&](const auto& row) {
    return row[1] != csv_number(options.dims.dhv) || row[2] != csv_number(options.state_bytes);
  });
  return {table, curve};
}

std::vector<Sheet> analyse_roofline(const AnalyseOptions& options) {
  Sheet roofs{.name = "roofline_machines",
              .columns = {"accelerator", "year", "flops_per_second", "bytes_per_second", "intensity", "source"},
              .title = "Machines"};
  Sheet points{.name = "roofline_points",
               .columns = {"accelerator", "chunk", "intensity", "attainable_flops_per_second", "bound"}};
  for (const Accelerator& machine : options.machines) {
    roofs.rows.push_back({machine.name, fmt::format("{}", machine.year), csv_number(machine.flops),
                          csv_number(machine.bandwidth), csv_number(machine.intensity()), machine.source});
    for (const double chunk : chunks(options)) {
      const Call work = call(options, chunk);
      const double intensity = work.flops / work.bytes;
      points.rows.push_back({machine.name, csv_number(chunk), csv_number(intensity),
                             csv_number(analysis::roofline(machine, intensity)),
                             intensity < machine.intensity() ? "memory" : "compute"});
    }
  }
  return {roofs, excerpt(points, title(options, "Roofline"), 1), points};
}

std::vector<Sheet> analyse_chunk(const AnalyseOptions& options) {
  return {best_sheet(options), cpu_sheet(options), flop_optimal_curves(), runtime_optimal_curves(options),
          intensity_curves(options)};
}

}  // namespace tfla::cli
