// tfla analyse transfer: how the gates and the norm layer pass a signal on (section 4.2, appendix D.2). One head, T
// 512, q, k, v from N(0, 1), constant gates; the gain is the mean over tokens of max |h| over that of max |v|, before
// and after an RMS norm.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "cli/analyse/analyse.h"
#include "cli/support/options.h"
#include "cli/support/progress.h"
#include "core/names.h"
#include "reference/regimes.h"
#include "tfla/tfla.h"

namespace tfla::cli {
namespace {

constexpr std::int64_t tokens = 512;
constexpr std::int64_t dim = 128;          // dqk and dhv
constexpr std::int64_t columns = dim + 1;  // a column of ones beside v: its h is q.n, the paper's row sum of S
constexpr double epsilons[] = {1e-2, 1e-6, 1e-8};
constexpr std::uint64_t seed = 1;

// The normalizers of the paper's figures, by the state's own m.
struct Normalizer {
  InputGate gate;
  const char* name;
  double (*denominator)(double row_sum, double m);
};
constexpr Normalizer normalizers[] = {
    {InputGate::exponential, "max(|S1| exp(-m))",
     [](double x, double m) { return std::max(std::abs(x), std::exp(-m)); }},
    {InputGate::exponential, "max(|S1| 1)", [](double x, double) { return std::max(std::abs(x), 1.0); }},
    {InputGate::exponential, "1", [](double, double) { return 1.0; }},
    {InputGate::sigmoid, "1", [](double, double) { return 1.0; }},
    {InputGate::sigmoid, "max(|S1| 1)", [](double x, double) { return std::max(std::abs(x), 1.0); }},
    {InputGate::sigmoid, "|S1|", [](double x, double) { return std::abs(x); }},
    {InputGate::sigmoid, "S1", [](double x, double) { return x; }},
};

std::vector<double> grid(double low, double high, double step) {
  std::vector<double> values;
  const auto count = static_cast<std::int64_t>(std::floor((high - low) / step + 1e-9));
  for (std::int64_t x = 0; x <= count; ++x) values.push_back(low + static_cast<double>(x) * step);
  return values;
}

// A token's h before any normalizer: its largest element, its mean square, and the row sum of S.
struct Row {
  double largest = 0;
  double square = 0;
  double row_sum = 0;
};

double largest(const double* values) {
  double most = 0;
  for (std::int64_t x = 0; x < dim; ++x) most = std::max(most, std::abs(values[x]));
  return most;
}

// The library on one sequence for one forget gate and every input gate, a head for each.
class Cell {
 public:
  explicit Cell(std::vector<double> input_gates)
      : input_gates_(std::move(input_gates)),
        q_(tokens * dim),
        k_(tokens * dim),
        v_(tokens * columns, 1.0),
        h_(tokens * heads() * columns),
        C_(heads() * dim * columns, 0.0),
        n_(heads() * dim, 0.0) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t x = 0; x < dim; ++x) {
        q_[t * dim + x] = reference::normal(seed, reference::Stream::q, t * dim + x);
        k_[t * dim + x] = reference::normal(seed, reference::Stream::k, t * dim + x);
        v_[t * columns + x] = reference::normal(seed, reference::Stream::v, t * dim + x);
      }
      value_gain_ += largest(&v_[t * columns]) / tokens;
    }
  }

  [[nodiscard]] std::int64_t heads() const { return static_cast<std::int64_t>(input_gates_.size()); }
  [[nodiscard]] double value_gain() const { return value_gain_; }

  // m of the paper is that of a sequence without a past, max over j <= t of log f's sum + i_j: with constant gates, i.
  // The library starts from m = 0 instead; an empty state at m = i makes it the same.
  [[nodiscard]] static double m(InputGate gate, double i) { return gate == InputGate::exponential ? i : 0.0; }

  void run(InputGate gate, double forget_gate, int threads) {
    std::vector<double> maxima;
    for (const double i : input_gates_) maxima.push_back(m(gate, i));
    const std::vector<double> forget(input_gates_.size(), forget_gate);
    const std::int64_t H = heads();
    forward({.q = {q_.data(), DType::float64, {1, tokens, 1, dim}},
             .k = {k_.data(), DType::float64, {1, tokens, 1, dim}},
             .v = {v_.data(), DType::float64, {1, tokens, H, columns}, {0, columns, 0, 1}},
             .i = {input_gates_.data(), DType::float64, {1, tokens, H}, {0, 0, 1}},
             .f = {forget.data(), DType::float64, {1, tokens, H}, {0, 0, 1}},
             .h = {h_.data(), DType::float64, {1, tokens, H, columns}},
             .initial_state = {.C = {C_.data(), DType::float64, {1, H, dim, columns}},
                               .n = {n_.data(), DType::float64, {1, H, dim}},
                               .m = {maxima.data(), DType::float64, {1, H}}},
             .options = {.gate = gate, .normalizer = tfla::Normalizer::none}},
            {.threads = threads});
  }

  // The tokens of one head of the last run.
  [[nodiscard]] std::vector<Row> rows(std::int64_t head) const {
    std::vector<Row> all;
    for (std::int64_t t = 0; t < tokens; ++t) {
      const double* h = &h_[(t * heads() + head) * columns];
      double square = 0;
      for (std::int64_t x = 0; x < dim; ++x) square += h[x] * h[x] / dim;
      all.push_back({largest(h), square, h[dim]});
    }
    return all;
  }

 private:
  std::vector<double> input_gates_;
  std::vector<double> q_, k_, v_, h_, C_, n_;
  double value_gain_ = 0;
};

