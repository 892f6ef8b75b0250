// Small device functions that several kernels share.
#pragma once

#include "cuda/call.h"
#include "cuda/portable/block_gemm.cuh"

namespace tfla::cuda {

inline constexpr double log2_e = 1.4426950408889634;

__device__ __forceinline__ double read_gate(const Rows& gate, GateType type, int batch, std::int64_t token, int head) {
  const std::int64_t at = batch * gate.batch + token * gate.token + head * gate.head;
  switch (type) {
    case GateType::float32: return static_cast<const float*>(gate.data)[at];
    case GateType::float64: return static_cast<const double*>(gate.data)[at];
    case GateType::bfloat16: return to_float(static_cast<const __nv_bfloat16*>(gate.data)[at]);
    case GateType::float16: return to_float(static_cast<const __half*>(gate.data)[at]);
  }
  return 0;
}

__device__ __forceinline__ void write_gate(const Rows& gate, GateType type, int batch, std::int64_t token, int head,
                                           double value) {
  const std::int64_t at = batch * gate.batch + token * gate.token + head * gate.head;
  switch (type) {
    case GateType::float32: static_cast<float*>(gate.data)[at] = static_cast<float>(value); break;
    case GateType::float64: static_cast<double*>(gate.data)[at] = value; break;
    case GateType::bfloat16:
      static_cast<__nv_bfloat16*>(gate.data)[at] = narrow<__nv_bfloat16>(static_cast<float>(value));
      break;
    case GateType::float16: static_cast<__half*>(gate.data)[at] = narrow<__half>(static_cast<float>(value)); break;
  }
}

// The row of a token and head.
template <class T>
__device__ __forceinline__ T* row_of(const Rows& rows, int batch, std::int64_t token, int head) {
  return static_cast<T*>(rows.data) + batch * rows.batch + token * rows.token + head * rows.head;
}

__device__ __forceinline__ double log_sigmoid(double x) { return fmin(x, 0.0) - log1p(exp(-fabs(x))); }

// log f and log i of a token. A forget gate of minus infinity is a full reset: a log f this small is as good, for input
// gates up to 1e4 in size, and keeps sums finite. NaN stays.
template <class Real>
__device__ __forceinline__ void log_gates(const Call<Real>& call, int batch, std::int64_t token, int head, double& f,
                                          double& i) {
  constexpr double least_log_forget = -3e4;
  f = read_gate(call.f, call.f_type, batch, token, head);
  i = read_gate(call.i, call.i_type, batch, token, head);
  if (call.capped) {
    f = call.cap * tanh(f / call.cap);
    i = call.cap * tanh(i / call.cap);
  }
  if (!call.log_space) f = log_sigmoid(f);
  if (f < least_log_forget) f = least_log_forget;
  if (!call.log_space && !call.exponential) i = log_sigmoid(i);
}

// Start of a sequence on the packed axis; a dense batch is packed row after row.
template <class Real>
__device__ __forceinline__ std::int64_t sequence_start(const Call<Real>& call, std::int64_t index) {
  if (call.cu_seqlens == nullptr) return index * call.tokens;
  const std::int64_t start = call.cu_is_64_bit ? static_cast<const std::int64_t*>(call.cu_seqlens)[index]
                                               : static_cast<const std::int32_t*>(call.cu_seqlens)[index];
  // The host cannot see these numbers: bad ones must not lead out of the tensors.
  return start < 0 ? 0 : start > call.tokens ? call.tokens : start;
}

template <class Real>
__device__ __forceinline__ int chunks_of(const Call<Real>& call, std::int64_t length) {
  return static_cast<int>((length + call.L - 1) / call.L);
}

// 2^(a + b) with a and b given as sums of two floats: the large parts cancel before anything is rounded.
__device__ __forceinline__ float exp2_sum(float2 a, float2 b) { return exp2f((a.x + b.x) + (a.y + b.y)); }
__device__ __forceinline__ double exp2_sum(double a, double b) { return exp2(a + b); }

}  // namespace tfla::cuda
