#include "cpu/stages/time_step.h"

#include <cmath>
#include <limits>

#include "core/time_step.h"
#include "cpu/gate_tensor.h"
#include "cpu/kernels/simd.h"
#include "cpu/stages/gates.h"

namespace tfla::cpu {

namespace {

[[nodiscard]] TimeStepRule<double> rule_of(const TimeStep& step) { return {step.softplus, step.least, step.most}; }

// Whether the number of a token's sequence is another than that of the token before it in the row; before the first
// token it is 0.
bool starts_afresh(const TensorView& seq_idx, const Sequence& sequence, std::int64_t token) {
  const auto number = [&](std::int64_t t) {
    return read_integer(seq_idx, sequence.batch * seq_idx.strides[0] + t * seq_idx.strides[1]);
  };
  const std::int64_t t = sequence.offset + token;
  return number(t) != (t == 0 ? 0 : number(t - 1));
}

}  // namespace

HeadStep head_step(const TimeStep& step, std::int64_t head) {
  return {.A = read_gate(step.A, head * step.A.strides[0]),
          .bias = step.bias.given() ? read_gate(step.bias, head * step.bias.strides[0]) : 0.0};
}

void time_step_gates(const Problem& problem, const Sequence& sequence, std::int64_t head, double* log_f,
                     double* log_i) {
  const TimeStep& step = *problem.time_step;
  const auto [A, bias] = head_step(step, head);
  const std::int64_t length = sequence.length;
  read_gates(problem.i, sequence, head, log_i);
  // softplus(x) = -log_sigmoid(-x), a vector at a time.
  for (std::int64_t t = 0; t < length; ++t) log_i[t] = step.softplus ? -(log_i[t] + bias) : log_i[t] + bias;
  if (step.softplus) simd::log_sigmoid(log_i, length);
  const TimeStepRule<double> limits{false, step.least, step.most};
  for (std::int64_t t = 0; t < length; ++t) {
    const double dt = limits.value(step.softplus ? -log_i[t] : log_i[t]);
    log_f[t] = A * dt;
    log_i[t] = dt + least_time_step;
  }
  simd::log(log_i, length);
  if (!step.seq_idx.given()) return;
  for (std::int64_t t = 0; t < length; ++t)
    if (starts_afresh(step.seq_idx, sequence, t)) log_f[t] = -std::numeric_limits<double>::infinity();
}

void store_time_step_gradients(const Problem& problem, const Sequence& sequence, std::int64_t head, std::int64_t begin,
                               std::int64_t count, const double* dlogi, const double* dlogf,
                               const MutableTensorView& ddt) {
  const TimeStep& step = *problem.time_step;
  const TimeStepRule<double> rule = rule_of(step);
  const auto [A, bias] = head_step(step, head);
  const std::int64_t at = head * problem.tokens() + sequence.packed + begin;
  for (std::int64_t t = 0; t < count; ++t) {
    const double x = read_gate(problem.i, gate_offset(problem.i, sequence, begin + t, head)) + bias;
    const double dt = rule.value(x);
    // A reset is no function of dt.
    const bool reset = step.seq_idx.given() && starts_afresh(step.seq_idx, sequence, begin + t);
    const double through_decay = reset ? 0.0 : dlogf[t];
    const double gradient = (dlogi[t] / (dt + least_time_step) + A * through_decay) * rule.slope(x);
    step.A_terms[at + t] = through_decay * dt;
    step.bias_terms[at + t] = gradient;
    write_gate(ddt, gate_offset(ddt, sequence, begin + t, head), gradient);
  }
}

void sum_time_step_gradients(const Problem& problem, const MutableTensorView& dA, const MutableTensorView& dbias) {
  const TimeStep& step = *problem.time_step;
  for (std::int64_t head = 0; head < problem.heads(); ++head) {
    double of_A = 0, of_bias = 0;
    for (std::int64_t index = 0; index < problem.plan.shape.sequences; ++index) {
      const Sequence sequence = problem.sequence(index);
      const std::int64_t at = head * problem.tokens() + sequence.packed;
      for (std::int64_t t = at; t < at + sequence.length; ++t) {
        of_A += step.A_terms[t];
        of_bias += step.bias_terms[t];
      }
    }
    write_gate(dA, head * dA.strides[0], of_A);
    if (dbias.given()) write_gate(dbias, head * dbias.strides[0], of_bias);
  }
}

}  // namespace tfla::cpu
