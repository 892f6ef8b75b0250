// A plan in words.
#include <fmt/format.h>

#include "core/checks.h"
#include "core/names.h"
#include "plan/cost/plan_cost.h"
#include "plan/cpu_plan.h"
#include "plan/cuda_plan.h"
#include "plan/kernel_table.h"

namespace tfla {

namespace {

std::string tile_of(const KernelRow& row) {
  if (row.rows > 0 && row.columns > 0) return fmt::format("{} x {} tiles, ", row.rows, row.columns);
  if (row.columns > 0) return fmt::format("{} columns, ", row.columns);
  return row.rows > 0 ? fmt::format("{} rows, ", row.rows) : "";
}

const char* code_of(Needs needs) {
  switch (needs) {
    case Needs::any_gpu: return "portable";
    case Needs::clusters: return "sm_90 and newer, by clusters";
    case Needs::sm90a: return "sm_90a";
  }
  return "";
}

}  // namespace

std::string describe(const Launch& launch, Device device) {
  if (device == Device::cpu) return std::string(describe_pass(launch));
  const KernelRow& row = row_of(launch);
  std::string text = fmt::format("{:<20}{}{}", name(row.kernel), tile_of(row), code_of(row.needs));
  if (is(launch, variant::keeps_states)) text += "; leaves states";
  if (is(launch, variant::token_blocks)) text += "; with vectors of token blocks";
  if (is(launch, variant::one_term)) text += "; keys rounded once";
  if (is(launch, variant::epilogue)) text += "; with D x and silu(z)";
  if (row.kernel == Kernel::forward && row.rows > 256)
    text += is(launch, variant::rest_of_dqk) ? "; the rest of dqk" : "; the first 256 of dqk";
  return text;
}

std::string describe(const Plan& plan) {
  const MlstmShape& shape = plan.shape;
  const double tensors = tensor_bytes(plan.operation, shape);
  std::string page;
  const auto line = [&page](const char* key, const std::string& value) {
    page += fmt::format("{:<16}{}\n", key, value);
  };
  line("operation", fmt::format("{}, {}", name(plan.operation), name(plan.formulation)));
  line("shape", fmt::format("B {}  T {}  N {}  Hqk {}  H {}  dqk {}  dhv {}", shape.batch, shape.tokens,
                            shape.sequences, shape.qk_heads, shape.heads, shape.dqk, shape.dhv));
  line("types", fmt::format("tensors {}, gates {}, arithmetic {}", name(shape.dtype), name(shape.gate_dtype),
                            name(plan.compute)));
  line("device", plan.device == Device::cuda
                     ? fmt::format("cuda, sm_{}, {} multiprocessors", plan.gpu.capability, plan.gpu.multiprocessors)
                     : fmt::format("cpu, {} thread{}", plan.threads, plan.threads == 1 ? "" : "s"));
  const char* key = "kernels";
  for (const Launch& launch : plan.launches) {
    line(key, describe(launch, plan.device));
    key = "";
  }
  if (plan.formulation == Formulation::recurrent) {
    line("panel", fmt::format("{} columns of the state at a time", plan.panel));
  } else if (plan.formulation == Formulation::chunkwise) {
    line("chunk size", fmt::format("{} tokens between stored states", plan.chunk));
    line("tile", fmt::format("{} tokens per set of matrix products", plan.tile));
    if (plan.slices > 1)
      line("slices", fmt::format("{}: heads in turn, each with states 128 tokens apart, in that memory", plan.slices));
    if (plan.run > 0)
      line("runs", fmt::format("{}: sequences that begin in the same {} tokens are worked through as one",
                               kernel_sequences(plan), plan.run));
    if (plan.device == Device::cuda)
      line("segments", fmt::format("{} per {}{}", plan.segments, plan.run > 0 ? "run" : "sequence",
                                   plan.pieces > 1 ? fmt::format(", summed up in {} pieces each", plan.pieces) : ""));
    else
      line("span", fmt::format("{} tokens per thread and turn{}{}", plan.span, plan.fused() ? " (whole sequences)" : "",
                               plan.abreast > 1 ? fmt::format(", {} heads abreast", plan.abreast) : ""));
  }
  line("scratch", fmt::format("{} bytes ({:.1f} % of the call's tensors)", plan.scratch_bytes,
                              tensors > 0 ? 100.0 * static_cast<double>(plan.scratch_bytes) / tensors : 0.0));
  if (plan.keep != Keep::nothing)
    line("saved", fmt::format("{} bytes: {}, from forward to backward", plan.saved_bytes,
                              plan.keep == Keep::states ? "states and denominators" : "denominators"));
  line("FLOPs", fmt::format("{:.4g} executed, {:.4g} useful", plan.flops, plan.useful_flops));
  line("bytes", fmt::format("{:.4g} moved at least ({:.1f} FLOPs per byte)", plan.bytes,
                            plan.bytes > 0 ? plan.useful_flops / plan.bytes : 0.0));
  return page;
}

}  // namespace tfla
