#include "tfla/analysis.h"

namespace tfla::analysis {

Polynomial operator+(const Polynomial& a, const Polynomial& b) {
  return {a.constant + b.constant, a.linear + b.linear, a.quadratic + b.quadratic};
}

Polynomial operator-(const Polynomial& a, const Polynomial& b) { return a + -1.0 * b; }

Polynomial operator*(double factor, const Polynomial& a) {
  return {factor * a.constant, factor * a.linear, factor * a.quadratic};
}

Polynomial sum(const std::vector<Term>& terms) {
  Polynomial total;
  for (const Term& term : terms) total = total + term.count;
  return total;
}

double unit(Formulation formulation, double tokens, double chunk) {
  switch (formulation) {
    case Formulation::chunkwise: return chunk;
    case Formulation::parallel: return tokens;
    case Formulation::recurrent: return 1;
  }
  return 1;
}

double total(const Polynomial& count, double unit, const Workload& workload) {
  return workload.batch * workload.heads * workload.tokens / unit * count(unit);
}

}  // namespace tfla::analysis
