// From a model to its table.
#include <fmt/format.h>

#include "core/checks.h"
#include "plan/cost/tables.h"

namespace tfla::analysis {
namespace {

using Table = std::vector<Term> (*)(const Model&);

void refuse_recurrent_backward() {
  refuse("tfla: model.formulation is recurrent; its backward pass is not counted, pass must be forward");
}

void check(const Model& model) {
  const auto positive = [](double value, const char* name) {
    if (!(value > 0)) refuse(fmt::format("tfla: model.{} is {}; it must be positive", name, value));
  };
  positive(model.dims.dqk, "dims.dqk");
  positive(model.dims.dhv, "dims.dhv");
  positive(model.factors.causal, "factors.causal");
}

std::vector<Term> select(const Model& model, Table chunkwise, Table parallel, Table recurrent) {
  check(model);
  switch (model.formulation) {
    case Formulation::chunkwise: return chunkwise(model);
    case Formulation::parallel: return parallel(model);
    case Formulation::recurrent: break;
  }
  if (recurrent == nullptr) refuse_recurrent_backward();
  return recurrent(model);
}

}  // namespace

std::vector<Term> flop_terms(const Model& model) {
  if (model.pass == Pass::backward)
    return select(model, tables::chunkwise_backward_flops, tables::parallel_backward_flops, nullptr);
  return select(model, tables::chunkwise_flops, tables::parallel_flops, tables::recurrent_flops);
}

std::vector<Term> byte_terms(const Model& model) {
  if (model.pass == Pass::backward)
    return select(model, tables::chunkwise_backward_bytes, tables::parallel_backward_bytes, nullptr);
  return select(model, tables::chunkwise_bytes, tables::parallel_bytes, tables::recurrent_bytes);
}

Polynomial flops(const Model& model) { return sum(flop_terms(model)); }
Polynomial bytes(const Model& model) { return sum(byte_terms(model)); }

Products products(Pass pass, Formulation formulation) {
  if (pass == Pass::backward) {
    // C once more, dC, and dQ, dK, dV through them; S and its dQ, dK; dS and dV.
    if (formulation == Formulation::chunkwise) return {.state = 5, .square_qk = 3, .square_hv = 2};
    if (formulation == Formulation::parallel) return {.state = 0, .square_qk = 3, .square_hv = 2};
    refuse_recurrent_backward();
  }
  if (formulation == Formulation::recurrent) return {.state = 2};
  return {.state = formulation == Formulation::chunkwise ? 2.0 : 0.0, .square_qk = 1, .square_hv = 1};
}

}  // namespace tfla::analysis
