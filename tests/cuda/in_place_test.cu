// What depends on the order in which blocks run: states in place, and two streams at once. Every call is repeated and
// compared bit for bit with one that has its memory to itself.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "reference/values.h"
#include "tests/cuda/device_memory.h"
#include "tests/cuda/on_gpu.h"

namespace tfla::test {
namespace {

// Counts the words in which two blocks of memory differ.
__global__ void count_differences(const std::uint16_t* x, const std::uint16_t* y, std::int64_t words,
                                  unsigned long long* differences) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  unsigned long long own = 0;
  for (std::int64_t at = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; at < words; at += stride)
    own += x[at] != y[at];
  if (own > 0) atomicAdd(differences, own);
}

struct RaceCase {
  std::string name;
  std::int64_t batch, tokens, heads, dqk, dhv;
  int calls;
  std::vector<std::int64_t> cu_seqlens = {};
  DType dtype = DType::bfloat16;
  bool portable = false;
  InputGate gate = InputGate::exponential;
  Formulation formulation = Formulation::chunkwise;
};
void PrintTo(const RaceCase& c, std::ostream* out) { *out << c.name; }

std::vector<std::int64_t> one_long_and_many_short() {
  std::vector<std::int64_t> bounds{0, 5000};
  for (int s = 0; s < 100; ++s) bounds.push_back(bounds.back() + 64);
  return bounds;
}

// Columns of a head in several rounds of blocks; blocks that drift apart; gates by clusters; segments, dense and
// packed; dqk above 256.
std::vector<RaceCase> race_cases() {
  const std::vector<std::int64_t> packed = one_long_and_many_short();
  std::vector<RaceCase> all{
      {"columns_in_two_rounds", 1, 64, 40, 64, 640, 60},
      {"columns_in_three_rounds", 1, 128, 44, 128, 896, 60},
      {"many_short_sequences", 512, 32, 8, 128, 256, 30},
      {"gates_by_clusters", 64, 1024, 8, 64, 64, 30},
      {"few_heads", 2, 300, 4, 128, 256, 60},
      {"segments", 1, 8192, 2, 128, 256, 60},
      {"wide", 4, 300, 40, 256, 512, 30},
      {"dqk_above_256", 2, 300, 30, 512, 640, 30},
      {"dqk_above_256_in_segments", 1, 8192, 2, 512, 256, 30},
      {"packed", 1, 512 * 32, 8, 128, 384, 30},
      {"packed_segments", 1, packed.back(), 1, 8, 8, 60, packed},
      {"packed_segments_of_wide_heads", 1, packed.back(), 2, 256, 256, 30, packed},
      {"sigmoid", 64, 64, 40, 64, 640, 30, {}, DType::bfloat16, false, InputGate::sigmoid},
      {"recurrent", 8, 64, 8, 64, 128, 20, {}, DType::bfloat16, false, InputGate::exponential, Formulation::recurrent}};
  for (std::int64_t token = 0; token <= 512 * 32; token += 32) all[9].cu_seqlens.push_back(token);
  const std::size_t count = all.size();
  for (std::size_t index = 0; index < count; ++index) {
    RaceCase half = all[index];
    half.dtype = DType::float16;
    half.name += "_float16";
    all.push_back(half);
    RaceCase portable = all[index];
    portable.portable = true;
    portable.calls /= 3;
    portable.name += "_portable";
    all.push_back(portable);
  }
  all.push_back({"float32", 64, 1024, 8, 64, 64, 20, {}, DType::float32});
  all.push_back({"float32_packed", 1, packed.back(), 2, 64, 64, 20, packed, DType::float32});
  all.push_back({"float64", 8, 1024, 8, 64, 64, 20, {}, DType::float64});
  return all;
}

// The tensors of a forward call on the GPU.
class Call {
 public:
  explicit Call(const RaceCase& c, std::uint32_t seed = 1) : case_(c), random_(seed) {
    const std::int64_t tokens = c.batch * c.tokens * c.heads;
    sequences_ = c.cu_seqlens.empty() ? c.batch : std::ssize(c.cu_seqlens) - 1;
    const std::int64_t states = sequences_ * c.heads;
    const bool wide = c.dtype == DType::float64;
    state_item_ = wide ? 8 : 4;
    q_ = draw(c.dtype, tokens * c.dqk, 0);
    k_ = draw(c.dtype, tokens * c.dqk, 0);
    v_ = draw(c.dtype, tokens * c.dhv, 0);
    i_ = draw(DType::float32, tokens, -1);
    f_ = draw(DType::float32, tokens, 4);
    h_ = empty(tokens * c.dhv * item_size(c.dtype));
    const DType state = wide ? DType::float64 : DType::float32;
    for (const std::int64_t size : {states * c.dqk * c.dhv, states * c.dqk, states}) {
      bytes_.push_back(size * state_item_);
      initial_.push_back(draw(state, size, 0));
      last_.push_back(empty(bytes_.back()));
    }
    if (c.cu_seqlens.empty()) return;
    lengths_ = empty(std::ssize(c.cu_seqlens) * 8);
    cudaMemcpy(memory(lengths_), c.cu_seqlens.data(), c.cu_seqlens.size() * 8, cudaMemcpyHostToDevice);
  }