struct Gain {
  double before = 0;
  double after[std::size(epsilons)] = {};
};

Gain gain(const std::vector<Row>& rows, const Normalizer& normalizer, double m, double value_gain) {
  Gain result;
  for (const Row& row : rows) {
    const double denominator = std::abs(normalizer.denominator(row.row_sum, m));
    const double most = row.largest / denominator;
    const double square = row.square / (denominator * denominator);
    result.before += most / (tokens * value_gain);
    for (std::size_t x = 0; x < std::size(epsilons); ++x) {
      result.after[x] += most / std::sqrt(square + epsilons[x]) / (tokens * value_gain);
    }
  }
  return result;
}

// One forget gate near 5 and a few input gates, for a person.
Sheet summary(const Sheet& map, const std::vector<double>& forget_gates, const std::vector<double>& input_gates) {
  const double f = *std::min_element(forget_gates.begin(), forget_gates.end(),
                                     [](double a, double b) { return std::abs(a - 5) < std::abs(b - 5); });
  Sheet sheet{
      .name = {},
      .columns = map.columns,
      .title = fmt::format("Gain at forget gate {}, T {}, dqk = dhv = {}, before the norm and after it by its epsilon",
                           f, tokens, dim)};
  constexpr std::size_t shown = 5;
  const std::size_t step = (input_gates.size() + shown - 1) / shown;
  for (const auto& row : map.rows) {
    for (std::size_t x = 0; x < input_gates.size(); x += step) {
      if (row[2] == csv_number(f) && row[3] == csv_number(input_gates[x])) sheet.rows.push_back(row);
    }
  }
  return sheet;
}

}  // namespace

std::vector<Sheet> analyse_transfer(const AnalyseOptions& options) {
  const std::vector<double> input_gates = grid(-12, 8, options.step);
  const std::vector<double> forget_gates = grid(-5, 12, options.step);
  Sheet map{.name = "transfer",
            .columns = {"gate", "normalizer", "forget_gate", "input_gate", "before", "after_1e-2", "after_1e-6",
                        "after_1e-8"}};
  Progress progress("tfla analyse transfer", static_cast<std::int64_t>(2 * forget_gates.size()));
  Cell cell(input_gates);
  for (const InputGate gate : {InputGate::exponential, InputGate::sigmoid}) {
    for (const double f : forget_gates) {
      progress.start(fmt::format("{} f {:.1f}", name(gate), f));
      cell.run(gate, f, options.threads);
      for (std::int64_t head = 0; head < cell.heads(); ++head) {
        const double i = input_gates[static_cast<std::size_t>(head)];
        const std::vector<Row> rows = cell.rows(head);
        for (const Normalizer& normalizer : normalizers) {
          if (normalizer.gate != gate) continue;
          const Gain g = gain(rows, normalizer, Cell::m(gate, i), cell.value_gain());
          map.rows.push_back({name(gate), normalizer.name, csv_number(f), csv_number(i), csv_number(g.before),
                              csv_number(g.after[0]), csv_number(g.after[1]), csv_number(g.after[2])});
        }
      }
      progress.done();
    }
  }
  progress.finish();
  return {summary(map, forget_gates, input_gates), map};
}

}  // namespace tfla::cli
