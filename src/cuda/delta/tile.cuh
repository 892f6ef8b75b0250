// What the portable kernels of the delta rule share: the gates of a tile, its scores, and its triangular system.
#pragma once

#include "cuda/delta/product.cuh"
#include "cuda/delta/tokens.cuh"

namespace tfla::cuda::delta {

// exp of a difference of sums in double. The rest of rounding the exponent to float goes into the result.
template <class Real>
__device__ __forceinline__ Real exp_of(double x) {
  if constexpr (sizeof(Real) == 8) {
    return exp(x);
  } else {
    const auto high = static_cast<float>(x);
    const float whole = expf(high);
    const auto rest = static_cast<float>(x - static_cast<double>(high));
    return isfinite(high) ? fmaf(whole, rest, whole) : whole;
  }
}

// Scalars of the tokens of a tile, in shared memory.
template <class Real>
struct Gates {
  static constexpr int size = Block<Real>::size;
  double log_decay[size];
  double b[size];  // sum of the log decays since the tile began
  Real beta[size];
  Real qbar[size];
  Real abar[size];
  Real q_norm[size], k_norm[size];  // 1 where q and k are not normalised
  Real gbar;

  // What is left at token t of what token j wrote.
  [[nodiscard]] __device__ __forceinline__ Real decay(int t, int j) const { return exp_of<Real>(b[t] - b[j]); }
};

// Begins and ends with a barrier.
template <class Real>
__device__ void load_gates(const Call<Real>& call, const Tile& tile, Gates<Real>& gates) {
  const int t = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (t < tile.count) {
    const std::int64_t token = tile.token + t;
    gates.beta[t] = static_cast<Real>(write_strength(call.rules.write, raw_beta(call, tile.batch, token, tile.head)));
    gates.log_decay[t] = log_decay(call, tile.batch, token, tile.head);
    const std::int64_t norm =
        (tile.batch * call.dims.tokens + token) * call.dims.qk_heads + tile.head / call.dims.group;
    gates.q_norm[t] = call.rules.normalize_qk ? call.scratch.q_norm[norm] : Real{1};
    gates.k_norm[t] = call.rules.normalize_qk ? call.scratch.k_norm[norm] : Real{1};
  }
  __syncthreads();
  if (t < tile.count) {
    double b = 0, all = 0;
    for (int j = 0; j < tile.count; ++j) {
      all += gates.log_decay[j];
      if (j == t) b = all;
    }
    gates.b[t] = b;
    gates.qbar[t] = exp_of<Real>(b);
    gates.abar[t] = exp_of<Real>(all - b);
    if (t == 0) gates.gbar = exp_of<Real>(all);
  }
  __syncthreads();
}

// Rows of q, k, v or dh of a tile, from column `first` on.
template <class T>
struct Rows {
  using Real = typename Config<T>::Real;
  const T* data;
  std::int64_t stride;

  __device__ Rows(const Strided& tensor, const Tile& tile, int head, int first = 0)
      : data(row_of<T>(tensor, tile.batch, tile.token, head) + first), stride(tensor.token) {}
  __device__ __forceinline__ Real operator()(int t, int col) const { return widen<Real>(data[t * stride + col]); }
};

// q or k of a tile as the rule sees them: normalised where the options say so.
template <class T>
struct Keys {
  using Real = typename Config<T>::Real;
  Rows<T> rows;
  const Real* norms;

