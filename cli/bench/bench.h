// The rows of `tfla bench`: what is timed, and how the results are shown.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/support/ceilings.h"
#include "cli/support/options.h"
#include "cli/support/timing.h"
#include "tfla/tfla.h"

namespace tfla::cli {

struct BenchOptions {
  CommonOptions common;
  Operator subject = Operator::mlstm;
  bool quick = false;
  bool gemm = false;
  std::optional<MlstmShape> shape;
  std::vector<std::int64_t> tokens;  // empty: the T of the shape, or a default list
  std::vector<DType> dtypes = {DType::float32};
  std::vector<InputGate> gates = {InputGate::exponential, InputGate::sigmoid};
  std::vector<Formulation> formulations = {Formulation::chunkwise, Formulation::parallel, Formulation::recurrent};
  bool forward = true;
  bool training = true;
  bool step = true;
  MeasureTimes times;  // of each row; all of them zero: depends on quick
  std::string json;
};

// A whole sequence: forward, or forward and backward ("training").
struct SequenceRow {
  bool training = false;
  InputGate gate = InputGate::exponential;
  Formulation formulation = Formulation::chunkwise;
  std::vector<Plan> plans;        // forward, then backward
  Timing timing;                  // call after call
  Timing burst;                   // a few after a rest; only on a GPU
  std::size_t scratch_bytes = 0;  // the larger of the plans', which may share it, and what forward saves for backward
  std::size_t tensor_bytes = 0;   // inputs and outputs
  double error_h = 0;             // relative, against float64, on a short sequence
};

struct StepRow {
  InputGate gate = InputGate::exponential;
  Plan plan;
  Timing timing;
  Timing copy;
  double traffic = 0;       // bytes of C and n, read and written
  double copy_traffic = 0;  // bytes of the copy, read and written
};

struct BenchResult {
  std::vector<SequenceRow> sequences;
  std::vector<StepRow> steps;
  std::optional<ProductRate> products;
};

// The delta rule: a whole sequence, or a step.
struct DeltaRow {
  std::string operation;  // forward, training, step
  std::vector<DeltaPlan> plans = {};
  Timing timing = {};
  Timing copy = {};  // step: of as many bytes as the state has
  double copy_traffic = 0;
};

// run.cc
[[nodiscard]] BenchResult run_bench(const BenchOptions& options);
[[nodiscard]] std::vector<MlstmShape> sequence_shapes(const BenchOptions& options);
[[nodiscard]] std::vector<MlstmShape> step_shapes(const BenchOptions& options);

// delta.cc
[[nodiscard]] std::vector<DeltaRow> run_delta_bench(const BenchOptions& options);
[[nodiscard]] std::string to_text(const std::vector<DeltaRow>& rows, bool color);
[[nodiscard]] nlohmann::ordered_json to_json(const std::vector<DeltaRow>& rows);

// report.cc
[[nodiscard]] std::string to_text(const BenchResult& result, bool color);
[[nodiscard]] nlohmann::ordered_json to_json(const BenchResult& result);

}  // namespace tfla::cli
