// What surrounds the tiles of the delta rule: norms of q and k, zeros in padding, and sums over heads and tokens.
#include "cuda/delta/tile.cuh"
#include "cuda/device.h"

namespace tfla::cuda::delta {

namespace {

constexpr double norm_eps = 1e-6;
constexpr int rows_of_cta = threads / side;  // rows of q or k, `side` threads each
constexpr int padding_tokens = 64;           // of a CTA

// A row of q or k: one token and head.
template <class Real>
struct Row {
  std::int64_t number;  // (batch * tokens + token) * qk_heads + head
  int batch, head;
  std::int64_t token;
  bool exists;

  __device__ explicit Row(const Dims& dims) {
    number = static_cast<std::int64_t>(blockIdx.x) * rows_of_cta + threadIdx.x / side;
    exists = number < dims.batch * dims.tokens * dims.qk_heads;
    head = static_cast<int>(number % dims.qk_heads);
    token = number / dims.qk_heads % dims.tokens;
    batch = static_cast<int>(number / dims.qk_heads / dims.tokens);
  }
};

// The sum over the threads of a row. All threads of the CTA take part.
__device__ __forceinline__ double sum_row(double value) {
  __shared__ double parts[rows_of_cta][side];
  const int row = static_cast<int>(threadIdx.x) / side, lane = static_cast<int>(threadIdx.x) % side;
  __syncthreads();
  parts[row][lane] = value;
  __syncthreads();
  double sum = 0;
  for (int other = 0; other < side; ++other) sum += parts[row][other];
  return sum;
}

template <class T>
__global__ void __launch_bounds__(threads) norms_kernel(Call<typename Config<T>::Real> call) {
  using Real = typename Config<T>::Real;
  const Row<Real> row(call.dims);
  const auto norm = [&](const Strided& tensor, Real* to) {
    double sum = 0;
    if (row.exists) {
      const T* x = row_of<T>(tensor, row.batch, row.token, row.head);
      for (int d = static_cast<int>(threadIdx.x) % side; d < call.dims.dqk; d += side) {
        const auto value = static_cast<double>(widen<Real>(x[d]));
        sum += value * value;
      }
    }
    sum = sum_row(sum);
    if (row.exists && threadIdx.x % side == 0) to[row.number] = static_cast<Real>(1 / sqrt(sum + norm_eps));
  };
  norm(call.tensors.q, call.scratch.q_norm);
  norm(call.tensors.k, call.scratch.k_norm);
}

// Tokens before the first sequence and behind the last one.
template <class Real>
__device__ __forceinline__ bool is_padding(const Call<Real>& call, std::int64_t token) {
  return call.cu_seqlens != nullptr && (token < boundary(call, 0) || token >= boundary(call, call.dims.sequences));
}

template <class T>
__global__ void __launch_bounds__(threads) padding_kernel(Call<typename Config<T>::Real> call) {
  const Dims& dims = call.dims;
  const Tensors& tensors = call.tensors;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * padding_tokens;
  const auto clear_gate = [&](const Strided& gate, GateType type, std::int64_t token) {
    if (gate.data == nullptr) return;
    for (int head = static_cast<int>(threadIdx.x); head < dims.heads; head += threads) {
      with_gate(gate, type,
                [&](auto* data) { data[gate_at(gate, 0, token, head)] = narrow<std::decay_t<decltype(*data)>>(0.0); });
    }
  };
  for (std::int64_t token = begin; token < begin + padding_tokens && token < dims.tokens; ++token) {
    if (!is_padding(call, token)) continue;
    for (int head = 0; head < dims.heads; ++head) {
      for (const Strided& rows : {tensors.h, tensors.dv}) {
        if (rows.data == nullptr) continue;
        T* row = row_of<T>(rows, 0, token, head);
        for (int c = static_cast<int>(threadIdx.x); c < dims.dhv; c += threads) row[c] = narrow<T>(0.0F);
      }
    }
    clear_gate(tensors.dbeta, call.rules.beta_type, token);
    clear_gate(tensors.dg, call.rules.g_type, token);
  }
}

// dq or dk of a row: the value heads of its group in their order, then through the norm, x / |x|.
template <class T, class Real>
__device__ __forceinline__ void sum_group(const Call<Real>& call, const Row<Real>& row, const Strided& input,
                                          const Strided& output, const Real* norms, const Real* parts) {
  const Dims& dims = call.dims;
  const int lane = static_cast<int>(threadIdx.x) % side;
  const bool padding = row.exists && is_padding(call, row.token);
  const Real* first = parts + row.number * dims.group * dims.dqk;
  const auto gradient = [&](int d) {
    Real sum = 0;
    for (int head = 0; head < dims.group; ++head) sum += first[static_cast<std::int64_t>(head) * dims.dqk + d];
    return sum;
  };
  Real norm = 1, along = 0;
  const T* x = row.exists ? row_of<T>(input, row.batch, row.token, row.head) : nullptr;
  if (call.rules.normalize_qk) {
    double dot = 0;
    if (row.exists && !padding) {
      norm = norms[row.number];
      for (int d = lane; d < dims.dqk; d += side)
        dot += static_cast<double>(norm * widen<Real>(x[d])) * static_cast<double>(gradient(d));
    }
    along = static_cast<Real>(sum_row(dot));
  }
  if (!row.exists) return;
  T* to = row_of<T>(output, row.batch, row.token, row.head);
  for (int d = lane; d < dims.dqk; d += side) {
    if (padding) {
      to[d] = narrow<T>(0.0F);
    } else if (call.rules.normalize_qk) {
      to[d] = narrow<T>(norm * (gradient(d) - along * (norm * widen<Real>(x[d]))));
    } else {
      to[d] = narrow<T>(gradient(d));
    }
  }
}

template <class T>
__global__ void __launch_bounds__(threads) sum_heads_kernel(Call<typename Config<T>::Real> call) {
  const Row<typename Config<T>::Real> row(call.dims);
  sum_group<T>(call, row, call.tensors.q, call.tensors.dq, call.scratch.q_norm, call.scratch.dq);
  sum_group<T>(call, row, call.tensors.k, call.tensors.dk, call.scratch.k_norm, call.scratch.dk);
}

// A CTA has a head.
template <class Real>
__global__ void __launch_bounds__(threads) sum_tokens_kernel(Call<Real> call) {
  __shared__ double parts[threads];
  const int head = static_cast<int>(blockIdx.x);
  const auto add_up = [&](const double* sums, const Strided& to, GateType type) {
    if (to.data == nullptr) return;
    double sum = 0;
    for (std::int64_t tile = threadIdx.x; tile < call.dims.tiles; tile += threads)
      sum += sums[tile * call.dims.heads + head];
    __syncthreads();
    parts[threadIdx.x] = sum;
    for (int half = threads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    if (threadIdx.x > 0) return;
    with_gate(to, type, [&](auto* data) { data[head * to.head] = narrow<std::decay_t<decltype(*data)>>(parts[0]); });
  };
  add_up(call.scratch.dA_log, call.tensors.dA_log, call.rules.A_log_type);
  add_up(call.scratch.ddt_bias, call.tensors.ddt_bias, call.rules.dt_bias_type);
}

[[nodiscard]] std::int64_t row_ctas(const Dims& dims) {
  return (dims.batch * dims.tokens * dims.qk_heads + rows_of_cta - 1) / rows_of_cta;
}

}  // namespace

template <class T>
void launch_norms(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  if (row_ctas(call.dims) > 0)
    launch_blocks("delta norms", norms_kernel<T>, row_ctas(call.dims), threads, 0, stream, call);
}
template <class T>
void launch_padding(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  const std::int64_t ctas = (call.dims.tokens + padding_tokens - 1) / padding_tokens;
  if (ctas > 0) launch_blocks("delta padding", padding_kernel<T>, ctas, threads, 0, stream, call);
}
template <class T>
void launch_sum_heads(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  if (row_ctas(call.dims) > 0)
    launch_blocks("delta sum_heads", sum_heads_kernel<T>, row_ctas(call.dims), threads, 0, stream, call);
}
template <class Real>
void launch_sum_tokens(const Call<Real>& call, cudaStream_t stream) {
  if (call.dims.heads > 0)
    launch_blocks("delta sum_tokens", sum_tokens_kernel<Real>, call.dims.heads, threads, 0, stream, call);
}

#define TFLA_INSTANTIATE(T)                                                             \
  template void launch_norms<T>(const Call<typename Config<T>::Real>&, cudaStream_t);   \
  template void launch_padding<T>(const Call<typename Config<T>::Real>&, cudaStream_t); \
  template void launch_sum_heads<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE
template void launch_sum_tokens(const Call<float>&, cudaStream_t);
template void launch_sum_tokens(const Call<double>&, cudaStream_t);

}  // namespace tfla::cuda::delta
