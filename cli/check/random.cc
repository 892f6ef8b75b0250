#include "cli/check/random.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "cli/support/json.h"
#include "cli/support/options.h"
#include "cli/support/progress.h"
#include "core/gate_family.h"
#include "reference/regimes.h"
#include "testkit/bounds.h"
#include "testkit/tensor.h"

namespace tfla::cli {
namespace {

using testkit::Case;
using testkit::TensorError;

// Random choices that depend on nothing but the seed.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : state_(reference::mix(seed)) {}

  [[nodiscard]] std::int64_t below(std::int64_t count) {
    state_ = reference::mix(state_);
    return static_cast<std::int64_t>(state_ % static_cast<std::uint64_t>(count));
  }
  [[nodiscard]] bool chance(std::int64_t one_in) { return below(one_in) == 0; }
  // Sizes of every order up to `most`.
  [[nodiscard]] std::int64_t size(std::int64_t most) {
    std::int64_t order = 2;
    while (order < most && !chance(4)) order *= 2;
    return 1 + below(std::min(order, most));
  }
  template <class Value>
  [[nodiscard]] Value one_of(std::initializer_list<Value> values) {
    return one_of(std::span(values.begin(), values.size()));
  }
  template <class Value, std::size_t Extent>
  [[nodiscard]] Value one_of(std::span<const Value, Extent> values) {
    return values[static_cast<std::size_t>(below(std::ssize(values)))];
  }

 private:
  std::uint64_t state_;
};

// Head dimensions: multiples of 8 as often as not, which Hopper's kernels want.
std::int64_t head_dim(Draw& draw, std::int64_t most) {
  const std::int64_t size = draw.size(most);
  return draw.chance(2) ? size : std::min(most, (size + 7) / 8 * 8);
}

std::vector<std::int64_t> boundaries(Draw& draw, std::int64_t tokens) {
  const std::int64_t end = draw.chance(3) ? draw.below(tokens + 1) : tokens;
  std::vector<std::int64_t> all{0, end};
  for (std::int64_t s = draw.size(9); s > 1; --s) all.push_back(draw.below(end + 1));
  std::sort(all.begin(), all.end());
  return all;
}

Case random_case(std::uint64_t seed, const Execution& execution) {
  Draw draw(seed);
  Case c;
  c.seed = seed;
  c.device = execution.device;
  c.regime = reference::all_regimes[draw.below(std::size(reference::all_regimes))];
  const std::int64_t group = draw.chance(3) ? draw.size(4) : 1, qk_heads = draw.size(4);
  c.shape = {.batch = draw.chance(2) ? draw.size(5) : 1,
             .tokens = draw.chance(20) ? 4097 : draw.size(700),
             .qk_heads = qk_heads,
             .heads = qk_heads * group,
             .dqk = head_dim(draw, 320),
             .dhv = head_dim(draw, 400),
             .dtype = draw.one_of({DType::bfloat16, DType::bfloat16, DType::float16, DType::float32, DType::float64})};
  c.shape.gate_dtype = draw.chance(2) ? DType::float32 : c.shape.dtype;
  // The reference works on every number of the state at every token.
  const std::int64_t work = c.shape.batch * c.shape.tokens * c.shape.heads * c.shape.dqk * c.shape.dhv;
  constexpr std::int64_t enough = std::int64_t{1} << 26;
  if (work > enough) c.shape.tokens = std::max<std::int64_t>(1, c.shape.tokens * enough / work);
  if (draw.chance(3)) {
    c.shape.batch = 1;
    c.cu_seqlens = boundaries(draw, c.shape.tokens);
    c.index_stride = draw.chance(2) ? 1 : 2;
  }
  c.layout = draw.one_of({testkit::Layout::bthd, testkit::Layout::bhtd, testkit::Layout::fused});
  c.initial_state = draw.chance(2);
  c.in_place = c.initial_state && draw.chance(2);
  c.last_state_grad = draw.chance(2);
  c.options = {.gate = draw.one_of(std::span(gate_table)).gate,
               .normalizer = draw.one_of({Normalizer::automatic, Normalizer::max, Normalizer::none}),
               .eps = draw.one_of({1e-6, 1e-3, 0.0}),
               .exact_normalizer_grad = draw.chance(3),
               .chunk_size = draw.chance(2) ? 0 : draw.size(600),
               .formulation = draw.chance(8) ? Formulation::parallel : Formulation::chunkwise};
  if (draw.chance(3)) c.options.soft_cap = 15;
  if (draw.chance(4)) c.options.qk_scale = 0.3;
  if (c.device == Device::cuda) {
    const bool states = draw.chance(3), denominators = !states && draw.chance(2);
    c.options.keep = states ? Keep::states : denominators ? Keep::denominators : Keep::nothing;
  }
  c.last_state = c.in_place || draw.chance(2);
  return c;
}

// One input gate in 20 far above the others, in one case of four.
void add_spikes(const MlstmForward& args, std::uint64_t seed) {
  Draw draw(seed ^ 0x5EED);
  if (!draw.chance(4)) return;
  std::vector<double> gates = testkit::gather(args.i);
  for (double& gate : gates)
    if (draw.chance(20)) gate += 8;
  MutableTensorView to;
  to.data = const_cast<void*>(args.i.data);  // the problem's own memory
  to.dtype = args.i.dtype;
  to.rank = args.i.rank;
  to.shape = args.i.shape;
  to.strides = args.i.strides;
  testkit::scatter(to, gates);
}

double unit_of(DType dtype) {
  switch (dtype) {
    case DType::bfloat16: return 0x1p-9;
    case DType::float16: return 0x1p-12;
    case DType::float64: return 0x1p-53;
    default: return 0x1p-24;
  }
}

// What a result may be off by: so many times the rounding of the result itself, of the operands on the way, and of
// sums. A result of few numbers scatters, and an operand is rounded more than once.
constexpr double slack = 6;

struct Finding {
  TensorError error;
  double allowed = 0;
};

// 16-bit products on a GPU read operands rounded to bfloat16 or float16, and n to 24 bits; all else works in float32,
// or float64. Exponents are sums of log gates in double, which reach the thousands.
std::vector<Finding> judge(const Case& c, const testkit::Judge& judge, const std::vector<TensorError>& errors) {
  const bool rounds = c.device == Device::cuda && item_size(c.shape.dtype) == 2;
  const double arithmetic = c.shape.dtype == DType::float64 ? 0x1p-41 : 0x1p-21;
  std::map<std::string, double> explained;
  std::int64_t beyond = 0;
  for (const TensorError& error : errors) beyond += error.beyond;
  std::vector<Finding> findings;
  for (const TensorError& error : errors) {
    const bool gate = error.tensor == "di" || error.tensor == "df";
    const bool state = error.tensor == "C" || error.tensor == "n" || error.tensor == "dC0" || error.tensor == "dn0";
    const DType stored = gate ? c.shape.gate_dtype : c.shape.dtype;
    const double norm = error.size > 0 ? error.size : 1;  // where all of it is zero, the error itself counts
    double result = state ? arithmetic : std::max(arithmetic, unit_of(stored));
    if (stored == DType::float16 && !state)  // below its normal numbers, half of what lies between two of them
      result += 0x1p-25 * std::sqrt(static_cast<double>(error.count)) / norm;
    result += arithmetic * error.terms / norm;
    Finding finding{error, slack * result};
    if (error.relative > finding.allowed) {
      if (explained.empty()) explained = judge.explained(rounds ? 0x1p-9 : arithmetic, rounds ? 0x1p-21 : arithmetic);
      finding.allowed = slack * (result + explained[error.tensor]);
      // Where results leave the range of float16, so do the operands that make them, and infinity spreads.
      if (beyond > 0 && error.not_finite > 0 && c.shape.dtype == DType::float16) finding.allowed = error.relative;
    }
    findings.push_back(finding);
  }
  return findings;
}

std::string describe_case(const Case& c) {
  const MlstmShape& s = c.shape;
  return fmt::format("{} {}/{} B {} T {}{} Hqk {} H {} dqk {} dhv {} {}, gates {}, eps {}, chunk {}{}{}{}{}{}{}",
                     reference::name(c.regime), static_cast<int>(c.options.gate),
                     static_cast<int>(c.options.normalizer), s.batch, s.tokens,
                     c.cu_seqlens.empty() ? "" : fmt::format(" packed {}", c.cu_seqlens.size() - 1), s.qk_heads,
                     s.heads, s.dqk, s.dhv, tfla::name(s.dtype), tfla::name(s.gate_dtype), c.options.eps,
                     c.options.chunk_size, c.initial_state ? (c.in_place ? ", state in place" : ", state") : "",
                     c.last_state ? "" : ", no last state", c.last_state_grad ? ", dstate" : "",
                     c.options.exact_normalizer_grad ? ", exact" : "", c.options.soft_cap ? ", cap" : "",
                     c.options.keep == Keep::states         ? ", keeps states"
                     : c.options.keep == Keep::denominators ? ", keeps denominators"
                                                            : "");
}

}  // namespace

