// den = max(|q.n|, exp(-m)) + eps of every token: part of stage `gates`, since it comes before any matrix product.
//
// n is carried token by token in double. q.n often cancels to a small part of its terms, and h is divided by it: from
// float32 row sums of the gated scores, one such row in a thousand loses three digits and dominates the error of h.
// In double it costs dqk multiply-adds per token, a few thousandths of the matrix products.
#pragma once

#include "cpu/stages/gates.h"

namespace tfla::cpu {

template <class Real>
struct NormBuffers {
  double* n = nullptr;       // [dqk]
  double* decay = nullptr;   // [norm_block]
  double* weight = nullptr;  // [norm_block]
  Real* q = nullptr;         // [tokens at a time,dqk] converted queries
  Real* k = nullptr;         // [tokens at a time,dqk] converted keys

  NormBuffers() = default;
  NormBuffers(Arena& arena, const Plan& plan);
};

// n before the first token of a sequence.
template <class Real>
void start_norm(const Problem& problem, const Sequence& sequence, std::int64_t head, const NormBuffers<Real>& buffers);

// Fills inverse and slope of tokens [begin, end) of one (sequence, head), whose gates are done. n is at `begin` on
// entry and at `end` on return, so tokens may come in any portions.
template <class Real>
void denominators(const Problem& problem, const GateVectors<Real>& vectors, const Sequence& sequence, std::int64_t head,
                  std::int64_t begin, std::int64_t end, const NormBuffers<Real>& buffers);

// The whole sequence at once, after its gates.
template <class Real>
void gates_and_denominators(const Problem& problem, const GateVectors<Real>& vectors, const Sequence& sequence,
                            std::int64_t head, const NormBuffers<Real>& buffers);

// 1 / den, and its slope for the exact gradient: -sign(q.n) / den where |q.n| is the denominator, else 0.
struct Denominator {
  double inverse = 1;
  double slope = 0;
};
[[nodiscard]] Denominator denominator(const Settings& settings, double qn, double m);

}  // namespace tfla::cpu
