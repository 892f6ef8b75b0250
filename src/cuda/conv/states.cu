// The last state of forward, and the gradient of the initial one: a thread has a channel of a sequence.
#include "cuda/conv/gradients.cuh"
#include "cuda/device.h"

namespace tfla::cuda::conv {

namespace {

struct Channel {
  std::int64_t sequence, channel;

  __device__ explicit Channel(const Dims& dims) {
    const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    sequence = thread / dims.channels;
    channel = thread % dims.channels;
  }
};
std::int64_t state_ctas(const Dims& dims, int threads) { return ceil_div(dims.sequences * dims.channels, threads); }

// In place row i comes from row i + length, which is not written before it is read.
template <class T>
__global__ void __launch_bounds__(threads<few_taps>) last_state_kernel(Call<typename Config<T>::Real> call) {
  using Real = typename Config<T>::Real;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const Channel own(call.dims);
  if (own.sequence >= call.dims.sequences) return;
  const Run run = whole_sequence(call, own.sequence);
  const Numbers &initial = call.tensors.initial, &last = call.tensors.last;
  const int reach = call.dims.width - 1;
#pragma unroll 1
  for (int row = 0; row < reach; ++row) {
    const std::int64_t token = run.last - reach + row, before = token - run.first + reach;
    const std::int64_t to = state_at(last, own.sequence, row, own.channel);
    if (token >= run.first) {
      write_number(last, to, widen<Real>(*place<T>(call.tensors.x, run.batch, token, own.channel)));
    } else if (initial.data == nullptr) {
      write_number(last, to, Real{0});
    } else {
      write_number(last, to, read_number<double>(initial, state_at(initial, own.sequence, before, own.channel)));
    }
  }
}

template <class T, int Taps>
__global__ void __launch_bounds__(threads<Taps>, ctas<Taps>) initial_state_kernel(Call<typename Config<T>::Real> call) {
  using Real = typename Config<T>::Real;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const Channel own(call.dims);
  if (own.sequence >= call.dims.sequences) return;
  const Run run = whole_sequence(call, own.sequence);
  const Numbers& to = call.tensors.dinitial;
  const int reach = call.dims.width - 1;
  Gradients<T, 1, Taps, gradient_group<T, Taps>> gradients(call, own.channel);
  gradients.walk(call, run, {run.first, -reach, 0}, own.channel, [&](int token, const Real(&x)[1]) {
    write_number(to, state_at(to, own.sequence, token + reach, own.channel),
                 x[0] + of_last_state(call, run, token, own.channel));
  });
}

}  // namespace

template <class T>
void launch_last_state(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  const std::int64_t ctas = state_ctas(call.dims, threads<few_taps>);
  if (ctas > 0) launch_chained("conv last_state", last_state_kernel<T>, ctas, threads<few_taps>, 0, stream, call);
}
template <class T>
void launch_initial_state(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  with_kernel<1>(1, call.dims.width, [&](auto /*size*/, auto taps) {
    const std::int64_t ctas = state_ctas(call.dims, threads<taps()>);
    if (ctas == 0) return;
    launch_chained("conv initial_state", initial_state_kernel<T, taps()>, ctas, threads<taps()>, 0, stream, call);
  });
}

#define TFLA_INSTANTIATE(T)                                                                \
  template void launch_last_state<T>(const Call<typename Config<T>::Real>&, cudaStream_t); \
  template void launch_initial_state<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda::conv
