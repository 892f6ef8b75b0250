// The paper's simplified tables exactly as printed, slips included: tests hold them against the exact ones, and
// docs/paper.md lists where they part.
#include "core/checks.h"
#include "plan/cost/tables.h"

namespace tfla::analysis {

using tables::constant;
using tables::linear;
using tables::quadratic;

namespace {

void check_forward(const Model& model) {
  if (model.pass != Pass::forward) refuse("tfla: model.pass is backward; the paper's tables count forward only");
}

std::vector<Term> printed_chunkwise(const Model& model) {
  const auto& [dqk, dhv] = model.dims;
  const double causal = model.factors.causal;
  const double state = dqk * dhv;
  const bool exponential = model.gate == InputGate::exponential;
  std::vector<Term> terms;
  terms.push_back({"Gates", exponential ? Polynomial{5, 6.5, 0.5} : Polynomial{1, 7.5, 0.5}});
  terms.push_back({"Numerator", {2 * state, 2 * state + dqk, 0}});
  if (exponential) terms.push_back({"Denominator", {2 * dqk, 2 * dqk, 0}});
  terms.push_back({"Cumulative Forget Gates", {0, 2.5, 0.5}});
  terms.push_back({"Gate Matrix", causal * (exponential ? Polynomial{0, 2, 5} : Polynomial{0, 0, 3})});
  terms.push_back({"Intra Outputs", causal * quadratic(2 * (dqk + dhv) + 3)});
  terms.push_back({"Inter Outputs", linear(2 * state + (exponential ? 3 : 1) * dqk)});
  terms.push_back({"Output Combination", linear(exponential ? 2 * dhv + 4 : dhv)});
  return terms;
}

std::vector<Term> printed_parallel(const Model& model) {
  const auto& [dqk, dhv] = model.dims;
  const double causal = model.factors.causal;
  const bool exponential = model.gate == InputGate::exponential;
  std::vector<Term> terms;
  terms.push_back({"Cumulative Forget Gates", {0, exponential ? 2.5 : 4.5, 0.5}});
  terms.push_back({"Gate Matrix", quadratic(6)});
  terms.push_back({"Attention Logits", causal * quadratic(2 * dqk + 2)});
  if (exponential) terms.push_back({"Normalization", causal * Polynomial{0, 2, 4}});
  terms.push_back({"Outputs", causal * quadratic(2 * dhv)});
  return terms;
}

std::vector<Term> printed_recurrent(const Model& model) {
  const auto& [dqk, dhv] = model.dims;
  const bool exponential = model.gate == InputGate::exponential;
  std::vector<Term> terms;
  terms.push_back({"Gates", constant(exponential ? 9 : 2)});
  terms.push_back({"Memory Cell Update", constant(4 * dqk * dhv)});
  if (exponential) terms.push_back({"Denominator & Scale", constant(6 * dqk + dhv + 3)});
  terms.push_back({"Output", constant(2 * dhv * dqk + dqk)});
  return terms;
}

}  // namespace

std::vector<Term> printed_flop_terms(const Model& model) {
  check_forward(model);
  switch (model.formulation) {
    case Formulation::chunkwise: return printed_chunkwise(model);
    case Formulation::parallel: return printed_parallel(model);
    case Formulation::recurrent: break;
  }
  return printed_recurrent(model);
}

Polynomial printed_flops(const Model& model) {
  check_forward(model);
  const auto& [dqk, dhv] = model.dims;
  const double causal = model.factors.causal;
  const double state = dqk * dhv;
  const bool exponential = model.gate == InputGate::exponential;
  switch (model.formulation) {
    case Formulation::chunkwise:
      if (exponential)
        return {2 * state + 2 * dqk + 5, 4 * state + 6 * dqk + 4 * dhv + 13 + 2 * causal,
                causal * (2 * (dqk + dhv) + 8) + 1};
      return {2 * state + 5, 4 * state + 2 * dqk + dhv + 11, causal * (2 * (dqk + dhv) + 6) + 1};
    case Formulation::parallel:
      if (exponential) return {0, 2 * causal + 2.5, causal * (2 * (dqk + dhv) + 6) + 6.5};
      return {0, 4.5, causal * (2 * (dqk + dhv) + 2) + 6.5};
    case Formulation::recurrent: break;
  }
  return constant(exponential ? 6 * state + 7 * dqk + dhv + 12 : 6 * state + dqk + 2);
}

Polynomial printed_difference(const Model& model) {
  check_forward(model);
  const auto& [dqk, dhv] = model.dims;
  const double causal = model.factors.causal;
  switch (model.formulation) {
    case Formulation::chunkwise: return {2 * dqk, 4 * dqk + 3 * dhv + 2 + 2 * causal, 2 * causal};
    case Formulation::parallel: return {0, 2 * causal - 2.5, 4 * causal};
    case Formulation::recurrent: break;
  }
  return constant(6 * dqk + dhv + 10);
}

Polynomial printed_bytes(const Model& model) {
  check_forward(model);
  const auto& [dqk, dhv] = model.dims;
  const ItemBytes& b = model.bytes;
  const double state = dqk * dhv;
  const bool exponential = model.gate == InputGate::exponential;
  switch (model.formulation) {
    case Formulation::chunkwise:
      return linear(4 * b.gates + 3 * (dhv + dqk) * b.qkv) +
             2 * b.states * (exponential ? Polynomial{state + dqk + 1, 1, 0} : constant(state));
    case Formulation::parallel: return linear(2 * (b.gates + (dhv + dqk) * b.qkv + (exponential ? b.states : 0)));
    case Formulation::recurrent: break;
  }
  // Printed under mLSTMexp what belongs to mLSTMsig, and the other way round.
  return constant(2 * b.gates + 2 * (dhv + dqk) * b.qkv + 2 * (state + (exponential ? 0 : dqk + 1)) * b.states);
}

}  // namespace tfla::analysis
