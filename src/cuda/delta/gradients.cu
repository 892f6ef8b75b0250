// Gradients of a tile of one value head, from C at its start, dC at its end, r and dX: all tiles side by side.
//
//   dS = scale D . (dH w^T)         E = -D . (dV w^T) for j < t               dbeta = dX . r
//   dQ = (scale qbar dH) C^T + dS K
//   dK = -(qbar dV) C^T + E K + (abar w) dC^T + dS^T Q + E^T K
//
// dg of a token is the sum of what its decay weighs, docs/delta.md: pairs of tokens on either side of it, reads of C
// from it on, writes to C' before it, and C in C'.
#include "cuda/arch/dynamic_shared.h"
#include "cuda/delta/tile.cuh"
#include "cuda/device.h"

namespace tfla::cuda::delta {

namespace {

template <class Real>
struct GradientsShared {
  static constexpr int size = Block<Real>::size;
  Slab<Real> slab;
  Gates<Real> gates;
  Real dS[Block<Real>::square];
  Real E[Block<Real>::square];
  // What decays weigh of pairs of tokens, then sums over the rows of a product by thread.
  union {
    Real pairs[Block<Real>::square];
    double parts[2][size][side];
    double all[threads];
  };
  double across[size], read[size], written[size];
  double dA_log[size], ddt_bias[size];
  double kept;
};

template <class T>
struct TileGradients {
  using Real = typename Config<T>::Real;
  using Size = Block<Real>;
  static constexpr int per = Size::per;
  const Call<Real>& call;
  GradientsShared<Real>& shared;
  const Tile& tile;
  Keys<T> q, k;
  Rows<T> dh;
  const Real *r, *dX;  // the tile's first rows
  const Real *C, *dC;
  bool zero_C, zero_dC;  // and memory is not initialised

  [[nodiscard]] __device__ __forceinline__ std::int64_t row(int t) const {
    return static_cast<std::int64_t>(t) * call.dims.heads * call.dims.dhv;
  }
  [[nodiscard]] __device__ __forceinline__ Real w(int t, int c) const { return shared.gates.beta[t] * r[row(t) + c]; }
  [[nodiscard]] __device__ __forceinline__ Real dV(int t, int c) const { return shared.gates.beta[t] * dX[row(t) + c]; }
  [[nodiscard]] __device__ __forceinline__ std::int64_t state(int d, int c) const {
    return static_cast<std::int64_t>(d) * call.dims.dhv + c;
  }
  [[nodiscard]] __device__ __forceinline__ bool has_decay() const { return call.tensors.g.data != nullptr; }

  // dS, E, and what decays weigh of every pair. A thread has the same pairs in all four products.
  __device__ __forceinline__ void scores() const {
    const int count = tile.count, dhv = call.dims.dhv, dqk = call.dims.dqk;
    const Gates<Real>& gates = shared.gates;
    const auto scale = static_cast<Real>(call.rules.scale);
    const auto written = [&](int j, int c) { return w(j, c); };
    const auto keep = [&](Real* square) {
      return [square](int, int t, int j, Real sum) { square[t * Size::pitch + j] = sum; };
    };
    {
      Sums<Real> sums;
      multiply<Along::depth, Along::depth>(sums, shared.slab, count, count, dhv, dh, written);
      sums.each(count, count, keep(shared.dS));
    }
    {
      Sums<Real> sums;
      multiply<Along::depth, Along::depth>(
          sums, shared.slab, count, count, dhv, [&](int t, int c) { return dV(t, c); }, written);
      sums.each(count, count, keep(shared.E));
    }
    each_score<T>(shared.slab, count, dqk, q, k, [&](int t, int j, Real score) {
      const int at = t * Size::pitch + j;
      const Real weight = j <= t ? scale * gates.decay(t, j) : Real{0};
      shared.pairs[at] = j < t ? shared.dS[at] * (weight * score) : Real{0};
      shared.dS[at] = j <= t ? weight * shared.dS[at] : Real{0};
    });
    each_score<T>(shared.slab, count, dqk, k, k, [&](int t, int j, Real score) {
      const int at = t * Size::pitch + j;
      const Real weight = j < t ? -gates.decay(t, j) : Real{0};
      if (j < t) shared.pairs[at] += shared.E[at] * (weight * score);
      shared.E[at] = j < t ? weight * shared.E[at] : Real{0};
    });
  }

