// Grouped heads behind Hopper's kernels: dQ and dK of a group from those of its heads, in the order of the heads.
#include <algorithm>

#include "cuda/arch/cluster.cuh"
#include "cuda/common/device.cuh"
#include "cuda/launch.h"

namespace tfla::cuda {

namespace {

constexpr int threads = 256;

// 16 bytes of a row.
template <class T>
struct alignas(16) Eight {
  static constexpr int count = 8;
  T x[count];
};

// Each thread has eight columns of a row of q or k at a time. Every other CTA is for dK.
template <class T>
__global__ void __launch_bounds__(threads) sum_groups_kernel(Call<float> call, std::int64_t pieces) {
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const Dims& dims = call.dims;
  const bool of_k = blockIdx.x % 2 == 1;
  const Strided &from = of_k ? call.tensors.dk_heads : call.tensors.dq_heads,
                &to = of_k ? call.tensors.dk : call.tensors.dq;
  const bool packed = call.packing.cu_seqlens != nullptr;
  // Tokens in no sequence have no gradients; gates has cleared their rows.
  const std::int64_t first = packed ? sequence_start(call, 0) : 0;
  const std::int64_t end = packed ? sequence_start(call, dims.sequences) : dims.tokens;
  const int eights = dims.dqk / Eight<T>::count;
  for (std::int64_t piece = static_cast<std::int64_t>(blockIdx.x / 2) * threads + threadIdx.x; piece < pieces;
       piece += static_cast<std::int64_t>(gridDim.x / 2) * threads) {
    // The plan sees to it that rows can be counted in 32 bits.
    const auto row = static_cast<int>(piece / eights), position = row / dims.qk_heads;
    const int column = static_cast<int>(piece - static_cast<std::int64_t>(row) * eights) * Eight<T>::count;
    const int head = row - position * dims.qk_heads;
    const int sequence = position / static_cast<int>(dims.tokens);
    const std::int64_t token = position - sequence * static_cast<int>(dims.tokens);
    if (token < first || token >= end) continue;
    const T* source = static_cast<const T*>(from.data) + sequence * from.batch + token * from.token +
                      static_cast<std::int64_t>(head) * dims.group * from.head + column;
    float sum[Eight<T>::count] = {};
#pragma unroll 4
    for (int member = 0; member < dims.group; ++member) {
      const auto eight = *reinterpret_cast<const Eight<T>*>(source + member * from.head);
#pragma unroll
      for (int x = 0; x < Eight<T>::count; ++x) sum[x] += to_float(eight.x[x]);
    }
    Eight<T> result;
#pragma unroll
    for (int x = 0; x < Eight<T>::count; ++x) result.x[x] = narrow<T>(sum[x]);
    *reinterpret_cast<Eight<T>*>(static_cast<T*>(to.data) + sequence * to.batch + token * to.token + head * to.head +
                                 column) = result;
  }
}

}  // namespace

template <class T>
void launch_sum_groups(const Call<float>& call, cudaStream_t stream) {
  const Dims& dims = call.dims;
  const std::int64_t pieces = dims.all_tokens() * dims.qk_heads * (dims.dqk / Eight<T>::count);
  if (pieces == 0) return;
  constexpr std::int64_t most_ctas = 1 << 20;
  const std::int64_t ctas = std::min((pieces + threads - 1) / threads, most_ctas);
  launch_chained("sum_groups", sum_groups_kernel<T>, 2 * ctas, threads, 0, stream, call, pieces);
}

template void launch_sum_groups<__nv_bfloat16>(const Call<float>&, cudaStream_t);
template void launch_sum_groups<__half>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda
