// The gradients of inputs: a thread walks through tokens in time, and each adds what it says of the inputs that it has
// seen. An input is done Taps-1 tokens later.
#pragma once

#include "cuda/conv/taps.cuh"

namespace tfla::cuda::conv {

// Tokens [begin, end) before and behind the token `at` of a run, whose gradients are asked for. What is at or behind
// `at` is walked through.
struct Part {
  std::int64_t at;
  int begin, end;
};

template <class T, int Size, int Taps, int Group>
struct Gradients {
  using Real = typename Config<T>::Real;
  using Inputs = Window<T, Size, Taps, Group>;
  static constexpr int lag = Taps - 1;

  Weights<Real, Size, Taps> weights;
  PerTap<Real, Size, Taps, 1> dweight;  // sums over the tokens that the part asks for
  Real dbias[Size];

  __device__ __forceinline__ Gradients(const Call<Real>& call, std::int64_t channel) {
    weights.read(call.tensors.weight, call.tensors.bias, channel, call.dims.width);
#pragma unroll
    for (int e = 0; e < Size; ++e) {
      dbias[e] = 0;
#pragma unroll
      for (int d = 0; d < Taps; ++d) dweight.at(d, e) = 0;
    }
  }

  // store(token, gradients), the token counted from part.at.
  template <class Store>
  __device__ __forceinline__ void walk(const Call<Real>& call, const Run& run, const Part& part, std::int64_t channel,
                                       const Store& store) {
    const Rows &from = call.tensors.x, &of = call.tensors.dy;
    Inputs inputs;
    Real dx[Inputs::length][Size] = {};  // of token t - lag + k
    inputs.start(call, run, part.at, channel);
    const T* x = place<T>(from, run.batch, part.at, channel);
    const T* dy = place<T>(of, run.batch, part.at, channel);
    // Tokens that see one of the part.
    const int seen =
        static_cast<int>(min(run.last - part.at, static_cast<std::int64_t>(part.end + call.dims.width - 1)));
#pragma unroll 1
    for (int t = 0; t < part.end + lag; t += Group) {
      if (t < seen) {
        inputs.load(x, from.token, seen - t);
        add_group(call, inputs, dx, dy, seen - t, part.end - t);
      }
#pragma unroll
      for (int k = 0; k < Group; ++k) {
        const int token = t - lag + k;
        if (token >= part.begin && token < part.end) store(token, dx[k]);
      }
      inputs.advance();
#pragma unroll
      for (int k = 0; k < Inputs::length; ++k) {
#pragma unroll
        for (int e = 0; e < Size; ++e) dx[k][e] = k < lag ? dx[k + Group][e] : Real{0};
      }
      x += Group * from.token;
      dy += Group * of.token;
    }
  }

 private:
  // The next tokens: so many that see the part, and so many of the part itself.
  __device__ __forceinline__ void add_group(const Call<Real>& call, const Inputs& inputs,
                                            Real (&dx)[Inputs::length][Size], const T* dy, int seen, int own) {
    const int width = call.dims.width;
    Piece<T, Size> pieces[Group];
#pragma unroll
    for (int j = 0; j < Group; ++j)
      if (j < seen) pieces[j] = *reinterpret_cast<const Piece<T, Size>*>(dy + j * call.tensors.dy.token);
#pragma unroll
    for (int j = 0; j < Group; ++j) {
      if (j >= seen) break;
      Real dz[Size];
#pragma unroll
      for (int e = 0; e < Size; ++e) {
        dz[e] = widen<Real>(pieces[j].x[e]);
        if (!call.dims.silu) continue;
        const Real z = inputs.sum(weights, width, j, e), gate = gate_of<T>(z);
        dz[e] *= gate * fma(z, 1 - gate, Real{1});
      }
#pragma unroll
      for (int d = 0; d < Taps; ++d) {
        if (d >= width) break;
#pragma unroll
        for (int e = 0; e < Size; ++e) dx[lag + j - d][e] = fma(weights.taps.at(d, e), dz[e], dx[lag + j - d][e]);
      }
      if (j >= own) continue;
#pragma unroll
      for (int d = 0; d < Taps; ++d) {
        if (d >= width) break;
#pragma unroll
        for (int e = 0; e < Size; ++e) dweight.at(d, e) = fma(dz[e], inputs.x[lag + j - d][e], dweight.at(d, e));
      }
#pragma unroll
      for (int e = 0; e < Size; ++e) dbias[e] += dz[e];
    }
  }
};

// What the last state says of an input that it holds: of the token `from`, counted from the first of the sequence.
template <class Real>
__device__ __forceinline__ Real of_last_state(const Call<Real>& call, const Run& run, std::int64_t from,
                                              std::int64_t channel) {
  const Numbers& dlast = call.tensors.dlast;
  const std::int64_t row = from - (run.last - run.first) + call.dims.width - 1;
  if (dlast.data == nullptr || row < 0) return 0;
  return read_number<Real>(dlast, state_at(dlast, run.sequence, row, channel));
}

// Tokens whose loads are in flight together: fewer where registers hold many taps.
template <class T, int Taps>
inline constexpr int gradient_group = Taps <= few_taps ? 4 : 1;

}  // namespace tfla::cuda::conv