  // across[t]: of pairs whose later token is t or follows it and whose earlier one is before t. Columns are added up
  // from the last row on, then rows.
  __device__ __forceinline__ void sum_pairs() const {
    const int thread = static_cast<int>(threadIdx.x);
    __syncthreads();
    if (thread < tile.count) {
      double sum = 0;
      for (int t = tile.count - 1; t > thread; --t) {
        sum += static_cast<double>(shared.pairs[t * Size::pitch + thread]);
        shared.pairs[t * Size::pitch + thread] = static_cast<Real>(sum);
      }
    }
    __syncthreads();
    if (thread < tile.count) {
      double sum = 0;
      for (int j = 0; j < thread; ++j) sum += static_cast<double>(shared.pairs[thread * Size::pitch + j]);
      shared.across[thread] = sum;
    }
    __syncthreads();
  }

  // gbar <C, dC>
  __device__ __forceinline__ void sum_states() const {
    double sum = 0;
    const std::int64_t numbers = static_cast<std::int64_t>(call.dims.dqk) * call.dims.dhv;
    if (!zero_C && !zero_dC) {
      for (std::int64_t at = threadIdx.x; at < numbers; at += threads)
        sum += static_cast<double>(C[at]) * static_cast<double>(dC[at]);
    }
    shared.all[threadIdx.x] = sum;
    for (int half = threads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) shared.all[threadIdx.x] += shared.all[threadIdx.x + half];
    }
    __syncthreads();
    if (threadIdx.x == 0) shared.kept = static_cast<double>(shared.gates.gbar) * shared.all[0];
    __syncthreads();
  }

  // `side` threads have a row.
  __device__ __forceinline__ void grad_write() const {
    const int lane = static_cast<int>(threadIdx.x) % side;
    for (int t = static_cast<int>(threadIdx.x) / side; t < tile.count; t += threads / side) {
      double sum = 0;
      for (int c = lane; c < call.dims.dhv; c += side)
        sum += static_cast<double>(dX[row(t) + c]) * static_cast<double>(r[row(t) + c]);
      shared.parts[0][t][lane] = sum;
    }
    __syncthreads();
    const int t = static_cast<int>(threadIdx.x);
    if (t < tile.count) {
      const std::int64_t token = tile.token + t;
      const double slope = write_slope(call.rules.write, raw_beta(call, tile.batch, token, tile.head));
      const double gradient = sum_parts(0, t) * slope;
      with_gate(call.tensors.dbeta, call.rules.beta_type, [&](auto* data) {
        data[gate_at(call.tensors.dbeta, tile.batch, token, tile.head)] =
            narrow<std::decay_t<decltype(*data)>>(gradient);
      });
    }
    __syncthreads();
  }
  [[nodiscard]] __device__ __forceinline__ double sum_parts(int which, int t) const {
    double sum = 0;
    for (int lane = 0; lane < side; ++lane) sum += shared.parts[which][t][lane];
    return sum;
  }

