// How warps of Hopper's kernels hand something on, and mistakes that compute-sanitizer has to see:
// tools/gpu_sanitize.sh runs them. A tool that is blind, or cries wolf, would make its other results worthless.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/copy.cuh"
#include "cuda/arch/shared.cuh"
#include "tests/cuda/on_gpu.h"

namespace tfla::test {
namespace {

constexpr int lanes = 32, rounds = 4;

// One warp writes, the other reads, in turns. On Hopper each arrives for the other as warps of its kernels do. Without
// order between its lanes it is a race.
template <bool Ordered>
__global__ void hand_over_kernel(float* sums) {
  namespace arch = cuda::arch;
  __shared__ float numbers[lanes];
  const unsigned place = arch::shared_address(numbers);
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const bool writes = threadIdx.x < lanes;
  const auto write = [&] { arch::write_float(place + 4 * lane, static_cast<float>(lane)); };
  const auto read = [&] { return arch::read_float(place + 4 * (lanes - 1 - lane)); };
  float sum = 0;
#if __CUDA_ARCH__ >= 900
  __shared__ std::uint64_t barriers[2];
  const unsigned full = arch::shared_address(barriers), empty = full + 8;
  if (threadIdx.x == 0) {
    for (const unsigned barrier : {full, empty}) arch::barrier_init(barrier, Ordered ? arch::warp_arrivals : 1);
    arch::barriers_ready();
  }
  __syncthreads();
  for (unsigned round = 0; round < rounds; ++round) {
    arch::wait(writes ? empty : full, writes ? (round & 1) ^ 1 : round & 1);
    if (writes)
      write();
    else
      sum += read();
    const unsigned next = writes ? full : empty;
    if (Ordered) {
      __syncwarp();
      if (arch::arrives(lane == 0)) arch::arrive(next);
    } else if (lane == 0) {
      arch::arrive(next);
    }
  }
#else
  for (int round = 0; round < rounds; ++round) {
    if (writes) write();
    if (Ordered) __syncthreads();
    if (!writes) sum += read();
    if (Ordered) __syncthreads();
  }
#endif
  if (!writes) sums[lane] = sum;
}

__global__ void write_kernel(float* to, int at) { to[at] = 1; }

class SanitizerProbeCuda : public Cuda {
 protected:
  void SetUp() override {
    Cuda::SetUp();
    if (!IsSkipped()) ASSERT_EQ(cudaMalloc(&sums, lanes * sizeof(float)), cudaSuccess);
  }
  void TearDown() override { cudaFree(sums); }
  float* sums = nullptr;
};

TEST_F(SanitizerProbeCuda, HandsOver) {
  hand_over_kernel<true><<<1, 2 * lanes>>>(sums);
  std::vector<float> found(lanes);
  ASSERT_EQ(cudaMemcpy(found.data(), sums, lanes * sizeof(float), cudaMemcpyDeviceToHost), cudaSuccess);
  for (int lane = 0; lane < lanes; ++lane)
    EXPECT_EQ(found[static_cast<std::size_t>(lane)], static_cast<float>(rounds * (lanes - 1 - lane)));
}

TEST_F(SanitizerProbeCuda, DISABLED_racecheck) {
  hand_over_kernel<false><<<1, 2 * lanes>>>(sums);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_F(SanitizerProbeCuda, DISABLED_memcheck) {
  write_kernel<<<1, 1>>>(sums, lanes);
  cudaDeviceSynchronize();
}

}  // namespace
}  // namespace tfla::test
