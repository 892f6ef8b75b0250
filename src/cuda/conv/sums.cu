// dweight and dbias from the sums of spans, in double and in an order that depends on their number alone.
#include "cuda/conv/taps.cuh"
#include "cuda/device.h"

namespace tfla::cuda::conv {

namespace {

constexpr int warps = 16;

// A CTA has one distance, or the bias, of a warp's lanes of channels. Every warp has its spans.
template <class Real>
__global__ void __launch_bounds__(warps* warp_size) sum_spans_kernel(Call<Real> call, std::int64_t tiles) {
  __shared__ double parts[warps][warp_size];
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const Dims& dims = call.dims;
  const int warp = static_cast<int>(threadIdx.x) / warp_size, lane = static_cast<int>(threadIdx.x) % warp_size;
  const std::int64_t number = blockIdx.x / tiles, channel = blockIdx.x % tiles * warp_size + lane;
  double sum = 0;
  if (channel < dims.channels) {
#pragma unroll 8
    for (std::int64_t span = warp; span < dims.spans; span += warps)
      sum += static_cast<double>(call.scratch.sums[(span * (dims.width + 1) + number) * dims.channels + channel]);
  }
  parts[warp][lane] = sum;
  for (int half = warps / 2; half > 0; half /= 2) {
    __syncthreads();
    if (warp < half) parts[warp][lane] += parts[warp + half][lane];
  }
  if (warp > 0 || channel >= dims.channels) return;
  const Numbers& to = number < dims.width ? call.tensors.dweight : call.tensors.dbias;
  const std::int64_t tap = number < dims.width ? dims.width - 1 - number : 0;
  if (to.data != nullptr) write_number(to, channel * to.strides[0] + tap * to.strides[1], parts[0][lane]);
}

}  // namespace

template <class Real>
void launch_sum_spans(const Call<Real>& call, cudaStream_t stream) {
  const std::int64_t tiles = ceil_div(call.dims.channels, warp_size);
  launch_chained("conv sum_spans", sum_spans_kernel<Real>, tiles * (call.dims.width + 1), warps * warp_size, 0, stream,
                 call, tiles);
}

template void launch_sum_spans(const Call<float>&, cudaStream_t);
template void launch_sum_spans(const Call<double>&, cudaStream_t);

}  // namespace tfla::cuda::conv
