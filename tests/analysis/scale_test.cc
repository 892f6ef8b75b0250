// Bytes and times of several GPUs. python/tests/lm/test_lm_scale.py has the same bytes from two processes that train.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "plan/cost/scale.h"

namespace tfla::scale {
namespace {

// No size is a multiple of another, or of the GPUs.
const Model odd = {.layers = 3, .dim = 36, .heads = 3, .vocab = 321, .ffn_dim = 101, .qk_dim = 18, .v_dim = 42};

Training training(Strategy strategy, std::int64_t gpus, std::int64_t micro_batches = 1) {
  const bool shares = strategy == Strategy::context || strategy == Strategy::context_fsdp;
  return {.strategy = strategy,
          .gpus = gpus,
          .context_ranks = shares ? gpus : 1,
          .micro_batch = 5,
          .micro_batches = micro_batches};
}

// By its name, with calls of all sizes together.
struct Row {
  std::int64_t calls = 0, bytes = 0, ranks = 0;
  Beneath beneath = Beneath::nothing;
  double sent = 0;
};
std::map<std::string, Row> rows(const Model& model, const Training& how) {
  std::map<std::string, Row> all;
  for (const Collective& one : collectives(model, how)) {
    Row& row = all[one.what];
    row.calls += one.calls;
    row.bytes += one.calls * one.bytes;
    row.ranks = one.ranks;
    row.beneath = one.beneath;
    row.sent += static_cast<double>(one.calls) * sent(one);
  }
  return all;
}
void expect_row(const Row& row, std::int64_t calls, std::int64_t bytes_each, Beneath beneath) {
  EXPECT_EQ(row.calls, calls);
  EXPECT_EQ(row.bytes, calls * bytes_each);
  EXPECT_EQ(row.beneath, beneath);
}

constexpr std::int64_t block_count = 36 + 2 * 3 * 36 + 3 * 42 * 36 + 2 * 18 * 36 + 2 * 3 + 42 + 36 + 3 * 101 * 36;
constexpr std::int64_t root_count = 2 * 321 * 36 + 36;
// Of eight: 3 rows are 1, 18 are 3, 36 are 5, 42 are 6, 101 are 13, 321 are 41. The output projection has 36 rows, as
// has the third matrix of the feed-forward layer.
constexpr std::int64_t block_shard =
    5 + 2 * 36 + 2 * 6 * 36 + 2 * 3 * 36 + 2 * 1 + 6 + 5 * 42 + 5 + 2 * 13 * 36 + 5 * 101;
constexpr std::int64_t root_shard = 2 * 41 * 36 + 5;

TEST(ScaleSmall, Parameters) {
  EXPECT_EQ(count(block_parameters(odd)), block_count);
  EXPECT_EQ(count(all_parameters(odd)), root_count + 3 * block_count);
  EXPECT_EQ(shard_count(block_parameters(odd), 8), block_shard);
  EXPECT_EQ(feed_forward_dim(768), 2048);
  EXPECT_EQ(feed_forward_dim(1024), 2752);
  EXPECT_EQ(feed_forward_dim(4096), 10944);
}

TEST(ScaleSmall, OneGpuSendsNothing) {
  for (const Strategy strategy : {Strategy::ddp, Strategy::fsdp, Strategy::context, Strategy::context_fsdp}) {
    EXPECT_TRUE(collectives(odd, training(strategy, 1)).empty());
    EXPECT_EQ(memory(odd, training(strategy, 1)).buffers, 0);
  }
}

// 1.4b: the head and the embedding have a bucket each, a block has five. Micro-batches do not matter.
TEST(ScaleSmall, DdpFillsItsBuckets) {
  const Model model = {24, 2048, 8, 50304, feed_forward_dim(2048), 1024, 2048};
  for (const std::int64_t micro_batches : {1, 3}) {
    const auto all = rows(model, training(Strategy::ddp, 8, micro_batches));
    ASSERT_EQ(all.size(), 2U);
    EXPECT_EQ(all.at("gradients").calls, 121);
    EXPECT_EQ(all.at("gradients").beneath, Beneath::last_backward);
    const Row& last = all.at("gradients of the last bucket");
    EXPECT_EQ(last.calls, 1);
    EXPECT_EQ(last.beneath, Beneath::nothing);
    EXPECT_GT(last.bytes, 4 * 50304 * 2048);
    EXPECT_EQ(all.at("gradients").bytes + last.bytes, 4 * count(all_parameters(model)));
  }
  Training narrow = training(Strategy::ddp, 8);
  narrow.item_bytes = 2;
  EXPECT_EQ(rows(model, narrow).at("gradients").calls, 121);
  EXPECT_EQ(2 * rows(model, narrow).at("gradients").bytes,
            rows(model, training(Strategy::ddp, 8)).at("gradients").bytes);
  // Less than the first bucket holds: all in the last. A byte more than it, and there are two.
  EXPECT_EQ(rows(odd, training(Strategy::ddp, 8)).size(), 1U);
  Model small = {.layers = 1, .dim = 1, .heads = 1, .vocab = (1 << 18) - 1, .ffn_dim = 1, .qk_dim = 1, .v_dim = 1};
  EXPECT_EQ(rows(small, training(Strategy::ddp, 8)).at("gradients").bytes, 1 << 20);  // with the norm
  small.vocab += 1;
  EXPECT_EQ(rows(small, training(Strategy::ddp, 8)).at("gradients").bytes, 1 << 20);  // without
}

// As two processes that train it send them.
TEST(ScaleSmall, DdpBeginsWithTheHead) {
  const Model model = {2, 1024, 4, 1024, feed_forward_dim(1024), 512, 1024};
  std::vector<std::int64_t> bytes;
  for (const Collective& one : collectives(model, training(Strategy::ddp, 2))) bytes.push_back(one.bytes);
  EXPECT_EQ(bytes, (std::vector<std::int64_t>{4194304, 33820672, 28094496, 26742784, 16818208}));
}

TEST(ScaleSmall, FsdpGathersBlocksTwiceInEveryMicroBatch) {
  for (const std::int64_t times : {1, 2}) {
    const auto all = rows(odd, training(Strategy::fsdp, 8, times));
    ASSERT_EQ(all.size(), 8U);
    expect_row(all.at("parameters of the root"), times, 4 * root_shard, Beneath::nothing);
    expect_row(all.at("parameters of the first block"), times, 4 * block_shard, Beneath::nothing);
    expect_row(all.at("parameters"), 2 * times, 4 * block_shard, Beneath::forward);
    expect_row(all.at("parameters again"), 3 * times, 4 * block_shard, Beneath::backward);
    expect_row(all.at("gradients"), 2, 8 * 4 * block_shard, Beneath::last_backward);
    expect_row(all.at("gradients of the first block"), 1, 8 * 4 * block_shard, Beneath::nothing);
    expect_row(all.at("gradients of the root"), 1, 8 * 4 * root_shard, Beneath::nothing);
    expect_row(all.at("norms"), 1, 4 * (3 + 3 * 15), Beneath::nothing);
  }
  Training narrow = training(Strategy::fsdp, 8);
  narrow.item_bytes = 2;
  expect_row(rows(odd, narrow).at("parameters"), 2, 2 * block_shard, Beneath::forward);
  expect_row(rows(odd, narrow).at("norms"), 1, 4 * (3 + 3 * 15), Beneath::nothing);
}

// States of 5 sequences and 3 heads: C 15 6 14, n 15 6 numbers, m 15, b 15 of 8 bytes.
TEST(ScaleSmall, ContextParallelSendsStates) {
  constexpr std::int64_t C = 4 * 15 * 6 * 14, n = 368, m = 64, b = 128;  // 360, 60 and 120 to a multiple of 16
  for (const Strategy strategy : {Strategy::context, Strategy::context_fsdp}) {
    Training how = training(strategy, 8, 2);
    auto all = rows(odd, how);
    expect_row(all.at("states"), 6, C + n + m + b, Beneath::nothing);
    expect_row(all.at("gradients of states"), 6, C + n, Beneath::nothing);
    EXPECT_EQ(all.size(), strategy == Strategy::context ? 3U : 10U);
    EXPECT_EQ(all.at("states").ranks, 8);
    how.checkpoint_activations = true;
    how.context_ranks = 2;
    all = rows(odd, how);
    expect_row(all.at("states"), 12, C + n + m + b, Beneath::nothing);
    expect_row(all.at("gradients of states"), 6, C + n, Beneath::nothing);
    EXPECT_EQ(all.at("states").ranks, 2);
    how.context_ranks = 1;
    EXPECT_FALSE(rows(odd, how).contains("states"));
  }
}

TEST(ScaleSmall, RingsSend) {
  const auto one = [](Operation operation) { return sent({operation, "", Beneath::nothing, 8, 1, 1000}); };
  EXPECT_DOUBLE_EQ(one(Operation::all_reduce), 1750);
  EXPECT_DOUBLE_EQ(one(Operation::reduce_scatter), 875);
  EXPECT_DOUBLE_EQ(one(Operation::all_gather), 7000);
}

TEST(ScaleSmall, Memory) {
  const std::int64_t whole = root_count + 3 * block_count, shard = root_shard + 3 * block_shard;
  const auto expect = [](const Memory& memory, std::int64_t parameters, std::int64_t gradients, std::int64_t buffers) {
    EXPECT_EQ(memory.parameters, 4 * parameters);
    EXPECT_EQ(memory.gradients, 4 * gradients);
    EXPECT_EQ(memory.optimizer, 8 * parameters);
    EXPECT_EQ(memory.buffers, 4 * buffers);
  };
  expect(memory(odd, training(Strategy::ddp, 8)), whole, whole, whole);
  expect(memory(odd, training(Strategy::context, 8, 2)), whole, whole, whole);
  expect(memory(odd, training(Strategy::fsdp, 8)), shard, shard, root_count + 2 * block_count);
  expect(memory(odd, training(Strategy::context_fsdp, 8, 2)), shard, whole, root_count + 2 * block_count);
}

const Network network = {.node_gpus = 8,
                         .node_bandwidth = 450,
                         .bandwidth = 50,
                         .call_seconds = 1000,
                         .node_step_seconds = 10,
                         .step_seconds = 100};

TEST(ScaleSmall, SecondsOfARing) {
  const auto time = [](Operation operation, std::int64_t ranks, const Network& over) {
    const Collective one = {operation, "", Beneath::nothing, ranks, 1, 9000};
    return seconds(one, over) - sent(one) / over.node_bandwidth;
  };
  EXPECT_NEAR(time(Operation::all_reduce, 8, network), 1000 + 14 * 10, 1e-9);
  EXPECT_NEAR(time(Operation::all_gather, 4, network), 1000 + 3 * 10, 1e-9);
  // Eight nodes: 7 of 63 steps leave one. Eight adapters carry 400 of the 450 bytes per second.
  Network fast = network;
  fast.bandwidth = 100;
  EXPECT_NEAR(time(Operation::reduce_scatter, 64, fast), 1000 + 56 * 10 + 7 * 100, 1e-9);
  EXPECT_NEAR(time(Operation::all_reduce, 64, fast), 1000 + 2 * (56 * 10 + 7 * 100), 1e-9);
  const Collective gather = {Operation::all_gather, "", Beneath::nothing, 64, 1, 9000};
  EXPECT_NEAR(seconds(gather, network) - seconds(gather, fast), 63 * 9000 * (1.0 / 400 - 1.0 / 450), 1e-9);
}

// Calls of 10 s each: a ring without latency.
Step timed(const std::vector<Collective>& all, const Training& how, double overlap, double kernel_seconds = 0) {
  const Network plain = {.node_bandwidth = 1, .call_seconds = 0, .node_step_seconds = 0, .overlap = overlap};
  return step(all, how, {300, kernel_seconds}, plain);
}
Collective calls(Beneath beneath, std::int64_t number) { return {Operation::all_gather, "", beneath, 2, number, 10}; }

TEST(ScaleSmall, WhatHidesBeneathComputation) {
  const Training one = training(Strategy::fsdp, 8), four = training(Strategy::fsdp, 8, 4);
  const auto hidden = [](Beneath beneath, std::int64_t number, const Training& how, double overlap = 1) {
    return timed({calls(beneath, number)}, how, overlap).hidden;
  };
  EXPECT_EQ(hidden(Beneath::nothing, 3, one), 0);
  EXPECT_NEAR(hidden(Beneath::forward, 3, one), 30, 1e-9);
  EXPECT_NEAR(hidden(Beneath::forward, 3, one, 0.5), 15, 1e-9);
  EXPECT_NEAR(hidden(Beneath::forward, 30, one), 100, 1e-9);  // a third of the step
  EXPECT_NEAR(hidden(Beneath::backward, 30, one), 200, 1e-9);
  EXPECT_NEAR(hidden(Beneath::last_backward, 30, one), 200, 1e-9);
  EXPECT_NEAR(hidden(Beneath::last_backward, 30, four), 50, 1e-9);
  EXPECT_NEAR(hidden(Beneath::backward, 16, four), 160, 1e-9);
  // A fourth of backward's 160 s is beneath the last micro-batch, which has 10 s of its 50 left.
  const Step both = timed({calls(Beneath::backward, 16), calls(Beneath::last_backward, 30)}, four, 1);
  EXPECT_NEAR(both.hidden, 120 + 50, 1e-9);
  EXPECT_NEAR(both.communication, 460, 1e-9);
  EXPECT_NEAR(both.sent, 460, 1e-9);
  EXPECT_NEAR(both.seconds(), 300 + 460 - 170, 1e-9);
}

TEST(ScaleSmall, ContextParallelRunsTheOperatorTwice) {
  EXPECT_EQ(timed({}, training(Strategy::context, 8), 1, 20).seconds(), 320);
  EXPECT_EQ(timed({}, training(Strategy::ddp, 8), 1, 20).seconds(), 300);
}

}  // namespace
}  // namespace tfla::scale
