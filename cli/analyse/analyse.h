// The subjects of `tfla analyse`: each makes sheets from the cost model (or, for transfer, from the library itself).
#pragma once

#include <string>
#include <vector>

#include "cli/analyse/scale.h"
#include "cli/analyse/sheet.h"
#include "tfla/analysis.h"

namespace tfla::cli {

struct AnalyseOptions {
  std::string out;
  analysis::Workload workload = {.batch = 8, .heads = 8, .tokens = 8192};  // the paper's 7B setting
  analysis::HeadDims dims = {.dqk = 256, .dhv = 512};
  analysis::Pass pass = analysis::Pass::forward;
  InputGate gate = InputGate::sigmoid;
  double chunk = 256;
  double causal = 0.5;
  double state_bytes = 4;
  std::vector<analysis::Accelerator> machines;
  double step = 0.5;  // of the gates' grid
  int threads = 0;
  ScaleOptions scale;

  [[nodiscard]] double pqk() const { return dims.dqk / dims.dhv; }
  [[nodiscard]] analysis::Model model(analysis::Pass which, Formulation formulation = Formulation::chunkwise) const {
    return {.pass = which,
            .formulation = formulation,
            .gate = gate,
            .dims = dims,
            .factors = {.causal = causal},
            .bytes = {.states = state_bytes}};
  }
};

[[nodiscard]] const char* pass_name(analysis::Pass pass);

// 2^from, ... 2^to with `per_octave` values in each octave.
[[nodiscard]] std::vector<double> powers_of_two(int from, int to, int per_octave = 1);

[[nodiscard]] std::vector<Sheet> analyse_flops(const AnalyseOptions& options);
[[nodiscard]] std::vector<Sheet> analyse_bytes(const AnalyseOptions& options);
[[nodiscard]] std::vector<Sheet> analyse_runtime(const AnalyseOptions& options);
[[nodiscard]] std::vector<Sheet> analyse_intensity(const AnalyseOptions& options);
[[nodiscard]] std::vector<Sheet> analyse_roofline(const AnalyseOptions& options);
[[nodiscard]] std::vector<Sheet> analyse_chunk(const AnalyseOptions& options);
[[nodiscard]] std::vector<Sheet> analyse_transfer(const AnalyseOptions& options);

}  // namespace tfla::cli