  // sums += factor(t) x(t, .) states^T for columns [first, first + cols) of dqk.
  template <class X>
  __device__ __forceinline__ void through(Sums<Real>& sums, const Real* states, int first, int cols, const X& x) const {
    multiply<Along::depth, Along::depth>(sums, shared.slab, tile.count, cols, call.dims.dhv, x,
                                         [&](int d, int c) { return states[state(first + d, c)]; });
  }
  // What a thread has of x_t . sums_t.
  __device__ __forceinline__ void add_dots(const Sums<Real>& sums, int first, int cols, const Keys<T>& x,
                                           double (&dots)[per]) const {
    sums.each(tile.count, cols, [&](int i, int t, int d, Real sum) {
      dots[i] += static_cast<double>(x(t, first + d)) * static_cast<double>(sum);
    });
  }
  // sums += square x, or its transpose.
  __device__ __forceinline__ void within(Sums<Real>& sums, const Real* square, bool transposed, int first, int cols,
                                         const Keys<T>& x) const {
    const auto rows = [&](int d, int j) { return x(j, first + d); };
    if (transposed) {
      multiply<Along::outer, Along::outer>(
          sums, shared.slab, tile.count, cols, tile.count, [&](int j, int t) { return square[t * Size::pitch + j]; },
          rows);
    } else {
      multiply<Along::depth, Along::outer>(
          sums, shared.slab, tile.count, cols, tile.count, [&](int t, int j) { return square[t * Size::pitch + j]; },
          rows);
    }
  }
  __device__ __forceinline__ void store(const Sums<Real>& sums, Real* to, int first, int cols) const {
    Real* rows = to + tile.row(call) * call.dims.dqk + first;
    sums.each(tile.count, cols, [&](int, int t, int d, Real sum) {
      rows[static_cast<std::int64_t>(t) * call.dims.heads * call.dims.dqk + d] = sum;
    });
  }

  __device__ __forceinline__ void grad_queries(int first, int cols, double (&read)[per]) const {
    const auto scale = static_cast<Real>(call.rules.scale);
    Sums<Real> dq;
    if (!zero_C) {
      through(dq, C, first, cols, [&](int t, int c) { return scale * shared.gates.qbar[t] * dh(t, c); });
      add_dots(dq, first, cols, q, read);
    }
    within(dq, shared.dS, false, first, cols, k);
    store(dq, call.scratch.dq, first, cols);
  }
  __device__ __forceinline__ void grad_keys(int first, int cols, double (&read)[per], double (&written)[per]) const {
    Sums<Real> dk;
    if (!zero_C) {
      through(dk, C, first, cols, [&](int t, int c) { return -shared.gates.qbar[t] * dV(t, c); });
      add_dots(dk, first, cols, k, read);
    }
    if (!zero_dC) {
      Sums<Real> stored;
      through(stored, dC, first, cols, [&](int t, int c) { return shared.gates.abar[t] * w(t, c); });
      add_dots(stored, first, cols, k, written);
#pragma unroll
      for (int i = 0; i < per; ++i) {
#pragma unroll
        for (int j = 0; j < per; ++j) dk.x[i][j] += stored.x[i][j];
      }
    }
    within(dk, shared.E, false, first, cols, k);
    within(dk, shared.dS, true, first, cols, q);
    within(dk, shared.E, true, first, cols, k);
    store(dk, call.scratch.dk, first, cols);
  }

