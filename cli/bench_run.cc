// Timing: inputs resident, plan and scratch made before the clock starts.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "bench.h"
#include "progress.h"
#include "reference/harness.h"
#include "report.h"
#include "workload.h"

namespace tfla::cli {
namespace {

const std::vector<std::int64_t> usual_tokens = {512, 1024, 2048, 4096, 8192};
const std::vector<std::int64_t> quick_tokens = {512, 1024, 2048, 4096};
const std::vector<std::int64_t> step_batches = {1, 4, 16, 64};

struct Variant {
  bool training;
  InputGate gate;
  Formulation formulation;
};

std::vector<Variant> sequence_variants(const BenchOptions& options) {
  std::vector<Variant> variants;
  for (const bool training : {false, true}) {
    if (training ? !options.training : !options.forward) continue;
    for (InputGate gate : options.gates) {
      for (Formulation formulation : options.formulations) {
        if (training && formulation == Formulation::recurrent) continue;
        variants.push_back({training, gate, formulation});
      }
    }
  }
  return variants;
}

std::vector<MlstmShape> sequence_shapes(const BenchOptions& options) {
  MlstmShape shape;
  shape.heads = shape.qk_heads = 4;
  shape.dqk = 128;
  shape.dhv = 256;
  if (options.shape) shape = *options.shape;
  std::vector<std::int64_t> tokens = options.tokens;
  if (tokens.empty() && options.shape) tokens = {shape.tokens};
  if (tokens.empty()) tokens = options.quick ? quick_tokens : usual_tokens;
  std::vector<MlstmShape> shapes;
  for (std::int64_t count : tokens) {
    set_tokens(shape, count);
    shapes.push_back(shape);
  }
  return shapes;
}

std::vector<MlstmShape> step_shapes(const BenchOptions& options) {
  if (options.shape && !options.forward && !options.training) return {*options.shape};
  std::vector<MlstmShape> shapes;
  for (std::int64_t batch : step_batches) {
    MlstmShape shape;
    shape.batch = batch;
    shape.heads = shape.qk_heads = 8;
    shape.dqk = 256;
    shape.dhv = 512;
    set_tokens(shape, 1);
    shapes.push_back(shape);
  }
  return shapes;
}

MlstmOptions mlstm_options(const BenchOptions& options, InputGate gate, Formulation formulation) {
  MlstmOptions out;
  out.gate = gate;
  out.formulation = formulation;
  out.chunk_size = options.common.chunk;
  return out;
}

// The relative error of H against float64, on a sequence short enough for the reference.
double error_of_h(MlstmShape shape, const MlstmOptions& options, const Execution& execution) {
  constexpr std::int64_t tokens = 256;
  shape.batch = 1;
  set_tokens(shape, tokens);
  reference::Case description;
  description.regime = reference::Regime::trained_like;
  description.shape = shape;
  description.options = options;
  reference::Problem problem(description);
  forward(problem.forward(), execution);
  const reference::Judge judge(problem, false);
  for (const reference::TensorError& error : judge.forward_errors()) {
    if (error.tensor == "h") return error.relative;
  }
  throw std::logic_error("tfla: the reference judged no h");
}

SequenceRow time_sequence(const Workload& workload, const Variant& variant, const BenchOptions& options) {
  const MlstmOptions mlstm = mlstm_options(options, variant.gate, variant.formulation);
  SequenceRow row;
  row.training = variant.training;
  row.gate = variant.gate;
  row.formulation = variant.formulation;
  const MlstmForward forward_args = workload.forward(mlstm);
  row.plans.push_back(plan(forward_args, options.common.execution));
  MlstmBackward backward_args;
  if (variant.training) {
    backward_args = workload.backward(mlstm);
    row.plans.push_back(plan(backward_args, options.common.execution));
  }
  for (const Plan& item : row.plans) row.scratch_bytes = std::max(row.scratch_bytes, item.scratch_bytes);
  row.tensor_bytes = workload.bytes(variant.training);
  const Buffer scratch(row.scratch_bytes);
  const auto call = [&] {
    forward(forward_args, row.plans.front(), scratch.span());
    if (variant.training) backward(backward_args, row.plans.back(), scratch.span());
  };
  row.timing = measure({call}, options.min_time).front();
  return row;
}

StepRow time_step(const MlstmShape& shape, InputGate gate, const BenchOptions& options) {
  const StepWorkload workload(shape);
  const MlstmStep args = workload.step(mlstm_options(options, gate, Formulation::chunkwise));
  StepRow row;
  row.gate = gate;
  row.plan = plan(args, options.common.execution);
  const Buffer scratch(row.plan.scratch_bytes);
  const Copy copy(workload.state_bytes(), row.plan.threads);
  const auto call = [&] { step(args, row.plan, scratch.span()); };
  const std::vector<Timing> timings = measure({call, [&copy] { copy(); }}, options.min_time);
  row.timing = timings[0];
  row.copy = timings[1];
  row.traffic = 2.0 * static_cast<double>(workload.state_bytes());
  row.copy_traffic = copy.traffic();
  return row;
}

// The plan of a shape finds what cannot be computed (sizes that overflow, say) before tensors are made for it.
void refuse_bad_shapes(const BenchOptions& options, const std::vector<MlstmShape>& sequences,
                       const std::vector<MlstmShape>& steps) {
  const MlstmOptions mlstm = mlstm_options(options, options.gates.front(), Formulation::chunkwise);
  for (const MlstmShape& shape : sequences) (void)plan(Operation::backward, shape, mlstm, options.common.execution);
  for (const MlstmShape& shape : steps) (void)plan(Operation::step, shape, mlstm, options.common.execution);
}

// Rows come out grouped by tensor; a reader wants them by what they compare.
auto reading_order(const SequenceRow& row) {
  const MlstmShape& shape = row.plans.front().shape;
  return std::tuple(row.training, shape.dtype, row.gate, row.formulation, shape.tokens);
}

}  // namespace

BenchResult run_bench(const BenchOptions& options) {
  const std::vector<Variant> variants = sequence_variants(options);
  const std::vector<MlstmShape> shapes = variants.empty() ? std::vector<MlstmShape>() : sequence_shapes(options);
  const std::vector<MlstmShape> steps = options.step ? step_shapes(options) : std::vector<MlstmShape>();
  if (variants.empty() && steps.empty()) {
    throw UsageError("tfla: --formulation was 'recurrent'; training takes chunkwise or parallel");
  }
  const std::size_t pieces =
      options.dtypes.size() * (shapes.size() * variants.size() + steps.size() * options.gates.size());
  Progress progress("tfla bench", static_cast<std::int64_t>(pieces + (options.gemm ? 1 : 0)));
  refuse_bad_shapes(options, shapes, steps);
  BenchResult result;
  if (options.gemm) {
    progress.start("matrix product");
    result.products = measure_products(resolved_threads(options.common.execution), options.min_time);
    progress.done();
  }
  std::map<std::tuple<DType, InputGate, Formulation>, double> errors;
  for (DType dtype : options.dtypes) {
    for (MlstmShape shape : shapes) {
      set_dtype(shape, dtype);
      const Workload workload(shape, options.training);
      for (const Variant& variant : variants) {
        progress.start(fmt::format("{} {} {} {} T {}", variant.training ? "training" : "forward", name(variant.gate),
                                   tfla::name(dtype), name(variant.formulation), shape.tokens));
        SequenceRow row = time_sequence(workload, variant, options);
        const auto [entry, is_new] = errors.try_emplace({dtype, variant.gate, variant.formulation}, 0.0);
        if (is_new) {
          entry->second =
              error_of_h(shape, mlstm_options(options, variant.gate, variant.formulation), options.common.execution);
        }
        row.error_h = entry->second;
        result.sequences.push_back(std::move(row));
        progress.done();
      }
    }
    for (MlstmShape shape : steps) {
      set_dtype(shape, dtype);
      for (InputGate gate : options.gates) {
        progress.start(fmt::format("step {} {} batch {}", name(gate), tfla::name(dtype), shape.batch));
        result.steps.push_back(time_step(shape, gate, options));
        progress.done();
      }
    }
  }
  std::stable_sort(result.sequences.begin(), result.sequences.end(),
                   [](const SequenceRow& a, const SequenceRow& b) { return reading_order(a) < reading_order(b); });
  std::stable_sort(result.steps.begin(), result.steps.end(), [](const StepRow& a, const StepRow& b) {
    return std::tuple(a.plan.shape.dtype, a.gate) < std::tuple(b.plan.shape.dtype, b.gate);
  });
  return result;
}

}  // namespace tfla::cli
