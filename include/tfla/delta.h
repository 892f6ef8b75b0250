// The delta rule, gated or not (DeltaNet, Gated DeltaNet): arguments and options of forward, backward and step.
//
//   C_t = exp(g_t) C_{t-1} + beta_t k_t r_t^T     r_t = v_t - exp(g_t) C_{t-1}^T k_t     h_t = C_t^T (scale q_t)
//
// A token writes what its value differs by from what the state says of its key: r_t is that residual, beta_t how much
// of it is written, g_t the logarithm of the decay. Axes, strides, heads and packed sequences are those of
// tfla/mlstm.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "tfla/plan.h"

namespace tfla {

// How beta is read.
//   plain          as it is, usually in [0,1], or in [0,2] for states with negative eigenvalues
//   sigmoid        sigmoid(beta)
//   twice_sigmoid  2 sigmoid(beta)
enum class WriteGate : std::uint8_t { plain, sigmoid, twice_sigmoid };

struct DeltaOptions {
  WriteGate write = WriteGate::plain;
  bool normalize_qk = false;            // q and k become x / sqrt(|x|^2 + 1e-6) first
  std::optional<double> qk_scale = {};  // default dqk^-0.5
  std::int64_t chunk_size = 0;          // spacing of stored states; 0: chosen by the plan

  bool operator==(const DeltaOptions&) const = default;
};

// A state is C alone, [N,H,dqk,dhv]: float32, or float64 when q, k, v are.
struct DeltaForward {
  TensorView q;                   // [B,T,Hqk,dqk]    float32, float64, bfloat16 or float16
  TensorView k;                   // [B,T,Hqk,dqk]    dtype of q
  TensorView v;                   // [B,T,H,dhv]      dtype of q
  TensorView beta;                // [B,T,H]          as `WriteGate` says, any float dtype
  TensorView g = {};              // [B,T,H]          optional log decay, usually not above 0, any float dtype; minus
                                  //                  infinity is a reset; default: no decay
  TensorView A_log = {};          // [H]              optional, any float dtype: with it the log decay is
                                  //                  -exp(A_log) softplus(g + dt_bias)
  TensorView dt_bias = {};        // [H]              optional, any float dtype, where A_log is given; default 0
  MutableTensorView h;            // [B,T,H,dhv]      out, dtype of q
  TensorView initial_state = {};  // [N,H,dqk,dhv]    optional
  MutableTensorView last_state = {};  // [N,H,dqk,dhv]    optional out; may be the very view of initial_state
  TensorView cu_seqlens = {};         // [N+1]            optional, as in MlstmForward
  DeltaOptions options = {};
};

struct DeltaBackward {
  TensorView q;                           // [B,T,Hqk,dqk]
  TensorView k;                           // [B,T,Hqk,dqk]
  TensorView v;                           // [B,T,H,dhv]
  TensorView beta;                        // [B,T,H]
  TensorView g = {};                      // [B,T,H]
  TensorView A_log = {};                  // [H]
  TensorView dt_bias = {};                // [H]
  TensorView dh;                          // [B,T,H,dhv]    gradient of h, dtype of q
  MutableTensorView dq;                   // [B,T,Hqk,dqk]  out, dtype of q
  MutableTensorView dk;                   // [B,T,Hqk,dqk]  out, dtype of q
  MutableTensorView dv;                   // [B,T,H,dhv]    out, dtype of q
  MutableTensorView dbeta;                // [B,T,H]        out, dtype of beta
  MutableTensorView dg = {};              // [B,T,H]        out, dtype of g; given where g is
  MutableTensorView dA_log = {};          // [H]            out, dtype of A_log; given where A_log is
  MutableTensorView ddt_bias = {};        // [H]            out, dtype of dt_bias; given where dt_bias is
  TensorView initial_state = {};          // [N,H,dqk,dhv]  as given to forward
  TensorView dlast_state = {};            // [N,H,dqk,dhv]  optional: gradient of the last state
  MutableTensorView dinitial_state = {};  // [N,H,dqk,dhv]  optional out
  TensorView cu_seqlens = {};             // [N+1]          as given to forward
  DeltaOptions options = {};
};

struct DeltaStep {
  TensorView q;             // [B,T,Hqk,dqk]  T new tokens, usually 1
  TensorView k;             // [B,T,Hqk,dqk]
  TensorView v;             // [B,T,H,dhv]
  TensorView beta;          // [B,T,H]
  TensorView g = {};        // [B,T,H]
  TensorView A_log = {};    // [H]
  TensorView dt_bias = {};  // [H]
  MutableTensorView h;      // [B,T,H,dhv]    out, dtype of q
  MutableTensorView state;  // [S,H,dqk,dhv]  updated in place
  TensorView slots = {};    // [B]            optional, as in MlstmStep
  DeltaOptions options = {};
};

// The axes of a call are those of the mLSTM; gate_dtype is that of beta.
using DeltaShape = MlstmShape;

// Every choice of a call, as `Plan` has them for the mLSTM.
struct DeltaPlan {
  Operation operation = Operation::forward;
  Device device = Device::cpu;
  DeltaShape shape = {};
  DeltaOptions options = {};
  DType compute = DType::float32;  // float64 for float64 inputs, else float32
  int threads = 1;                 // no more than there is work for
  DeviceFacts gpu = {};            // cuda: what it was made for
  Launches launches = {};          // cuda: once for each slice

  std::int64_t tile = 0;    // tokens of one set of matrix products, and of one triangular system
  std::int64_t chunk = 0;   // spacing of the states that backward stores: a whole number of tiles
  std::int64_t panel = 0;   // columns of the state that a thread, or a CTA, takes at a time: they do not depend on each
                            // other
  std::int64_t slices = 1;  // cuda: parts of the heads that backward takes one after the other, in the same scratch

  std::size_t scratch_bytes = 0;
  double flops = 0;         // of the matrix products, masked halves of tiles included
  double useful_flops = 0;  // only the causal half of the products inside a tile
  double bytes = 0;         // inputs, outputs and states, each moved once

  bool operator==(const DeltaPlan&) const = default;
};

[[nodiscard]] std::string describe(const DeltaPlan& plan);

// From a shape alone, or from arguments, which are validated first.
[[nodiscard]] DeltaPlan delta_plan(Operation operation, const DeltaShape& shape, const DeltaOptions& options,
                                   const Execution& execution = {});
[[nodiscard]] DeltaPlan delta_plan(const DeltaForward& args, const Execution& execution = {});
[[nodiscard]] DeltaPlan delta_plan(const DeltaBackward& args, const Execution& execution = {});
[[nodiscard]] DeltaPlan delta_plan(const DeltaStep& args, const Execution& execution = {});

// Validate, plan, allocate scratch, run. On the CPU: the device cuda is refused (docs/delta.md).
void delta_forward(const DeltaForward& args, const Execution& execution = {});
void delta_backward(const DeltaBackward& args, const Execution& execution = {});
void delta_step(const DeltaStep& args, const Execution& execution = {});

// The same without allocation: `scratch` as in tfla/tfla.h.
void delta_forward(const DeltaForward& args, const DeltaPlan& plan, std::span<std::byte> scratch,
                   void* stream = nullptr);
void delta_backward(const DeltaBackward& args, const DeltaPlan& plan, std::span<std::byte> scratch,
                    void* stream = nullptr);
void delta_step(const DeltaStep& args, const DeltaPlan& plan, std::span<std::byte> scratch, void* stream = nullptr);

}  // namespace tfla
