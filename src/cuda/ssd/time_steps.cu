// Time steps become the gates of the scan, and the gradients of these become those of time steps. A CTA has a block of
// tokens and up to 32 heads; lanes have neighbouring heads, as dt lies in memory.
#include "cuda/arch/cluster.cuh"
#include "cuda/device.h"
#include "cuda/ssd/tokens.cuh"

namespace tfla::cuda::ssd {

namespace {

constexpr int threads = 256;

// Heads side by side: the least power of two that holds all of them, and no more than a warp.
int lanes_for(int heads) {
  int lanes = 1;
  while (lanes < heads && lanes < warp_size) lanes *= 2;
  return lanes;
}
int head_ctas(int heads, int lanes) { return (heads + lanes - 1) / lanes; }

// The head and the tokens of a thread.
struct Tokens {
  std::int64_t block, first, end;  // positions [first, end), `step` apart
  int head, step;

  __device__ Tokens(const Dims& dims, int lanes) {
    const unsigned parts = static_cast<unsigned>((dims.heads + lanes - 1) / lanes);
    const int thread = static_cast<int>(threadIdx.x);
    block = blockIdx.x / parts;
    head = static_cast<int>(blockIdx.x % parts) * lanes + thread % lanes;
    step = threads / lanes;
    first = block * ssd_token_block + thread / lanes;
    const std::int64_t last = (block + 1) * ssd_token_block, all = dims.positions();
    end = head < dims.heads ? (last < all ? last : all) : first;
  }
};

// A time step before its rule.
template <class Work, class Real>
__device__ __forceinline__ Work raw_step(const Call<Real>& call, const Position& position, int head, Work bias) {
  const Strided& dt = call.tensors.dt;
  return static_cast<Work>(read_gate(dt, call.rules.dt_type, position.batch, position.token, head)) + bias;
}

// The weight of a time step, of which log i is the logarithm. What is divided by it again has no use for a small one
// but that it is not 0. float16 operands of a tile share a power of two, and would lose one that lies far below the
// others.
template <class T, class Work>
__device__ __forceinline__ Work weight_of(Work dt) {
  constexpr auto least = static_cast<Work>(0x1p-28);
  if constexpr (std::is_same_v<T, __half>)
    return dt < least ? least : dt;  // NaN stays
  else
    return dt + static_cast<Work>(least_time_step);
}

template <class Work, class Real>
__device__ __forceinline__ Work bias_of(const Call<Real>& call, int head) {
  return call.tensors.dt_bias.data == nullptr ? Work{0} : read_number<Work>(call.tensors.dt_bias, head);
}

// D of every head and column, for a scan with an epilogue.
template <class Real>
__device__ __forceinline__ void copy_skip(const Call<Real>& call) {
  if (call.scratch.D == nullptr) return;
  const std::int64_t count = static_cast<std::int64_t>(call.dims.heads) * call.dims.P;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x; at < count;
       at += static_cast<std::int64_t>(gridDim.x) * threads)
    call.scratch.D[at] =
        read_number<Real>(call.tensors.D, static_cast<int>(at / call.dims.P), static_cast<int>(at % call.dims.P));
}

template <class T>
__global__ void __launch_bounds__(threads) time_steps_kernel(Call<typename Config<T>::Real> call, int lanes) {
  using Real = typename Config<T>::Real;
  using Work = GateWork<T>;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  copy_skip(call);
  const Tokens own(call.dims, lanes);
  if (own.first >= own.end) return;
  const auto A = read_number<Work>(call.tensors.A, own.head), bias = bias_of<Work>(call, own.head);
  const TimeStepRule<Work> rule = rule_of<Work>(call.rules);
  Position position(call.dims, own.first);
  for (std::int64_t at = own.first; at < own.end; at += own.step, position.advance(call.dims, own.step)) {
    const Work dt = rule.value(raw_step(call, position, own.head, bias));
    const bool afresh = starts_afresh(call.sequences, position);
    const std::int64_t to = at * call.dims.heads + own.head;
    call.scratch.log_f[to] = afresh ? -static_cast<Real>(INFINITY) : static_cast<Real>(A * dt);
    call.scratch.log_i[to] = static_cast<Real>(std::log(weight_of<T>(dt)));
  }
}

// The sum over the threads of a head, for the first of them. All threads of the CTA take part.
__device__ __forceinline__ double sum_head(double value, int lanes, double (&parts)[threads]) {
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  parts[thread] = value;
  for (int half = threads / 2; half >= lanes; half /= 2) {
    __syncthreads();
    if (thread < half) parts[thread] += parts[thread + half];
  }
  return parts[thread];
}

// What is small in di is divided by what is small in dt, so that this is in double.
template <class T>
__global__ void __launch_bounds__(threads) time_step_gradients_kernel(Call<typename Config<T>::Real> call, int lanes) {
  using Work = GateWork<T>;
  __shared__ double parts[threads];
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const Tokens own(call.dims, lanes);
  double of_A = 0, of_bias = 0;
  if (own.first < own.end) {
    const auto A = read_number<double>(call.tensors.A, own.head);
    const auto bias = bias_of<Work>(call, own.head);
    const TimeStepRule<Work> rule = rule_of<Work>(call.rules);
    const Packed packed(call.sequences, call.dims);
    Position position(call.dims, own.first);
    for (std::int64_t at = own.first; at < own.end; at += own.step, position.advance(call.dims, own.step)) {
      double gradient = 0;
      if (packed.has(position.token)) {
        const Work x = raw_step(call, position, own.head, bias);
        const auto dt = static_cast<double>(rule.value(x));
        const std::int64_t from = at * call.dims.heads + own.head;
        // A reset is no function of dt.
        const double df = starts_afresh(call.sequences, position) ? 0.0 : static_cast<double>(call.scratch.df[from]);
        const auto di = static_cast<double>(call.scratch.di[from]);
        gradient = (di / weight_of<T>(dt) + A * df) * static_cast<double>(rule.slope(x));
        of_A += df * dt;
        of_bias += gradient;
      }
      const Strided& ddt = call.tensors.ddt;
      const std::int64_t to = gate_at(ddt, position.batch, position.token, own.head);
      with_gate(ddt, call.rules.dt_type,
                [&](auto* data) { data[to] = narrow<std::decay_t<decltype(*data)>>(gradient); });
    }
  }
  const double sum_of_A = sum_head(of_A, lanes, parts), sum_of_bias = sum_head(of_bias, lanes, parts);
  if (threadIdx.x >= lanes || own.head >= call.dims.heads) return;
  const std::int64_t to = own.block * call.dims.heads + own.head;
  call.scratch.dA[to] = sum_of_A;
  call.scratch.ddt_bias[to] = sum_of_bias;
}

template <class Real>
std::int64_t ctas_of(const Call<Real>& call, int lanes) {
  return ceil_div(call.dims.positions(), ssd_token_block) * head_ctas(call.dims.heads, lanes);
}

}  // namespace

template <class T>
void launch_time_steps(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  const int lanes = lanes_for(call.dims.heads);
  if (call.dims.positions() == 0) return;
  launch_chained("ssd time_steps", time_steps_kernel<T>, ctas_of(call, lanes), threads, 0, stream, call, lanes);
}

template <class T>
void launch_time_step_gradients(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  const int lanes = lanes_for(call.dims.heads);
  if (call.dims.positions() == 0) return;
  launch_chained("ssd time_step_gradients", time_step_gradients_kernel<T>, ctas_of(call, lanes), threads, 0, stream,
                 call, lanes);
}

#define TFLA_INSTANTIATE(T)                                                                \
  template void launch_time_steps<T>(const Call<typename Config<T>::Real>&, cudaStream_t); \
  template void launch_time_step_gradients<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda::ssd
