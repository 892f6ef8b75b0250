// What only a GPU can get wrong: grids and tensors beyond 16 and 31 bits, streams, graphs, bitwise repeats.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "testkit/tensor.h"
#include "tests/cuda/device_memory.h"
#include "tests/cuda/on_gpu.h"
#include "tests/support/support.h"

namespace tfla::test {
namespace {

using testkit::Case;
using testkit::gather;
using testkit::Problem;

TEST_F(Cuda, SeventyThousandHeadsAndRows) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    Case c = gpu_case({.batch = 35000, .tokens = 3, .qk_heads = 1, .heads = 2, .dqk = 8, .dhv = 8, .dtype = dtype});
    c.initial_state = true;
    Problem problem(c);
    const testkit::Judge judge(problem, true);
    forward(problem.forward(), on_gpu);
    backward(problem.backward(), on_gpu);
    EXPECT_TRUE(within_bounds(judge.forward_errors(), c)) << label(c);
    EXPECT_TRUE(within_bounds(judge.backward_errors(), c)) << label(c);
  }
}

TEST_F(Cuda, SameBitsFromRunToRun) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    for (const bool keep : {false, true}) {
      Case c =
          gpu_case({.batch = 2, .tokens = 1000, .qk_heads = 2, .heads = 4, .dqk = 128, .dhv = 256, .dtype = dtype});
      c.options.exact_normalizer_grad = true;
      c.options.keep = keep ? Keep::states : Keep::nothing;
      c.initial_state = c.last_state_grad = true;
      Problem problem(c);
      const Snapshot expected = run_both(problem, on_gpu);
      for (int run = 0; run < 3; ++run) EXPECT_TRUE(same_bits(run_both(problem, on_gpu), expected)) << label(c);
    }
  }
}

// A call recorded once, with other lengths and other data at every replay.
TEST_F(Cuda, GraphsFollowDataAndLengths) {
  Case c =
      gpu_case({.batch = 1, .tokens = 700, .qk_heads = 1, .heads = 2, .dqk = 64, .dhv = 96, .dtype = DType::bfloat16});
  c.cu_seqlens = {0, 130, 130, 451, 700};
  c.initial_state = true;
  c.options.keep = Keep::states;
  Problem problem(c);
  const Plan plans[2] = {plan(problem.forward(), on_gpu), plan(problem.backward(), on_gpu)};
  std::byte* scratch = nullptr;
  ASSERT_EQ(cudaMalloc(&scratch, plans[0].scratch_bytes + plans[1].scratch_bytes), cudaSuccess);
  cudaStream_t stream{};
  cudaGraph_t graph{};
  cudaGraphExec_t recorded{};
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  forward(problem.forward(), plans[0], std::span(scratch, plans[0].scratch_bytes), stream);
  backward(problem.backward(), plans[1], std::span(scratch, plans[1].scratch_bytes), stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&recorded, graph, 0), cudaSuccess);

  auto* lengths = static_cast<std::int64_t*>(const_cast<void*>(problem.forward().cu_seqlens.data));
  for (const std::vector<std::int64_t>& now :
       {std::vector<std::int64_t>{0, 130, 130, 451, 700}, {0, 1, 2, 3, 700}, {0, 700, 700, 700, 700}}) {
    std::copy(now.begin(), now.end(), lengths);
    Values q = gather(problem.forward().q);
    for (double& x : q) x = -0.5 * x;
    overwrite(problem.forward().q, q);
    const Snapshot expected = run_both(problem, on_gpu);
    problem.poison();
    ASSERT_EQ(cudaGraphLaunch(recorded, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    Snapshot replayed = snapshot(problem.forward());
    replayed.merge(snapshot(problem.backward()));
    EXPECT_TRUE(same_bits(replayed, expected)) << "second sequence ends at " << now[2];
  }
  cudaGraphExecDestroy(recorded);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  cudaFree(scratch);
}

__global__ void fill_small(std::uint16_t* to, std::int64_t count, std::uint32_t seed) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t e = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; e < count; e += stride) {
    std::uint64_t x = (static_cast<std::uint64_t>(e) + seed) * 0x9E3779B97F4A7C15ULL;
    x ^= x >> 29;
    // bfloat16 between 0.5 and 1, either sign.
    to[e] = static_cast<std::uint16_t>(0x3F00U | (x & 0x7FU) | (x & 0x80U) << 8);
  }
}

