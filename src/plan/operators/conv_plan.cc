#include "plan/operators/conv_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/names.h"
#include "plan/arithmetic.h"
#include "plan/backend.h"
#include "plan/operators/conv_backend.h"
#include "plan/operators/conv_cuda.h"

namespace tfla {

namespace {

// Elements that are worth a thread: waking one takes as long as thousands of them.
constexpr std::int64_t least_work = 1 << 14;

// More than this would not change anything, and might not fit into 64 bits.
constexpr std::int64_t many = std::int64_t{1} << 40;

// Tiles of x and of what is made of it stay in the second-level cache; rows of them are long enough for the loads of
// one line to bring the next ones. A span is what the sums of gradients are rounded by, so that it depends on no
// threads.
void choose_ranges(ConvPlan& plan) {
  const ConvShape& shape = plan.shape;
  const std::int64_t tokens = std::clamp<std::int64_t>(std::min(shape.batch, many) * shape.tokens, 1, many);
  const bool along = shape.along_tokens;
  plan.tile = along ? 512 : 32;
  plan.panel = along ? 16 : 256;
  plan.span = along ? 2048 : 512;
  if (plan.operation == Operation::step) plan.tile = plan.span = std::max<std::int64_t>(shape.tokens, 1);
  plan.span = std::min(plan.span, tokens);
  plan.tile = std::min(plan.tile, plan.span);
  plan.panel = std::min(plan.panel, shape.channels);
}

// No more threads than there is work for.
void use_threads(ConvPlan& plan) {
  const ConvShape& shape = plan.shape;
  const std::int64_t rows = plan.operation == Operation::step ? shape.batch : plan.spans();
  const std::int64_t units = std::min(rows, many) * std::min(plan.panels(), std::int64_t{1} << 20);
  const double elements =
      static_cast<double>(shape.batch) * static_cast<double>(shape.tokens) * static_cast<double>(shape.channels);
  const auto worth = static_cast<std::int64_t>(elements / static_cast<double>(least_work)) + 1;
  plan.threads = static_cast<int>(std::clamp<std::int64_t>(std::min(units, worth), 1, plan.threads));
}

void count(ConvPlan& plan) {
  const ConvShape& shape = plan.shape;
  const double elements =
      static_cast<double>(shape.batch) * static_cast<double>(shape.tokens) * static_cast<double>(shape.channels);
  const double products = plan.operation == Operation::backward ? 3 : 1;
  const double tensors = plan.operation == Operation::backward ? 3 : 2;
  plan.flops = products * 2 * elements * static_cast<double>(shape.width);
  plan.bytes = tensors * elements * static_cast<double>(item_size(shape.dtype));
}

}  // namespace

ConvPlan make_conv_plan(Operation operation, const ConvShape& shape, const ConvOptions& options, const ConvGiven& given,
                        const Execution& execution) {
  ConvPlan plan{.operation = operation,
                .device = execution.device,
                .shape = shape,
                .options = options,
                .compute = shape.dtype == DType::float64 ? DType::float64 : DType::float32,
                .threads = execution.threads > 0 ? execution.threads : cpu_threads()};
  count(plan);
  if (execution.device == Device::cuda) {
    plan.gpu = execution.gpu ? *execution.gpu : backend(Device::cuda).facts();
    plan.given = given;
    plan_conv_cuda(plan);
    return plan;
  }
  choose_ranges(plan);
  use_threads(plan);
  plan.scratch_bytes = cpu_scratch_bytes(plan);
  return plan;
}

std::string describe(const ConvPlan& plan) {
  const ConvShape& shape = plan.shape;
  std::string page;
  const auto line = [&page](const char* key, const std::string& value) {
    page += fmt::format("{:<16}{}\n", key, value);
  };
  line("operation", fmt::format("{} of the causal convolution", name(plan.operation)));
  line("shape", fmt::format("B {}  T {}  N {}  D {}  W {}", shape.batch, shape.tokens, shape.sequences, shape.channels,
                            shape.width));
  line("types", fmt::format("tensors {}, arithmetic {}", name(shape.dtype), name(plan.compute)));
  line("memory", shape.along_tokens ? "tokens side by side" : "channels side by side");
  if (plan.device == Device::cuda) {
    line("device", fmt::format("cuda, sm_{}, {} multiprocessors", plan.gpu.capability, plan.gpu.multiprocessors));
    std::string all;
    for (const Launch& launch : plan.launches)
      all += fmt::format("{}{}", all.empty() ? "" : ", ", name(static_cast<ConvKernel>(launch.kernel)));
    line("kernels", all);
    line("span", fmt::format("{} tokens for {} thread{}", plan.span, conv_lanes(plan.shape),
                             conv_lanes(plan.shape) == 1 ? "" : "s"));
    line("tile", fmt::format("{} tokens and {} channels that a thread takes at a time", plan.tile, plan.panel));
  } else {
    line("device", fmt::format("cpu, {} thread{}", plan.threads, plan.threads == 1 ? "" : "s"));
    line("span", fmt::format("{} tokens and {} channels that a thread takes at a time", plan.span, plan.panel));
    line("tile", fmt::format("{} tokens in the cache together", plan.tile));
  }
  line("scratch", fmt::format("{} bytes", plan.scratch_bytes));
  line("FLOPs", fmt::format("{:.4g}", plan.flops));
  line("bytes", fmt::format("{:.4g} moved at least", plan.bytes));
  return page;
}

}  // namespace tfla