  __device__ __forceinline__ Real operator()(int t, int d) const { return norms[t] * rows(t, d); }
};

// The scores of a tile: store(t, j, x_t.k_j) for every pair.
template <class T, class Real, class Store>
__device__ __forceinline__ void each_score(Slab<Real>& slab, int count, int dqk, const Keys<T>& x, const Keys<T>& k,
                                           const Store& store) {
  Sums<Real> sums;
  multiply<Along::depth, Along::depth>(sums, slab, count, count, dqk, x, k);
  sums.each(count, count, [&](int, int t, int j, Real score) { store(t, j, score); });
}

// L_tj = D_tj k_t.k_j for j < t, zero elsewhere.
template <class T, class Real>
__device__ __forceinline__ void key_scores(Slab<Real>& slab, const Gates<Real>& gates, int count, int dqk,
                                           const Keys<T>& k, Real* square) {
  each_score<T>(slab, count, dqk, k, k, [&](int t, int j, Real score) {
    square[t * Block<Real>::pitch + j] = j < t ? gates.decay(t, j) * score : Real{0};
  });
}

// P_tj = scale D_tj q_t.k_j for j <= t, zero elsewhere.
template <class T, class Real>
__device__ __forceinline__ void query_scores(Slab<Real>& slab, const Gates<Real>& gates, int count, int dqk, Real scale,
                                             const Keys<T>& q, const Keys<T>& k, Real* square) {
  each_score<T>(slab, count, dqk, q, k, [&](int t, int j, Real score) {
    square[t * Block<Real>::pitch + j] = j <= t ? scale * gates.decay(t, j) * score : Real{0};
  });
}

inline constexpr int solve_rows = 16;  // that a thread solves one by one; others take from them side by side

// x_t = x_t - sum over j < t of L_tj beta_j x_j, from the top. x becomes beta x; store(t, column, x_t) sees x.
// Begins with a barrier.
template <class Real, class Store>
__device__ __forceinline__ void solve(const Real* L, const Real* beta, Real* x, int count, int width,
                                      const Store& store) {
  constexpr int pitch = Block<Real>::pitch, size = Block<Real>::size;
  const int thread = static_cast<int>(threadIdx.x);
  for (int begin = 0; begin < count; begin += solve_rows) {
    const int end = min(begin + solve_rows, count);
    __syncthreads();
    if (thread < width) {
      for (int t = begin; t < end; ++t) {
        Real value = x[t * pitch + thread];
        for (int j = begin; j < t; ++j) value -= L[t * pitch + j] * x[j * pitch + thread];
        store(t, thread, value);
        x[t * pitch + thread] = beta[t] * value;
      }
    }
    __syncthreads();
    const int column = thread % size;
    for (int t = end + thread / size; column < width && t < count; t += threads / size) {
      Real taken = 0;
      for (int j = begin; j < end; ++j) taken += L[t * pitch + j] * x[j * pitch + column];
      x[t * pitch + column] -= taken;
    }
  }
}

// The transposed system, from the bottom: x_j = x_j - sum over t > j of L_tj beta_t x_t.
template <class Real, class Store>
__device__ __forceinline__ void solve_transposed(const Real* L, const Real* beta, Real* x, int count, int width,
                                                 const Store& store) {
  constexpr int pitch = Block<Real>::pitch, size = Block<Real>::size;
  const int thread = static_cast<int>(threadIdx.x);
  for (int begin = (count - 1) / solve_rows * solve_rows; begin >= 0; begin -= solve_rows) {
    const int end = min(begin + solve_rows, count);
    __syncthreads();
    if (thread < width) {
      for (int j = end - 1; j >= begin; --j) {
        Real value = x[j * pitch + thread];
        for (int t = j + 1; t < end; ++t) value -= L[t * pitch + j] * x[t * pitch + thread];
        store(j, thread, value);
        x[j * pitch + thread] = beta[j] * value;
      }
    }
    __syncthreads();
    const int column = thread % size;
    for (int j = thread / size; column < width && j < begin; j += threads / size) {
      Real taken = 0;
      for (int t = begin; t < end; ++t) taken += L[t * pitch + j] * x[t * pitch + column];
      x[j * pitch + column] -= taken;
    }
  }
}

// A state in scratch: [dqk,dhv] without gaps, from a CTA's first column on.
template <class Real>
__device__ __forceinline__ Real* state_at(Real* states, const Dims& dims, std::int64_t number, int head, int first) {
  return states + (number * dims.heads + head) * dims.dqk * dims.dhv + first;
}

// f(row, column) for the columns of a state that a CTA has; a thread has the same ones every time.
template <class F>
__device__ __forceinline__ void each_of_state(int dqk, int width, int size, const F& f) {
  const int column = static_cast<int>(threadIdx.x) % size;
  for (int d = static_cast<int>(threadIdx.x) / size; column < width && d < dqk; d += threads / size) f(d, column);
}

template <class Real>
__device__ __forceinline__ Real* carried(const StridedState& state, std::int64_t sequence, int head, int first) {
  return static_cast<Real*>(state.data) + sequence * state.sequence + head * state.head + first;
}

// The unit of work of a CTA that has some columns of one head of one sequence.
template <class Real>
struct Panel {
  std::int64_t sequence;
  int head;
  int first, width;  // columns of dhv

  __device__ Panel(const Dims& dims, std::int64_t unit) {
    const int panels = (dims.dhv + Block<Real>::size - 1) / Block<Real>::size;
    first = static_cast<int>(unit % panels) * Block<Real>::size;
    width = min(Block<Real>::size, dims.dhv - first);
    head = static_cast<int>(unit / panels % dims.heads);
    sequence = unit / panels / dims.heads;
  }
};

template <class Real>
[[nodiscard]] std::int64_t panels_of(const Dims& dims) {
  return dims.sequences * dims.heads * ((dims.dhv + Block<Real>::size - 1) / Block<Real>::size);
}

}  // namespace tfla::cuda::delta
