// The causal convolution of a few tokens, channel by channel, that layers of Mamba-2, Gated DeltaNet and xLSTM have
// before their recurrence: arguments and options of forward, backward and step.
//
//   y_t = act(bias + sum_w weight_w x_{t-W+1+w})     w = 0 ... W-1
//
// What lies before a sequence comes from its initial state, or is 0. Views take any strides; they are fast, and never
// copied, where the channels lie side by side in memory, or the tokens do. Packed sequences are those of tfla/mlstm.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "tfla/plan.h"

namespace tfla {

//   none   z
//   silu   z sigmoid(z)
enum class ConvActivation : std::uint8_t { none, silu };

struct ConvOptions {
  ConvActivation activation = ConvActivation::none;

  bool operator==(const ConvOptions&) const = default;
};

// A state is the last W-1 inputs of a sequence, the oldest first.
struct ConvForward {
  TensorView x;                       // [B,T,D]    float32, float64, bfloat16 or float16
  TensorView weight;                  // [D,W]      any float dtype, W at most max_conv_width
  TensorView bias = {};               // [D]        optional, any float dtype; default 0
  MutableTensorView y;                // [B,T,D]    out, dtype of x
  TensorView initial_state = {};      // [N,W-1,D]  optional, any float dtype; N: as in MlstmForward
  MutableTensorView last_state = {};  // [N,W-1,D]  optional out, any float dtype; may be the very view of initial_state
  TensorView cu_seqlens = {};         // [N+1]      optional, as in MlstmForward
  TensorView seq_idx = {};  // [B,T]      optional, int32 or int64: neighbours of one number are a sequence, a number
                            //            below 0 is padding, whose y is 0; without states and cu_seqlens
  ConvOptions options = {};
};

// Nothing of forward is saved: what the activation's slope needs is computed again.
struct ConvBackward {
  TensorView x;                           // [B,T,D]
  TensorView weight;                      // [D,W]
  TensorView bias = {};                   // [D]
  TensorView dy;                          // [B,T,D]    gradient of y, dtype of x
  MutableTensorView dx;                   // [B,T,D]    out, dtype of x
  MutableTensorView dweight;              // [D,W]      out, dtype of weight
  MutableTensorView dbias = {};           // [D]        out, dtype of bias; given where bias is
  TensorView initial_state = {};          // [N,W-1,D]  as given to forward
  TensorView dlast_state = {};            // [N,W-1,D]  optional, any float dtype: gradient of the last state
  MutableTensorView dinitial_state = {};  // [N,W-1,D]  optional out, any float dtype
  TensorView cu_seqlens = {};             // [N+1]      as given to forward
  TensorView seq_idx = {};                // [B,T]      as given to forward
  ConvOptions options = {};
};

struct ConvStep {
  TensorView x;                   // [B,T,D]  T new tokens, usually 1
  TensorView weight;              // [D,W]
  TensorView bias = {};           // [D]
  MutableTensorView y;            // [B,T,D]  out, dtype of x
  MutableTensorView state;        // [S,L,D]  the last L inputs, L at least W-1, any float dtype; updated in place
  TensorView slots = {};          // [B]      optional, as in MlstmStep
  TensorView cache_seqlens = {};  // [B]  optional, int32 or int64, not below 0: the state is a ring, in which the input
                                  //      number i of a sequence lies in row i modulo L, and so many came before
  ConvOptions options = {};
};

inline constexpr std::int64_t max_conv_width = 32;

// What a call looks like without its pointers.
struct ConvShape {
  std::int64_t batch = 1;
  std::int64_t tokens = 0;       // T; for packed sequences the length of the packed axis
  std::int64_t channels = 1;     // D
  std::int64_t width = 1;        // W
  std::int64_t sequences = 1;    // N
  DType dtype = DType::float32;  // of x and y
  bool packed = false;           // cu_seqlens is given; else N = B
  bool along_tokens = false;     // tokens of x lie side by side in memory, channels do not
  bool aligned = true;           // cuda, forward and backward: rows of the [B,T,D] tensors begin on 16 bytes

  bool operator==(const ConvShape&) const = default;
};

// Which optional tensors a call has, as far as its launches depend on them.
struct ConvGiven {
  bool last_state = true;
  bool dinitial_state = true;

  bool operator==(const ConvGiven&) const = default;
};

// Every choice of a call, as `Plan` has them for the mLSTM.
struct ConvPlan {
  Operation operation = Operation::forward;
  Device device = Device::cpu;
  ConvShape shape = {};
  ConvOptions options = {};
  DType compute = DType::float32;  // float64 for float64 inputs, else float32
  int threads = 1;                 // no more than there is work for
  DeviceFacts gpu = {};            // cuda: what it was made for
  ConvGiven given = {};            // cuda: what the call it was made for has; from a shape alone all
  Launches launches = {};          // cuda: what runs, in this order

  std::int64_t span = 1;   // tokens of the batch, row after row, whose gradients of weights are summed up together: a
                           // thread takes them at a time, or on a GPU some neighbouring ones
  std::int64_t tile = 1;   // tokens of a span that are in the cache together; cuda: that a thread takes one by one
  std::int64_t panel = 1;  // channels that a thread takes at a time

  std::size_t scratch_bytes = 0;
  double flops = 0;
  double bytes = 0;  // inputs and outputs, each moved once

  [[nodiscard]] std::int64_t spans() const { return (shape.batch * shape.tokens + span - 1) / span; }
  [[nodiscard]] std::int64_t panels() const { return (shape.channels + panel - 1) / panel; }
  bool operator==(const ConvPlan&) const = default;
};

[[nodiscard]] std::string describe(const ConvPlan& plan);

// From a shape alone, or from arguments, which are validated first.
[[nodiscard]] ConvPlan conv_plan(Operation operation, const ConvShape& shape, const ConvOptions& options,
                                 const Execution& execution = {});
[[nodiscard]] ConvPlan conv_plan(const ConvForward& args, const Execution& execution = {});
[[nodiscard]] ConvPlan conv_plan(const ConvBackward& args, const Execution& execution = {});
[[nodiscard]] ConvPlan conv_plan(const ConvStep& args, const Execution& execution = {});

// Validate, plan, allocate scratch, run. On the CPU: the device cuda is refused, but for tests of its kernels
// (docs/cuda/conv.md).
void conv_forward(const ConvForward& args, const Execution& execution = {});
void conv_backward(const ConvBackward& args, const Execution& execution = {});
void conv_step(const ConvStep& args, const Execution& execution = {});

// The same without allocation: `scratch` as in tfla/tfla.h.
void conv_forward(const ConvForward& args, const ConvPlan& plan, std::span<std::byte> scratch, void* stream = nullptr);
void conv_backward(const ConvBackward& args, const ConvPlan& plan, std::span<std::byte> scratch,
                   void* stream = nullptr);
void conv_step(const ConvStep& args, const ConvPlan& plan, std::span<std::byte> scratch, void* stream = nullptr);

}  // namespace tfla
