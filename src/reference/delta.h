// The independent float64 reference of the delta rule: its recurrence token by token, every state kept, and
// back-propagation through it. No chunk, no triangular system: it shares nothing with the code it judges.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tfla/delta.h"

namespace tfla::reference {

// One head of one sequence. Dense, row-major.
struct DeltaHead {
  std::int64_t tokens = 0;  // T
  std::int64_t dqk = 1;
  std::int64_t dhv = 1;
  std::vector<double> q;        // [T,dqk]
  std::vector<double> k;        // [T,dqk]
  std::vector<double> v;        // [T,dhv]
  std::vector<double> beta;     // [T] raw
  std::vector<double> g;        // [T] raw, empty: no decay
  std::optional<double> A_log;  // with it the log decay is -exp(A_log) softplus(g + dt_bias)
  double dt_bias = 0;
  std::vector<double> C0;       // [dqk,dhv], empty: zero
  std::vector<double> dh;       // [T,dhv], empty: forward only
  std::vector<double> dC_last;  // [dqk,dhv], empty: zero
};

struct DeltaHeadResult {
  std::vector<double> h;      // [T,dhv]
  std::vector<double> C;      // [dqk,dhv] last state
  std::vector<double> dq;     // [T,dqk], the gradients are empty when dh is
  std::vector<double> dk;     // [T,dqk]
  std::vector<double> dv;     // [T,dhv]
  std::vector<double> dbeta;  // [T]
  std::vector<double> dg;     // [T], zero without g
  double dA_log = 0;
  double ddt_bias = 0;
  std::vector<double> dC0;  // [dqk,dhv]
  // Squares of what gradients are made of. The gradient of a log decay gamma is <exp(gamma) C, dC>.
  double dg_terms = 0;        // of ||exp(gamma) C|| ||dC||, times the slope of gamma in g
  double dA_log_terms = 0;    // of dgamma gamma, of which dA_log is the sum
  double ddt_bias_terms = 0;  // of dg, of which ddt_bias is the sum
  double dA_log_sums = 0;     // dg_terms with gamma in place of its slope
  double dq_terms = 0;        // of the part along q that normalize_qk takes from dq, of which nothing is left
  double dk_terms = 0;        // the same of dk
};

// Reads write, normalize_qk and qk_scale of the options.
[[nodiscard]] DeltaHeadResult evaluate(const DeltaHead& head, const DeltaOptions& options);

// A whole call. Dense, row-major, with the shapes of tfla/delta.h; what is not given is empty.
struct DeltaCall {
  std::int64_t batch = 1, tokens = 0, qk_heads = 1, heads = 1, dqk = 1, dhv = 1;
  std::vector<std::int64_t> cu_seqlens = {};  // empty: every row of the batch is a sequence
  std::vector<double> q = {}, k = {}, v = {}, beta = {}, g = {}, A_log = {}, dt_bias = {};
  std::vector<double> initial_state = {}, dh = {}, dlast_state = {};

  [[nodiscard]] std::int64_t sequences() const {
    return cu_seqlens.empty() ? batch : static_cast<std::int64_t>(cu_seqlens.size()) - 1;
  }
};

struct DeltaResult {
  std::vector<double> h, last_state;
  std::vector<double> dq, dk, dv, dbeta, dg, dA_log, ddt_bias, dinitial_state;  // empty when dh is
  // Roots of the sums over all heads of DeltaHeadResult.
  double dg_terms = 0, dA_log_terms = 0, ddt_bias_terms = 0, dA_log_sums = 0, dq_terms = 0, dk_terms = 0;
};

[[nodiscard]] DeltaResult evaluate(const DeltaCall& call, const DeltaOptions& options);

}  // namespace tfla::reference
