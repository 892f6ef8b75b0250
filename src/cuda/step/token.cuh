// The scalars of one token, as the kernels of stage `step` for sm_90 take them.
#pragma once

#include "cuda/step/portable.cuh"

namespace tfla::cuda {

template <class Real>
struct TokenScalars {
  Decay<Real> decay;
  Real weight, inverse, m;
};

// decay, weight, 1 / den and m of one token, by one warp. In float32 where the state is: the sum f + m is kept as two
// numbers, so that large m cost no digits, and the chain that all blocks wait for is a third as long as in double.
template <class T>
__device__ TokenScalars<typename Config<T>::Real> token_scalars(const StepCall<typename Config<T>::Real>& step,
                                                                const Row<typename Config<T>::Real>& row, int t,
                                                                int head, const T* q, const T* k) {
  using Real = typename Config<T>::Real;
  const Call<Real>& call = step.call;
  const Real* n = static_cast<const Real*>(step.n.data) + row.slot * step.n.sequence + head * step.n.head;
  // All loads go out before anything waits: even lanes read the forget gate, odd ones the input gate.
  const int lane = threadIdx.x % 32;
  const bool odd = lane % 2 == 1;
  const Real m =
      finite_max_state(static_cast<const Real*>(step.m.data)[row.slot * step.m.sequence + head * step.m.head]);
  const Real gate =
      static_cast<Real>(read_gate(odd ? call.tensors.i : call.tensors.f, odd ? call.rules.i_type : call.rules.f_type,
                                  row.batch, row.token + t, head));
  using Wide = typename Config<T>::Norm;  // as everywhere that q.n is summed
  Wide qn = 0, qk = 0;
  if (call.rules.normalized) {
#pragma unroll 8
    for (int r = lane; r < call.dims.dqk; r += 32) {
      const auto query = static_cast<Wide>(widen<Real>(q[r]));
      qn += query * static_cast<Wide>(n[r]);
      qk += query * static_cast<Wide>(widen<Real>(k[r]));
    }
  }
  Real f = __shfl_sync(0xFFFFFFFFU, gate, 0), i = __shfl_sync(0xFFFFFFFFU, gate, 1);
  if (call.rules.capped) {
    const auto cap = static_cast<Real>(call.rules.cap);
    f = cap * tanh(f / cap);
    i = cap * tanh(i / cap);
  }
  if (!call.rules.log_space) f = log_sigmoid(f);
  if (f < static_cast<Real>(least_log_forget)) f = static_cast<Real>(least_log_forget);
  if (!call.rules.log_space && !call.rules.exponential) i = log_sigmoid(i);
  const Real sum = f + m, part = sum - m;
  const Real rest = (f - part) + (m - (sum - part));  // sum + rest is f + m exactly
  const Real next = call.rules.exponential ? max(sum, i) : Real{0};
  const Decay<Real> decay = decay_of<Real>((sum - next) + rest);
  const Real weight = exp(i - next);
  Real inverse = 1;
  if (call.rules.normalized) {
    const Wide kept = static_cast<Wide>(decay.whole) + static_cast<Wide>(decay.rest);
    Wide product = static_cast<Wide>(call.rules.scale) * (kept * qn + static_cast<Wide>(weight) * qk);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) product += __shfl_xor_sync(0xFFFFFFFFU, product, offset);
    inverse = Denominator<Real>(static_cast<Real>(product), exp(-next), call.rules.eps).inverse;
  }
  return {decay, weight, inverse, next};
}

}  // namespace tfla::cuda
