// Small device functions that several kernels share.
#pragma once

#include "core/gate_family.h"
#include "cuda/arch/cluster.cuh"
#include "cuda/arch/math.cuh"
#include "cuda/call.h"
#include "cuda/common/types.h"

namespace tfla::cuda {

inline constexpr int warp_size = 32;
inline constexpr double log2_e = 1.4426950408889634;

// Calls with(pointer) with the gate in its own type.
template <class With>
__device__ __forceinline__ void with_gate(const Strided& gate, GateType type, const With& with) {
  switch (type) {
    case GateType::float32: return with(static_cast<float*>(gate.data));
    case GateType::float64: return with(static_cast<double*>(gate.data));
    case GateType::bfloat16: return with(static_cast<__nv_bfloat16*>(gate.data));
    case GateType::float16: return with(static_cast<__half*>(gate.data));
  }
}
template <class Work, class Gate>
__device__ __forceinline__ Work gate_as(Gate x) {
  if constexpr (is_16_bit<Gate>)
    return static_cast<Work>(to_float(x));
  else
    return static_cast<Work>(x);
}

__device__ __forceinline__ std::int64_t gate_at(const Strided& gate, int batch, std::int64_t token, int head) {
  return batch * gate.batch + token * gate.token + head * gate.head;
}
__device__ __forceinline__ double read_gate(const Strided& gate, GateType type, int batch, std::int64_t token,
                                            int head) {
  const std::int64_t at = gate_at(gate, batch, token, head);
  double x = 0;
  with_gate(gate, type, [&](const auto* data) { x = gate_as<double>(data[at]); });
  return x;
}

// The row of a token and head.
template <class T>
__device__ __forceinline__ T* row_of(const Strided& tensor, int batch, std::int64_t token, int head) {
  return static_cast<T*>(tensor.data) + batch * tensor.batch + token * tensor.token + head * tensor.head;
}

// The type in which gates of tensors of type T are worked on: float is enough for 16 bits.
template <class T>
using GateWork = std::conditional_t<is_16_bit<T>, float, double>;

// sigmoid(x). That of 16-bit tensors takes two instructions of the hardware: their rounding hides the difference, and
// the division would take longer than memory.
template <class T, class Real>
__device__ __forceinline__ Real sigmoid_of(Real x) {
  if constexpr (is_16_bit<T>)
    return __fdividef(1.0F, 1 + arch::exp2(-x * static_cast<float>(log2_e)));
  else
    return sigmoid(x);
}

// Raw gates become log f and log i. NaN stays.
template <class Work>
__device__ __forceinline__ void take_logs(const Rules& rules, Work& forget, Work& input) {
  if (rules.capped) {
    forget = soft_cap(static_cast<Work>(rules.cap), forget);
    input = soft_cap(static_cast<Work>(rules.cap), input);
  }
  forget = limit_reset(log_gate(rules.family.forget, forget));
  input = log_gate(rules.family.input, input);
}

// log f and log i of a token.
template <class Work, class Real>
__device__ __forceinline__ void log_gates(const Call<Real>& call, int batch, std::int64_t token, int head, double& f,
                                          double& i) {
  auto forget = static_cast<Work>(read_gate(call.tensors.f, call.rules.f_type, batch, token, head));
  auto input = static_cast<Work>(read_gate(call.tensors.i, call.rules.i_type, batch, token, head));
  take_logs(call.rules, forget, input);
  f = forget;
  i = input;
}

// 1 / den of a token, and the derivative of den by q.n times -1 / den.
template <class Real>
struct Denominator {
  Real inverse = 1, slope = 0;

  Denominator() = default;
  // floor: exp(-m).
  __device__ Denominator(Real qn, Real floor, double eps) {
    const Real size = fabs(qn);
    inverse = 1 / ((size < floor ? floor : size) + static_cast<Real>(eps));
    slope = size > floor ? copysign(inverse, -qn) : Real{0};
  }
};

// op over this lane's value and those of the lanes before it, in groups of `Lanes` neighbours.
template <int Lanes = warp_size, class Op>
__device__ __forceinline__ double warp_scan(double value, const Op& op) {
#pragma unroll
  for (int offset = 1; offset < Lanes; offset *= 2) {
    const double other = __shfl_up_sync(0xFFFFFFFFU, value, offset, Lanes);
    if (threadIdx.x % Lanes >= offset) value = op(other, value);
  }
  return value;
}

// A number of cu_seqlens. The host cannot see them: bad ones must not lead out of the tensors.
__device__ __forceinline__ std::int64_t read_boundary(const void* cu_seqlens, std::int64_t at, bool is_64_bit,
                                                      std::int64_t tokens) {
  const std::int64_t start =
      is_64_bit ? static_cast<const std::int64_t*>(cu_seqlens)[at] : static_cast<const std::int32_t*>(cu_seqlens)[at];
  return start < 0 ? 0 : start > tokens ? tokens : start;
}

// Start of a sequence on the packed axis; a dense batch is packed row after row.
template <class Real>
__device__ __forceinline__ std::int64_t sequence_start(const Call<Real>& call, std::int64_t index) {
  if (call.packing.cu_seqlens == nullptr) return index * call.dims.tokens;
  return read_boundary(call.packing.cu_seqlens, index * call.packing.cu_stride, call.packing.cu_is_64_bit,
                       call.dims.tokens);
}

// Writes `bytes` of zeros from `data` on, by all threads of the CTA.
__device__ __forceinline__ void clear_row(void* data, int bytes) {
  auto* halves = static_cast<std::uint16_t*>(data);  // no type of tensors is smaller
  for (int x = static_cast<int>(threadIdx.x); x < bytes / 2; x += static_cast<int>(blockDim.x)) halves[x] = 0;
}

// Tokens of the packed axis that are in no sequence have rows of zeros in all outputs. Written by all threads of CTAs 0
// to ctas - 1 of a kernel.
template <class Real>
__device__ __forceinline__ void clear_padding(const Call<Real>& call, unsigned cta, unsigned ctas) {
  const std::int64_t begin = sequence_start(call, 0), end = sequence_start(call, call.dims.sequences);
  const std::int64_t padding = begin + call.dims.tokens - end;  // in front of all sequences, and behind them
  const int item = call.rules.tensors_16_bit ? 2 : static_cast<int>(sizeof(Real));
  const auto clear = [&](const Strided& tensor, std::int64_t token, int heads, int bytes_of_item, int width) {
    if (tensor.data == nullptr) return;
    for (int head = 0; head < heads; ++head)
      clear_row(static_cast<unsigned char*>(tensor.data) + (token * tensor.token + head * tensor.head) * bytes_of_item,
                width * bytes_of_item);
  };
  const auto gate_bytes = [](GateType type) {
    return type == GateType::float64 ? 8 : type == GateType::float32 ? 4 : 2;
  };
  for (std::int64_t x = cta; x < padding; x += ctas) {
    const std::int64_t token = x < begin ? x : end + (x - begin);
    clear(call.tensors.h, token, call.dims.heads, item, call.dims.dhv);
    clear(call.tensors.dq, token, call.dims.qk_heads, item, call.dims.dqk);
    clear(call.tensors.dk, token, call.dims.qk_heads, item, call.dims.dqk);
    clear(call.tensors.dv, token, call.dims.heads, item, call.dims.dhv);
    clear(call.tensors.di, token, call.dims.heads, gate_bytes(call.rules.i_type), 1);
    clear(call.tensors.df, token, call.dims.heads, gate_bytes(call.rules.f_type), 1);
  }
}

// Number of the first chunk of a sequence.
template <class Real>
__device__ __forceinline__ std::int64_t first_chunk(const Call<Real>& call, std::int64_t sequence) {
  return call.dims.chunks_per_row > 0 ? sequence * call.dims.chunks_per_row
                                      : sequence_start(call, sequence) / call.dims.L + sequence;
}

template <class Real>
__device__ __forceinline__ int chunks_of(const Call<Real>& call, std::int64_t length) {
  return static_cast<int>((length + call.dims.L - 1) / call.dims.L);
}

// An exponent as exp_sum takes it: in base 2 and as two floats for float32 work. A double stays in base e: multiplying
// it by log2(e) would cost a digit where log f sums to thousands.
__device__ __forceinline__ void as_exponent(double x, float2& to) {
  x *= log2_e;
  const auto high = static_cast<float>(x);
  to = {high, isfinite(high) ? static_cast<float>(x - high) : 0.0F};
}
__device__ __forceinline__ void as_exponent(double x, double& to) { to = x; }

// exp(a + b). Exponents of two floats cancel in their large parts before anything is rounded.
__device__ __forceinline__ float exp_sum(float2 a, float2 b) { return arch::exp2((a.x + b.x) + (a.y + b.y)); }
__device__ __forceinline__ double exp_sum(double a, double b) { return exp(a + b); }

}  // namespace tfla::cuda
