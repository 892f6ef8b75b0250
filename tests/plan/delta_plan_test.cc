// What is chosen for the delta rule, call by call.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

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

}  // namespace
}  // namespace tfla::test