  [[nodiscard]] MlstmForward args(bool in_place) const {
    const RaceCase& c = case_;
    const auto tensor = [&](int memory_of, std::int64_t width) {
      return MutableTensorView(memory(memory_of), c.dtype, {c.batch, c.tokens, c.heads, width});
    };
    const auto gate = [&](int memory_of) {
      return TensorView(memory(memory_of), DType::float32, {c.batch, c.tokens, c.heads});
    };
    const auto state = [&](const std::vector<int>& of) {
      const DType dtype = state_item_ == 8 ? DType::float64 : DType::float32;
      return MutableMlstmState{{memory(of[0]), dtype, {sequences_, c.heads, c.dqk, c.dhv}},
                               {memory(of[1]), dtype, {sequences_, c.heads, c.dqk}},
                               {memory(of[2]), dtype, {sequences_, c.heads}}};
    };
    const MutableMlstmState last = state(last_), initial = in_place ? last : state(initial_);
    MlstmForward args{.q = tensor(q_, c.dqk),
                      .k = tensor(k_, c.dqk),
                      .v = tensor(v_, c.dhv),
                      .i = gate(i_),
                      .f = gate(f_),
                      .h = tensor(h_, c.dhv),
                      .initial_state = {initial.C, initial.n, initial.m},
                      .last_state = last,
                      .options = {.gate = c.gate, .formulation = c.formulation}};
    if (lengths_ >= 0) args.cu_seqlens = TensorView(memory(lengths_), DType::int64, {sequences_ + 1});
    return args;
  }

  // Poison, or in place the initial state, where the results will be.
  void prepare(bool in_place) const {
    cudaMemset(memory(h_), 0xFF, static_cast<std::size_t>(h_bytes()));
    for (std::size_t part = 0; part < last_.size(); ++part) {
      const auto bytes = static_cast<std::size_t>(bytes_[part]);
      if (in_place)
        cudaMemcpy(memory(last_[part]), memory(initial_[part]), bytes, cudaMemcpyDeviceToDevice);
      else
        cudaMemset(memory(last_[part]), 0xFF, bytes);
    }
  }

  // Keeps what the call has left, to compare the others with.
  void expect_these() {
    expected_.clear();
    for (const auto& [index, bytes] : results()) {
      expected_.emplace_back(bytes);
      cudaMemcpy(expected_.back().data, memory(index), static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice);
    }
  }
  [[nodiscard]] bool as_expected() const {
    DeviceMemory count(sizeof(unsigned long long));
    cudaMemset(count.data, 0, sizeof(unsigned long long));
    std::size_t part = 0;
    for (const auto& [index, bytes] : results())
      count_differences<<<528, 256>>>(static_cast<const std::uint16_t*>(memory(index)),
                                      static_cast<const std::uint16_t*>(expected_[part++].data), bytes / 2,
                                      static_cast<unsigned long long*>(count.data));
    unsigned long long differences = 1;
    cudaMemcpy(&differences, count.data, sizeof(differences), cudaMemcpyDeviceToHost);
    return differences == 0;
  }
  [[nodiscard]] bool whole() const {
    for (const DeviceMemory& m : memory_)
      if (m.data == nullptr) return false;
    return true;
  }