// v, h, dh and dv have more than 2^31 elements each; the last sequence lies beyond that mark, and must be what the same
// tokens give in small tensors. On Hopper kernel `values` has one panel of dqk here and hundreds of tiles to a block:
// that is where it once hung.
TEST_F(Cuda, TensorsBeyondTwoToThe31) {
  constexpr std::int64_t dqk = 16, dhv = 512, last = 300, tokens = (std::int64_t{1} << 31) / dhv + 1000;
  DeviceMemory q(tokens * dqk * 2), k(tokens * dqk * 2), v(tokens * dhv * 2), h(tokens * dhv * 2), dh(tokens * dhv * 2);
  DeviceMemory dq(tokens * dqk * 2), dk(tokens * dqk * 2), dv(tokens * dhv * 2);
  DeviceMemory i(tokens * 2), f(tokens * 2), di(tokens * 2), df(tokens * 2), lengths(3 * 8);
  const std::int64_t bounds[] = {0, tokens - last, tokens};
  for (const DeviceMemory* m : {&q, &k, &v, &h, &dh, &dq, &dk, &dv, &i, &f, &di, &df, &lengths})
    if (m->data == nullptr) GTEST_SKIP() << "tfla: this GPU has not enough memory for the test";
  cudaMemcpy(lengths.data, bounds, sizeof(bounds), cudaMemcpyHostToDevice);
  std::uint32_t seed = 1;
  for (const auto& [memory, width] :
       {std::pair(&q, dqk), {&k, dqk}, {&v, dhv}, {&dh, dhv}, {&i, std::int64_t{1}}, {&f, std::int64_t{1}}})
    fill_small<<<1024, 256>>>(static_cast<std::uint16_t*>(memory->data), tokens * width, seed++);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  // The tokens [begin, begin + count) as tensors of their own.
  const auto rows = [](const DeviceMemory& m, std::int64_t begin, std::int64_t count, std::int64_t width) {
    return MutableTensorView(static_cast<std::uint16_t*>(m.data) + begin * width, DType::bfloat16,
                             {1, count, 1, width});
  };
  const auto gates = [](const DeviceMemory& m, std::int64_t begin, std::int64_t count) {
    return MutableTensorView(static_cast<std::uint16_t*>(m.data) + begin, DType::bfloat16, {1, count, 1});
  };
  const auto run = [&](std::int64_t begin, std::int64_t count, const TensorView& packing, const Execution& execution) {
    forward({.q = rows(q, begin, count, dqk),
             .k = rows(k, begin, count, dqk),
             .v = rows(v, begin, count, dhv),
             .i = gates(i, begin, count),
             .f = gates(f, begin, count),
             .h = rows(h, begin, count, dhv),
             .cu_seqlens = packing},
            execution);
    backward({.q = rows(q, begin, count, dqk),
              .k = rows(k, begin, count, dqk),
              .v = rows(v, begin, count, dhv),
              .i = gates(i, begin, count),
              .f = gates(f, begin, count),
              .dh = rows(dh, begin, count, dhv),
              .dq = rows(dq, begin, count, dqk),
              .dk = rows(dk, begin, count, dqk),
              .dv = rows(dv, begin, count, dhv),
              .di = gates(di, begin, count),
              .df = gates(df, begin, count),
              .cu_seqlens = packing},
             execution);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  };
  const auto results = [&] {
    std::vector<std::vector<std::uint16_t>> all;
    for (const auto& [memory, width] :
         {std::pair(&h, dhv), {&dq, dqk}, {&dk, dqk}, {&dv, dhv}, {&di, std::int64_t{1}}, {&df, std::int64_t{1}}}) {
      all.emplace_back(static_cast<std::size_t>(last * width));
      cudaMemcpy(all.back().data(), static_cast<std::uint16_t*>(memory->data) + (tokens - last) * width,
                 all.back().size() * 2, cudaMemcpyDeviceToHost);
    }
    return all;
  };
  for (const bool portable : {true, false}) {
    const Execution execution{.device = Device::cuda, .portable = portable};
    run(0, tokens, TensorView(lengths.data, DType::int64, {3}), execution);
    const auto beyond = results();
    for (const DeviceMemory* m : {&h, &dv}) cudaMemset(m->data, 0xFF, static_cast<std::size_t>(tokens * dhv * 2));
    run(tokens - last, last, {}, execution);
    EXPECT_EQ(beyond, results()) << (portable ? "portable" : "chosen by the plan");
  }
}

}  // namespace
}  // namespace tfla::test
