#include "core/cost.h"

#include <algorithm>

namespace tfla {

namespace {

// Products with the state per token and head, each 2 dqk dhv operations, and products inside a square, per token and
// column: 2 dqk for Q K^T and its gradients, 2 dhv for S V and its gradients.
struct Products {
  double state = 0;
  double square_qk = 0;
  double square_hv = 0;
};

Products products(const Plan& plan) {
  const bool backward = plan.operation == Operation::backward;
  if (plan.operation == Operation::step || plan.formulation == Formulation::recurrent) return {.state = 2};
  if (plan.formulation == Formulation::parallel) {
    // Backward forms S three times (denominators, rows, columns) and dS twice.
    if (backward) return {.square_qk = 5, .square_hv = 3};
    return {.square_qk = 1, .square_hv = 1};
  }
  const double inner = static_cast<double>((plan.chunk + plan.tile - 1) / plan.tile);
  const double rebuilt = (inner - 1) / inner;  // tile states inside a chunk are computed once more
  if (backward)
    return {.state = 5 + rebuilt + (plan.fused() ? 0 : 2), .square_qk = 3.0 + (plan.fused() ? 0 : 1), .square_hv = 2};
  return {.state = plan.fused() ? 2.0 : 3.0, .square_qk = 1, .square_hv = 1};
}

}  // namespace

double tensor_bytes(Operation operation, const MlstmShape& shape) {
  const double tokens = static_cast<double>(shape.batch) * static_cast<double>(shape.tokens);
  const double qk = static_cast<double>(shape.qk_heads) * static_cast<double>(shape.dqk);
  const double hv = static_cast<double>(shape.heads) * static_cast<double>(shape.dhv);
  const double gates = 2.0 * static_cast<double>(shape.heads);
  const double item = static_cast<double>(item_size(shape.dtype));
  const double gate_item = static_cast<double>(item_size(shape.gate_dtype));
  if (operation == Operation::backward) return tokens * ((4 * qk + 3 * hv) * item + 2 * gates * gate_item);
  return tokens * ((2 * qk + 2 * hv) * item + gates * gate_item);
}

Cost cost(const Plan& plan) {
  const MlstmShape& shape = plan.shape;
  const double rows =
      static_cast<double>(shape.batch) * static_cast<double>(shape.tokens) * static_cast<double>(shape.heads);
  const auto dqk = static_cast<double>(shape.dqk);
  const auto dhv = static_cast<double>(shape.dhv);
  const double width = static_cast<double>(std::min(plan.tile, std::max<std::int64_t>(shape.longest, 1)));
  const Products count = products(plan);
  const double state = rows * count.state * 2 * dqk * dhv;
  // In a tile every row meets every column; in the parallel formulation squares above the diagonal are left out.
  const double square = rows * width * 2 * (count.square_qk * dqk + count.square_hv * dhv);
  const double executed = plan.formulation == Formulation::parallel ? 0.5 : 1.0;
  // A useful product is one that the method needs: rebuilt states and repeated squares do not count.
  const double useful_state = plan.formulation == Formulation::parallel ? 0
                              : plan.operation == Operation::backward   ? 5
                                                                        : 2;
  const bool backward = plan.operation == Operation::backward;
  const bool squares = plan.operation != Operation::step && plan.formulation != Formulation::recurrent;
  const double useful_square = squares ? rows * width * ((backward ? 3 : 1) * dqk + (backward ? 2 : 1) * dhv) : 0;

  Cost result{.flops = state + executed * square,
              .useful_flops = rows * useful_state * 2 * dqk * dhv + useful_square,
              .bytes = tensor_bytes(plan.operation, shape)};
  if (plan.operation == Operation::step) {
    const double item = plan.compute == DType::float64 ? 8 : 4;
    result.bytes += 2 * static_cast<double>(shape.batch) * static_cast<double>(shape.heads) * dqk * (dhv + 1) * item;
  }
  return result;
}

}  // namespace tfla
