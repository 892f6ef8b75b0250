// Random calls of the delta rule in every regime, dtype and layout.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <utility>
#include <vector>

#include "reference/delta.h"
#include "testkit/case.h"
#include "testkit/tensor.h"
#include "tfla/tfla.h"

namespace tfla::testkit {

// How the decay is given.
//   none    no g
//   log     g is its logarithm
//   rate    with A_log
//   biased  with A_log and dt_bias
enum class Decay : std::uint8_t { none, log, rate, biased };

// What write strengths, decays and keys look like. Keys are of length 1 where nothing else is said.
enum class DeltaRegime : std::uint8_t {
  ordinary,     // strengths of sigmoid(N(0,1)), log decays of -exp(N(-2,1))
  faint,        // strengths below 1e-4
  kept,         // the same, and log decays of exactly -1e-6: the initial state stays, and each decay is rounded alike
  every_other,  // every other strength is exactly 0
  full,         // strengths of exactly 1
  twofold,      // strengths of exactly 2
  lasting,      // log decays of about -1e-6
  brief,        // log decays below -20
  gone,         // log decays below -100
  resets,       // every seventh log decay is minus infinity
  growing,      // log decays of N(0, 0.1^2), half of them above 0
  extremes,     // log decays of 0, -1e-3, -20, -100, -1e4 and minus infinity in turn
  one_key,      // all keys of a head are one key, strengths of exactly 1
  one_key_beyond,  // the same with strengths of 1.9
  raw_keys         // keys of N(0, 1.44 / dqk)
};
inline constexpr DeltaRegime all_delta_regimes[] = {
    DeltaRegime::ordinary, DeltaRegime::faint,          DeltaRegime::kept,    DeltaRegime::every_other,
    DeltaRegime::full,     DeltaRegime::twofold,        DeltaRegime::lasting, DeltaRegime::brief,
    DeltaRegime::gone,     DeltaRegime::resets,         DeltaRegime::growing, DeltaRegime::extremes,
    DeltaRegime::one_key,  DeltaRegime::one_key_beyond, DeltaRegime::raw_keys};
[[nodiscard]] const char* name(DeltaRegime regime);

struct DeltaCase {
  DeltaRegime regime = DeltaRegime::ordinary;
  DeltaShape shape = {};                 // `sequences` and `longest` are derived; leave them
  Decay decay = Decay::log;              //
  DType g_dtype = DType::float32;        // of g, A_log and dt_bias; shape.gate_dtype is that of beta
  std::vector<std::int64_t> cu_seqlens;  // empty: a dense batch. May end before `tokens`: the rest is padding
  std::int64_t index_stride = 1;         // of cu_seqlens, with other numbers between its own
  DeltaOptions options = {};
  Layout layout = Layout::bthd;
  bool initial_state = false;    // also asks for its gradient
  bool in_place = false;         // forward's last state takes the place of that
  bool last_state = true;        // forward is asked for it
  bool last_state_grad = false;  // feeds a gradient into the last state
  int threads = 1;
  Device device = Device::cpu;
  bool on_chip = false;  // cuda: by Hopper's kernels where there are any, and not by portable ones
  std::uint64_t seed = 1;
};

// A name for GoogleTest: letters, digits and underscores.
[[nodiscard]] std::string label(const DeltaCase& description);
void PrintTo(const DeltaCase& description, std::ostream* out);

// Owns the tensors of a case: inputs drawn and rounded to their dtype, outputs poisoned with NaN. Not copyable, since
// the argument structs point into it.
class DeltaProblem {
 public:
  explicit DeltaProblem(const DeltaCase& given);
  DeltaProblem(const DeltaProblem&) = delete;
  DeltaProblem& operator=(const DeltaProblem&) = delete;

  DeltaCase description;
  DeltaForward forward;
  DeltaBackward backward;

  void poison();                                    // NaN into every output again
  [[nodiscard]] reference::DeltaCall call() const;  // the inputs as they are now, in float64
  // Whether all that is not an output still is what it was: margins of buffers and columns between outputs.
  [[nodiscard]] bool surroundings_intact() const;

 private:
  void allocate_tokens();
  void allocate_rest();
  void draw();
  void draw_gates();
  void fill_arguments();
  void start_last_state() const;

  Tensor q_, k_, v_, beta_, g_, A_log_, dt_bias_, dh_, C0_, dC_last_, packing_;
  Tensor h_, C_, dq_, dk_, dv_, dbeta_, dg_, dA_log_, ddt_bias_, dC0_;
  std::vector<Tensor> holes_;  // columns of fused outputs that belong to none
};

using DeltaOutputs = std::vector<std::pair<std::string, MutableTensorView>>;
[[nodiscard]] DeltaOutputs outputs(const DeltaForward& args);   // h, C
[[nodiscard]] DeltaOutputs outputs(const DeltaBackward& args);  // dq, dk, dv, dbeta, dg, dA_log, ddt_bias, dC0
[[nodiscard]] DeltaOutputs outputs(const DeltaStep& args);      // h, C

}  // namespace tfla::testkit
