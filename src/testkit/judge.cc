#include "testkit/judge.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

#include "reference/values.h"
#include "testkit/answers.h"
#include "testkit/bounds.h"
#include "testkit/storage.h"

namespace tfla::testkit {
namespace {

constexpr std::int64_t no_index = -1;

// The range of normal numbers. What lies outside is not an error of arithmetic: float16 ends at 65504.
struct NormalRange {
  double least, largest;
};

NormalRange normal_range(DType dtype) {
  switch (dtype) {
    case DType::float64: return {std::numeric_limits<double>::min(), std::numeric_limits<double>::max()};
    case DType::float16: return {0x1p-14, 65504};
    default: return {std::numeric_limits<float>::min(), std::numeric_limits<float>::max()};
  }
}

// A number nearer to the end of the range may be beyond it when it is off by what it may be off by.
constexpr double judged_part = 0.5;

// Numbers below this are subnormal in the arithmetic itself, which is float32 for 16-bit dtypes: any of them, or zero,
// is as good as another. A float16 is subnormal long before, and has to be right all the same.
double least_in_arithmetic(DType dtype) {
  return dtype == DType::float64 ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
}

// `rescale` holds one factor for each run of equal length, or is empty.
TensorError compare(std::string tensor, const TensorView& view, const std::vector<double>& expected,
                    const std::vector<double>& rescale = {}) {
  TensorError error{.tensor = std::move(tensor), .worst_index = no_index};
  double difference_squares = 0, squares = 0;
  const NormalRange range = normal_range(view.dtype);
  const double lost = least_in_arithmetic(view.dtype);
  const std::size_t run = rescale.empty() ? 1 : expected.size() / rescale.size();
  for (std::size_t index = 0; index < expected.size(); ++index) {
    if (!(std::abs(expected[index]) < judged_part * range.largest)) {
      ++error.beyond;
      continue;
    }
    const auto logical = static_cast<std::int64_t>(index);
    double actual = reference::load(view.data, view.dtype, reference::offset_of(view, logical));
    if (!rescale.empty()) actual *= rescale[index / run];
    if (std::abs(expected[index]) < lost && std::abs(actual) < lost) continue;
    const double difference = std::abs(actual - expected[index]);
    if (!std::isfinite(actual)) {
      if (error.not_finite++ == 0) error.worst_index = logical;
      error.worst = std::numeric_limits<double>::infinity();
    } else if (difference > error.worst || error.worst_index == no_index) {
      error.worst = difference;
      error.worst_index = logical;
    }
    difference_squares += difference * difference;
    squares += expected[index] * expected[index];
  }
  error.worst_index = std::max<std::int64_t>(error.worst_index, 0);
  error.size = std::sqrt(squares);
  error.count = std::ssize(expected);
  if (error.not_finite > 0) {
    error.relative = std::numeric_limits<double>::infinity();
  } else if (difference_squares > 0) {
    // Where the answer is all zeros (the forget gates of one token without a state), the error itself counts; where
    // all of it is subnormal in its dtype, it counts as the least normal numbers.
    const double least = range.least * std::sqrt(static_cast<double>(expected.size()));
    const double norm = squares > 0 ? std::max(std::sqrt(squares), least) : 1;
    error.relative = std::sqrt(difference_squares) / norm;
  }
  return error;
}

// A write outside an output is reported as one more tensor with an infinite error, so that no bound allows it.
void append_broken_margins(std::vector<TensorError>& errors,
                           const std::vector<std::pair<const char*, const Tensor*>>& outputs) {
  for (const auto& [tensor, output] : outputs) {
    if (!output->given() || output->buffer->margins_intact()) continue;
    const double infinity = std::numeric_limits<double>::infinity();
    errors.push_back({.tensor = std::string("outside ") + tensor, .relative = infinity, .worst = infinity});
  }
}

}  // namespace

Judge::Judge(const Problem& problem, bool with_backward)
    : problem_(problem),
      with_backward_(with_backward),
      answers_(std::make_unique<Answers>(Answers::of(problem, with_backward, {}))) {}

std::map<std::string, double> Judge::explained(double operands, double norms) const {
  constexpr int draws = 3;
  std::map<std::string, double> squares;
  for (int draw = 0; draw < draws; ++draw) {
    const reference::Roundings roundings{operands, norms, reference::mix(static_cast<std::uint64_t>(draw))};
    const Answers rough = Answers::of(problem_, with_backward_, roundings);
    for (const auto& [tensor, values] : rough.tensors()) {
      const std::vector<double>& exact = *answers_->tensors().at(tensor);
      double difference = 0, size = 0;
      for (std::size_t at = 0; at < exact.size(); ++at) {
        difference += ((*values)[at] - exact[at]) * ((*values)[at] - exact[at]);
        size += exact[at] * exact[at];
      }
      if (size > 0) squares[tensor] += difference / size / draws;
    }
  }
  for (auto& [tensor, square] : squares) square = std::sqrt(square);
  return squares;
}

Judge::~Judge() = default;

std::vector<TensorError> Judge::forward_errors() const {
  wait_for_buffers();
  const Problem::Storage& storage = *problem_.storage_;
  std::vector<TensorError> errors{compare("h", storage.h.view, answers_->h)};
  const double squares = std::inner_product(answers_->h.begin(), answers_->h.end(), answers_->h.begin(), 0.0);
  if (squares > 0) errors.front().spread = std::sqrt(answers_->spread / squares);
  if (storage.m.given()) {
    std::vector<double> rescale = gather(storage.m.view);
    for (std::size_t index = 0; index < rescale.size(); ++index) {
      rescale[index] = std::exp(rescale[index] - answers_->m[index]);
    }
    errors.push_back(compare("C", storage.C.view, answers_->C, rescale));
    errors.push_back(compare("n", storage.n.view, answers_->n, rescale));
  }
  append_broken_margins(errors, storage.forward_outputs());
  return errors;
}

std::vector<TensorError> Judge::backward_errors() const {
  wait_for_buffers();
  const Problem::Storage& storage = *problem_.storage_;
  const Answers& a = *answers_;
  std::vector<TensorError> errors{compare("dq", storage.dq.view, a.dq), compare("dk", storage.dk.view, a.dk),
                                  compare("dv", storage.dv.view, a.dv), compare("di", storage.di.view, a.di),
                                  compare("df", storage.df.view, a.df)};
  errors.back().terms = std::sqrt(a.gate_terms);
  const MlstmShape& s = storage.description.shape;
  if (on_tensor_cores(storage.description) && s.batch * s.tokens * s.heads < many_numbers)
    errors.back().explained = explained(unit_of_rounding(DType::bfloat16) / 2, 0)["df"];
  if (storage.dC0.given()) {
    errors.push_back(compare("dC0", storage.dC0.view, a.dC0));
    errors.push_back(compare("dn0", storage.dn0.view, a.dn0));
  }
  append_broken_margins(errors, storage.backward_outputs());
  return errors;
}

}  // namespace tfla::testkit
