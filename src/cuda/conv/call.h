// A call of the convolution as its kernels see it: plain data, passed by value. Real: float, or double for float64.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/call.h"
#include "cuda/common/types.h"
#include "plan/operators/conv_cuda.h"

namespace tfla::cuda::conv {

struct Dims {
  std::int64_t batch, tokens, channels, sequences;
  std::int64_t span, tile, spans;  // as the plan has them
  int width, lanes;
  bool silu;
};

// A [B,T,D] tensor in the type of x. Strides in elements.
struct Rows {
  void* data = nullptr;
  std::int64_t batch = 0, token = 0, channel = 0;
};

// A tensor of any float dtype: [N,rows,D] of states, [D,W] and [D] of weights and bias. Null: not given.
struct Numbers {
  void* data = nullptr;
  std::int64_t strides[3] = {};
  GateType type = GateType::float32;
};

// int32 or int64. Null: not given.
struct Integers {
  const void* data = nullptr;
  std::int64_t strides[2] = {};
  bool are_64_bit = false;
};

struct Tensors {
  Rows x, y, dy, dx;
  Numbers weight, bias, dweight, dbias;
  Numbers initial, last, dlast, dinitial;
};

template <class Real>
struct Call {
  Dims dims;
  Tensors tensors;
  Integers cu_seqlens, seq_idx;
  ConvScratch<Real> scratch;
};

// Tokens on states in place.
struct StepCall {
  Dims dims;
  Tensors tensors;
  Numbers state;                // [S,L,D]
  std::int64_t states, length;  // S, L
  Integers slots;               // [B] which state a row uses; null: its own number
  Integers cache_seqlens;       // [B] of a ring: how many inputs came before
};

// panel: channels of a thread, as the plan says.
template <class T>
void launch_forward(const Call<typename Config<T>::Real>& call, std::int64_t panel, cudaStream_t stream);
template <class T>
void launch_last_state(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class T>
void launch_gradients(const Call<typename Config<T>::Real>& call, std::int64_t panel, cudaStream_t stream);
template <class T>
void launch_initial_state(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class Real>
void launch_sum_spans(const Call<Real>& call, cudaStream_t stream);
template <class T>
void launch_step(const StepCall& step, cudaStream_t stream);

}  // namespace tfla::cuda::conv
