// The step of the delta rule: a CTA has 32 columns of a state in place. A token reads what they say of its key, then
// writes the difference to its value.
#include "core/decay.h"
#include "cuda/delta/tile.cuh"
#include "cuda/device.h"

namespace tfla::cuda::delta {

namespace {

constexpr double norm_eps = 1e-6;
constexpr int step_columns = 32;
constexpr int row_groups = threads / step_columns;  // threads that share a column

template <class Real>
struct StepShared {
  double norms[2][threads];
  Real sums[row_groups][step_columns];
};

template <class Real>
__device__ __forceinline__ tfla::Decay<Real> decay_of(double log_decay) {
  if (fabs(log_decay) > tfla::Decay<Real>::near_one) return {Real{0}, static_cast<Real>(exp(log_decay))};
  return {Real{1}, static_cast<Real>(expm1(log_decay))};
}

// 1 / |q| and 1 / |k| of a token. All threads of the CTA take part.
template <class T, class Real>
__device__ __forceinline__ void norms_of(StepShared<Real>& shared, const T* q, const T* k, int dqk, Real& q_norm,
                                         Real& k_norm) {
  const int thread = static_cast<int>(threadIdx.x);
  double sums[2] = {};
  for (int d = thread; d < dqk; d += threads) {
    const auto x = static_cast<double>(widen<Real>(q[d])), y = static_cast<double>(widen<Real>(k[d]));
    sums[0] += x * x;
    sums[1] += y * y;
  }
  __syncthreads();
  shared.norms[0][thread] = sums[0];
  shared.norms[1][thread] = sums[1];
  for (int half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread >= half) continue;
    shared.norms[0][thread] += shared.norms[0][thread + half];
    shared.norms[1][thread] += shared.norms[1][thread + half];
  }
  __syncthreads();
  q_norm = static_cast<Real>(1 / sqrt(shared.norms[0][0] + norm_eps));
  k_norm = static_cast<Real>(1 / sqrt(shared.norms[1][0] + norm_eps));
}

// The sum over the threads of a column, for all of them.
template <class Real>
__device__ __forceinline__ Real sum_column(StepShared<Real>& shared, int group, int lane, Real value) {
  __syncthreads();
  shared.sums[group][lane] = value;
  __syncthreads();
  Real sum = 0;
  for (int other = 0; other < row_groups; ++other) sum += shared.sums[other][lane];
  return sum;
}

template <class Real>
__device__ __forceinline__ std::int64_t slot_of(const StepCall<Real>& step, std::int64_t row) {
  if (step.slots == nullptr) return row;
  return step.slots_are_64_bit ? static_cast<const std::int64_t*>(step.slots)[row * step.slot_stride]
                               : static_cast<const std::int32_t*>(step.slots)[row * step.slot_stride];
}

template <class T>
__global__ void __launch_bounds__(threads) step_kernel(StepCall<typename Config<T>::Real> step, int column_tiles) {
  using Real = typename Config<T>::Real;
  __shared__ StepShared<Real> shared;
  const Call<Real>& call = step.call;
  const Dims& dims = call.dims;
  const int lane = static_cast<int>(threadIdx.x) % step_columns, group = static_cast<int>(threadIdx.x) / step_columns;
  const int column = static_cast<int>(blockIdx.x % column_tiles) * step_columns + lane;
  const int head = static_cast<int>(blockIdx.x / column_tiles % dims.heads);
  const int batch = static_cast<int>(blockIdx.x / column_tiles / dims.heads);
  const bool inside = column < dims.dhv;
  const std::int64_t slot = slot_of(step, batch);
  // The host cannot see slots: any that does not exist is padding.
  if (slot < 0 || slot >= step.states) {
    for (std::int64_t t = group; inside && t < dims.tokens; t += row_groups)
      row_of<T>(call.tensors.h, batch, t, head)[column] = narrow<T>(0.0F);
    return;
  }
  Real* C = carried<Real>(step.state, slot, head, column);
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    const T* q = row_of<T>(call.tensors.q, batch, t, head / dims.group);
    const T* k = row_of<T>(call.tensors.k, batch, t, head / dims.group);
    Real q_norm = 1, k_norm = 1;
    if (call.rules.normalize_qk) norms_of<T>(shared, q, k, dims.dqk, q_norm, k_norm);
    Real recalled = 0;
    for (int d = group; inside && d < dims.dqk; d += row_groups)
      recalled += k_norm * widen<Real>(k[d]) * C[d * step.state.row];
    recalled = sum_column(shared, group, lane, recalled);
    const tfla::Decay<Real> decay = decay_of<Real>(log_decay(call, batch, t, head));
    const auto beta = static_cast<Real>(write_strength(call.rules.write, raw_beta(call, batch, t, head)));
    const Real value = inside ? widen<Real>(row_of<T>(call.tensors.v, batch, t, head)[column]) : Real{0};
    const Real written = beta * (value - (decay.whole + decay.rest) * recalled);
    const Real query_scale = static_cast<Real>(call.rules.scale) * q_norm;
    Real h = 0;
    for (int d = group; inside && d < dims.dqk; d += row_groups) {
      const Real old = C[d * step.state.row], key = k_norm * widen<Real>(k[d]);
      const Real updated = fma(decay.whole, old, fma(decay.rest, old, key * written));
      C[d * step.state.row] = updated;
      h += query_scale * widen<Real>(q[d]) * updated;
    }
    h = sum_column(shared, group, lane, h);
    if (inside && group == 0) row_of<T>(call.tensors.h, batch, t, head)[column] = narrow<T>(h);
  }
}

}  // namespace

template <class T>
void launch_step(const StepCall<typename Config<T>::Real>& step, cudaStream_t stream) {
  const Dims& dims = step.call.dims;
  const int tiles = (dims.dhv + step_columns - 1) / step_columns;
  const std::int64_t ctas = dims.batch * dims.heads * tiles;
  if (ctas == 0) return;
  launch_blocks("delta step", step_kernel<T>, ctas, threads, 0, stream, step, tiles);
}

#define TFLA_INSTANTIATE(T) template void launch_step<T>(const StepCall<typename Config<T>::Real>&, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda::delta
