// The convolution: a thread walks through its tokens with the last inputs in registers, a group of loads at a time.
#include "cuda/conv/taps.cuh"
#include "cuda/device.h"

namespace tfla::cuda::conv {

namespace {

constexpr int group = 4;  // tokens whose loads are in flight together

template <class T, int Size, int Taps>
__global__ void __launch_bounds__(threads<Taps>, ctas<Taps>) forward_kernel(Call<typename Config<T>::Real> call) {
  using Real = typename Config<T>::Real;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const Own own(call.dims, Size);
  if (!own.exist) return;
  const Rows &from = call.tensors.x, &to = call.tensors.y;
  Weights<Real, Size, Taps> weights;
  weights.read(call.tensors.weight, call.tensors.bias, own.channel, call.dims.width);
  own.each_run(call, [&](const Run& run) {
    if (run.padding) return clear<T, Size>(to, run, own.channel);
    Window<T, Size, Taps, group> window;
    window.start(call, run, run.begin, own.channel);
    const T* x = place<T>(from, run.batch, run.begin, own.channel);
    T* y = place<T>(to, run.batch, run.begin, own.channel);
    const int tokens = static_cast<int>(run.end - run.begin);
#pragma unroll 1
    for (int t = 0; t < tokens; t += group) {
      window.load(x, from.token, tokens - t);
#pragma unroll
      for (int j = 0; j < group; ++j) {
        if (t + j >= tokens) break;
        Piece<T, Size> piece;
#pragma unroll
        for (int e = 0; e < Size; ++e) {
          const Real z = window.sum(weights, call.dims.width, j, e);
          piece.x[e] = narrow<T>(call.dims.silu ? z * gate_of<T>(z) : z);
        }
        *reinterpret_cast<Piece<T, Size>*>(y + j * to.token) = piece;
      }
      window.advance();
      x += group * from.token;
      y += group * to.token;
    }
  });
}

}  // namespace

template <class T>
void launch_forward(const Call<typename Config<T>::Real>& call, std::int64_t panel, cudaStream_t stream) {
  if (call.dims.spans == 0) return;
  with_kernel<16 / static_cast<int>(sizeof(T))>(panel, call.dims.width, [&](auto size, auto taps) {
    launch_chained("conv forward", forward_kernel<T, size(), taps()>, ctas_of(call.dims, size(), threads<taps()>),
                   threads<taps()>, 0, stream, call);
  });
}

#define TFLA_INSTANTIATE(T) \
  template void launch_forward<T>(const Call<typename Config<T>::Real>&, std::int64_t, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda::conv