  __device__ __forceinline__ void collect_dots(const double (&read)[per], const double (&written)[per]) const {
    const int t = static_cast<int>(threadIdx.x), lane = t % side;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < per; ++i) {
      shared.parts[0][Sums<Real>::row_of(i)][lane] = read[i];
      shared.parts[1][Sums<Real>::row_of(i)][lane] = written[i];
    }
    __syncthreads();
    if (t < tile.count) {
      shared.read[t] = sum_parts(0, t);
      shared.written[t] = sum_parts(1, t);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void grad_decay() const {
    const int t = static_cast<int>(threadIdx.x);
    if (t >= tile.count) return;
    double sum = shared.kept + shared.across[t];
    for (int later = t; later < tile.count; ++later) sum += shared.read[later];
    for (int earlier = 0; earlier < t; ++earlier) sum += shared.written[earlier];
    // Nothing passes a reset, and gates may be infinite there.
    const bool reset = is_reset(shared.gates.log_decay[t]);
    const std::int64_t token = tile.token + t;
    double gradient = reset ? 0.0 : sum, dA_log = 0, ddt_bias = 0;
    const Tensors& tensors = call.tensors;
    if (tensors.A_log.data != nullptr && !reset) {
      const double bias =
          tensors.dt_bias.data == nullptr ? 0.0 : read_gate(tensors.dt_bias, call.rules.dt_bias_type, 0, 0, tile.head);
      const double x = read_gate(tensors.g, call.rules.g_type, tile.batch, token, tile.head) + bias;
      const double rate = exp(read_gate(tensors.A_log, call.rules.A_log_type, 0, 0, tile.head));
      dA_log = -rate * softplus(x) * gradient;
      gradient *= -rate * sigmoid(x);
      ddt_bias = gradient;
    }
    shared.dA_log[t] = dA_log;
    shared.ddt_bias[t] = ddt_bias;
    with_gate(tensors.dg, call.rules.g_type, [&](auto* data) {
      data[gate_at(tensors.dg, tile.batch, token, tile.head)] = narrow<std::decay_t<decltype(*data)>>(gradient);
    });
  }
};

template <class T>
__global__ void __launch_bounds__(threads) gradients_kernel(Call<typename Config<T>::Real> call) {
  using Real = typename Config<T>::Real;
  TFLA_DYNAMIC_SHARED(16, memory);
  auto& shared = *reinterpret_cast<GradientsShared<Real>*>(memory);
  const Dims& dims = call.dims;
  const std::int64_t number = blockIdx.x / dims.heads;
  const int head = static_cast<int>(blockIdx.x % dims.heads), qk_head = head / dims.group;
  const Sequence sequence = sequence_at(call, sequence_of_tile(call, number));
  const std::int64_t index = number - sequence.first_tile, tiles = tiles_of(call, sequence);
  const bool fused = call.tensors.A_log.data != nullptr;
  const std::int64_t sums_at = number * dims.heads + head;
  if (index < 0 || index >= tiles) {
    if (threadIdx.x == 0) call.scratch.dA_log[sums_at] = call.scratch.ddt_bias[sums_at] = 0;
    return;
  }
  const Tile tile = tile_of(call, sequence, head, index);
  load_gates(call, tile, shared.gates);
  const TileGradients<T> work{call,
                              shared,
                              tile,
                              {{call.tensors.q, tile, qk_head}, shared.gates.q_norm},
                              {{call.tensors.k, tile, qk_head}, shared.gates.k_norm},
                              {call.tensors.dh, tile, head},
                              call.scratch.residuals + tile.row(call) * dims.dhv,
                              call.scratch.grad_residuals + tile.row(call) * dims.dhv,
                              state_at(call.scratch.states, dims, number, head, 0),
                              state_at(call.scratch.grad_states, dims, number, head, 0),
                              index == 0 && call.carried.initial.data == nullptr,
                              index == tiles - 1 && call.carried.dlast.data == nullptr};
  work.scores();
  if (work.has_decay()) {
    work.sum_pairs();
    work.sum_states();
  }
  __syncthreads();
  work.grad_write();
  double read[Block<Real>::per] = {}, written[Block<Real>::per] = {};
  for (int first = 0; first < dims.dqk; first += Block<Real>::size) {
    const int cols = min(Block<Real>::size, dims.dqk - first);
    work.grad_queries(first, cols, read);
    work.grad_keys(first, cols, read, written);
  }
  if (!work.has_decay()) return;
  work.collect_dots(read, written);
  work.grad_decay();
  if (!fused) return;
  __syncthreads();
  if (threadIdx.x > 0) return;
  double dA_log = 0, ddt_bias = 0;
  for (int t = 0; t < tile.count; ++t) {
    dA_log += shared.dA_log[t];
    ddt_bias += shared.ddt_bias[t];
  }
  call.scratch.dA_log[sums_at] = dA_log;
  call.scratch.ddt_bias[sums_at] = ddt_bias;
}

}  // namespace

template <class T>
void launch_gradients(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  using Real = typename Config<T>::Real;
  const std::int64_t ctas = call.dims.tiles * call.dims.heads;
  if (ctas == 0) return;
  launch_blocks("delta gradients", gradients_kernel<T>, ctas, threads, static_cast<int>(sizeof(GradientsShared<Real>)),
                stream, call);
}

#define TFLA_INSTANTIATE(T) template void launch_gradients<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda::delta
