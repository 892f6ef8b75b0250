// Stage `denominators`: den = max(|q.n|, exp(-m)) + eps of every token. A warp has a chunk and a head, and carries n in
// double from token to token, from its value at the chunk's start: q.n often cancels to a small part of its terms, and
// h is divided by it.
#include "cuda/common/runs.cuh"
#include "cuda/launch.h"

namespace tfla::cuda {

namespace {

constexpr int threads = 128;
constexpr int most_in_registers = 8;  // elements of n per lane: dqk up to 256

// The n of one head. A lane has every 32nd element, in registers, or for large dqk in scratch.
template <bool InRegisters>
struct NormState {
  double own[most_in_registers];
  double* memory;

  __device__ double& at(int e) { return InRegisters ? own[e] : memory[warp_size * e]; }
};

template <class T, bool InRegisters>
__global__ void __launch_bounds__(threads) denominators_kernel(Call<typename Config<T>::Real> call) {
  using Real = typename Config<T>::Real;
  using Norm = typename Config<T>::Norm;
  const std::int64_t unit = (blockIdx.x * static_cast<std::int64_t>(threads) + threadIdx.x) / warp_size;
  if (unit >= call.dims.chunk_count * call.dims.heads) return;
  const Chunk chunk = call.packing.chunks[unit / call.dims.heads];
  const int head = static_cast<int>(unit % call.dims.heads);
  const int lane = threadIdx.x % warp_size;
  const std::int64_t at = call.dims.vector(chunk, head);
  const int elements = InRegisters ? most_in_registers : (call.dims.dqk + warp_size - 1) / warp_size;

  NormState<InRegisters> n;
  n.memory = call.stored.n_work + unit * call.dims.dqk + lane;
#pragma unroll
  for (int e = 0; e < elements; ++e) {
    const int r = lane + warp_size * e;
    if (r < call.dims.dqk)
      n.at(e) = static_cast<double>(static_cast<const Norm*>(call.stored.n)[unit * call.dims.dqk + r]);
  }

  double m_above = call.gates.m_start[unit];
  for (int base = 0; base < chunk.length; base += warp_size) {
    // Each lane makes the scalars of one token from the gates themselves. m and log f are small numbers, their sums
    // over a long chunk are not, and the rounding of those would show in q.n.
    const int t = base + lane;
    const bool valid = t < chunk.length;
    double log_f = 0, log_i = -INFINITY;
    if (valid) log_gates<GateWork<T>>(call, chunk.batch, chunk.token + t, head, log_f, log_i);
    const bool begins = (resets(call, chunk, unit / call.dims.heads, base) >> lane & 1) != 0;
    const double own_f = log_f;
    if (begins) log_f += reset_log_forget;
    const double b = warp_scan(log_f, [](double x, double y) { return x + y; });
    const double top =
        warp_scan(begins ? fmax(log_i, own_f) - b : log_i - b, [](double x, double y) { return fmax(x, y); });
    const double m = call.rules.family.has_max_state ? b + fmax(m_above, top) : 0.0;
    const double m_before = __shfl_up_sync(0xFFFFFFFFU, m, 1);
    const double decay = exp(log_f + (lane == 0 ? m_above : m_before) - m);
    const double weight = exp(log_i - m);
    m_above = __shfl_sync(0xFFFFFFFFU, m, warp_size - 1);
    double qn = 0;
    for (int s = 0; s < min(warp_size, chunk.length - base); ++s) {
      const double keep = __shfl_sync(0xFFFFFFFFU, decay, s), add = __shfl_sync(0xFFFFFFFFU, weight, s);
      const T* q = row_of<T>(call.tensors.q, chunk.batch, chunk.token + base + s, head / call.dims.group);
      const T* k = row_of<T>(call.tensors.k, chunk.batch, chunk.token + base + s, head / call.dims.group);
      double sum = 0;
#pragma unroll
      for (int e = 0; e < elements; ++e) {
        const int r = lane + warp_size * e;
        if (r >= call.dims.dqk) continue;
        n.at(e) = keep * n.at(e) + add * static_cast<double>(widen<Real>(k[r]));
        sum += static_cast<double>(widen<Real>(q[r])) * n.at(e);
      }
#pragma unroll
      for (int offset = warp_size / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, offset);
      if (lane == s) qn = call.rules.scale * sum;
    }
    if (!valid) continue;
    const Denominator<double> den(qn, exp(-m), call.rules.eps);
    call.gates.inverse[at + t] = static_cast<Real>(den.inverse);
    call.gates.slope[at + t] = static_cast<Real>(den.slope);
  }
}

template <class Real>
__global__ void __launch_bounds__(threads) ones_kernel(Real* vector, std::int64_t count) {
  const std::int64_t index = blockIdx.x * static_cast<std::int64_t>(threads) + threadIdx.x;
  if (index < count) vector[index] = 1;
}

}  // namespace

template <class T>
void launch_denominators(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  const auto blocks = [](std::int64_t count) { return (count + threads - 1) / threads; };
  if (!call.rules.normalized) {
    const std::int64_t count = call.dims.all_tokens() * call.dims.heads;
    if (count > 0)
      launch_blocks("ones", ones_kernel<typename Config<T>::Real>, blocks(count), threads, 0, stream,
                    call.gates.inverse, count);
    return;
  }
  const std::int64_t warps = call.dims.chunk_count * call.dims.heads;
  if (warps == 0) return;
  const bool in_registers = call.dims.dqk <= warp_size * most_in_registers;
  launch_blocks("denominators", in_registers ? denominators_kernel<T, true> : denominators_kernel<T, false>,
                blocks(warps * warp_size), threads, 0, stream, call);
}

#define TFLA_INSTANTIATE(T) template void launch_denominators<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda
