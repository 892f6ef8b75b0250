// The state space dual of Mamba-2: arguments and options of forward, backward and step.
//
//   S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T     y_t = (S_t C_t + D x_t) silu(z_t)
//
// It is the mLSTM without a denominator, with q = C, k = B, v = x, log i = log dt and log f = dt A (tfla/mlstm.h); what
// Mamba-2 computes before and after that is part of the call. dt is min(max(x, dt_min), dt_max) of x = dt + dt_bias, or
// of its softplus.
//
// Axes: B batch, T tokens, H heads, P their dimension, G groups (H is a multiple of G; head h reads B and C of group
// h / (H / G)), S dimension of the state, N sequences (B, or the packed ones of cu_seqlens). Any strides with a
// contiguous last axis.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "tfla/plan.h"

namespace tfla {

struct SsdOptions {
  bool dt_softplus = false;
  double dt_min = 0;  // not negative: dt is a weight
  double dt_max = std::numeric_limits<double>::infinity();
  std::int64_t chunk_size = 0;  // spacing of stored states; 0: chosen by the plan

  bool operator==(const SsdOptions&) const = default;
};

struct SsdForward {
  TensorView x;                       // [B,T,H,P]  float32, float64, bfloat16 or float16
  TensorView dt;                      // [B,T,H]    any float dtype
  TensorView A;                       // [H]        negative for decays below 1, any float dtype
  TensorView B;                       // [B,T,G,S]  dtype of x
  TensorView C;                       // [B,T,G,S]  dtype of x
  TensorView D = {};                  // [H] or [H,P]  optional, any float dtype
  TensorView z = {};                  // [B,T,H,P]  optional, dtype of x
  TensorView dt_bias = {};            // [H]        optional, any float dtype
  MutableTensorView y;                // [B,T,H,P]  out, dtype of x
  MutableTensorView ungated = {};     // [B,T,H,P]  optional out where z is given: y before silu(z), for backward
  TensorView initial_state = {};      // [N,H,P,S]  optional; float32, or float64 where x is; any strides
  MutableTensorView last_state = {};  // [N,H,P,S]  optional out, as initial_state, of which it may be the very view
  TensorView cu_seqlens = {};         // [N+1]      optional, as in MlstmForward
  TensorView seq_idx = {};            // [B,T]      optional int32 or int64: the state starts afresh where the number is
                                      //            another than that of the token before; before the first it is 0
  SsdOptions options = {};
};

struct SsdBackward {
  TensorView x;                           // [B,T,H,P]
  TensorView dt;                          // [B,T,H]
  TensorView A;                           // [H]
  TensorView B;                           // [B,T,G,S]
  TensorView C;                           // [B,T,G,S]
  TensorView D = {};                      // [H] or [H,P]
  TensorView z = {};                      // [B,T,H,P]
  TensorView dt_bias = {};                // [H]
  TensorView ungated = {};                // [B,T,H,P]  as forward left it, where z is given
  TensorView dy;                          // [B,T,H,P]  gradient of y, dtype of x
  MutableTensorView dx;                   // [B,T,H,P]  out, dtype of x
  MutableTensorView ddt;                  // [B,T,H]    out, dtype of dt
  MutableTensorView dA;                   // [H]        out, dtype of A
  MutableTensorView dB;                   // [B,T,G,S]  out, dtype of x
  MutableTensorView dC;                   // [B,T,G,S]  out, dtype of x
  MutableTensorView dD = {};              // like D     out, dtype of D; given where D is
  MutableTensorView dz = {};              // [B,T,H,P]  out, dtype of x; given where z is
  MutableTensorView ddt_bias = {};        // [H]        out, dtype of dt_bias; given where dt_bias is
  TensorView initial_state = {};          // [N,H,P,S]  as given to forward
  TensorView dlast_state = {};            // [N,H,P,S]  optional: gradient of the last state
  MutableTensorView dinitial_state = {};  // [N,H,P,S]  optional out
  TensorView cu_seqlens = {};             // [N+1]      as given to forward
  TensorView seq_idx = {};                // [B,T]      as given to forward
  SsdOptions options = {};
};

struct SsdStep {
  TensorView x;             // [B,T,H,P]  T new tokens, usually 1
  TensorView dt;            // [B,T,H]
  TensorView A;             // [H]
  TensorView B;             // [B,T,G,S]
  TensorView C;             // [B,T,G,S]
  TensorView D = {};        // [H] or [H,P]
  TensorView z = {};        // [B,T,H,P]
  TensorView dt_bias = {};  // [H]
  MutableTensorView y;      // [B,T,H,P]  out, dtype of x
  MutableTensorView state;  // [N,H,P,S]  updated in place; float32, bfloat16 or float16, or float64 where x is
  TensorView slots = {};    // [B]        optional, as in MlstmStep
  SsdOptions options = {};
};

// Which optional tensors a call has and how they lie, as far as its launches depend on them.
struct SsdGiven {
  bool D = true;
  bool z = true;
  bool initial_state = true;
  bool last_state = true;  // backward: dlast_state
  bool dinitial_state = true;
  bool aligned = true;  // forward: rows of y, z and ungated lie as the fastest GPU kernels want them

  bool operator==(const SsdGiven&) const = default;
};

// Every choice of a call. `scan` says it of the mLSTM that runs inside; its shape has dqk = S, dhv = P, qk_heads = G.
struct SsdPlan {
  Operation operation = Operation::forward;
  SsdOptions options = {};
  Plan scan = {};
  int threads = 1;
  std::int64_t panel = 0;         // step: rows of a head's state that a thread takes at a time
  SsdGiven given = {};            // cuda: what the call it was made for has; from a shape alone all
  Launches launches = {};         // cuda: what runs, in this order; the launches of `scan` are one of these
  std::size_t scratch_bytes = 0;  // of the whole call

  bool operator==(const SsdPlan&) const = default;
};

[[nodiscard]] std::string describe(const SsdPlan& plan);

// From a shape alone, or from arguments, which are validated first.
[[nodiscard]] SsdPlan ssd_plan(Operation operation, const MlstmShape& shape, const SsdOptions& options,
                               const Execution& execution = {});
[[nodiscard]] SsdPlan ssd_plan(const SsdForward& args, const Execution& execution = {});
[[nodiscard]] SsdPlan ssd_plan(const SsdBackward& args, const Execution& execution = {});
[[nodiscard]] SsdPlan ssd_plan(const SsdStep& args, const Execution& execution = {});

// Validate, plan, allocate scratch, run. On the CPU: the device cuda is refused, but for tests of its kernels
// (docs/cuda/ssd.md).
void ssd_forward(const SsdForward& args, const Execution& execution = {});
void ssd_backward(const SsdBackward& args, const Execution& execution = {});
void ssd_step(const SsdStep& args, const Execution& execution = {});

// The same without allocation: `scratch` as in tfla/tfla.h.
void ssd_forward(const SsdForward& args, const SsdPlan& plan, std::span<std::byte> scratch, void* stream = nullptr);
void ssd_backward(const SsdBackward& args, const SsdPlan& plan, std::span<std::byte> scratch, void* stream = nullptr);
void ssd_step(const SsdStep& args, const SsdPlan& plan, std::span<std::byte> scratch, void* stream = nullptr);

}  // namespace tfla
