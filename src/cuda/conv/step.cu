// The step: a thread has one channel of a row of the batch, and with it that channel of its state. So many threads for
// few bytes each keep memory as busy as pieces of 16 bytes would, and small batches have enough CTAs.
#include "cuda/conv/taps.cuh"
#include "cuda/device.h"

namespace tfla::cuda::conv {

namespace {

// One channel of a state: where the last inputs lie in it, and where new ones go.
struct History {
  const Numbers& state;
  std::int64_t base;    // of the channel
  std::int64_t length;  // rows
  std::int64_t begin;   // of a ring: the row of the first new input
  std::int64_t into;    // the row of the first new input that is kept
  bool ring;

  __device__ History(const StepCall& step, std::int64_t slot, std::int64_t batch, std::int64_t channel)
      : state(step.state),
        base(state_at(step.state, slot, 0, channel)),
        length(step.length),
        begin(0),
        ring(step.cache_seqlens.data != nullptr && step.length > 0) {
    const std::int64_t tokens = step.dims.tokens, kept = min(tokens, length);
    into = length - kept;
    if (!ring) return;
    const std::int64_t count = read_integer(step.cache_seqlens, batch * step.cache_seqlens.strides[0]);
    begin = count > 0 ? count % length : 0;
    into = (begin + tokens - kept) % length;
  }

  [[nodiscard]] __device__ __forceinline__ std::int64_t at(std::int64_t row) const {
    return base + row * state.strides[1];
  }
  // The input that lies `back` before the first new one.
  template <class Real>
  [[nodiscard]] __device__ __forceinline__ Real before(int back) const {
    const std::int64_t row = ring ? begin - back + (begin < back ? length : 0) : length - back;
    return read_number<Real>(state, at(row));
  }

  // Of more inputs than the state holds only the last are kept. Rows move to the front before any is lost.
  template <class Real, class T>
  __device__ __forceinline__ void update(const T* x, std::int64_t stride, std::int64_t tokens) const {
    const std::int64_t kept = min(tokens, length);
    with_gate({state.data}, state.type, [&](auto* data) {
      using State = std::decay_t<decltype(*data)>;
      for (std::int64_t row = 0; !ring && row < length - kept; ++row) data[at(row)] = data[at(row + kept)];
      std::int64_t row = into;
      for (std::int64_t t = tokens - kept; t < tokens; ++t) {
        data[at(row)] = narrow<State>(widen<Real>(x[t * stride]));
        row = row + 1 < length ? row + 1 : 0;
      }
    });
  }
};

template <class T, int Taps>
__global__ void __launch_bounds__(threads<Taps>, ctas<Taps>) step_kernel(StepCall step) {
  using Real = typename Config<T>::Real;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const Dims& dims = step.dims;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t batch = thread / dims.channels, channel = thread % dims.channels;
  if (batch >= dims.batch) return;
  const Rows &from = step.tensors.x, &to = step.tensors.y;
  const T* x = place<T>(from, batch, 0, channel);
  T* y = place<T>(to, batch, 0, channel);
  const std::int64_t slot =
      step.slots.data == nullptr ? batch : read_integer(step.slots, batch * step.slots.strides[0]);
  // The host cannot see slots: any that does not exist is padding.
  if (slot < 0 || slot >= step.states) {
    for (std::int64_t t = 0; t < dims.tokens; ++t) y[t * to.token] = narrow<T>(0.0F);
    return;
  }
  const History history(step, slot, batch, channel);
  Weights<Real, 1, Taps> weights;
  weights.read(step.tensors.weight, step.tensors.bias, channel, dims.width);
  Window<T, 1, Taps, 1> window;
#pragma unroll
  for (int k = 0; k < Taps - 1; ++k)
    window.x[k][0] = Taps - 1 - k < dims.width ? history.before<Real>(Taps - 1 - k) : Real{0};
#pragma unroll 1
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    window.load(x + t * from.token, 0, 1);
    const Real z = window.sum(weights, dims.width, 0, 0);
    y[t * to.token] = narrow<T>(dims.silu ? z * gate_of<T>(z) : z);
    window.advance();
  }
  if (history.length > 0) history.update<Real>(x, from.token, dims.tokens);
}

}  // namespace

template <class T>
void launch_step(const StepCall& step, cudaStream_t stream) {
  with_kernel<1>(1, step.dims.width, [&](auto /*size*/, auto taps) {
    const std::int64_t ctas = ceil_div(step.dims.batch * step.dims.channels, threads<taps()>);
    if (ctas > 0) launch_chained("conv step", step_kernel<T, taps()>, ctas, threads<taps()>, 0, stream, step);
  });
}

#define TFLA_INSTANTIATE(T) template void launch_step<T>(const StepCall&, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda::conv
