// What a call left in a problem's outputs, judged by the float64 reference.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "testkit/problem.h"

namespace tfla::testkit {

struct TensorError {
  std::string tensor;            // "h", "C", "n", "m", "dq", ... "dC0", "dn0"
  double relative = 0;           // ||x - ref|| / ||ref||; infinite when x has a NaN or infinity the reference has not
  double worst = 0;              // largest absolute difference
  std::int64_t worst_index = 0;  // of that element, counted row-major over the tensor's logical shape
  std::int64_t not_finite = 0;   // NaN or infinity where the reference is finite
  std::int64_t beyond = 0;       // elements of the reference that the dtype has no room for, or hardly any
  double size = 0;               // ||ref|| of the others
  std::int64_t count = 0;        // of its elements
  double terms = 0;              // of df: the size of the sums that it is a difference of
  double spread = 0;  // of h: its relative error if each number of the state is off by its own size (reference.h)
  double explained =
      0;  // of df, where few numbers make it up: what roundings of the states make of it (Judge::explained)
};

// Compares what forward (and backward) left in a problem's outputs with the reference. The reference is evaluated
// once, in the constructor, on the rounded inputs. C, n are compared in a common scale: (C, m) and (C e, m - 1) are
// equal.
class Judge {
 public:
  explicit Judge(const Problem& problem, bool with_backward);
  ~Judge();
  [[nodiscard]] std::vector<TensorError> forward_errors() const;   // h, C, n
  [[nodiscard]] std::vector<TensorError> backward_errors() const;  // dq, dk, dv, di, df and, where asked, dC0, dn0

  // The relative error that roundings of the operands by themselves make of every tensor: the root of the mean of the
  // squares over some draws.
  [[nodiscard]] std::map<std::string, double> explained(double operands, double norms) const;

 private:
  const Problem& problem_;
  bool with_backward_;
  struct Answers;
  std::unique_ptr<Answers> answers_;
};

}  // namespace tfla::testkit
