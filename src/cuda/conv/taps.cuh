// What a thread of the convolution has: some channels with their weights, and the tokens of a span, or a lane's part of
// them. Distances count backwards: the weight at distance d meets the input d tokens before.
#pragma once

#include "cuda/conv/runs.cuh"

namespace tfla::cuda::conv {

inline constexpr int few_taps = static_cast<int>(conv_few_taps), many_taps = static_cast<int>(max_conv_width);

// Threads of a CTA: windows of many taps leave what goes with them to shared memory.
template <int Taps>
inline constexpr int threads = Taps <= few_taps ? 128 : 64;
// CTAs of a multiprocessor, to which ptxas would add some by spilling a register or two.
template <int Taps>
inline constexpr int ctas = Taps <= few_taps ? 3 : 4;

// Channels of a row that are moved at once.
template <class T, int Size>
struct alignas(Size * sizeof(T)) Piece {
  T x[Size];
};

template <class T>
__device__ __forceinline__ T* place(const Rows& rows, std::int64_t batch, std::int64_t token, std::int64_t channel) {
  return static_cast<T*>(rows.data) + batch * rows.batch + token * rows.token + channel * rows.channel;
}

template <class T, int Size>
__device__ __forceinline__ void clear(const Rows& rows, const Run& run, std::int64_t channel) {
  for (std::int64_t t = run.begin; t < run.end; ++t)
    *reinterpret_cast<Piece<T, Size>*>(place<T>(rows, run.batch, t, channel)) = Piece<T, Size>{};
}

template <class Real>
__device__ __forceinline__ Real read_number(const Numbers& numbers, std::int64_t at) {
  Real x = 0;
  with_gate({numbers.data}, numbers.type, [&](const auto* data) { x = gate_as<Real>(data[at]); });
  return x;
}
template <class Real>
__device__ __forceinline__ void write_number(const Numbers& numbers, std::int64_t at, Real x) {
  with_gate({numbers.data}, numbers.type, [&](auto* data) { data[at] = narrow<std::decay_t<decltype(*data)>>(x); });
}

__device__ __forceinline__ std::int64_t state_at(const Numbers& state, std::int64_t sequence, std::int64_t row,
                                                 std::int64_t channel) {
  return sequence * state.strides[0] + row * state.strides[1] + channel * state.strides[2];
}

// The channels and the span of a thread. Neighbours have lanes of a span, then neighbouring channels. Divisions are
// calls, so that all are made here, before registers are full.
struct Own {
  std::int64_t channel, span;
  int lane;
  bool exist;
  std::int64_t left;  // positions from the first one of the thread to the end of the span
  Position first;

  __device__ Own(const Dims& dims, int size) {
    const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const std::int64_t unit = thread / dims.lanes, pieces = dims.channels / size;
    lane = static_cast<int>(thread % dims.lanes);
    channel = unit % pieces * size;
    span = unit / pieces;
    exist = span < dims.spans;
    const std::int64_t position = span * dims.span + lane * dims.tile;
    left = min((span + 1) * dims.span, dims.batch * dims.tokens) - position;
    first = {position / dims.tokens, position % dims.tokens};
  }

  // Calls work(run) for all tokens of the thread.
  template <class Real, class Work>
  __device__ __forceinline__ void each_run(const Call<Real>& call, const Work& work) const {
    const Dims& dims = call.dims;
    const std::int64_t others = (dims.lanes - 1) * dims.tile;
    Position at = first;
    for (std::int64_t rest = left; rest > 0;) {
      conv::each_run(call, at, min(dims.tile, rest), work);
      rest -= dims.tile + others;
      if (rest > 0) at.advance(dims, others);
    }
  }
};
[[nodiscard]] inline std::int64_t ctas_of(const Dims& dims, std::int64_t size, std::int64_t threads) {
  return ceil_div(dims.spans * (dims.channels / size) * dims.lanes, threads);
}

// sigmoid(x), without a division that is a call: to a few units of float32.
template <class T, class Real>
__device__ __forceinline__ Real gate_of(Real x) {
  if constexpr (std::is_same_v<T, float>)
    return __fdividef(1.0F, 1 + std::exp(-x));
  else
    return sigmoid_of<T>(x);
}

// Numbers of a thread by distance. Few are in registers; many leave these to windows of tokens, and are volatile
// because the compiler would keep them in registers all the same. Arrays that are there together differ in `Which`.
template <class Real, int Size, int Taps, int Which>
class PerTap {
 public:
  [[nodiscard]] __device__ __forceinline__ auto& at(int d, int e) {
    if constexpr (in_registers) {
      return own_[d][e];
    } else {
      __shared__ volatile Real all[Taps][threads<Taps>];
      return all[d][threadIdx.x];
    }
  }

