// dx, and the sums of a span for dweight and dbias.
#include "cuda/conv/gradients.cuh"
#include "cuda/device.h"

namespace tfla::cuda::conv {

namespace {

// The sum over the lanes of a span, in an order that depends on nothing.
template <class Real>
__device__ __forceinline__ Real sum_lanes(Real x, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFFU, x, offset);
  return x;
}

// Row `number` of the sums of a span. All lanes of a warp take part.
template <class Real, int Size>
__device__ __forceinline__ void store_sums(const Call<Real>& call, const Own& own, int number, const Real (&x)[Size]) {
  const Dims& dims = call.dims;
  Piece<Real, Size> piece;
#pragma unroll
  for (int e = 0; e < Size; ++e) piece.x[e] = sum_lanes(x[e], dims.lanes);
  if (!own.exist || own.lane > 0) return;
  Real* to = call.scratch.sums + (own.span * (dims.width + 1) + number) * dims.channels + own.channel;
  *reinterpret_cast<Piece<Real, Size>*>(to) = piece;
}

template <class T, int Size, int Taps>
__global__ void __launch_bounds__(threads<Taps>, ctas<Taps>) gradients_kernel(Call<typename Config<T>::Real> call) {
  using Real = typename Config<T>::Real;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const Own own(call.dims, Size);
  const Rows& to = call.tensors.dx;
  // All lanes of a warp sum up in the end, those too that have nothing.
  Gradients<T, Size, Taps, gradient_group<T, Taps>> gradients(call, own.exist ? own.channel : 0);
  if (own.exist) {
    own.each_run(call, [&](const Run& run) {
      if (run.padding) return clear<T, Size>(to, run, own.channel);
      T* dx = place<T>(to, run.batch, run.begin, own.channel);
      const Part part{run.begin, 0, static_cast<int>(run.end - run.begin)};
      gradients.walk(call, run, part, own.channel, [&](int token, const Real(&x)[Size]) {
        Piece<T, Size> piece;
#pragma unroll
        for (int e = 0; e < Size; ++e)
          piece.x[e] = narrow<T>(x[e] + of_last_state(call, run, run.begin - run.first + token, own.channel + e));
        *reinterpret_cast<Piece<T, Size>*>(dx + token * to.token) = piece;
      });
    });
  }
#pragma unroll
  for (int d = 0; d < Taps; ++d) {
    if (d >= call.dims.width) break;
    Real sums[Size];
#pragma unroll
    for (int e = 0; e < Size; ++e) sums[e] = gradients.dweight.at(d, e);
    store_sums(call, own, d, sums);
  }
  store_sums(call, own, call.dims.width, gradients.dbias);
}

}  // namespace

template <class T>
void launch_gradients(const Call<typename Config<T>::Real>& call, std::int64_t panel, cudaStream_t stream) {
  if (call.dims.spans == 0) return;
  constexpr int most = 4, piece = 16 / static_cast<int>(sizeof(T)), panel_size = piece < most ? piece : most;
  with_kernel<panel_size>(panel, call.dims.width, [&](auto size, auto taps) {
    launch_chained("conv gradients", gradients_kernel<T, size(), taps()>, ctas_of(call.dims, size(), threads<taps()>),
                   threads<taps()>, 0, stream, call);
  });
}

#define TFLA_INSTANTIATE(T) \
  template void launch_gradients<T>(const Call<typename Config<T>::Real>&, std::int64_t, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda::conv
