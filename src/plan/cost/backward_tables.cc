// The backward pass, which the paper does not count: its formulas of appendix B by its rules of appendix F (a
// multiply-add is 2, a running sum of x terms x (x + 1) / 2, nothing that a kernel computes twice, no initial state).
// Forward leaves n.q and m of every row (mLSTMexp), which backward reads; the states are computed once more.
#include "plan/cost/tables.h"

namespace tfla::tables {

using analysis::Factors;
using analysis::ItemBytes;

std::vector<Term> chunkwise_backward_flops(const Model& model) {
  const auto& [dqk, dhv] = model.dims;
  const Factors& f = model.factors;
  const bool exponential = model.gate == InputGate::exponential;
  const double state = dqk * dhv;
  const double gates = exponential ? 1 : 2;  // with an activation other than exp
  const Polynomial state_product = linear(2 * state);
  const Polynomial square_qk = quadratic(f.causal * 2 * dqk);
  const Polynomial square_hv = quadratic(f.causal * 2 * dhv);
  const std::vector<Term> forward = chunkwise_flops(model);
  const auto same_as_forward = [&](const char* name) {
    for (const Term& term : forward) {
      if (term.name == name) return term;
    }
    return Term{};
  };
  std::vector<Term> terms;
  terms.push_back(same_as_forward("Gates"));
  terms.push_back({"States", constant(2 * state) + state_product + linear(dqk), state_product});
  if (exponential) terms.push_back({"Gradients over Denominator", linear(dhv)});
  terms.push_back({"State Gradients", constant(2 * state) + state_product + linear(dqk), state_product});
  terms.push_back(same_as_forward("Cumulative Forget Gates"));
  terms.push_back(same_as_forward("Gate Matrix"));
  terms.push_back({"Scores", square_qk + quadratic(f.causal * 2), square_qk});       // scaled, gated
  terms.push_back({"Score Gradients", square_hv + quadratic(f.causal), square_hv});  // gated
  // Through the state: scaled and weighted. Inside the chunk: scaled. Then added.
  terms.push_back({"Query Gradients", state_product + square_qk + linear(4 * dqk), state_product + square_qk});
  terms.push_back({"Key Gradients", state_product + square_qk + linear(3 * dqk), state_product + square_qk});
  terms.push_back({"Value Gradients", state_product + square_hv + linear(dhv), state_product + square_hv});
  // Inner products for g, a, b; S . dS with its row and column sums; reverse sums of a and b; activations.
  terms.push_back({"Gate Gradients", constant(2 * state + 1) + linear(4 * dqk + 2) + quadratic(f.causal * 3) +
                                         2.0 * running_sum() + linear(3 + gates * (1 + f.sig))});
  return terms;
}

std::vector<Term> parallel_backward_flops(const Model& model) {
  const auto& [dqk, dhv] = model.dims;
  const Factors& f = model.factors;
  const bool exponential = model.gate == InputGate::exponential;
  const double gates = exponential ? 1 : 2;
  const Polynomial square_qk = quadratic(f.causal * 2 * dqk);
  const Polynomial square_hv = quadratic(f.causal * 2 * dhv);
  const std::vector<Term> forward = parallel_flops(model);
  std::vector<Term> terms = {forward[0], forward[1]};  // Cumulative Forget Gates, Gate Matrix
  if (exponential) terms.push_back({"Gradients over Denominator", linear(dhv)});
  terms.push_back({"Scores", square_qk + quadratic(f.causal * 2), square_qk});
  terms.push_back({"Score Gradients", square_hv + quadratic(f.causal), square_hv});
  terms.push_back({"Query Gradients", square_qk + linear(dqk), square_qk});
  terms.push_back({"Key Gradients", square_qk + linear(dqk), square_qk});
  terms.push_back({"Value Gradients", square_hv, square_hv});
  terms.push_back({"Gate Gradients", quadratic(f.causal * 3) + running_sum() + linear(1 + gates * (1 + f.sig))});
  return terms;
}

std::vector<Term> chunkwise_backward_bytes(const Model& model) {
  const auto& [dqk, dhv] = model.dims;
  const ItemBytes& b = model.bytes;
  const bool exponential = model.gate == InputGate::exponential;
  const Polynomial state = constant(dqk * dhv * b.states);
  const Polynomial scale = constant(exponential ? b.states : 0);    // m of a stored state
  const Polynomial norms = linear(exponential ? 2 * b.states : 0);  // n.q and m of every row
  const Polynomial gates = linear(2 * b.gates);
  return {{"States Load", linear((dqk + dhv) * b.qkv) + gates},
          {"States Store", state + scale},
          {"State Gradients Load", linear((dqk + dhv) * b.qkv) + gates + norms},
          {"State Gradients Store", state},
          {"Gradients Load", linear((2 * dqk + 2 * dhv) * b.qkv) + gates + norms + 2.0 * state + scale},
          {"Gradients Store", linear((2 * dqk + dhv) * b.qkv) + gates}};
}

std::vector<Term> parallel_backward_bytes(const Model& model) {
  const auto& [dqk, dhv] = model.dims;
  const ItemBytes& b = model.bytes;
  const bool exponential = model.gate == InputGate::exponential;
  const Polynomial norms = linear(exponential ? 2 * b.states : 0);
  const Polynomial gates = linear(2 * b.gates);
  return {{"Load", linear((2 * dqk + 2 * dhv) * b.qkv) + gates + norms},
          {"Store", linear((2 * dqk + dhv) * b.qkv) + gates}};
}

}  // namespace tfla::tables
