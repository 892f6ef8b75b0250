// The paper's exact tables of appendix F: FLOPs and memory operations of the forward pass. Names of rows are the
// paper's.
#include "plan/cost/tables.h"

namespace tfla::tables {

using analysis::Factors;
using analysis::ItemBytes;

std::vector<Term> chunkwise_flops(const Model& model) {
  const auto& [dqk, dhv] = model.dims;
  const Factors& f = model.factors;
  const bool exponential = model.gate == InputGate::exponential;
  const double state = dqk * dhv;
  const Polynomial squares = quadratic(f.causal * 2 * (dqk + dhv));
  std::vector<Term> terms;
  const Polynomial decays = linear(2) + running_sum();
  terms.push_back({"Gates", exponential ? decays + linear(1 + f.exp + f.log + f.sig) + constant(3 + f.max + f.exp)
                                        : decays + linear(f.exp + 2 * (f.log + f.sig)) + constant(f.exp)});
  terms.push_back({"Numerator", constant(2 * state) + linear(2 * state + dqk), linear(2 * state)});
  if (exponential) terms.push_back({"Denominator", constant(2 * dqk) + linear(2 * dqk)});
  terms.push_back({"Cumulative Forget Gates", running_sum() + linear((exponential ? 1 : 2) * (f.log + f.sig))});
  terms.push_back({"Gate Matrix", exponential ? f.causal * (quadratic(3 + f.exp + f.max) + linear(1 + f.max))
                                              : f.causal * quadratic(2 + f.exp)});
  terms.push_back({"Intra Outputs", squares + quadratic(f.causal * 3), squares});
  terms.push_back({"Inter Outputs", linear(2 * state + (exponential ? 3 : 1) * dqk), linear(2 * state)});
  terms.push_back({"Output Combination", exponential ? linear(2 * dhv + 1 + f.max + f.abs + f.exp) : linear(dhv)});
  return terms;
}

std::vector<Term> parallel_flops(const Model& model) {
  const auto& [dqk, dhv] = model.dims;
  const Factors& f = model.factors;
  const bool exponential = model.gate == InputGate::exponential;
  const Polynomial scores = quadratic(f.causal * 2 * dqk);
  const Polynomial outputs = quadratic(f.causal * 2 * dhv);
  std::vector<Term> terms;
  terms.push_back({"Cumulative Forget Gates", running_sum() + linear((exponential ? 1 : 2) * (f.log + f.sig))});
  // The same for both gates in the paper, although mLSTMsig takes no maximum.
  terms.push_back({"Gate Matrix", quadratic(3 + f.exp + f.max + f.mask)});
  terms.push_back({"Attention Logits", scores + quadratic(f.causal * 2), scores});
  if (exponential) terms.push_back({"Normalization", f.causal * (quadratic(3 + f.abs) + linear(f.exp + f.max))});
  terms.push_back({"Outputs", outputs, outputs});
  return terms;
}

std::vector<Term> recurrent_flops(const Model& model) {
  const auto& [dqk, dhv] = model.dims;
  const Factors& f = model.factors;
  const bool exponential = model.gate == InputGate::exponential;
  const double state = dqk * dhv;
  std::vector<Term> terms;
  terms.push_back({"Gates", constant(exponential ? 4 + 2 * f.exp + f.log + f.sig + f.max : 2 * f.sig)});
  terms.push_back({"Memory Cell Update", constant(4 * state), constant(2 * state)});
  if (exponential) terms.push_back({"Denominator & Scale", constant(6 * dqk + dhv + 1 + f.abs + f.max)});
  terms.push_back({"Output", constant(2 * state + dqk), constant(2 * state)});
  return terms;
}

std::vector<Term> chunkwise_bytes(const Model& model) {
  const auto& [dqk, dhv] = model.dims;
  const ItemBytes& b = model.bytes;
  const bool exponential = model.gate == InputGate::exponential;
  const Polynomial states = constant((dqk * dhv + (exponential ? dqk + 1 : 0)) * b.states);
  const Polynomial gates = linear(2 * b.gates);
  return {{"Recurrent Load", linear((dqk + dhv) * b.qkv) + gates},
          {"Recurrent Store", states},
          {"Parallel Load", linear((2 * dqk + dhv) * b.qkv) + gates + states},
          {"Parallel Store", linear(dhv * b.qkv + (exponential ? 2 * b.states : 0))}};
}

std::vector<Term> parallel_bytes(const Model& model) {
  const auto& [dqk, dhv] = model.dims;
  const ItemBytes& b = model.bytes;
  const bool exponential = model.gate == InputGate::exponential;
  return {{"Load", linear((2 * dqk + dhv) * b.qkv + 2 * b.gates)},
          {"Store", linear(dhv * b.qkv + (exponential ? 2 * b.states : 0))}};
}

std::vector<Term> recurrent_bytes(const Model& model) {
  const auto& [dqk, dhv] = model.dims;
  const ItemBytes& b = model.bytes;
  const bool exponential = model.gate == InputGate::exponential;
  const double states = (dqk * dhv + (exponential ? dqk + 1 : 0)) * b.states;
  return {{"Load", constant((2 * dqk + dhv) * b.qkv + 2 * b.gates + states)},
          {"Store", constant(dhv * b.qkv + states)}};
}

}  // namespace tfla::tables
