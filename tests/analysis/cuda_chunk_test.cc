// The cost model of the portable CUDA kernels: the chunk that the plan takes from it, and the measurements behind it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "plan/cost/cuda_rates.h"
#include "plan/cost/cuda_time.h"
#include "plan/cost/plan_cost.h"

namespace tfla::analysis {
namespace {

constexpr DType dtypes[] = {DType::bfloat16, DType::float16, DType::float32, DType::float64};
constexpr HeadDims head_dims[] = {{1, 1}, {32, 32}, {64, 64}, {128, 256}, {256, 512}, {1024, 1024}};

// By looking at all of them, and by the closed form, from which a power of two is never farther than a factor sqrt(2).
TEST(CudaChunkSmall, IsThePowerOfTwoWithTheLeastTime) {
  for (const DType dtype : dtypes) {
    for (const HeadDims& dims : head_dims) {
      const Polynomial seconds = cuda_chunk_seconds(CudaWork::training, dtype, dims);
      std::int64_t best = 0;
      double least = std::numeric_limits<double>::infinity();
      for (std::int64_t chunk = 64; chunk <= 1024; chunk *= 2) {
        const double per_token = seconds(static_cast<double>(chunk)) / static_cast<double>(chunk);
        if (per_token < least) {
          least = per_token;
          best = chunk;
        }
      }
      EXPECT_EQ(best_cuda_chunk(dtype, dims), best) << dims.dqk << "/" << dims.dhv;
      const double closed = std::clamp(best_chunk(seconds), 64.0, 1024.0);
      EXPECT_LE(std::abs(std::log2(static_cast<double>(best) / closed)), 0.5 + 1e-9) << dims.dqk << "/" << dims.dhv;
    }
  }
}

// Wider heads have larger states, whose traffic a longer chunk spares.
TEST(CudaChunkSmall, GrowsWithTheHead) {
  for (const DType dtype : dtypes) {
    std::int64_t before = 0;
    for (const HeadDims& dims : head_dims) {
      EXPECT_GE(best_cuda_chunk(dtype, dims), before);
      before = best_cuda_chunk(dtype, dims);
    }
  }
}

// The operations that the model prices are those that the plan counts, but for the ends of the sequence: its first
// chunk meets no state and its last leaves none.
TEST(CudaChunkSmall, PricesThePlansOperations) {
  constexpr std::int64_t tokens = 1 << 20;
  for (const std::int64_t chunk : {64, 128, 1024}) {
    const HeadDims dims{128, 128};  // one part: a wider head makes its squares more than once
    const Plan plan{.device = Device::cuda,
                    .shape = {.tokens = tokens, .dqk = 128, .dhv = 128, .longest = tokens},
                    .options = {},
                    .tile = 64,
                    .chunk = chunk,
                    .span = tokens};
    const CudaRates& rates = cuda_half_constants.forward;
    const auto x = static_cast<double>(chunk);
    const double others =
        rates.state * 128 * 128 * 2 / x + rates.row * (2 * 128 + 128) * 2 + rates.square * (x + 64) / 2;
    const double products = cuda_chunk_seconds(CudaWork::forward, DType::bfloat16, dims)(x) / x - others;
    EXPECT_NEAR(products * static_cast<double>(tokens) / (rates.flop * cost(plan).flops), 1, 2e-3) << chunk;
  }
}

// Where a GPU has been measured: the constants in the code are the stored fit, the chunk they lead to is the one that
// the fit marked, and it is within 5 % of the best from 64 to 4,096 in training.
TEST(CudaChunkSmall, ConstantsAreTheStoredFit) {
  std::ifstream file(TFLA_SOURCE_DIR "/docs/benchmarks/chunk_sizes_cuda.json");
  if (!file)
    GTEST_SKIP() << "docs/benchmarks/chunk_sizes_cuda.json is not there; benchmarks/gpu/chunk_sizes.py measures it";
  const nlohmann::json report = nlohmann::json::parse(file);
  const struct {
    const char* variant;
    DType dtype;
    CudaConstants constants;
  } variants[] = {{"portable bfloat16", DType::bfloat16, cuda_half_constants},
                  {"portable float32", DType::float32, cuda_float_constants}};
  int judged = 0;
  for (const auto& [variant, dtype, constants] : variants) {
    if (!report.at("rates").contains(variant)) continue;
    const nlohmann::json& fitted = report.at("rates").at(variant);
    for (const auto& [name, rates] : {std::pair("forward", constants.forward), {"training", constants.training}}) {
      EXPECT_EQ(rates.flop, fitted.at(name).at("flop").get<double>()) << variant;
      EXPECT_EQ(rates.square, fitted.at(name).at("square").get<double>()) << variant;
      EXPECT_EQ(rates.state, fitted.at(name).at("state").get<double>()) << variant;
      EXPECT_EQ(rates.row, fitted.at(name).at("row").get<double>()) << variant;
    }
    for (const nlohmann::json& row : report.at("rows")) {
      if (row.at("variant") != variant) continue;
      const HeadDims dims{row.at("dqk"), row.at("dhv")};
      const bool training = row.at("operation") == "training";
      const Polynomial seconds = cuda_chunk_seconds(training ? CudaWork::training : CudaWork::forward, dtype, dims);
      const Workload workload{row.at("batch"), row.at("heads"), row.at("tokens")};
      EXPECT_NEAR(total(seconds, row.at("chunk"), workload) / row.at("predicted").get<double>(), 1, 1e-9) << row;
      if (!training || !row.at("default").get<bool>()) continue;
      EXPECT_EQ(best_cuda_chunk(dtype, dims), row.at("chunk").get<std::int64_t>()) << row;
      for (const nlohmann::json& other : report.at("rows")) {
        if (other.at("variant") != variant || other.at("operation") != "training") continue;
        if (other.at("dqk") != row.at("dqk") || other.at("dhv") != row.at("dhv")) continue;
        EXPECT_LE(row.at("seconds").get<double>(), 1.05 * other.at("seconds").get<double>()) << other;
        ++judged;
      }
    }
  }
  EXPECT_GE(judged, 2 * 7) << "no variant of the portable kernels was measured";
}

}  // namespace
}  // namespace tfla::analysis