 private:
  static constexpr bool in_registers = Taps <= few_taps;
  static_assert(in_registers || Size == 1);
  Real own_[in_registers ? Taps : 1][Size];
};

template <class Real, int Size, int Taps>
struct Weights {
  PerTap<Real, Size, Taps, 0> taps;
  Real bias[Size];

  // Those of a call that are not there are 0.
  __device__ __forceinline__ void read(const Numbers& weight, const Numbers& biases, std::int64_t channel, int width) {
    with_gate({weight.data}, weight.type, [&](const auto* data) {
#pragma unroll
      for (int d = 0; d < Taps; ++d) {
#pragma unroll
        for (int e = 0; e < Size; ++e)
          taps.at(d, e) =
              d < width ? gate_as<Real>(data[(channel + e) * weight.strides[0] + (width - 1 - d) * weight.strides[1]])
                        : Real{0};
      }
    });
#pragma unroll
    for (int e = 0; e < Size; ++e)
      bias[e] = biases.data == nullptr ? Real{0} : read_number<Real>(biases, (channel + e) * biases.strides[0]);
  }
};

// Inputs of `Group` tokens and of those before them: entry k is Taps-1-k before the first of these.
template <class T, int Size, int Taps, int Group>
struct Window {
  using Real = typename Config<T>::Real;
  static constexpr int length = Taps - 1 + Group;
  Real x[length][Size];

  // Before a token of a run: what lies before the sequence is its initial state, or 0.
  __device__ __forceinline__ void start(const Call<Real>& call, const Run& run, std::int64_t token,
                                        std::int64_t channel) {
    const Numbers& state = call.tensors.initial;
    const int width = call.dims.width;
#pragma unroll
    for (int k = 0; k < Taps - 1; ++k) {
      const int d = Taps - 1 - k;
      const std::int64_t from = token - d;
      const bool wanted = d < width, in_x = from >= run.first, in_state = !in_x && state.data != nullptr;
      Piece<T, Size> piece{};
      if (wanted && in_x)
        piece = *reinterpret_cast<const Piece<T, Size>*>(place<T>(call.tensors.x, run.batch, from, channel));
#pragma unroll
      for (int e = 0; e < Size; ++e) {
        x[k][e] =
            wanted && in_state
                ? read_number<Real>(state, state_at(state, run.sequence, from - run.first + width - 1, channel + e))
                : widen<Real>(piece.x[e]);
      }
    }
  }
  // The next `count` tokens.
  __device__ __forceinline__ void load(const T* from, std::int64_t stride, int count) {
    Piece<T, Size> pieces[Group] = {};
#pragma unroll
    for (int j = 0; j < Group; ++j)
      if (j < count) pieces[j] = *reinterpret_cast<const Piece<T, Size>*>(from + j * stride);
#pragma unroll
    for (int j = 0; j < Group; ++j) {
#pragma unroll
      for (int e = 0; e < Size; ++e) x[Taps - 1 + j][e] = widen<Real>(pieces[j].x[e]);
    }
  }
  // What comes before the activation in token j of the group. Taps that the call does not have may meet anything.
  __device__ __forceinline__ Real sum(Weights<Real, Size, Taps>& weights, int width, int j, int e) const {
    Real z = weights.bias[e];
#pragma unroll
    for (int d = 0; d < Taps; ++d)
      if (d < width) z = fma(weights.taps.at(d, e), x[Taps - 1 + j - d][e], z);
    return z;
  }
  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int k = 0; k < Taps - 1; ++k) {
#pragma unroll
      for (int e = 0; e < Size; ++e) x[k][e] = x[k + Group][e];
    }
  }
};

// Calls launch(Size, Taps), as constants, for the kernel of a panel.
template <int Size, class Launch>
void with_kernel(std::int64_t panel, int width, const Launch& launch) {
  if (panel == Size && Size > 1)
    return launch(std::integral_constant<int, Size>{}, std::integral_constant<int, few_taps>{});
  if (width <= few_taps) return launch(std::integral_constant<int, 1>{}, std::integral_constant<int, few_taps>{});
  launch(std::integral_constant<int, 1>{}, std::integral_constant<int, many_taps>{});
}

}  // namespace tfla::cuda::conv
