// Random calls of the state space dual in every regime, dtype and layout.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <utility>
#include <vector>

#include "reference/ssd.h"
#include "testkit/case.h"
#include "testkit/tensor.h"
#include "tfla/tfla.h"

namespace tfla::testkit {

// What time steps and rates look like. Where dt_softplus is set, dt is what softplus makes these of.
enum class SsdRegime : std::uint8_t {
  ordinary,  // dt of 0.03 exp(N(0,0.7^2)), A of -exp(N(1.4,0.7^2)); every eleventh dt is below 0
  lasting,   // dt of about 1e-3, A of -1e-3
  kept,      // dt A of exactly 17.5 2^-24: the initial state stays, and each decay is rounded alike
  growing,   // A on both sides of 0
  brief,     // dt A below -20
  gone,      // dt A below -100
  still,     // two of three dt are exactly 0
  large,     // dt of about 20, A of -1e-2
  resets,    // every other token starts afresh, where there are numbers of sequences
  edges      // dt of exactly 1/32 and 1/16, and halfway between: with those as limits, at the limits
};
inline constexpr SsdRegime all_ssd_regimes[] = {
    SsdRegime::ordinary, SsdRegime::lasting, SsdRegime::kept,  SsdRegime::growing, SsdRegime::brief,
    SsdRegime::gone,     SsdRegime::still,   SsdRegime::large, SsdRegime::resets,  SsdRegime::edges};
[[nodiscard]] const char* name(SsdRegime regime);

enum class Skip : std::uint8_t { none, per_head, per_channel };
enum class Numbers : std::uint8_t { none, int32, int64 };

struct SsdCase {
  SsdRegime regime = SsdRegime::ordinary;
  MlstmShape shape = {};           // dqk is S, dhv is P, qk_heads is G; gate_dtype is that of dt
  DType A_dtype = DType::float32;  // of A and dt_bias
  DType D_dtype = DType::float32;
  Skip skip = Skip::none;
  bool z = false;
  bool dt_bias = false;
  Numbers seq_idx = Numbers::none;
  std::vector<std::int64_t> cu_seqlens;  // empty: a dense batch. May end before `tokens`: the rest is padding
  std::int64_t index_stride = 1;         // of cu_seqlens, with other numbers between its own
  SsdOptions options = {};
  Layout layout = Layout::bthd;  // bhtd: heads before tokens, D with P before H, vectors as columns of tables.
                                 // fused: [z | x | B | C | dt] as Mamba-2 projects them, gradients likewise
  std::int64_t hole = 3;         // columns of a fused tensor that belong to nothing, between x and B
  bool initial_state = false;    // also asks for its gradient
  bool in_place = false;         // forward's last state takes the place of that
  bool last_state = true;        // forward is asked for it
  bool last_state_grad = false;  // feeds a gradient into the last state
  bool turned_states = false;    // memory of states is [N,H,S,P]
  int threads = 1;
  Device device = Device::cpu;  // cuda: in memory that the GPU and the reference both see
  bool portable = true;         // cuda: only the kernels that every GPU has
  std::uint64_t seed = 1;
};

// A name for GoogleTest: letters, digits and underscores.
[[nodiscard]] std::string label(const SsdCase& description);
void PrintTo(const SsdCase& description, std::ostream* out);

// Owns the tensors of a case: inputs drawn and rounded to their dtype, outputs poisoned with NaN. Not copyable, since
// the argument structs point into it. Backward reads what forward left in `ungated`.
class SsdProblem {
 public:
  explicit SsdProblem(const SsdCase& given);
  SsdProblem(const SsdProblem&) = delete;
  SsdProblem& operator=(const SsdProblem&) = delete;

  SsdCase description;
  SsdForward forward;
  SsdBackward backward;

  void poison_forward();  // NaN into every output of forward again, and where it is in place, the initial state
  void poison_backward();
  [[nodiscard]] reference::SsdCall call() const;  // the inputs as they are now, in float64
  // Whether all that is not an output still is what it was: margins of buffers and columns between outputs.
  [[nodiscard]] bool surroundings_intact() const;
  // A step on `state` with the inputs of forward.
  [[nodiscard]] SsdStep step(const MutableTensorView& state) const;

 private:
  void allocate_tokens();
  void allocate_fused();
  void allocate_heads();
  void allocate_states();
  void draw();
  void draw_time_steps();
  void draw_numbers();
  void fill_arguments();
  void start_last_state() const;
  [[nodiscard]] Tensor of_heads(DType dtype, bool output);

  Tensor x_, dt_, A_, B_, C_, D_, z_, dt_bias_, seq_idx_, dy_, S0_, dS_last_, packing_;
  Tensor y_, ungated_, S_, dx_, ddt_, dA_, dB_, dC_, dD_, dz_, ddt_bias_, dS0_;
  std::vector<Tensor> holes_;  // columns of outputs that belong to none
};

using SsdOutputs = std::vector<std::pair<std::string, MutableTensorView>>;
[[nodiscard]] SsdOutputs outputs(const SsdForward& args);   // y, ungated, S
[[nodiscard]] SsdOutputs outputs(const SsdBackward& args);  // dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dS0
[[nodiscard]] SsdOutputs outputs(const SsdStep& args);      // y, S

}  // namespace tfla::testkit
