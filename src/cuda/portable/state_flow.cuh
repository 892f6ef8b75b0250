// What the kernels of stage `states` share: the two directions of time, segments of a sequence and their totals.
#pragma once

#include "cuda/common/device.cuh"
#include "cuda/launch.h"

namespace tfla::cuda {

// What differs between the two directions of time.
template <class T, Time Direction>
struct Flow {
  using Real = typename Config<T>::Real;
  using Norm = typename Config<T>::Norm;
  const Call<Real>& call;
  int head;

  __device__ const Strided& x() const { return Direction == Time::forward ? call.tensors.k : call.tensors.q; }
  __device__ const Strided& y() const { return Direction == Time::forward ? call.tensors.v : call.tensors.dh; }
  __device__ const StridedState& from_C() const {
    return Direction == Time::forward ? call.carried.C0 : call.carried.dC_last;
  }
  __device__ const StridedState& from_n() const {
    return Direction == Time::forward ? call.carried.n0 : call.carried.dn_last;
  }
  __device__ const StridedState& to_C() const {
    return Direction == Time::forward ? call.carried.C_last : call.carried.dC0;
  }
  __device__ const StridedState& to_n() const {
    return Direction == Time::forward ? call.carried.n_last : call.carried.dn0;
  }
  __device__ void* stored_C() const { return Direction == Time::forward ? call.stored.C : call.stored.dC; }
  __device__ void store_n(std::int64_t at, Norm value) const {
    if (Direction == Time::forward)
      static_cast<Norm*>(call.stored.n)[at] = value;
    else
      call.stored.dn[at] = static_cast<Real>(value);
  }
  // The weight of a token in C.
  __device__ Real weight(std::int64_t at) const {
    if (Direction == Time::forward) return call.gates.abar[at];
    return static_cast<Real>(call.rules.scale) * call.gates.qbar[at] * call.gates.inverse[at];
  }
  // Its weight in n, from the gate scan itself: abar is rounded, and q.n would show it.
  __device__ Norm n_weight(std::int64_t at, double b_last, double m_end) const {
    if (Direction == Time::reverse) {
      return call.rules.exact ? static_cast<Norm>(call.rules.scale) * static_cast<Norm>(call.gates.qbar[at]) *
                                    static_cast<Norm>(call.gates.deta[at])
                              : Norm{0};
    }
    if constexpr (is_16_bit<T>)
      return call.gates.abar[at];
    else
      return exp(b_last + call.gates.c[at] - m_end);
  }
  __device__ Norm n_decay(Real decay, double b_last, double m_start, double m_end) const {
    if constexpr (is_16_bit<T>)
      return decay;
    else
      return exp(b_last + m_start - m_end);
  }
};

// One number of a state that the caller gives or takes.
template <class Real>
__device__ __forceinline__ Real& state_element(const StridedState& state, std::int64_t sequence, int head,
                                               std::int64_t r, std::int64_t c) {
  return static_cast<Real*>(state.data)[sequence * state.sequence + head * state.head + r * state.row + c];
}

// The chunks of one segment of a sequence.
template <class Real>
struct Segment {
  std::int64_t first;  // number of the first chunk of the sequence
  int chunks;          // of the sequence
  int low, high;       // chunks [low, high) of the segment

  __device__ Segment(const Call<Real>& call, std::int64_t sequence, int index, int chunks_per_segment) {
    const std::int64_t start = sequence_start(call, sequence);
    const std::int64_t length = max(sequence_start(call, sequence + 1) - start, static_cast<std::int64_t>(0));
    chunks = chunks_of(call, length);
    first = first_chunk(call, sequence);
    low = min(index * chunks_per_segment, chunks);
    high = min(low + chunks_per_segment, chunks);
  }
};

// Where the C and n of a piece lie among the totals.
template <class Real>
__device__ __forceinline__ Real* segment_state(const Call<Real>& call, std::int64_t sequence, int head, int piece) {
  const std::int64_t size = static_cast<std::int64_t>(call.dims.dqk) * call.dims.padded_dhv();
  return call.stored.segment_C +
         ((sequence * call.dims.heads + head) * call.dims.segments * call.dims.pieces + piece) * size;
}
template <class T>
__device__ __forceinline__ typename Config<T>::Norm* segment_norm(const Call<typename Config<T>::Real>& call,
                                                                  std::int64_t sequence, int head, int piece) {
  return static_cast<typename Config<T>::Norm*>(call.stored.segment_n) +
         ((sequence * call.dims.heads + head) * call.dims.segments * call.dims.pieces + piece) * call.dims.dqk;
}

}  // namespace tfla::cuda
