// What the kernels of stage `step` share.
#pragma once

#include "cuda/common/device.cuh"

namespace tfla::cuda {

inline constexpr int step_threads = 256;

// The tokens and the state of one row of the batch.
template <class Real>
struct Row {
  std::int64_t token;   // first token, in its row of the tensors
  std::int64_t packed;  // tokens before it
  int length;
  int batch;
  std::int64_t slot;

  __device__ Row(const StepCall<Real>& step, std::int64_t index) {
    const Call<Real>& call = step.call;
    const std::int64_t start = sequence_start(call, index);
    const bool dense = call.packing.cu_seqlens == nullptr;
    token = dense ? 0 : start;
    packed = start;
    length = static_cast<int>(max(sequence_start(call, index + 1) - start, static_cast<std::int64_t>(0)));
    batch = dense ? static_cast<int>(index) : 0;
    slot = step.slots == nullptr   ? index
           : step.slots_are_64_bit ? __ldcg(static_cast<const std::int64_t*>(step.slots) + index * step.slot_stride)
                                   : __ldcg(static_cast<const std::int32_t*>(step.slots) + index * step.slot_stride);
  }

  // Whether the row has a state. The host cannot see slots: any that does not exist is padding.
  [[nodiscard]] __device__ bool has_state(const StepCall<Real>& step) const { return slot >= 0 && slot < step.states; }

  // Writes zeros into columns [first, first + count) of h of a row that has no state, by all threads of the CTA.
  template <class T>
  __device__ void clear_outputs(const Call<Real>& call, int head, int first, int count) const {
    for (int t = 0; t < length; ++t)
      clear_row(row_of<T>(call.tensors.h, batch, token + t, head) + first, count * static_cast<int>(sizeof(T)));
  }
};

// exp(x) - 1 of small x. A series will do in float32: with expm1 a step of few states took 0.05 us longer (H200).
__device__ __forceinline__ double less_one(double x) { return expm1(x); }
__device__ __forceinline__ float less_one(float x) {
  float series = 1.0F / 720;
  series = fmaf(series, x, 1.0F / 120);
  series = fmaf(series, x, 1.0F / 24);
  series = fmaf(series, x, 1.0F / 6);
  series = fmaf(series, x, 0.5F);
  return fmaf(series * x, x, x);
}

// A decay from its logarithm, in the arithmetic of that.
template <class Real, class Log>
__device__ __forceinline__ Decay<Real> decay_of(Log log) {
  const bool near_one = fabs(log) <= static_cast<Log>(Decay<Real>::near_one);
  return {near_one ? Real{1} : Real{0}, static_cast<Real>(near_one ? less_one(log) : exp(log))};
}

template <class Real>
__device__ __forceinline__ Real decayed(const Decay<Real>& decay, Real x, Real added) {
  return fma(decay.whole, x, fma(decay.rest, x, added));
}

// Four columns of a row of C.
template <class Real>
struct Piece {
  static constexpr int size = 4;
  using Vector = std::conditional_t<sizeof(Real) == 4, float4, double2>;  // 16 bytes
  static constexpr int lanes = 16 / sizeof(Real);
  Real x[size];

  __device__ __forceinline__ void load(const Real* from, int count, bool wide) {
    if (wide) {
#pragma unroll
      for (int part = 0; part < size; part += lanes) {
        const Vector vector = *reinterpret_cast<const Vector*>(from + part);
        x[part] = vector.x;
        x[part + 1] = vector.y;
        if constexpr (lanes == 4) {
          x[part + 2] = vector.z;
          x[part + 3] = vector.w;
        }
      }
    } else {
#pragma unroll
      for (int e = 0; e < size; ++e) x[e] = e < count ? from[e] : Real{0};
    }
  }
  __device__ __forceinline__ void store(Real* to, int count, bool wide) const {
    if (wide) {
#pragma unroll
      for (int part = 0; part < size; part += lanes) {
        Vector vector;
        vector.x = x[part];
        vector.y = x[part + 1];
        if constexpr (lanes == 4) {
          vector.z = x[part + 2];
          vector.w = x[part + 3];
        }
        *reinterpret_cast<Vector*>(to + part) = vector;
      }
    } else {
#pragma unroll
      for (int e = 0; e < size; ++e) {
        if (e < count) to[e] = x[e];
      }
    }
  }
};

// Sums a thread's columns over the rows of C inside its warp, and leaves one sum per warp in `sums`. ColumnGroups
// threads share a row, and neighbours have neighbouring columns.
template <int ColumnGroups, class Real, int Width>
__device__ __forceinline__ void sum_rows(Real (&out)[Piece<Real>::size],
                                         Real (&sums)[step_threads / warp_size][Width]) {
  static_assert(ColumnGroups <= warp_size && Width == ColumnGroups * Piece<Real>::size);
#pragma unroll
  for (int e = 0; e < Piece<Real>::size; ++e) {
#pragma unroll
    for (int offset = ColumnGroups; offset < warp_size; offset *= 2)
      out[e] += __shfl_xor_sync(0xFFFFFFFFU, out[e], offset);
    if (threadIdx.x % warp_size < ColumnGroups)
      sums[threadIdx.x / warp_size][threadIdx.x % ColumnGroups * Piece<Real>::size + e] = out[e];
  }
}

// Whether C can be moved in pieces of 16 bytes.
template <class Real>
bool state_is_wide(const StepCall<Real>& step) {
  const auto aligned = [](std::int64_t elements) {
    return elements * static_cast<std::int64_t>(sizeof(Real)) % 16 == 0;
  };
  return reinterpret_cast<std::uintptr_t>(step.C.data) % 16 == 0 && aligned(step.C.sequence) && aligned(step.C.head) &&
         aligned(step.C.row) && step.call.dims.dhv % Piece<Real>::size == 0;
}

}  // namespace tfla::cuda
