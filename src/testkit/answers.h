// What the reference says of a whole problem.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "reference/reference.h"
#include "testkit/judge.h"

namespace tfla::testkit {

struct Judge::Answers {
  std::vector<double> h, C, n, m, dq, dk, dv, di, df, dC0, dn0;
  double spread = 0, gate_terms = 0;

  [[nodiscard]] static Answers of(const Problem& problem, bool with_backward, const reference::Roundings& roundings);
  [[nodiscard]] std::map<std::string, const std::vector<double>*> tensors() const {
    return {{"h", &h},   {"C", &C},   {"n", &n},   {"dq", &dq},   {"dk", &dk},
            {"dv", &dv}, {"di", &di}, {"df", &df}, {"dC0", &dC0}, {"dn0", &dn0}};
  }
};

}  // namespace tfla::testkit
