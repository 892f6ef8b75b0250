// Timing: inputs resident, plan and scratch made before the clock starts.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <tuple>

#include "cli/bench/bench.h"
#include "cli/support/json.h"
#include "cli/support/progress.h"
#include "cli/support/workload.h"
#include "core/names.h"
#include "plan/backend.h"
#include "testkit/judge.h"

namespace tfla::cli {
namespace {

const std::vector<std::int64_t> usual_tokens = {512, 1024, 2048, 4096, 8192};
const std::vector<std::int64_t> quick_tokens = {512, 1024, 2048, 4096};
const std::vector<std::int64_t> step_batches = {1, 4, 16, 64}, gpu_step_batches = {1, 8, 64, 256};

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

MlstmOptions mlstm_options(const BenchOptions& options, InputGate gate, Formulation formulation) {
  MlstmOptions out;
  out.gate = gate;
  out.formulation = formulation;
  out.chunk_size = options.common.chunk;
  // On a GPU, training is fastest with the states of forward at hand, and takes no more memory at its peak.
  if (options.common.execution.device == Device::cuda && options.training) out.keep = Keep::states;
  return out;
}

// The relative error of H against float64, on a sequence short enough for the reference.
double error_of_h(MlstmShape shape, const MlstmOptions& options, const Execution& execution) {
  constexpr std::int64_t tokens = 256;
  shape.batch = 1;
  set_tokens(shape, tokens);
  testkit::Case description;
  description.regime = reference::Regime::trained_like;
  description.shape = shape;
  description.options = options;
  description.options.keep = Keep::nothing;  // what would be kept depends on the kernels, and h does not
  description.device = execution.device;
  testkit::Problem problem(description);
  forward(problem.forward(), execution);
  const testkit::Judge judge(problem, false);
  for (const testkit::TensorError& error : judge.forward_errors()) {
    if (error.tensor == "h") return error.relative;
  }
  throw std::logic_error("tfla: the reference judged no h");
}

// Times call(stream), and `other` in turn with it where there is one. On a GPU the call is recorded and replayed: what
// remains is the time of its kernels.
std::vector<Timing> time_calls(const std::function<void(void*)>& call, Device device, MeasureTimes times,
                               const std::function<void()>& other) {
  std::unique_ptr<Recording> recorded;
  std::vector<std::function<void()>> calls = {[&] { call(nullptr); }};
  if (device == Device::cuda) {
    recorded = gpu_instruments().record(call);
    calls[0] = [&] { recorded->replay(); };
  }
  if (other) calls.push_back(other);
  return measure(calls, times, [device] {
    if (device == Device::cuda) gpu_instruments().synchronize();
  });
}

SequenceRow time_sequence(const Workload& workload, const Variant& variant, const BenchOptions& options) {
  const MlstmOptions mlstm = mlstm_options(options, variant.gate, variant.formulation);
  SequenceRow row;
  row.training = variant.training;
  row.gate = variant.gate;
  row.formulation = variant.formulation;
  const Execution& execution = options.common.execution;
  MlstmForward forward_args = workload.forward(mlstm);
  row.plans.push_back(plan(forward_args, execution));
  MlstmBackward backward_args;
  if (variant.training) {
    backward_args = workload.backward(mlstm);
    row.plans.push_back(plan(backward_args, execution));
  }
  const Buffer saved(row.plans.front().saved_bytes, execution.device);
  forward_args.saved = saved.span();
  backward_args.saved = saved.span();
  for (const Plan& item : row.plans) row.scratch_bytes = std::max(row.scratch_bytes, item.scratch_bytes);
  row.tensor_bytes = workload.bytes(variant.training);
  const Buffer scratch(row.scratch_bytes, execution.device, Pages::huge);
  const auto call = [&](void* stream) {
    forward(forward_args, row.plans.front(), scratch.span(), stream);
    if (variant.training) backward(backward_args, row.plans.back(), scratch.span(), stream);
  };
  if (execution.device == Device::cuda) {
    const std::unique_ptr<Recording> recorded = gpu_instruments().record(call);
    row.burst = measure_burst([&] { return recorded->replay_seconds(); });
  }
  row.timing = time_calls(call, execution.device, options.times, {}).front();
  row.scratch_bytes += saved.size();
  return row;
}

StepRow time_step(const MlstmShape& shape, InputGate gate, const BenchOptions& options) {
  const Device device = options.common.execution.device;
  const StepWorkload workload(shape, device);
  const MlstmStep args = workload.step(mlstm_options(options, gate, Formulation::chunkwise));
  StepRow row;
  row.gate = gate;
  row.plan = plan(args, options.common.execution);
  const Buffer scratch(row.plan.scratch_bytes, device);
  const Copy copy(workload.state_bytes(), row.plan.threads, device);
  const int together = device == Device::cuda ? 20 : 1;  // a single step is shorter than the launch of a recording
  const auto call = [&](void* stream) {
    for (int x = 0; x < together; ++x) step(args, row.plan, scratch.span(), stream);
  };
  const std::vector<Timing> timings = time_calls(call, device, options.times, [&copy] { copy(); });
  row.timing = timings[0].per(together);
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
  for (std::int64_t batch : options.common.execution.device == Device::cuda ? gpu_step_batches : step_batches) {
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
    result.products = measure_products(resolved_threads(options.common.execution), options.times.all);
    progress.done();
  }
  std::map<std::tuple<DType, InputGate, Formulation>, double> errors;
  for (DType dtype : options.dtypes) {
    for (MlstmShape shape : shapes) {
      set_dtype(shape, dtype);
      const Workload workload(shape, options.training, options.common.execution.device);
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