 private:
  [[nodiscard]] void* memory(int index) const { return memory_[static_cast<std::size_t>(index)].data; }
  [[nodiscard]] std::int64_t h_bytes() const {
    return case_.batch * case_.tokens * case_.heads * case_.dhv * item_size(case_.dtype);
  }
  // h and the last state: which memory, and how much of it.
  [[nodiscard]] std::vector<std::pair<int, std::int64_t>> results() const {
    std::vector<std::pair<int, std::int64_t>> all{{h_, h_bytes()}};
    for (std::size_t part = 0; part < last_.size(); ++part) all.emplace_back(last_[part], bytes_[part]);
    return all;
  }
  int empty(std::int64_t bytes) {
    memory_.emplace_back(bytes);
    return static_cast<int>(memory_.size()) - 1;
  }
  // A few thousand different numbers around `mean`, again and again: what repeats does not matter here.
  int draw(DType dtype, std::int64_t count, double mean) {
    constexpr std::int64_t different = 4099;
    const int index = empty(count * item_size(dtype));
    if (memory(index) == nullptr) return index;
    std::normal_distribution<double> normal(mean);
    std::vector<std::byte> numbers(static_cast<std::size_t>(std::min(count, different) * item_size(dtype)));
    for (std::int64_t e = 0; e < std::min(count, different); ++e)
      reference::store(numbers.data(), dtype, e, normal(random_));
    const auto bytes = static_cast<std::size_t>(count * item_size(dtype));
    auto* to = static_cast<std::byte*>(memory(index));
    cudaMemcpy(to, numbers.data(), numbers.size(), cudaMemcpyHostToDevice);
    for (std::size_t done = numbers.size(); done < bytes; done *= 2)
      cudaMemcpy(to + done, to, std::min(done, bytes - done), cudaMemcpyDeviceToDevice);
    return index;
  }

  RaceCase case_;
  std::mt19937 random_;
  std::int64_t sequences_ = 0, state_item_ = 4;
  std::vector<DeviceMemory> memory_;
  int q_ = 0, k_ = 0, v_ = 0, i_ = 0, f_ = 0, h_ = 0, lengths_ = -1;
  std::vector<DeviceMemory> expected_;
  std::vector<int> initial_, last_;
  std::vector<std::int64_t> bytes_;
};

class CudaRaces : public ::testing::TestWithParam<RaceCase> {
 protected:
  void SetUp() override {
    if (const std::string reason = why_unavailable(Device::cuda); !reason.empty()) GTEST_SKIP() << reason;
  }
};

TEST_P(CudaRaces, StateInPlace) {
  const RaceCase& c = GetParam();
  const Execution execution{.device = Device::cuda, .portable = c.portable};
  Call call(c);
  if (!call.whole()) GTEST_SKIP() << "tfla: this GPU has not enough memory for the test";
  call.prepare(false);
  forward(call.args(false), execution);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  call.expect_these();
  int different = 0;
  for (int turn = 0; turn < c.calls; ++turn) {
    call.prepare(true);
    forward(call.args(true), execution);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    different += call.as_expected() ? 0 : 1;
  }
  EXPECT_EQ(different, 0) << "of " << c.calls << " calls";
}

INSTANTIATE_TEST_SUITE_P(All, CudaRaces, ::testing::ValuesIn(race_cases()),
                         [](const auto& test) { return test.param.name; });

// A plan from the shape alone does not know that the state is in place, and is refused.
TEST_F(Cuda, APlanForSeparateStatesIsNotOneForStatesInPlace) {
  const Call call(race_cases().front());
  const MlstmForward apart = call.args(false), together = call.args(true);
  const Plan chosen = plan(apart, on_gpu);
  EXPECT_NE(chosen, plan(together, on_gpu));
  const DeviceMemory scratch(static_cast<std::int64_t>(chosen.scratch_bytes));
  const std::span<std::byte> bytes(static_cast<std::byte*>(scratch.data), chosen.scratch_bytes);
  EXPECT_THROW(forward(together, chosen, bytes), InvalidArgument);
  EXPECT_NO_THROW(forward(apart, chosen, bytes));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_F(Cuda, TwoStreamsAtOnce) {
  const std::vector<RaceCase> cases{{"", 2, 700, 4, 128, 256, 0}, {"", 3, 333, 6, 64, 128, 0}};
  std::vector<Call> calls;
  std::vector<cudaStream_t> streams(cases.size());
  for (std::size_t index = 0; index < cases.size(); ++index) {
    Call& call = calls.emplace_back(cases[index], static_cast<std::uint32_t>(index));
    call.prepare(false);
    forward(call.args(false), on_gpu);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    call.expect_these();
    ASSERT_EQ(cudaStreamCreateWithFlags(&streams[index], cudaStreamNonBlocking), cudaSuccess);
  }
  int different = 0;
  for (int turn = 0; turn < 100; ++turn) {
    for (const Call& call : calls) call.prepare(false);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (std::size_t index = 0; index < calls.size(); ++index)
      for (int again = 0; again < 3; ++again)
        forward(calls[index].args(false), {.device = Device::cuda, .stream = streams[index]});
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (const Call& call : calls) different += call.as_expected() ? 0 : 1;
  }
  EXPECT_EQ(different, 0);
  for (const cudaStream_t stream : streams) cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace tfla::test
