// A call of the state space dual as its kernels see it: plain data, passed by value. Real: float, or double for
// float64.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/time_step.h"
#include "cuda/call.h"
#include "cuda/common/types.h"
#include "plan/operators/ssd_cuda.h"

namespace tfla::cuda::ssd {

struct Dims {
  std::int64_t batch, tokens, sequences;
  int heads, group;  // heads that share B and C
  int P, S;

  [[nodiscard]] __host__ __device__ std::int64_t positions() const { return batch * tokens; }
};

// A number per head, or one per head and column. Strides in elements.
struct PerHead {
  void* data = nullptr;
  std::int64_t head = 0;
  std::int64_t column = 0;  // 0: the same for all
  GateType type = GateType::float32;
};

struct Rules {
  TimeStepRule<double> time_step;
  GateType dt_type;  // of ddt too
};

// data is null where a tensor is not given.
struct Tensors {
  Strided x, z, y, ungated;  // [B,T,H,P]
  Strided h;                 // where the scan leaves its outputs: ungated, or y
  Strided dy, dh, dx, dz;    // dh is dy where there is no z
  Strided dt, ddt;           // [B,T,H]
  PerHead A, D, dt_bias, dA, dD, ddt_bias;
  bool wide = false;  // every row of all [B,T,H,P] tensors can be moved in pieces of 16 bytes
};

// Where sequences begin and end: those of cu_seqlens (null: dense), and tokens whose number is another than that of the
// token before (null: none).
struct Sequences {
  const void* cu_seqlens = nullptr;
  std::int64_t cu_stride = 0;
  bool cu_is_64_bit = false;
  const void* seq_idx = nullptr;
  std::int64_t seq_idx_batch = 0, seq_idx_token = 0;
  bool seq_idx_is_64_bit = false;
};

template <class Real>
struct Call {
  Dims dims;
  Rules rules;
  Tensors tensors;
  Sequences sequences;
  SsdScratch<Real> scratch;
};

// Matrices [N,H,rows,columns] with any strides.
struct Matrices {
  void* data = nullptr;
  std::int64_t sequence = 0, head = 0, row = 0, column = 0;
};

// One state of every sequence and head, which becomes its transpose.
template <class Real>
struct Turn {
  Matrices from, to;   // to[n,h,c,r] = from[n,h,r,c]
  std::int64_t units;  // sequences times heads
  int heads, rows, columns;
  Real* zeros;  // as many zeros go here, or null
  std::int64_t zero_count;
};

// Tokens on states in place.
template <class Real>
struct StepCall {
  Call<Real> call;
  Strided B, C;         // [B,T,G,S]
  StridedState state;   // [N,H,P,S]
  bool wide;            // rows of the state, of B and of C can be moved in pieces of 16 bytes
  std::int64_t states;  // how many there are
  const void* slots;    // [B] which state a row uses; null: its own number
  std::int64_t slot_stride;
  bool slots_are_64_bit;
};

template <class T>
void launch_time_steps(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class T>
void launch_time_step_gradients(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class T>
void launch_epilogue(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class T>
void launch_epilogue_gradients(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class T>
void launch_skip_gradients(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class Real>
void launch_sum_tokens(const Call<Real>& call, cudaStream_t stream);
template <class Real>
void launch_turn_states(const Turn<Real>& turn, cudaStream_t stream);
// T: the type of x; State: that of states.
template <class T, class State>
void launch_step(const StepCall<typename Config<T>::Real>& step, cudaStream_t stream);

}  // namespace tfla::cuda::ssd