int check_random(std::int64_t count, std::uint64_t seed, const Execution& execution, const std::string& json) {
  JsonFile file(json);
  Progress progress("tfla check", count);
  nlohmann::ordered_json outliers = nlohmann::ordered_json::array();
  std::vector<std::string> lines;
  std::int64_t tensors = 0;
  for (std::int64_t index = 0; index < count; ++index) {
    const std::uint64_t own = seed + static_cast<std::uint64_t>(index);
    const Case c = random_case(own, execution);
    progress.start(fmt::format("seed {}", own));
    testkit::Problem problem(c);
    add_spikes(problem.forward(), own);
    const testkit::Judge judged(problem, true);
    forward(problem.forward(), execution);
    std::vector<TensorError> errors = judged.forward_errors();
    backward(problem.backward(), execution);
    for (TensorError& error : judged.backward_errors()) errors.push_back(std::move(error));
    for (const Finding& finding : judge(c, judged, errors)) {
      ++tensors;
      if (finding.error.relative <= finding.allowed) continue;
      lines.push_back(fmt::format("seed {}: {} is off by {:.1e}, {:.1e} is explained; {}", own, finding.error.tensor,
                                  finding.error.relative, finding.allowed, describe_case(c)));
      outliers.push_back({{"seed", own},
                          {"tensor", finding.error.tensor},
                          {"relative_error", finding.error.relative},
                          {"explained", finding.allowed},
                          {"case", describe_case(c)}});
    }
    progress.done();
  }
  for (const std::string& line : lines) fmt::print("{}\n", line);
  fmt::print("{} calls, {} tensors from seed {} on; roundings explain all but {}.\n", count, tensors, seed,
             lines.size());
  nlohmann::ordered_json report = describe_run(execution.device, execution.threads);
  report["calls"] = count;
  report["seed"] = seed;
  report["outliers"] = outliers;
  file.write(report);
  return lines.empty() ? 0 : 1;
}

}  // namespace tfla::cli
