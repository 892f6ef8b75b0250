#include "tests/support/support.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <ostream>
#include <type_traits>

#include "testkit/tensor.h"

namespace tfla::test {
namespace {

using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;
using Outputs = std::vector<std::pair<std::string, MutableTensorView>>;

Outputs given_only(Outputs all) {
  std::erase_if(all, [](const auto& output) { return !output.second.given(); });
  return all;
}

const char* short_name(DType dtype) {
  switch (dtype) {
    case DType::float32: return "f32";
    case DType::float64: return "f64";
    case DType::bfloat16: return "bf16";
    case DType::float16: return "f16";
    default: return "int";
  }
}

}  // namespace

std::string why_unavailable(Device device) {
  try {
    static_cast<void>(plan(Operation::forward, MlstmShape{}, {}, {.device = device}));
    return {};
  } catch (const Unavailable& reason) {
    return reason.what();
  }
}

Outputs outputs(const MlstmForward& args) {
  return given_only({{"h", args.h}, {"C", args.last_state.C}, {"n", args.last_state.n}, {"m", args.last_state.m}});
}

Outputs outputs(const MlstmBackward& args) {
  return given_only({{"dq", args.dq},
                     {"dk", args.dk},
                     {"dv", args.dv},
                     {"di", args.di},
                     {"df", args.df},
                     {"dC0", args.dinitial_state.C},
                     {"dn0", args.dinitial_state.n}});
}

Outputs outputs(const MlstmStep& args) {
  return given_only({{"h", args.h}, {"C", args.state.C}, {"n", args.state.n}, {"m", args.state.m}});
}

template <class Args>
Snapshot snapshot(const Args& args) {
  Snapshot taken_now;
  for (const auto& [name, view] : outputs(args)) taken_now[name] = testkit::gather(view);
  return taken_now;
}
template Snapshot snapshot(const MlstmForward&);
template Snapshot snapshot(const MlstmBackward&);
template Snapshot snapshot(const MlstmStep&);

Snapshot run_forward(testkit::Problem& problem, const Execution& execution) {
  problem.poison();
  forward(problem.forward(), execution);
  return snapshot(problem.forward());
}

Snapshot run_backward(testkit::Problem& problem, const Execution& execution) {
  problem.poison();
  backward(problem.backward(), execution);
  return snapshot(problem.backward());
}

Snapshot run_both(testkit::Problem& problem, const Execution& execution) {
  Snapshot both = run_forward(problem, execution);
  both.merge(run_backward(problem, execution));
  return both;
}

AssertionResult same_bits(const Values& actual, const Values& expected) {
  if (actual.size() != expected.size()) {
    return AssertionFailure() << actual.size() << " elements instead of " << expected.size();
  }
  for (std::size_t index = 0; index < actual.size(); ++index) {
    if (std::isnan(actual[index]) && std::isnan(expected[index])) continue;
    if (std::bit_cast<std::uint64_t>(actual[index]) != std::bit_cast<std::uint64_t>(expected[index])) {
      return AssertionFailure() << "element " << index << " is " << actual[index] << " instead of " << expected[index]
                                << " (difference " << actual[index] - expected[index] << ")";
    }
  }
  return AssertionSuccess();
}

AssertionResult same_bits(const Snapshot& actual, const Snapshot& expected) {
  if (actual.size() != expected.size()) return AssertionFailure() << "different sets of outputs";
  for (const auto& [name, values] : expected) {
    if (const AssertionResult same = same_bits(actual.at(name), values); !same) {
      return AssertionFailure() << name << ": " << same.message();
    }
  }
  return AssertionSuccess();
}

AssertionResult close(const Values& actual, const Values& expected, double allowed) {
  if (actual.size() != expected.size()) {
    return AssertionFailure() << actual.size() << " elements instead of " << expected.size();
  }
  double difference_squares = 0, squares = 0, worst = 0;
  std::size_t worst_index = 0, not_finite = 0;
  for (std::size_t index = 0; index < actual.size(); ++index) {
    const double difference = std::abs(actual[index] - expected[index]);
    if (!std::isfinite(difference)) ++not_finite;
    if (!(difference <= worst)) {
      worst = difference;
      worst_index = index;
    }
    difference_squares += difference * difference;
    squares += expected[index] * expected[index];
  }
  const double relative = difference_squares == 0 ? 0 : std::sqrt(difference_squares / (squares > 0 ? squares : 1));
  if (relative <= allowed) return AssertionSuccess();
  return AssertionFailure() << "relative error " << relative << " > " << allowed << ", worst element " << worst_index
                            << " is " << actual[worst_index] << " instead of " << expected[worst_index] << ", "
                            << not_finite << " not finite";
}

AssertionResult close(const Snapshot& actual, const Snapshot& expected, const testkit::Case& description) {
  if (actual.size() != expected.size()) return AssertionFailure() << "different sets of outputs";
  for (const auto& [name, values] : expected) {
    Values compared = actual.at(name);
    if (name == "m") continue;
    if ((name == "C" || name == "n") && expected.contains("m")) {
      const Values &m = actual.at("m"), &m_expected = expected.at("m");
      const std::size_t run = m.empty() ? 1 : compared.size() / m.size();
      for (std::size_t index = 0; index < compared.size(); ++index) {
        compared[index] *= std::exp(m[index / run] - m_expected[index / run]);
      }
    }
    const double allowed = testkit::allowed_error(name, description);
    if (const AssertionResult near = close(compared, values, allowed); !near) {
      return AssertionFailure() << name << ": " << near.message();
    }
  }
  return AssertionSuccess();
}

AssertionResult within_bounds(const std::vector<testkit::TensorError>& errors, const testkit::Case& description) {
  AssertionResult result = AssertionFailure();
  bool good = true;
  for (const testkit::TensorError& error : errors) {
    const double allowed = testkit::allowed_error(error, description);
    if (error.relative <= allowed) continue;
    good = false;
    result << "\n  " << error.tensor << ": relative error " << error.relative << " > " << allowed << ", worst element "
           << error.worst_index << " is off by " << error.worst << ", " << error.not_finite << " not finite";
  }
  return good ? AssertionSuccess() : result;
}

template <class Data>
BasicTensorView<Data> slice(BasicTensorView<Data> view, int axis, std::int64_t begin, std::int64_t count) {
  if (!view.given()) return view;
  using Byte = std::conditional_t<std::is_const_v<Data>, const std::byte, std::byte>;
  view.data =
      static_cast<Byte*>(view.data) + begin * view.strides.at(static_cast<std::size_t>(axis)) * item_size(view.dtype);
  view.shape.at(static_cast<std::size_t>(axis)) = count;
  return view;
}
template TensorView slice(TensorView, int, std::int64_t, std::int64_t);
template MutableTensorView slice(MutableTensorView, int, std::int64_t, std::int64_t);

Values taken(const Values& values, const TensorView& shaped_like, int axis, const std::vector<std::int64_t>& order) {
  std::int64_t inner = 1;
  for (int later = axis + 1; later < shaped_like.rank; ++later) {
    inner *= shaped_like.shape.at(static_cast<std::size_t>(later));
  }
  const std::int64_t extent = shaped_like.shape.at(static_cast<std::size_t>(axis));
  Values result(values.size());
  for (std::int64_t index = 0; index < std::ssize(values); ++index) {
    const std::int64_t entry = index / inner % extent;
    const std::int64_t from = index + (order.at(static_cast<std::size_t>(entry)) - entry) * inner;
    result[static_cast<std::size_t>(index)] = values[static_cast<std::size_t>(from)];
  }
  return result;
}

void overwrite(const TensorView& view, const Values& values) {
  MutableTensorView writable;
  writable.data = const_cast<void*>(view.data);
  writable.dtype = view.dtype;
  writable.rank = view.rank;
  writable.shape = view.shape;
  writable.strides = view.strides;
  testkit::scatter(writable, values);
}

std::string label(const testkit::Case& c) {
  const MlstmOptions& o = c.options;
  std::string text = reference::name(c.regime);
  text += o.gate == InputGate::exponential ? "_exp" : o.gate == InputGate::sigmoid ? "_sig" : "_log";
  text += o.normalizer == Normalizer::max ? "max" : o.normalizer == Normalizer::none ? "none" : "auto";
  text += o.formulation == Formulation::chunkwise  ? "_chunkwise"
          : o.formulation == Formulation::parallel ? "_parallel"
                                                   : "_recurrent";
  text +=
      "_L" + std::to_string(o.chunk_size) + "_" + short_name(c.shape.dtype) + "_gates" + short_name(c.shape.gate_dtype);
  for (const auto& [name, value] :
       {std::pair("_B", c.shape.batch), std::pair("_T", c.shape.tokens), std::pair("_Hqk", c.shape.qk_heads),
        std::pair("_H", c.shape.heads), std::pair("_dqk", c.shape.dqk), std::pair("_dhv", c.shape.dhv)}) {
    text += name + std::to_string(value);
  }
  if (!c.cu_seqlens.empty()) {
    text += "_packed" + std::to_string(c.cu_seqlens.size() - 1);
    if (c.cu_seqlens.back() < c.shape.tokens) text += "_padded";
    if (c.index_stride != 1) text += "_strided";
  }
  text += c.layout == testkit::Layout::bthd ? "_bthd" : c.layout == testkit::Layout::bhtd ? "_bhtd" : "_fused";
  if (c.initial_state) text += c.in_place ? "_inplace" : "_state";
  if (!c.last_state) text += "_nolaststate";
  if (c.last_state_grad) text += "_laststategrad";
  if (o.exact_normalizer_grad) text += "_exact";
  if (o.soft_cap) text += "_cap";
  if (o.qk_scale) text += "_scale";
  if (o.keep == Keep::states) text += "_keep";
  if (o.keep == Keep::denominators) text += "_keepdenominators";
  if (c.device == Device::cuda) text += "_cuda";
  if (c.seed != 1) text += "_seed" + std::to_string(c.seed);
  return text;
}

}  // namespace tfla::test

namespace tfla::testkit {

void PrintTo(const Case& description, std::ostream* out) { *out << test::label(description); }

}  // namespace tfla::testkit
