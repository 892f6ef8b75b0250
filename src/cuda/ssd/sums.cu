// dA, ddt_bias and dD from the sums of blocks of tokens, in an order that depends on the shape alone.
#include "cuda/arch/cluster.cuh"
#include "cuda/device.h"
#include "cuda/ssd/tokens.cuh"

namespace tfla::cuda::ssd {

namespace {

constexpr int warps = 16;
constexpr int threads = warps * warp_size;

// The sum of sums[block * channels + channel] over all blocks, in warp 0. Each lane has a channel of its own, if
// `exists`, and every warp its blocks. All threads of the CTA take part.
template <class Number>
__device__ __forceinline__ double sum_blocks(const Number* sums, std::int64_t blocks, std::int64_t channels,
                                             std::int64_t channel, bool exists, double (&parts)[warps][warp_size]) {
  const int warp = static_cast<int>(threadIdx.x) / warp_size, lane = static_cast<int>(threadIdx.x) % warp_size;
  double sum = 0;
  if (exists) {
#pragma unroll 8
    for (std::int64_t block = warp; block < blocks; block += warps)
      sum += static_cast<double>(sums[block * channels + channel]);
  }
  __syncthreads();
  parts[warp][lane] = sum;
  for (int half = warps / 2; half > 0; half /= 2) {
    __syncthreads();
    if (warp < half) parts[warp][lane] += parts[warp + half][lane];
  }
  return parts[warp][lane];
}

// The first CTAs have a head of D each, the others a warp's lanes of heads of dA or ddt_bias.
template <class Real>
__global__ void __launch_bounds__(threads)
    sum_tokens_kernel(Call<Real> call, std::int64_t blocks, int skip_ctas, int head_ctas) {
  __shared__ double parts[warps][warp_size];
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const Dims& dims = call.dims;
  const Tensors& tensors = call.tensors;
  const int lane = static_cast<int>(threadIdx.x) % warp_size, cta = static_cast<int>(blockIdx.x);
  const bool first_warp = threadIdx.x < warp_size;
  if (cta < skip_ctas) {
    double of_head = 0;
    for (int base = 0; base < dims.P; base += warp_size) {
      const int column = base + lane;
      const std::int64_t channels = static_cast<std::int64_t>(dims.heads) * dims.P;
      const double sum = sum_blocks(call.scratch.dD, blocks, channels, static_cast<std::int64_t>(cta) * dims.P + column,
                                    column < dims.P, parts);
      if (tensors.dD.column == 0) {
        of_head += sum;
      } else if (first_warp && column < dims.P) {
        write_number(tensors.dD, cta, column, sum);
      }
    }
    if (tensors.dD.column != 0 || !first_warp) return;
#pragma unroll
    for (int offset = warp_size / 2; offset > 0; offset /= 2) of_head += __shfl_xor_sync(0xFFFFFFFFU, of_head, offset);
    if (lane == 0) write_number(tensors.dD, cta, 0, of_head);
    return;
  }
  const bool of_A = cta - skip_ctas < head_ctas;
  const int head = (cta - skip_ctas) % head_ctas * warp_size + lane;
  const double sum =
      sum_blocks(of_A ? call.scratch.dA : call.scratch.ddt_bias, blocks, dims.heads, head, head < dims.heads, parts);
  if (first_warp && head < dims.heads) write_number(of_A ? tensors.dA : tensors.ddt_bias, head, 0, sum);
}

}  // namespace

template <class Real>
void launch_sum_tokens(const Call<Real>& call, cudaStream_t stream) {
  const int skip_ctas = call.tensors.dD.data == nullptr ? 0 : call.dims.heads;
  const int head_ctas = static_cast<int>(ceil_div(call.dims.heads, warp_size));
  const int gates = call.tensors.ddt_bias.data == nullptr ? 1 : 2;
  launch_chained("ssd sum_tokens", sum_tokens_kernel<Real>, skip_ctas + gates * head_ctas, threads, 0, stream, call,
                 ceil_div(call.dims.positions(), ssd_token_block), skip_ctas, head_ctas);
}

template void launch_sum_tokens(const Call<float>&, cudaStream_t);
template void launch_sum_tokens(const Call<double>&, cudaStream_t);

}  // namespace tfla::cuda::ssd
