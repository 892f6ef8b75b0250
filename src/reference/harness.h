// Random problems in every regime, dtype and layout, run through tfla and judged against the float64 reference.
// `tfla check`, the tests and the benchmarks share it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tfla/tfla.h"

namespace tfla::reference {

// The gate distributions of docs/numerics.md.
enum class Regime : std::uint8_t { randn, init, trained_like, large_i, capped_extremes, never_forget, resets };
inline constexpr Regime all_regimes[] = {
    Regime::randn,           Regime::init,         Regime::trained_like, Regime::large_i,
    Regime::capped_extremes, Regime::never_forget, Regime::resets};
[[nodiscard]] const char* name(Regime regime);

// Where q, k, v and h lie in memory. fused: q, k, v are slices of one projection [B,T,Hqk*(2 dqk)+H*dhv], dq, dk, dv
// alike.
enum class Layout : std::uint8_t { bthd, bhtd, fused };

struct Case {
  Regime regime = Regime::randn;
  MlstmShape shape;                      // `sequences` and `longest` are derived; leave them
  std::vector<std::int64_t> cu_seqlens;  // empty: a dense batch. May end before `tokens`: the rest is padding
  std::int64_t index_stride = 1;         // of cu_seqlens, with other numbers between its own
  MlstmOptions options;
  Layout layout = Layout::bthd;
  bool initial_state = false;    // also asks for its gradient
  bool in_place = false;         // forward's last state takes the place of that
  bool last_state_grad = false;  // feeds a gradient into the last state
  std::uint64_t seed = 1;
  Device device = Device::cpu;  // where the tensors lie, and the call is to run
};

// Owns the tensors of a case: inputs drawn and rounded to their dtype, outputs poisoned with NaN. Not copyable,
// since the argument structs point into it.
class Problem {
 public:
  explicit Problem(const Case& description);
  ~Problem();
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  [[nodiscard]] MlstmForward& forward();  // with last_state asked for (not for T = 0 batches of zero sequences)
  [[nodiscard]] MlstmBackward& backward();
  void poison();  // NaN into every output again

 private:
  friend class Judge;
  struct Storage;
  std::unique_ptr<Storage> storage_;
};

struct TensorError {
  std::string tensor;            // "h", "C", "n", "m", "dq", ... "dC0", "dn0"
  double relative = 0;           // ||x - ref|| / ||ref||; infinite when x has a NaN or infinity the reference has not
  double worst = 0;              // largest absolute difference
  std::int64_t worst_index = 0;  // of that element, counted row-major over the tensor's logical shape
  std::int64_t not_finite = 0;   // NaN or infinity where the reference is finite
  std::int64_t beyond = 0;       // elements of the reference that the dtype has no room for, or hardly any
  double size = 0;               // ||ref|| of the others
  std::int64_t count = 0;        // of its elements
  double terms = 0;              // of df: the size of the sums that it is a difference of
  double spread = 0;  // of h: its relative error if each number of the state is off by its own size (reference.h)
  double explained =
      0;  // of df, where few numbers make it up: what roundings of the states make of it (Judge::explained)
};

// Compares what forward (and backward) left in a problem's outputs with the reference. The reference is evaluated
// once, in the constructor, on the rounded inputs. C, n are compared in a common scale: (C, m) and (C e, m - 1) are
// equal.
class Judge {
 public:
  explicit Judge(const Problem& problem, bool with_backward);
  ~Judge();
  [[nodiscard]] std::vector<TensorError> forward_errors() const;   // h, C, n
  [[nodiscard]] std::vector<TensorError> backward_errors() const;  // dq, dk, dv, di, df and, where asked, dC0, dn0

  // The relative error that roundings of the operands by themselves make of every tensor: the root of the mean of the
  // squares over some draws.
  [[nodiscard]] std::map<std::string, double> explained(double operands, double norms) const;

 private:
  const Problem& problem_;
  bool with_backward_;
  struct Answers;
  std::unique_ptr<Answers> answers_;
};

// The bound on the relative error of `tensor` that this project promises (docs/numerics.md). On a GPU, 16-bit products
// are rounded on the way: there the bound is what the paper's kernels reach, and a fifth of it for df above 1e-2.
[[nodiscard]] double bound(const std::string& tensor, Regime regime, DType dtype, Device device = Device::cpu);

// That bound for a case: a 16-bit number counts by the root mean square of its rounding over many elements, and where
// few make up the norm, by all of it.
[[nodiscard]] double allowed_error(const std::string& tensor, const Case& description);

// The same where it is known how much the denominators cancel. The recurrent formulation rounds its state at every
// token; what sixteen such roundings make of h is allowed too. On tensor cores so is what four roundings of the states
// make of df where few numbers make it up: each is a sum over the state, and it may nearly cancel.
[[nodiscard]] double allowed_error(const TensorError& error, const Case& description);

}  // namespace tfla::reference
