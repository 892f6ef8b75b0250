// A call of the delta rule as its kernels see it: plain data, passed by value. Real: float, or double for float64.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/call.h"
#include "cuda/common/types.h"
#include "plan/operators/delta_cuda.h"

namespace tfla::cuda::delta {

struct Dims {
  std::int64_t batch, tokens, sequences;
  int qk_heads, heads, group;  // group = heads / qk_heads
  int dqk, dhv;
  int tile;                    // tokens
  int panel;                   // columns of a state that a CTA has
  std::int64_t tiles_per_row;  // one sequence per row of the batch: its tiles; 0: packed sequences
  std::int64_t tiles;          // upper bound of the number of all
};

struct Rules {
  WriteGate write;
  bool normalize_qk;
  GateType beta_type, g_type, A_log_type, dt_bias_type;
  double scale;
};

// Gates and numbers per head are of their own type, and data is null where they are not given.
struct Tensors {
  Strided q, k, v, h, dh, dq, dk, dv;
  Strided beta, g, dbeta, dg;
  Strided A_log, dt_bias, dA_log, ddt_bias;  // [H]: only the stride of heads
};

struct States {
  StridedState initial, last, dlast, dinitial;
};

template <class Real>
struct Call {
  Dims dims;
  Rules rules;
  Tensors tensors;
  States carried;
  DeltaScratch<Real> scratch;
  const void* cu_seqlens;  // null: dense
  std::int64_t cu_stride;
  bool cu_is_64_bit;
};

// Tokens on states in place.
template <class Real>
struct StepCall {
  Call<Real> call;
  StridedState state;  // [S,H,dqk,dhv]
  std::int64_t states;
  const void* slots;  // [B] which state a row uses; null: its own number
  std::int64_t slot_stride;
  bool slots_are_64_bit;
};

template <class T>
void launch_norms(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class T>
void launch_padding(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class T>
void launch_forward(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class T>
void launch_states(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class T>
void launch_grad_states(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class T>
void launch_gradients(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class T>
void launch_sum_heads(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class Real>
void launch_sum_tokens(const Call<Real>& call, cudaStream_t stream);
template <class T>
void launch_step(const StepCall<typename Config<T>::Real>& step, cudaStream_t stream);

}  // namespace tfla::cuda::delta
