// The scalars of one token, for the kernels of stage `step` on sm_90 and newer.
#pragma once

#include "cuda/step/portable.cuh"

namespace tfla::cuda {

template <class Real>
struct TokenScalars {
  Decay<Real> decay;
  Real weight, inverse, m;
};

// decay, weight, 1 / den and m of one token, by one warp. float32 states take float32 arithmetic: the chain that all
// CTAs wait for is then a third as long as in double. The sum f + m is kept as two numbers, so that a large m costs no
// digits.
template <class T>
__device__ TokenScalars<typename Config<T>::Real> token_scalars(const StepCall<typename Config<T>::Real>& step,
                                                                const Row<typename Config<T>::Real>& row, int t,
                                                                int head, const T* q, const T* k) {
  using Real = typename Config<T>::Real;
  const Call<Real>& call = step.call;
  const Real* n = static_cast<const Real*>(step.n.data) + row.slot * step.n.sequence + head * step.n.head;
  // All loads are in flight before anything waits: even lanes read the forget gate, odd ones the input gate.
  const int lane = threadIdx.x % warp_size;
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
    for (int r = lane; r < call.dims.dqk; r += warp_size) {
      const auto query = static_cast<Wide>(widen<Real>(q[r]));
      qn += query * static_cast<Wide>(n[r]);
      qk += query * static_cast<Wide>(widen<Real>(k[r]));
    }
  }
  Real f = __shfl_sync(0xFFFFFFFFU, gate, 0), i = __shfl_sync(0xFFFFFFFFU, gate, 1);
  take_logs(call.rules, f, i);
  const Real sum = f + m, part = sum - m;
  const Real rest = (f - part) + (m - (sum - part));  // sum + rest is f + m exactly
  const Real next = call.rules.family.has_max_state ? max(sum, i) : Real{0};
  const Decay<Real> decay = decay_of<Real>((sum - next) + rest);
  const Real weight = exp(i - next);
  Real inverse = 1;
  if (call.rules.normalized) {
    const Wide kept = static_cast<Wide>(decay.whole) + static_cast<Wide>(decay.rest);
    Wide product = static_cast<Wide>(call.rules.scale) * (kept * qn + static_cast<Wide>(weight) * qk);
#pragma unroll
    for (int offset = warp_size / 2; offset > 0; offset /= 2) product += __shfl_xor_sync(0xFFFFFFFFU, product, offset);
    inverse = Denominator<Real>(static_cast<Real>(product), exp(-next), call.rules.eps).inverse;
  }
  return {decay, weight, inverse, next};
}

}  // namespace tfla::cuda
