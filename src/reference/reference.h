// The independent float64 reference: the recurrence of section 2.1 token by token and back-propagation through it.
// No chunk, no gate scan, no matrix library: it shares nothing with the code it judges.
#pragma once

#include <cstdint>
#include <vector>

#include "tfla/mlstm.h"

namespace tfla::reference {

// One head of one sequence. Dense, row-major.
struct Head {
  std::int64_t tokens = 0;  // T
  std::int64_t dqk = 1;
  std::int64_t dhv = 1;
  std::vector<double> q;   // [T,dqk]
  std::vector<double> k;   // [T,dqk]
  std::vector<double> v;   // [T,dhv]
  std::vector<double> i;   // [T] raw
  std::vector<double> f;   // [T] raw
  std::vector<double> C0;  // [dqk,dhv], empty: zero
  std::vector<double> n0;  // [dqk], empty: zero
  double m0 = 0;
  std::vector<double> dh;       // [T,dhv], empty: forward only
  std::vector<double> dC_last;  // [dqk,dhv], empty: zero
  std::vector<double> dn_last;  // [dqk], empty: zero
};

struct HeadResult {
  std::vector<double> h;  // [T,dhv]
  std::vector<double> C;  // [dqk,dhv] last state
  std::vector<double> n;  // [dqk]
  double m = 0;
  double spread = 0;        // square of what h is off by if each number of C and n is, independently, by its own size
  std::vector<double> dq;   // [T,dqk], the gradients are empty when dh is
  std::vector<double> dk;   // [T,dqk]
  std::vector<double> dv;   // [T,dhv]
  std::vector<double> di;   // [T]
  std::vector<double> df;   // [T]
  std::vector<double> dC0;  // [dqk,dhv]
  std::vector<double> dn0;  // [dqk]
  double gate_terms = 0;    // sum of the squares of q.dq and k.dk, of which df is made
};

[[nodiscard]] double log_sigmoid(double x);

// Errors that arithmetic in fewer digits makes, put into the reference: whatever is read as an operand of a product is
// off by up to this part of its size, each number and each reading by itself. What they do to a result tells how much
// of an error is the problem's own.
struct Roundings {
  double operands = 0;  // C, dC, n and dn in gradients, weighted keys and queries, scores, h in <dh, h>
  double norms = 0;     // n and what it is summed from, where the denominator is made
  std::uint64_t seed = 1;
};

// Reads gate, normalizer, eps, qk_scale, soft_cap and exact_normalizer_grad of the options.
[[nodiscard]] HeadResult evaluate(const Head& head, const MlstmOptions& options, const Roundings& roundings = {});

}  // namespace tfla::reference
