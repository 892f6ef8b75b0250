// The table of kernels and the plans made from it, for GPUs that need not be there.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "plan/cuda_plan.h"
#include "plan/cuda_scratch.h"
#include "tests/ssd/cases.h"
#include "tests/support/every_kernel_cases.h"
#include "tests/support/support.h"

namespace tfla::test {
namespace {

using testkit::Case;

Execution on(std::string_view name, bool portable = false) {
  for (const KnownGpu& gpu : known_gpus())
    if (gpu.name == name) return {.device = Device::cuda, .portable = portable, .gpu = gpu.facts};
  ADD_FAILURE() << "no GPU is named " << name;
  return {};
}

MlstmShape shape_of(std::int64_t batch, std::int64_t tokens, std::int64_t heads, std::int64_t dqk, std::int64_t dhv,
                    DType dtype = DType::bfloat16) {
  return {.batch = batch,
          .tokens = tokens,
          .qk_heads = heads,
          .heads = heads,
          .dqk = dqk,
          .dhv = dhv,
          .sequences = batch,
          .longest = tokens,
          .dtype = dtype,
          .gate_dtype = DType::float32};
}

// The kernels of a plan in a row: sm_90a's in capital letters, those by clusters with a star.
std::string kernels_of(const Plan& plan) {
  std::string text;
  for (const Launch& launch : plan.launches) {
    const KernelRow& row = row_of(launch);
    std::string name(tfla::name(row.kernel));
    if (row.needs == Needs::sm90a)
      for (char& letter : name) letter = static_cast<char>(std::toupper(letter));
    text += (text.empty() ? "" : " ") + name + (row.needs == Needs::clusters ? "*" : "");
  }
  return text;
}

struct PlanRow {
  std::string_view gpu;
  Operation operation;
  MlstmShape shape;
  MlstmOptions options;
  std::int64_t segments;
  std::string kernels;
};

MlstmShape packed(MlstmShape shape, std::int64_t sequences) {
  shape.packed = true;
  shape.sequences = sequences;
  return shape;
}

MlstmShape with_grad_n(MlstmShape shape) {
  shape.dn_last = true;
  return shape;
}

MlstmShape shared_heads(MlstmShape shape) {
  shape.qk_heads = shape.heads / 2;
  return shape;
}

std::vector<PlanRow> plan_rows() {
  using enum Operation;
  const MlstmShape paper = shape_of(8, 8192, 16, 128, 256), alone = shape_of(1, 65536, 4, 128, 256);
  const MlstmShape line = shape_of(1, 65536, 16, 128, 256);
  const MlstmOptions states{.keep = Keep::states}, denominators{.keep = Keep::denominators};
  const MlstmOptions exact{.exact_normalizer_grad = true};
  const std::string portable_backward = "gates states denominators grad_states grad_qkv grad_gates";
  return {
      {"H200", forward, paper, {}, 1, "gates FORWARD"},
      {"H100 SXM", forward, paper, {}, 1, "gates FORWARD"},
      {"H100 PCIe", forward, paper, {}, 1, "gates FORWARD"},
      {"H20", forward, paper, {}, 1, "gates FORWARD"},
      {"A100", forward, paper, {}, 1, "gates states outputs"},
      {"L40S", forward, paper, {}, 1, "gates states outputs"},
      {"RTX 4090", forward, paper, {}, 1, "gates states outputs"},
      {"B200", forward, paper, {}, 1, "gates states outputs"},
      {"RTX 5090", forward, paper, {}, 1, "gates states outputs"},
      {"H200", forward, shape_of(8, 512, 16, 128, 256), {}, 1, "gates* FORWARD"},
      {"B200", forward, shape_of(8, 512, 16, 128, 256), {}, 1, "gates* states outputs"},
      {"A100", forward, shape_of(8, 512, 16, 128, 256), {}, 1, "gates states outputs"},
      {"A100", forward, shape_of(8, 512, 16, 128, 256, DType::float32), {}, 1, "gates states denominators outputs"},
      {"H200", backward, paper, {}, 1, "gates STATES denominators GRAD_STATES GRAD_QKV grad_gates"},
      {"H200", backward, paper, denominators, 1, "gates GRAD_Q_FORWARD GRAD_V_REVERSE GRAD_K_REVERSE grad_gates"},
      {"H200", backward, paper, states, 1, "gates GRAD_STATES GRAD_QKV grad_gates"},
      {"H200", backward, with_grad_n(paper), denominators, 1,
       "gates STATES GRAD_STATES_V GRAD_N GRAD_QK_NORM grad_gates"},
      {"H200", backward, shared_heads(paper), denominators, 1,
       "gates STATES GRAD_STATES GRAD_QKV sum_groups grad_gates"},
      {"H200", backward, shared_heads(with_grad_n(paper)), denominators, 1,
       "gates states grad_states grad_qkv grad_gates"},
      {"H200", backward, shared_heads(shape_of(8, 8192, 64, 64, 64)), denominators, 1,
       "gates STATES GRAD_STATES GRAD_QKV_SMALL sum_groups grad_gates"},
      {"H200", backward, shared_heads(shape_of(8, 8192, 8, 256, 512)), denominators, 1,
       "gates STATES GRAD_STATES_V GRAD_QK sum_groups grad_gates"},
      {"A100", backward, shared_heads(paper), denominators, 1, "gates states grad_states grad_qkv grad_gates"},
      {"A100", backward, paper, {}, 1, portable_backward},
      {"RTX 4090", backward, paper, {}, 1, portable_backward},
      {"B200", backward, paper, states, 1, "gates grad_states grad_qkv grad_gates"},
      {"RTX 5090", backward, paper, denominators, 1, "gates states grad_states grad_qkv grad_gates"},
      {"A100", backward, paper, exact, 1,
       "gates states denominators grad_denominators grad_states grad_qkv grad_gates"},
      {"H200", backward, paper, exact, 1,
       "gates STATES denominators gates GRAD_STATES_V ROW_DOTS GRAD_N GRAD_QK_NORM grad_gates"},
      {"H200", backward, shape_of(8, 8192, 8, 256, 512), states, 1, "gates GRAD_STATES_V GRAD_QK grad_gates"},
      {"H200",
       backward,
       shape_of(8, 8192, 8, 256, 512, DType::float16),
       {},
       1,
       "gates STATES denominators GRAD_STATES GRAD_V GRAD_QK grad_gates"},
      {"H200", backward, shape_of(8, 8192, 16, 64, 64), states, 1, "gates GRAD_STATES GRAD_QKV_SMALL grad_gates"},
      {"H200", forward, shape_of(8, 8192, 8, 512, 512), {}, 1, "gates FORWARD FORWARD"},
      {"H200", forward, shape_of(8, 8192, 8, 520, 512), {}, 1, "gates states outputs"},
      {"H200", forward, alone, {}, 16, "gates SEGMENT_TOTALS segment_scan FORWARD"},
      {"H100 PCIe", forward, alone, {}, 14, "gates SEGMENT_TOTALS segment_scan FORWARD"},
      {"H20", forward, alone, {}, 19, "gates SEGMENT_TOTALS segment_scan FORWARD"},
      {"H200", backward, alone, states, 16,
       "gates GRAD_SEGMENT_TOTALS grad_segment_scan GRAD_STATES_V GRAD_QK grad_gates"},
      {"H200", backward, alone, denominators, 32,
       "gates SEGMENT_TOTALS segment_scan GRAD_Q_FORWARD GRAD_SEGMENT_TOTALS grad_segment_scan GRAD_V_REVERSE "
       "GRAD_K_REVERSE grad_gates"},
      {"A100", forward, alone, {}, 27, "gates segment_totals segment_scan states outputs"},
      {"H200", forward, packed(alone, 8), {}, 33, "gates SEGMENT_TOTALS SEGMENT_SCAN FORWARD"},
      {"H200", backward, packed(line, 128), denominators, 8,
       "gates SEGMENT_TOTALS SEGMENT_SCAN GRAD_Q_FORWARD GRAD_SEGMENT_TOTALS GRAD_SEGMENT_SCAN GRAD_V_REVERSE "
       "GRAD_K_REVERSE grad_gates"},
      // In runs.
      {"H200", backward, packed(line, 129), denominators, 8,
       "gates SEGMENT_TOTALS SEGMENT_SCAN STATES GRAD_SEGMENT_TOTALS GRAD_SEGMENT_SCAN GRAD_STATES GRAD_QKV "
       "grad_gates"},
      {"H200", step, shape_of(1, 1, 8, 256, 512), {}, 1, "step*"},
      {"H200", step, shape_of(256, 1, 8, 256, 512), {}, 1, "step_many*"},
      {"A100", step, shape_of(256, 1, 8, 256, 512), {}, 1, "step"},
      {"B200", step, shape_of(64, 1, 8, 256, 2048), {}, 1, "step_many*"},
      {"B200", step, shape_of(1, 1, 8, 256, 2048), {}, 1, "step"},
      {"A100", forward, shape_of(2, 100, 4, 64, 64), {.formulation = Formulation::recurrent}, 1, "start_state step"},
  };
}

TEST(KernelTableSmall, PlansForGpusThatAreNotThere) {
  for (const PlanRow& row : plan_rows()) {
    const Plan chosen = plan(row.operation, row.shape, row.options, on(row.gpu));
    EXPECT_EQ(kernels_of(chosen), row.kernels) << row.gpu << '\n' << describe(chosen);
    EXPECT_EQ(chosen.segments, row.segments) << row.gpu << '\n' << describe(chosen);
  }
}

TEST(KernelTableSmall, NoKernelHasMoreSharedMemoryThanTheGpu) {
  const MlstmShape shape = shape_of(8, 8192, 16, 128, 256);
  Execution execution = on("H200");
  execution.gpu->shared_bytes = most_shared_bytes(Needs::sm90a);
  EXPECT_EQ(kernels_of(plan(Operation::forward, shape, {}, execution)), "gates FORWARD");
  --execution.gpu->shared_bytes;
  EXPECT_EQ(kernels_of(plan(Operation::forward, shape, {}, execution)), "gates states outputs");
  EXPECT_EQ(kernels_of(plan(Operation::backward, shape, {}, execution)),
            kernels_of(plan(Operation::backward, shape, {}, on("H200", true))));
  execution.gpu->shared_bytes = most_shared_bytes(Needs::any_gpu) - 1;
  EXPECT_THROW(static_cast<void>(plan(Operation::forward, shape, {}, execution)), InvalidArgument);
}

TEST(KernelTableSmall, ForwardTakesTheSmallestTileThatHoldsAHead) {
  for (const DType dtype : {DType::bfloat16, DType::float16})
    for (const std::int64_t dqk : {8, 64, 72, 128, 136, 256})
      for (const std::int64_t dhv : {8, 64, 72, 256}) {
        if (dtype == DType::float16 && dqk > 128 && dhv <= 64) continue;  // shared memory has no room for it
        const Plan chosen = plan(Operation::forward, shape_of(8, 8192, 16, dqk, dhv, dtype), {}, on("H200"));
        ASSERT_EQ(kernels_of(chosen), "gates FORWARD") << describe(chosen);
        const KernelRow& row = row_of(chosen.launches[1]);
        EXPECT_EQ(row.rows, dqk <= 64 ? 64 : dqk <= 128 ? 128 : 256) << describe(chosen);
        EXPECT_EQ(row.columns, dhv <= 64 ? 64 : 128) << describe(chosen);
      }
}

// A build whose newest code is that of sm_80 has no clusters on newer GPUs either.
TEST(KernelTableSmall, ClustersNeedTheirCode) {
  const MlstmShape token = shape_of(1, 1, 8, 256, 512), brief = shape_of(64, 512, 8, 64, 64, DType::float32);
  for (const std::string_view gpu : {"H200", "B200"}) {
    Execution execution = on(gpu);
    EXPECT_EQ(kernels_of(plan(Operation::step, token, {}, execution)), "step*") << gpu;
    EXPECT_EQ(kernels_of(plan(Operation::forward, brief, {}, execution)), "gates* states denominators outputs") << gpu;
    execution.gpu->code = 80;
    EXPECT_EQ(kernels_of(plan(Operation::step, token, {}, execution)), "step") << gpu;
    EXPECT_EQ(kernels_of(plan(Operation::forward, brief, {}, execution)), "gates states denominators outputs") << gpu;
  }
}

TEST(KernelTableSmall, EveryGpuPlansEveryCallWithKernelsItRuns) {
  for (const KnownGpu& gpu : known_gpus())
    for (const bool portable : {false, true})
      for (const Operation operation : {Operation::forward, Operation::backward, Operation::step})
        for (const DType dtype : {DType::bfloat16, DType::float16, DType::float32, DType::float64})
          for (const std::int64_t dqk : {8, 64, 65, 128, 256, 512, 1024})
            for (const std::int64_t dhv : {8, 64, 128, 200, 256, 512, 1024}) {
              const MlstmShape own = shape_of(2, operation == Operation::step ? 1 : 1000, 4, dqk, dhv, dtype);
              for (const Keep keep : {Keep::nothing, Keep::denominators, Keep::states})
                for (const bool aligned : {true, false})
                  for (MlstmShape shape : {own, shared_heads(own), packed(own, 3)}) {
                    shape.aligned = aligned;
                    const Plan chosen = plan(operation, shape, {.keep = keep},
                                             {.device = Device::cuda, .portable = portable, .gpu = gpu.facts});
                    ASSERT_GT(chosen.launches.size(), 0) << describe(chosen);
                    EXPECT_TRUE(aligned || !needs_alignment(chosen)) << describe(chosen);
                    for (const Launch& launch : chosen.launches) {
                      const KernelRow& kernel = row_of(launch);
                      EXPECT_TRUE(kernel.takes(shape)) << describe(chosen);
                      EXPECT_LE(most_shared_bytes(kernel.needs), gpu.facts.shared_bytes) << describe(chosen);
                      EXPECT_TRUE(kernel.needs != Needs::clusters || gpu.facts.capability >= 90) << describe(chosen);
                      EXPECT_TRUE(kernel.needs != Needs::sm90a || (gpu.facts.capability == 90 && !portable))
                          << describe(chosen);
                    }
                  }
            }
}

// A kernel as it is compiled: its row, the type of its tensors, and bits of Launch::variant.
using Compiled = std::tuple<std::size_t, DType, unsigned>;

std::string text(const Compiled& kernel) {
  const auto& [row, dtype, bits] = kernel;
  return describe(Launch{static_cast<std::uint8_t>(row), static_cast<std::uint8_t>(bits)}, Device::cuda) + ", " +
         name(dtype) + ((bits & variant::packed) != 0 ? ", packed" : "") +
         ((bits & variant::normalized) != 0 ? ", normalized" : "");
}

// Bits that make a kernel of its own out of a launch. Kernels that are the same for packed sequences have none of that.
unsigned compiled_bits(const KernelRow& row, const Launch& launch) {
  unsigned bits = 0;
  if (row.needs == Needs::sm90a && row.kernel != Kernel::grad_n && row.kernel != Kernel::copy_state)
    bits |= variant::packed;
  if (row.kernel == Kernel::forward)
    bits |= variant::normalized | variant::keeps_states | variant::rest_of_dqk | variant::epilogue;
  if (row.kernel == Kernel::segment_totals) bits |= variant::one_term;
  if (row.kernel == Kernel::gates) bits |= variant::token_blocks;
  return launch.variant & bits;
}

std::set<Compiled> compiled_kernels() {
  std::set<Compiled> all;
  for (std::size_t number = 0; number < kernel_table.size(); ++number) {
    const KernelRow& row = kernel_table[number];
    for (const DType dtype : {DType::bfloat16, DType::float16, DType::float32, DType::float64}) {
      if ((row.types & type_bit(dtype)) == 0) continue;
      for (unsigned bits = 0; bits < 128; ++bits) {
        if (compiled_bits(row, Launch{0, static_cast<std::uint8_t>(bits)}) != bits) continue;
        const unsigned batch = (bits & variant::packed) != 0 ? tfla::packed : dense;
        if (row.needs == Needs::sm90a && (row.batches & batch) == 0 &&
            !((row.kernel == Kernel::grad_n || row.kernel == Kernel::copy_state)))
          continue;
        const bool is_bf16 = dtype == DType::bfloat16;
        if ((bits & variant::keeps_states) != 0 && (!is_bf16 || (row.keeps_states & batch) == 0)) continue;
        if ((bits & variant::rest_of_dqk) != 0 && row.rows != 512) continue;
        if ((bits & variant::epilogue) != 0 &&
            (!is_bf16 || (row.epilogues & batch) == 0 || (bits & ~variant::packed) != variant::epilogue))
          continue;
        if ((bits & variant::one_term) != 0 && (!is_bf16 || row.needs != Needs::sm90a)) continue;
        if ((bits & variant::token_blocks) != 0 && !is_bf16) continue;
        all.insert({number, dtype, bits});
      }
    }
  }
  return all;
}

void add_launches(std::set<Compiled>& all, const Plan& plan) {
  for (const Launch& launch : plan.launches)
    all.insert({launch.kernel, plan.shape.dtype, compiled_bits(row_of(launch), launch)});
}

// The shape that a call of this case has on a GPU.
MlstmShape shape_on_gpu(const SmallCase& small) {
  const Case& c = small.c;
  MlstmShape shape = c.shape;
  shape.packed = !c.cu_seqlens.empty();
  shape.sequences = shape.packed ? static_cast<std::int64_t>(c.cu_seqlens.size()) - 1 : shape.batch;
  shape.longest = shape.tokens;
  const bool recurrent = c.options.formulation == Formulation::recurrent;
  shape.aligned = recurrent ? shape.dhv % 4 == 0 : shape.dqk % 8 == 0 && shape.dhv % 8 == 0;
  shape.states = shape.packed && (c.initial_state || c.last_state);
  return shape;
}

// Short packed sequences are merged where no state is those of one of them.
TEST(KernelTableSmall, ShortSequencesAreMergedIntoRuns) {
  MlstmShape shape{.tokens = 65536, .qk_heads = 16, .heads = 16, .dqk = 128, .dhv = 256, .longest = 65536};
  shape.dtype = DType::bfloat16;
  shape.packed = true;
  const auto planned = [&](std::int64_t sequences, Keep keep = Keep::nothing, bool portable = false) {
    shape.sequences = sequences;
    return plan(Operation::backward, shape, {.keep = keep}, on("H200", portable));
  };
  for (const bool portable : {false, true}) {
    EXPECT_EQ(planned(8, Keep::nothing, portable).run, 0);
    EXPECT_EQ(planned(128, Keep::nothing, portable).run, 0);
    EXPECT_EQ(planned(129, Keep::nothing, portable).run, 1024);
    EXPECT_EQ(planned(16384, Keep::nothing, portable).run, 1024);
    EXPECT_EQ(kernel_sequences(planned(16384, Keep::nothing, portable)), 64);
    // Scratch does not grow with their number, but for the states of long ones that are not merged.
    EXPECT_EQ(planned(16384, Keep::nothing, portable).scratch_bytes,
              planned(129, Keep::nothing, portable).scratch_bytes);
  }
  EXPECT_NE(describe(planned(16384)).find("runs            64:"), std::string::npos) << describe(planned(16384));
  EXPECT_EQ(describe(planned(8)).find("runs"), std::string::npos);
  // Kept states are those of sequences. Short ones are not kept.
  EXPECT_EQ(planned(1024, Keep::states).keep, Keep::states);
  EXPECT_EQ(planned(1024, Keep::states).run, 0);
  EXPECT_EQ(planned(1025, Keep::states).keep, Keep::denominators);
  EXPECT_EQ(planned(1025, Keep::states).run, 1024);
  EXPECT_EQ(planned(1025, Keep::states, true).keep, Keep::denominators);
  // Few heads: more runs, for all multiprocessors to have some.
  shape.qk_heads = shape.heads = 2;
  EXPECT_EQ(planned(16384).run, 256);
  shape.states = true;
  EXPECT_EQ(planned(16384).run, 0);
  shape.states = false;
  shape.dtype = DType::float64;
  EXPECT_EQ(planned(16384).run, 0);
}

// Any state in the arguments, or gradient of one, keeps sequences apart.
TEST(KernelTableSmall, StatesInArgumentsKeepSequencesApart) {
  Case c;
  c.shape = {.tokens = 50, .dqk = 8, .dhv = 8};
  c.cu_seqlens = {0, 30, 30, 50};
  c.initial_state = c.last_state_grad = true;
  testkit::Problem problem(c);
  const MlstmForward with_states = problem.forward();
  const MlstmBackward with_gradients = problem.backward();
  const auto forward_run = [&](bool initial, bool last) {
    MlstmForward args = with_states;
    if (!initial) args.initial_state = {};
    if (!last) args.last_state = {};
    return plan(args, on("H200")).run;
  };
  EXPECT_GT(forward_run(false, false), 0);
  EXPECT_EQ(forward_run(true, false), 0);
  EXPECT_EQ(forward_run(false, true), 0);
  const auto backward_run = [&](int kept) {
    MlstmBackward args = with_gradients;
    if (kept != 0) args.initial_state = {};
    if (kept != 1) args.dlast_state.C = {};
    if (kept != 2) args.dlast_state.n = {};
    if (kept != 3) args.dinitial_state.C = {};
    if (kept != 4) args.dinitial_state.n = {};
    return plan(args, on("H200")).run;
  };
  for (int kept = 0; kept < 5; ++kept) EXPECT_EQ(backward_run(kept), 0) << "argument " << kept;
  EXPECT_GT(backward_run(5), 0);
}

// The cases that run on a GPU launch every row of the table, for every type and variant that it is compiled for.
TEST(KernelTableSmall, EveryKernelIsRunByATest) {
  std::set<Compiled> run;
  for (const SmallCase& small : small_cases()) {
    const bool portable = small.kernels == Kernels::portable;
    const Execution execution = on("H200", portable);
    MlstmShape shape = shape_on_gpu(small);
    shape.in_place = small.c.initial_state && small.c.in_place;
    add_launches(run, plan(Operation::forward, shape, small.c.options, execution));
    if (small.c.options.formulation == Formulation::recurrent) {
      // What has no clusters takes the kernels of every GPU.
      Execution without = execution;
      without.gpu->code = 80;
      add_launches(run, plan(Operation::forward, shape, small.c.options, without));
      continue;
    }
    shape.in_place = false;
    shape.states = shape.packed && (small.c.initial_state || small.c.last_state_grad);
    shape.dn_last = small.c.last_state_grad && (small.norms || portable);
    add_launches(run, plan(Operation::backward, shape, small.c.options, execution));
  }
  Execution untested = on("H200");
  untested.untested = true;
  for (const SsdCase& c : ssd_hopper_cases()) {
    const SsdProblem problem(c);
    add_launches(run, ssd_plan(problem.forward, untested).scan);
    add_launches(run, ssd_plan(problem.backward, untested).scan);
  }
  for (const Compiled& kernel : compiled_kernels())
    EXPECT_TRUE(run.contains(kernel)) << "no case runs " << text(kernel);
  for (const Compiled& kernel : run)
    EXPECT_TRUE(compiled_kernels().contains(kernel)) << "not in the table: " << text(kernel);
}

TEST(KernelTableSmall, RowsOfAKernelDoNotRepeat) {
  std::map<std::tuple<Kernel, Needs, int, int, unsigned, std::int64_t>, std::size_t> seen;
  for (std::size_t number = 0; number < kernel_table.size(); ++number) {
    const KernelRow& row = kernel_table[number];
    const auto [place, fresh] =
        seen.insert({{row.kernel, row.needs, row.rows, row.columns, row.types, row.dqk.most}, number});
    EXPECT_TRUE(fresh) << "rows " << place->second << " and " << number;
    EXPECT_LT(number, 256) << "a launch has one byte for it";
  }
}

TEST(KernelTableSmall, BuffersDoNotOverlapAndFillWhatThePlanCounts) {
  for (const SmallCase& small : small_cases()) {
    if (small.c.options.formulation == Formulation::recurrent) continue;
    const Plan chosen = plan(Operation::backward, shape_on_gpu(small), small.c.options, on("H200"));
    const Layout layout = lay_out(largest_slice(chosen));
    EXPECT_EQ(layout.scratch_bytes(), chosen.scratch_bytes);
    EXPECT_EQ(lay_out(chosen).saved_bytes(), chosen.saved_bytes);
    std::set<std::size_t> offsets;
    for (std::size_t buffer = 0; buffer < static_cast<std::size_t>(Buffer::count); ++buffer) {
      const auto which = static_cast<Buffer>(buffer);
      if (!layout.has(which) || layout.is_saved(which)) continue;
      EXPECT_LE(layout.at(which), layout.scratch_bytes());
      EXPECT_EQ(layout.at(which) % scratch_alignment, 0);
    }
  }
}

}  // namespace
}  // namespace tfla::test
