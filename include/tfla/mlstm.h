// The mLSTM operator: arguments and options of forward, backward and step.
//
//   C_t = f_t C_{t-1} + i_t k_t v_t^T     n_t = f_t n_{t-1} + i_t k_t     h_t = C_t^T (scale q_t) / den_t
//
// Axes: B batch, T tokens, H value heads, Hqk query/key heads (H is a multiple of Hqk; head h reads query/key head
// h / (H / Hqk)), dqk and dhv head dimensions, N sequences (B, or the packed sequences of cu_seqlens).
// Any strides with a contiguous last axis; for (B,H,T,D) memory pass view.transposed(1, 2). With the device cuda all
// tensors, cu_seqlens and slots included, lie in device memory, where the last two are not read for validation: a slot
// that does not exist is padding there, and tokens outside of what cu_seqlens says have rows of 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "tfla/tensor_view.h"

namespace tfla {

// How the raw gates i and f are read, after the soft cap.
//   exponential  log i = i               log f = log sigmoid(f)   a max state m holds weights of any size in scale
//   sigmoid      log i = log sigmoid(i)  log f = log sigmoid(f)   m = 0
//   log          log i = i               log f = f                m = 0; for weights of moderate size and decays made
//                elsewhere (Retention, Simple GLA, Mamba-2). f = 0 keeps everything, minus infinity is a reset.
enum class InputGate : std::uint8_t { exponential, sigmoid, log };

// none: denominator 1. max: max(|q.n|, exp(-m)) + eps. automatic: max for the exponential gate, none for the others.
enum class Normalizer : std::uint8_t { automatic, none, max };

// Three ways to compute the same function.
//   chunkwise  linear in T, parallel inside a chunk: the one to use
//   parallel   quadratic in T, no states in between
//   recurrent  token by token; forward only
enum class Formulation : std::uint8_t { chunkwise, parallel, recurrent };

enum class Device : std::uint8_t { cpu, cuda };

// What forward leaves in `saved`, so that backward does not compute it again: faster training, more memory. On the CPU
// nothing is kept.
//   nothing
//   denominators  two numbers per token and head
//   states        these, and the states at the starts of chunks
enum class Keep : std::uint8_t { nothing, denominators, states };

struct MlstmOptions {
  InputGate gate = InputGate::exponential;
  Normalizer normalizer = Normalizer::automatic;
  double eps = 1e-6;                    // added to the denominator after the max
  std::optional<double> qk_scale = {};  // default dqk^-0.5
  std::optional<double> soft_cap = {};  // gates become cap * tanh(x / cap) first; default: no cap
  bool exact_normalizer_grad = false;   // differentiate through the denominator; the paper does not
  std::int64_t chunk_size = 0;          // spacing of stored states; 0: chosen by the plan
  Formulation formulation = Formulation::chunkwise;
  Keep keep = Keep::nothing;  // cuda: what forward leaves for backward
  // Deprecated: the names that `keep` had. true is Keep::states and Keep::denominators; they go with version 0.3. (No
  // attribute: gcc 12 would warn of every copy of the options.)
  bool keep_states = false;
  bool keep_rows = false;

  bool operator==(const MlstmOptions&) const = default;
};

// The stabilised state: true C = C exp(m), true n = n exp(m). float32, or float64 when q, k, v are.
template <class View>
struct BasicMlstmState {
  View C;  // [N,H,dqk,dhv]
  View n;  // [N,H,dqk]
  View m;  // [N,H]
};
using MlstmState = BasicMlstmState<TensorView>;
using MutableMlstmState = BasicMlstmState<MutableTensorView>;

// Gradients of a state. The max state m only fixes the scale of C and n, so it has none.
template <class View>
struct BasicMlstmStateGrad {
  View C;  // [N,H,dqk,dhv]
  View n;  // [N,H,dqk]
};
using MlstmStateGrad = BasicMlstmStateGrad<TensorView>;
using MutableMlstmStateGrad = BasicMlstmStateGrad<MutableTensorView>;

struct MlstmForward {
  TensorView q;                       // [B,T,Hqk,dqk]  float32, float64, bfloat16 or float16
  TensorView k;                       // [B,T,Hqk,dqk]  dtype of q
  TensorView v;                       // [B,T,H,dhv]    dtype of q
  TensorView i;                       // [B,T,H]        input gate as `InputGate` says, any float dtype
  TensorView f;                       // [B,T,H]        forget gate as `InputGate` says, any float dtype
  MutableTensorView h;                // [B,T,H,dhv]    out, dtype of q
  MlstmState initial_state = {};      // optional, all three or none
  MutableMlstmState last_state = {};  // optional out; may be the very views of initial_state
  TensorView cu_seqlens = {};         // [N+1]          optional int32 or int64: 0 = c_0 <= ... <= c_N <= T; then B = 1.
                                      //                Tokens from c_N on are padding: rows of 0 in h and gradients
  std::span<std::byte> saved = {};    // [plan.saved_bytes] out, where options.keep asks for it
  MlstmOptions options = {};
};

struct MlstmBackward {
  TensorView q;                               // [B,T,Hqk,dqk]
  TensorView k;                               // [B,T,Hqk,dqk]
  TensorView v;                               // [B,T,H,dhv]
  TensorView i;                               // [B,T,H]
  TensorView f;                               // [B,T,H]
  TensorView dh;                              // [B,T,H,dhv]    gradient of h, dtype of q
  MutableTensorView dq;                       // [B,T,Hqk,dqk]  out, dtype of q
  MutableTensorView dk;                       // [B,T,Hqk,dqk]  out, dtype of q
  MutableTensorView dv;                       // [B,T,H,dhv]    out, dtype of q
  MutableTensorView di;                       // [B,T,H]        out, dtype of i
  MutableTensorView df;                       // [B,T,H]        out, dtype of f
  MlstmState initial_state = {};              // as given to forward
  MlstmStateGrad dlast_state = {};            // optional: gradient of the last state, at its own m; C, n or both
  MutableMlstmStateGrad dinitial_state = {};  // optional out: C, n or both
  TensorView cu_seqlens = {};                 // as given to forward
  std::span<const std::byte> saved = {};      // as forward left it
  MlstmOptions options = {};
};

struct MlstmStep {
  TensorView q;             // [B,T,Hqk,dqk]  T new tokens, usually 1
  TensorView k;             // [B,T,Hqk,dqk]
  TensorView v;             // [B,T,H,dhv]
  TensorView i;             // [B,T,H]
  TensorView f;             // [B,T,H]
  MutableTensorView h;      // [B,T,H,dhv]    out, dtype of q
  MutableMlstmState state;  // C [S,H,dqk,dhv], n [S,H,dqk], m [S,H]: updated in place
  TensorView slots = {};    // [B]            optional int32 or int64: row b uses state slots[b]; default b. A row with
                            //                slot -1 is padding: it has no state, and its h is 0
  MlstmOptions options = {};
};

}  // namespace tfla
