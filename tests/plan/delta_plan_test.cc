// What is chosen for the delta rule, call by call.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

#include "plan/arithmetic.h"
#include "plan/operators/delta_cuda.h"
#include "tfla/tfla.h"

namespace tfla::test {
namespace {

DeltaShape shape_of(std::int64_t batch, std::int64_t tokens, std::int64_t heads, std::int64_t dqk, std::int64_t dhv) {
  return {.batch = batch,
          .tokens = tokens,
          .qk_heads = heads,
          .heads = heads,
          .dqk = dqk,
          .dhv = dhv,
          .sequences = batch,
          .longest = tokens};
}

DeltaShape shared_by_all(DeltaShape shape) {
  shape.qk_heads = 1;
  return shape;
}

DeltaShape packed(DeltaShape shape, std::int64_t sequences, std::int64_t longest) {
  shape.packed = true;
  shape.sequences = sequences;
  shape.longest = longest;
  return shape;
}

struct Row {
  Operation operation;
  DeltaShape shape;
  std::int64_t chunk_size;
  int threads;
  // What is chosen.
  std::int64_t tile, chunk, panel;
  int used;
};

std::vector<Row> rows() {
  using enum Operation;
  const DeltaShape usual = shape_of(1, 2048, 4, 128, 128), few = shape_of(1, 2048, 1, 128, 128);
  return {
      {forward, usual, 0, 2, 64, 64, 128, 2},
      {forward, usual, 0, 4, 64, 64, 128, 4},
      // Columns of a head go to several threads, 32 of them at least.
      {forward, usual, 0, 8, 64, 64, 64, 8},
      {forward, few, 0, 3, 64, 64, 48, 3},
      {forward, few, 0, 64, 64, 64, 32, 4},
      // Tiles are even parts of a chunk, none above 64 tokens.
      {forward, usual, 100, 1, 50, 100, 128, 1},
      {forward, usual, 1, 1, 1, 1, 128, 1},
      {forward, shape_of(1, 30, 4, 128, 128), 0, 1, 30, 30, 128, 1},
      {forward, shape_of(1, 0, 4, 128, 128), 0, 2, 1, 1, 128, 2},
      // A whole sequence is one chunk where memory allows, and one sequence of a query/key head is one thread's.
      {backward, usual, 0, 2, 64, 2048, 128, 2},
      {backward, usual, 0, 64, 64, 512, 128, 4},
      {backward, usual, 256, 2, 64, 256, 128, 2},
      {backward, shared_by_all(usual), 0, 8, 64, 2048, 128, 1},
      {backward, shape_of(1, 65536, 1, 128, 128), 0, 8, 64, 32768, 128, 1},
      {backward, packed(usual, 5, 1000), 0, 64, 64, 256, 128, 20},
      // A panel of a step stays in the cache between its two passes.
      {step, shape_of(1, 1, 8, 256, 512), 0, 2, 1, 1, 128, 2},
      {step, shape_of(1, 1, 1, 64, 64), 0, 16, 1, 1, 32, 2},
      {step, shape_of(1, 1, 1, 100000, 64), 0, 1, 1, 1, 16, 1},
  };
}

TEST(DeltaPlanSmall, Choices) {
  for (const Row& row : rows()) {
    const DeltaPlan plan =
        delta_plan(row.operation, row.shape, {.chunk_size = row.chunk_size}, {.threads = row.threads});
    EXPECT_EQ(plan.tile, row.tile) << describe(plan);
    EXPECT_EQ(plan.chunk, row.chunk) << describe(plan);
    EXPECT_EQ(plan.panel, row.panel) << describe(plan);
    EXPECT_EQ(plan.threads, row.used) << describe(plan);
  }
}

TEST(DeltaPlanSmall, ThreadsWithoutWorkTakeNoScratch) {
  for (const Operation operation : {Operation::forward, Operation::backward, Operation::step}) {
    const DeltaShape shape = shape_of(1, operation == Operation::step ? 1 : 500, 2, 64, 64);
    EXPECT_EQ(delta_plan(operation, shape, {}, {.threads = 4}).scratch_bytes,
              delta_plan(operation, shape, {}, {.threads = 1000}).scratch_bytes);
  }
}

TEST(DeltaPlanSmall, SizesThatDoNotFitAreRefused) {
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  for (const Operation operation : {Operation::forward, Operation::backward, Operation::step}) {
    const DeltaShape wide = shape_of(1, 1, 1, 1LL << 31, 8), deep = shape_of(1, 8, 1, (1LL << 31) - 1, (1LL << 31) - 1);
    EXPECT_THROW((void)delta_plan(operation, wide, {}), InvalidArgument);
    EXPECT_THROW((void)delta_plan(operation, deep, {}, {.threads = 64}), InvalidArgument);
    EXPECT_THROW((void)delta_plan(operation, packed(shape_of(1, 8, 2, 4, 4), most, 8), {}), InvalidArgument);
  }
}

TEST(DeltaPlanSmall, BackwardDoesMoreThanForward) {
  const DeltaShape shape = shape_of(2, 1000, 4, 64, 64);
  const DeltaPlan forward = delta_plan(Operation::forward, shape, {}),
                  backward = delta_plan(Operation::backward, shape, {});
  EXPECT_GT(backward.useful_flops, 2 * forward.useful_flops);
  EXPECT_GT(forward.flops, forward.useful_flops);
  EXPECT_GT(backward.bytes, forward.bytes);
}

DeltaPlan plan_for(const DeviceFacts& gpu, const DeltaShape& shape, bool portable = false,
                   Operation operation = Operation::forward) {
  return delta_plan(operation, shape, {}, {.device = Device::cuda, .portable = portable, .untested = true, .gpu = gpu});
}

DeltaShape in_bfloat16(DeltaShape shape) {
  shape.dtype = shape.gate_dtype = DType::bfloat16;
  return shape;
}

TEST(DeltaPlanSmall, HopperKeepsTheStatesOnTheChip) {
  const DeltaShape shape = in_bfloat16(shape_of(4, 8192, 32, 128, 128));
  for (const KnownGpu& gpu : known_gpus()) {
    const bool hopper = gpu.facts.capability == 90;
    const DeltaPlan plan = plan_for(gpu.facts, shape);
    EXPECT_EQ(launches(plan, DeltaKernel::forward_on_chip), hopper) << gpu.name << "\n" << describe(plan);
    EXPECT_EQ(launches(plan, DeltaKernel::solve), hopper) << gpu.name;
    EXPECT_EQ(launches(plan, DeltaKernel::forward), !hopper) << gpu.name;
    EXPECT_FALSE(launches(plan_for(gpu.facts, shape, true), DeltaKernel::solve)) << gpu.name;
    const DeltaPlan back = plan_for(gpu.facts, shape, false, Operation::backward);
    for (const DeltaKernel kernel : {DeltaKernel::solve, DeltaKernel::states_on_chip, DeltaKernel::grad_states_on_chip})
      EXPECT_EQ(launches(back, kernel), hopper) << gpu.name << "\n" << describe(back);
    for (const DeltaKernel kernel : {DeltaKernel::states, DeltaKernel::grad_states})
      EXPECT_EQ(launches(back, kernel), !hopper) << gpu.name;
    EXPECT_TRUE(launches(back, DeltaKernel::gradients)) << gpu.name;
  }
}

TEST(DeltaPlanSmall, WhatHopperTakes) {
  const DeviceFacts h200{.capability = 90, .multiprocessors = 132, .shared_bytes = 227 * 1024, .code = 90};
  DeltaShape unaligned = in_bfloat16(shape_of(4, 8192, 32, 128, 128)), half = unaligned;
  unaligned.aligned = false;
  half.dtype = DType::float16;
  const struct {
    DeltaShape shape;
    bool on_chip;
    std::int64_t panel;
  } rows[] = {
      {in_bfloat16(shape_of(4, 8192, 32, 128, 256)), true, 128},
      {in_bfloat16(shape_of(4, 1, 32, 8, 72)), true, 128},
      {in_bfloat16(shape_of(4, 8192, 32, 128, 64)), true, 64},
      // Few heads: twice as many CTAs with half of the columns each.
      {in_bfloat16(shape_of(1, 8192, 32, 128, 128)), true, 64},
      {in_bfloat16(shape_of(1, 8192, 66, 128, 128)), true, 64},
      {in_bfloat16(shape_of(1, 8192, 67, 128, 128)), true, 128},
      {packed(in_bfloat16(shape_of(1, 8192, 32, 128, 128)), 100, 4000), true, 128},
      {in_bfloat16(shape_of(4, 8192, 32, 136, 128)), false, 64},
      {in_bfloat16(shape_of(4, 8192, 32, 100, 128)), false, 64},
      {in_bfloat16(shape_of(4, 8192, 32, 128, 100)), false, 64},
      {in_bfloat16(shape_of(4, 0, 32, 128, 128)), false, 64},
      {shape_of(4, 8192, 32, 128, 128), false, 64},
      {unaligned, false, 64},
      {half, false, 64},
  };
  for (const auto& row : rows) {
    const DeltaPlan plan = plan_for(h200, row.shape);
    EXPECT_EQ(launches(plan, DeltaKernel::forward_on_chip), row.on_chip) << describe(plan);
    EXPECT_EQ(plan.panel, row.panel) << describe(plan);
    if (row.on_chip) {
      EXPECT_EQ(plan.tile, 64) << describe(plan);
      EXPECT_GE(plan.scratch_bytes, static_cast<std::size_t>(ceil_div(row.shape.tokens, 64) * row.shape.heads * 18432))
          << describe(plan);
      EXPECT_NE(describe(plan).find("solve, forward_on_chip"), std::string::npos) << describe(plan);
    }
  }
}

}  // namespace
}  // namespace tfla::test
