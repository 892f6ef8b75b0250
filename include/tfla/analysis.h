// The cost model: operations and bytes of the mLSTM in its three formulations, and what follows from them on a machine:
// time, arithmetic intensity, the chunk size that is best.
//
// The counts are those of the paper's appendix F, term by term and with its factors as parameters; the backward pass,
// which the paper leaves out, is counted by the same rules from the formulas of its appendix B. docs/paper.md says
// where the paper's simplified tables do not follow from its exact ones: both are here.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tfla/mlstm.h"

namespace tfla::analysis {

enum class Pass : std::uint8_t { forward, backward };

// Real numbers, so that curves over head dimensions are smooth.
struct HeadDims {
  double dqk = 256;
  double dhv = 512;
};

// Operations that one application of a function counts for, and the share of a square that causality leaves.
struct Factors {
  double exp = 1;
  double log = 1;
  double sig = 1;
  double max = 1;
  double abs = 1;
  double mask = 1;
  double causal = 0.5;
};

// Bytes of one element.
struct ItemBytes {
  double qkv = 2;     // q, k, v, h and their gradients
  double gates = 2;   // i, f and their gradients
  double states = 4;  // C, n, m
};

// What is counted. The paper's own setting is the default.
struct Model {
  Pass pass = Pass::forward;
  Formulation formulation = Formulation::chunkwise;
  InputGate gate = InputGate::sigmoid;  // exponential with its normalizer and max state, sigmoid without
  HeadDims dims = {};
  Factors factors = {};
  ItemBytes bytes = {};
};

// A count for one head and one unit of x tokens: constant + linear x + quadratic x^2. The unit is a chunk (chunkwise),
// the whole sequence (parallel), or one token (recurrent, where only x = 1 makes sense).
struct Polynomial {
  double constant = 0;
  double linear = 0;
  double quadratic = 0;

  [[nodiscard]] double operator()(double x) const { return constant + x * (linear + x * quadratic); }
  bool operator==(const Polynomial&) const = default;
};
[[nodiscard]] Polynomial operator+(const Polynomial& a, const Polynomial& b);
[[nodiscard]] Polynomial operator-(const Polynomial& a, const Polynomial& b);
[[nodiscard]] Polynomial operator*(double factor, const Polynomial& a);

// One row of a table.
struct Term {
  std::string name;
  Polynomial count;
  Polynomial products = {};  // the part of count that is matrix products: what tensor cores or a BLAS do
};
[[nodiscard]] Polynomial sum(const std::vector<Term>& terms);

// Exact tables. The recurrent formulation has no backward pass and is refused there.
[[nodiscard]] std::vector<Term> flop_terms(const Model& model);
[[nodiscard]] std::vector<Term> byte_terms(const Model& model);
[[nodiscard]] Polynomial flops(const Model& model);
[[nodiscard]] Polynomial bytes(const Model& model);

// The paper's simplified tables as printed, which set every factor but `causal` to 1. Forward only.
[[nodiscard]] std::vector<Term> printed_flop_terms(const Model& model);
[[nodiscard]] Polynomial printed_flops(const Model& model);       // the table of totals
[[nodiscard]] Polynomial printed_bytes(const Model& model);       // the row "Total" of a memory table
[[nodiscard]] Polynomial printed_difference(const Model& model);  // mLSTMexp less mLSTMsig, of the table of totals

// The matrix products a method needs, per token: so many with the state, 2 dqk dhv operations each, and per column of
// a square so many of 2 dqk (Q K^T and its gradients) and of 2 dhv (S V and its gradients).
struct Products {
  double state = 0;
  double square_qk = 0;
  double square_hv = 0;
};
[[nodiscard]] Products products(Pass pass, Formulation formulation);

// ---------------------------------------------------------------- whole calls

struct Workload {
  double batch = 1;
  double heads = 1;
  double tokens = 1;  // T
};
// Tokens of the unit that a polynomial takes: the chunk, T or 1.
[[nodiscard]] double unit(Formulation formulation, double tokens, double chunk);
[[nodiscard]] double total(const Polynomial& count, double unit, const Workload& workload);

// ---------------------------------------------------------------- machines

struct Accelerator {
  std::string name;
  int year = 0;
  double flops = 0;      // per second, bfloat16 matrix products without sparsity
  double bandwidth = 0;  // bytes per second
  std::string source;

  [[nodiscard]] double intensity() const { return flops / bandwidth; }
};
[[nodiscard]] const std::vector<Accelerator>& accelerators();
[[nodiscard]] const Accelerator& accelerator(const std::string& name);

struct Runtime {
  double flop_seconds = 0;
  double byte_seconds = 0;

  [[nodiscard]] double sum() const { return flop_seconds + byte_seconds; }  // nothing overlaps
  [[nodiscard]] double overlapped() const { return flop_seconds > byte_seconds ? flop_seconds : byte_seconds; }
};
[[nodiscard]] Runtime runtime(double flops, double bytes, const Accelerator& machine);
// FLOPs per second that a method with this arithmetic intensity can reach at most.
[[nodiscard]] double roofline(const Accelerator& machine, double intensity);

// ---------------------------------------------------------------- the best chunk size

// Where count(L) / L is least: sqrt(constant / quadratic).
[[nodiscard]] double best_chunk(const Polynomial& count);
// Where the time on a machine is least, as a sum or overlapped. Without a memory term both are best_chunk(flops).
[[nodiscard]] double best_chunk(const Polynomial& flops, const Polynomial& bytes, const Accelerator& machine);
[[nodiscard]] double best_chunk_overlapped(const Polynomial& flops, const Polynomial& bytes,
                                           const Accelerator& machine);
// The paper's two closed forms, letter by letter (mLSTMsig, forward, dqk = pqk dhv).
[[nodiscard]] double printed_flop_optimal_chunk(double dhv, double pqk, double causal);
[[nodiscard]] double printed_runtime_optimal_chunk(double dhv, double pqk, double causal, double state_bytes,
                                                   double intensity);
// The minimum of a function with one valley on [low, high], both positive, to about eight digits.
[[nodiscard]] double minimize(const std::function<double(double)>& f, double low, double high);
// The power of two with the least distance in the logarithm.
[[nodiscard]] double nearest_power_of_two(double x);

}  // namespace tfla::analysis
