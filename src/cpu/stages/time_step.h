// The state space dual's part of stage `gates`: log f = dt A and log i = log dt, and the gradients of dt, A and the
// bias.
#pragma once

#include "cpu/problem.h"

namespace tfla::cpu {

// dt of a token from what the caller gives, the bias included. `A` of the same head.
struct HeadStep {
  double A = 0;
  double bias = 0;
};
[[nodiscard]] HeadStep head_step(const TimeStep& step, std::int64_t head);

// log f and log i of every token of one (sequence, head), resets by seq_idx included.
void time_step_gates(const Problem& problem, const Sequence& sequence, std::int64_t head, double* log_f, double* log_i);

// Gradients of log i and log f of tokens [begin, begin + count) become the gradient of dt, and terms of the sums below.
void store_time_step_gradients(const Problem& problem, const Sequence& sequence, std::int64_t head, std::int64_t begin,
                               std::int64_t count, const double* dlogi, const double* dlogf,
                               const MutableTensorView& ddt);

// The gradients of A and of the bias (which may be left out), from the terms of all tokens.
void sum_time_step_gradients(const Problem& problem, const MutableTensorView& dA, const MutableTensorView& dbias);

}  // namespace tfla::cpu
