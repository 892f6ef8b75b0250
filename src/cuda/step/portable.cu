// Stage `step`: tokens one after another on a state in place. The scalars of each token first (gates, m, n, 1 / den),
// then the matrix state in tiles of columns at memory speed: every element read and written once per token.
#include "cuda/launch.h"
#include "cuda/step/portable.cuh"

namespace tfla::cuda {

namespace {

constexpr int scalars_threads = 128;
constexpr int step_warps = step_threads / warp_size;
constexpr int start_rows = 2 * step_warps;  // rows of a state that a CTA of start_states takes

template <class T>
__global__ void __launch_bounds__(scalars_threads) step_scalars_kernel(StepCall<typename Config<T>::Real> step) {
  using Real = typename Config<T>::Real;
  const Call<Real>& call = step.call;
  const std::int64_t index = blockIdx.x / call.dims.heads;
  const int head = static_cast<int>(blockIdx.x % call.dims.heads);
  const Row<Real> row(step, index);
  if (!row.has_state(step)) return;
  Real* n = static_cast<Real*>(step.n.data) + row.slot * step.n.sequence + head * step.n.head;
  Real* m_state = static_cast<Real*>(step.m.data) + row.slot * step.m.sequence + head * step.m.head;
  __shared__ double parts[scalars_threads / warp_size];
  double m = finite_max_state(*m_state);
  for (int t = 0; t < row.length; ++t) {
    double f, i;
    log_gates<GateWork<T>>(call, row.batch, row.token + t, head, f, i);
    const double next = call.rules.family.has_max_state ? static_cast<double>(static_cast<Real>(fmax(f + m, i))) : 0.0;
    const Decay<Real> decay = decay_of<Real>(f + m - next);
    const auto weight = static_cast<Real>(exp(i - next));
    m = next;
    const T* q = row_of<T>(call.tensors.q, row.batch, row.token + t, head / call.dims.group);
    const T* k = row_of<T>(call.tensors.k, row.batch, row.token + t, head / call.dims.group);
    double sum = 0;
    for (int r = threadIdx.x; r < call.dims.dqk; r += scalars_threads) {
      const Real updated = decayed(decay, n[r], weight * widen<Real>(k[r]));
      n[r] = updated;
      sum += static_cast<double>(widen<Real>(q[r]) * updated);
    }
#pragma unroll
    for (int offset = warp_size / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, offset);
    if (threadIdx.x % warp_size == 0) parts[threadIdx.x / warp_size] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      double total = 0;
      for (double part : parts) total += part;
      const Denominator<double> den(total * call.rules.scale, exp(-m), call.rules.eps);
      const std::int64_t at = head * call.dims.all_tokens() + row.packed + t;
      step.decay[at] = decay;
      step.weight[at] = weight;
      call.gates.inverse[at] = call.rules.normalized ? static_cast<Real>(den.inverse) : Real{1};
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *m_state = static_cast<Real>(m);
}

// ColumnGroups threads work side by side on a row of C, the others on the rows below: 32 for long stretches of memory,
// 8 for more CTAs where there are few states.
template <class T, int ColumnGroups>
__global__ void __launch_bounds__(step_threads)
    step_state_kernel(StepCall<typename Config<T>::Real> step, int column_tiles, bool wide) {
  using Real = typename Config<T>::Real;
  constexpr int piece = Piece<Real>::size;
  constexpr int width = ColumnGroups * piece;
  constexpr int row_groups = step_threads / ColumnGroups;
  const Call<Real>& call = step.call;
  std::int64_t unit = blockIdx.x;
  const int first_column = static_cast<int>(unit % column_tiles) * width;
  const int column = first_column + threadIdx.x % ColumnGroups * piece;
  unit /= column_tiles;
  const int head = static_cast<int>(unit % call.dims.heads);
  const Row<Real> row(step, unit / call.dims.heads);
  if (!row.has_state(step))
    return row.template clear_outputs<T>(call, head, first_column, min(width, call.dims.dhv - first_column));
  const int count = min(piece, call.dims.dhv - column);
  const int first = threadIdx.x / ColumnGroups;
  Real* C = static_cast<Real*>(step.C.data) + row.slot * step.C.sequence + head * step.C.head + column;
  __shared__ Real sums[step_warps][width];

  for (int t = 0; t < row.length; ++t) {
    const std::int64_t at = head * call.dims.all_tokens() + row.packed + t;
    const Decay<Real> decay = step.decay[at];
    const Real weight = step.weight[at];
    const T* q = row_of<T>(call.tensors.q, row.batch, row.token + t, head / call.dims.group);
    const T* k = row_of<T>(call.tensors.k, row.batch, row.token + t, head / call.dims.group);
    const T* v = row_of<T>(call.tensors.v, row.batch, row.token + t, head) + column;
    Real value[piece], out[piece] = {};
#pragma unroll
    for (int e = 0; e < piece; ++e) value[e] = e < count ? widen<Real>(v[e]) : Real{0};
    if (count > 0) {
#pragma unroll 8
      for (int r = first; r < call.dims.dqk; r += row_groups) {
        Piece<Real> c;
        c.load(C + r * step.C.row, count, wide);
        const Real input = weight * widen<Real>(k[r]), query = widen<Real>(q[r]);
#pragma unroll
        for (int e = 0; e < piece; ++e) {
          c.x[e] = decayed(decay, c.x[e], input * value[e]);
          out[e] += query * c.x[e];
        }
        c.store(C + r * step.C.row, count, wide);
      }
    }
    sum_rows<ColumnGroups>(out, sums);
    __syncthreads();
    const int c = first_column + static_cast<int>(threadIdx.x);
    if (threadIdx.x < width && c < call.dims.dhv) {
      Real total = 0;
      for (const auto& warp : sums) total += warp[threadIdx.x];
      row_of<T>(call.tensors.h, row.batch, row.token + t, head)[c] =
          narrow<T>(static_cast<Real>(call.rules.scale) * total * call.gates.inverse[at]);
    }
    __syncthreads();
  }
}

// A warp has a row of C at a time; the first CTA of a state has its n and m. `parts` CTAs share a state.
template <class Real>
__global__ void start_states_kernel(StepCall<Real> step, int parts) {
  const Call<Real>& call = step.call;
  if (call.packing.cu_seqlens != nullptr) clear_padding(call, blockIdx.x, gridDim.x);
  const std::int64_t unit = blockIdx.x / parts, sequence = unit / call.dims.heads;
  const int head = static_cast<int>(unit % call.dims.heads), part = static_cast<int>(blockIdx.x % parts);
  const auto start = [&](const StridedState& from, const StridedState& to, int row, int first, int count, int stride) {
    if (to.data == nullptr) return;
    const std::int64_t source = sequence * from.sequence + head * from.head + row * from.row;
    const std::int64_t target = sequence * to.sequence + head * to.head + row * to.row;
    for (int c = first; c < count; c += stride)
      static_cast<Real*>(to.data)[target + c] =
          from.data == nullptr ? Real{0} : static_cast<const Real*>(from.data)[source + c];
  };
  const int thread = static_cast<int>(threadIdx.x), warp = thread / warp_size;
  for (int row = part * start_rows + warp; row < min((part + 1) * start_rows, call.dims.dqk); row += step_warps)
    start(call.carried.C0, step.C, row, thread % warp_size, call.dims.dhv, warp_size);
  if (part > 0) return;
  start(call.carried.n0, step.n, 0, thread, call.dims.dqk, step_threads);
  start(call.carried.m0, step.m, 0, thread, 1, step_threads);
}

}  // namespace

template <class Real>
void launch_start_states(const StepCall<Real>& step, cudaStream_t stream) {
  const int parts = step.C.data == nullptr ? 1 : (step.call.dims.dqk + start_rows - 1) / start_rows;
  const std::int64_t ctas = step.call.dims.sequences * step.call.dims.heads * parts;
  if (ctas == 0) return;
  launch_blocks("start_states", start_states_kernel<Real>, ctas, step_threads, 0, stream, step, parts);
}
template void launch_start_states(const StepCall<float>&, cudaStream_t);
template void launch_start_states(const StepCall<double>&, cudaStream_t);

template <class T>
void launch_step(const StepCall<typename Config<T>::Real>& step, int columns, cudaStream_t stream) {
  using Real = typename Config<T>::Real;
  const Call<Real>& call = step.call;
  const std::int64_t units = call.dims.sequences * call.dims.heads;
  if (units == 0) return;
  const bool wide = state_is_wide(step);
  const int tiles = (call.dims.dhv + columns - 1) / columns;
  launch_blocks("step_scalars", step_scalars_kernel<T>, units, scalars_threads, 0, stream, step);
  launch_blocks("step_state", columns == 32 ? step_state_kernel<T, 8> : step_state_kernel<T, 32>, units * tiles,
                step_threads, 0, stream, step, tiles, wide);
}

#define TFLA_INSTANTIATE(T) template void launch_step<T>(const StepCall<typename Config<T>::Real>&, int, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda
